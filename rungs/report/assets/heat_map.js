// A picture of numbers as colours: rows from the bottom up, columns from left to right.

// Stops of viridis (van der Walt & Smith 2015), which colour-blind readers can tell apart.
const STOPS = ["#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c",
               "#28ae80", "#5ec962", "#addc30", "#fde725"].map(rgbOf);
const NOT_FINITE = "#d55e00";
const OUTLIERS = 0.02;
const MARGIN = { left: 40, right: 6, top: 4, bottom: 34 };

// A scale of colours. A share of the lowest and of the highest values has the colours of its ends,
// so that outliers leave the others apart; it is logarithmic if the rest spans a factor of ten. `all`
// are the values that are shown, `values` those that the colours are for.
class ColourScale {
  constructor(values, all = values) {
    const sorted = Float64Array.from(values.filter(Number.isFinite)).sort();
    const at = (share) => sorted[Math.round(share * (sorted.length - 1))] ?? NaN;
    [this.low, this.high] = [at(OUTLIERS), at(1 - OUTLIERS)];
    this.isLog = this.low > 0 && this.high > 10 * this.low;
    this.hasNotFinite = all.some((value) => value !== null && !Number.isFinite(value));
  }

  share(value) {
    const to = this.isLog ? (x) => Math.log(Math.max(x, Number.MIN_VALUE)) : Number;
    const span = to(this.high) - to(this.low);
    return span ? Math.min(1, Math.max(0, (to(value) - to(this.low)) / span)) : 0.5;
  }

  colour(value) {
    return Number.isFinite(value) ? colourAt(this.share(value)) : NOT_FINITE;
  }

  // Return a bar of the colours with the numbers at its ends.
  legend() {
    const canvas = element("canvas", { className: "scale", width: 180, height: 12 });
    const ctx = canvas.getContext("2d");
    for (let x = 0; x < 180; x++) {
      ctx.fillStyle = colourAt(x / 179);
      ctx.fillRect(x, 0, 1, 12);
    }
    const mark = element("span", { className: "not-finite" });
    const note = this.hasNotFinite ? [mark, "not finite"] : [];
    return element("span", { className: "legend" }, `${shortNumber(this.low)} `, canvas,
                   ` ${shortNumber(this.high)}${this.isLog ? ", logarithmic" : ""}`, ...note);
  }
}

function colourAt(share) {
  const place = share * (STOPS.length - 1);
  const [low, high] = [STOPS[Math.floor(place)], STOPS[Math.ceil(place)]];
  const part = place - Math.floor(place);
  return `rgb(${low.map((c, i) => Math.round(c + part * (high[i] - c))).join(" ")})`;
}

function rgbOf(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

// Return a canvas of cells. `map`: columns and rows (their labels), labels of the axes, if any,
// valueAt(column, row), null for no value; scale; chosen column or null. `pointed(column, row)` is
// called when the mouse is over a cell, `clicked(column)` at a click.
function heatMap(map, width, { pointed, clicked }) {
  const height = MARGIN.top + MARGIN.bottom + Math.min(300, Math.max(90, 16 * map.rows.length));
  const canvas = element("canvas", { role: "img" });
  const ratio = devicePixelRatio;
  [canvas.width, canvas.height] = [width * ratio, height * ratio];
  [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
  canvas.setAttribute("aria-label", map.title);
  const ctx = canvas.getContext("2d");
  ctx.scale(ratio, ratio);
  const cell = {
    width: (width - MARGIN.left - MARGIN.right) / map.columns.length,
    height: (height - MARGIN.top - MARGIN.bottom) / map.rows.length,
  };
  const bottom = height - MARGIN.bottom;
  drawCells(ctx, map, cell, bottom);
  drawLabels(ctx, map, cell, bottom, width);
  const at = (event) => {
    const column = Math.floor((event.offsetX - MARGIN.left) / cell.width);
    const row = Math.floor((bottom - event.offsetY) / cell.height);
    const isInside = column in map.columns && row in map.rows;
    return isInside ? [column, row] : null;
  };
  canvas.addEventListener("pointermove", (event) => pointed(at(event)));
  canvas.addEventListener("pointerleave", () => pointed(null));
  canvas.addEventListener("click", (event) => at(event) && clicked(at(event)[0]));
  return canvas;
}

function drawCells(ctx, map, cell, bottom) {
  map.columns.forEach((_, column) => map.rows.forEach((__, row) => {
    const value = map.valueAt(column, row);
    if (value === null) return;
    ctx.fillStyle = map.scale.colour(value);
    const [x, y] = [MARGIN.left + column * cell.width, bottom - (row + 1) * cell.height];
    ctx.fillRect(x, y, cell.width + 0.5, cell.height + 0.5);
  }));
  if (map.chosen === null) return;
  const x = MARGIN.left + map.chosen * cell.width;
  for (const [colour, width] of [["--background", 6], ["--text", 2.5]]) { // seen on cells of any colour
    [ctx.strokeStyle, ctx.lineWidth] = [theme.property(colour), width];
    ctx.strokeRect(x, MARGIN.top, Math.max(cell.width, 2), bottom - MARGIN.top);
  }
}

function drawLabels(ctx, map, cell, bottom, width) {
  ctx.fillStyle = theme.property("--text");
  ctx.font = "12px system-ui";
  ctx.textBaseline = "middle";
  ctx.textAlign = "right";
  const everyRow = Math.ceil(16 / cell.height);
  map.rows.forEach((label, row) => {
    if (row % everyRow === 0)
      ctx.fillText(label, MARGIN.left - 5, bottom - (row + 0.5) * cell.height);
  });
  ctx.textAlign = "center";
  const longest = Math.max(...map.columns.map((label) => ctx.measureText(label).width));
  const everyColumn = Math.ceil((longest + 14) / cell.width);
  map.columns.forEach((label, column) => {
    if (column % everyColumn === 0)
      ctx.fillText(label, MARGIN.left + (column + 0.5) * cell.width, bottom + 10);
  });
  ctx.fillText(map.columnLabel, (MARGIN.left + width) / 2, bottom + 26);
  ctx.save();
  ctx.translate(9, (MARGIN.top + bottom) / 2);
  ctx.rotate(-Math.PI / 2);
  ctx.fillText(map.rowLabel, 0, 0);
  ctx.restore();
}
