// A chart of one metric of all runs. uPlot draws axes, cursor and selection; the lines are drawn from
// the runs' own points, which are at different steps, with a few points for each pixel at most.

const MOST_MARKS = 120;
const X_LABELS = { step: "step", tokens: "tokens", flops: "FLOPs", seconds: "seconds of training" };

class Chart {
  // `settings`: metric, title, xName, logX, logY, smoothing. `actions`: zoomed(min, max), reset(),
  // moved(chart, x or null), chosen(x).
  constructor(place, runs, settings, actions) {
    Object.assign(this, { place, runs, settings, actions });
    this.curves = runs.map((run) => this.curvesOf(run));
    this.window = this.extent;
    this.plot = new uPlot(this.options(), this.data(), place);
    this.plot.root.addEventListener("dblclick", () => actions.reset());
    this.plot.over.addEventListener("click", () => this.choose());
    this.describe();
  }

  curvesOf(run) {
    const { metric, xName, logX, smoothing } = this.settings;
    const exact = exactCurve(run, metric, xName, logX);
    return { exact, smooth: smoothing ? smoothCurve(run, metric, xName, logX, smoothing) : null };
  }

  get extent() {
    const firsts = [], lasts = [];
    for (const { exact } of this.curves) {
      if (!exact.x.length) continue;
      firsts.push(exact.x[0]);
      lasts.push(exact.x[exact.x.length - 1]);
    }
    if (!firsts.length) return [1, 2];
    const [low, high] = [Math.min(...firsts), Math.max(...lasts)];
    return low < high ? [low, high] : [low, low + 1];
  }

  data() {
    return [this.extent, ...this.runs.map(() => [1, 1])];
  }

  options() {
    const { logX, logY, xName } = this.settings;
    const grid = { stroke: theme.property("--grid"), width: 1 };
    const axis = { stroke: theme.property("--text"), grid, ticks: grid, font: "12px system-ui" };
    const values = (_, ticks) => ticks.map((tick) => (tick === null ? "" : shortNumber(tick)));
    return {
      width: this.width,
      height: this.height,
      legend: { show: false },
      cursor: {
        drag: { x: true, y: false, setScale: false },
        focus: { prox: 24 },
        points: { show: false },
        y: false,
        bind: { dblclick: () => null },
      },
      scales: {
        x: { time: false, distr: logX ? 3 : 1, range: () => this.window },
        y: { distr: logY ? 3 : 1, range: () => this.yRange() },
      },
      axes: [
        { ...axis, values, ...(logX && logTicks), label: X_LABELS[xName], labelSize: 18, labelFont: "12px system-ui", size: 34 },
        { ...axis, values, ...(logY && logTicks), size: sizeOfLabels },
      ],
      series: [{}, ...this.runs.map((run, i) => this.series(run, i))],
      hooks: {
        setSelect: [(plot) => this.zoomToSelection(plot)],
        setCursor: [(plot) => this.cursorMoved(plot)],
        drawAxes: [(plot) => this.drawExactLines(plot)],
        draw: [(plot) => this.drawMarks(plot)],
      },
    };
  }

  get width() {
    return Math.max(240, this.place.clientWidth);
  }

  get height() {
    return Math.round(Math.min(320, Math.max(200, this.width * 0.5)));
  }

  series(run, i) {
    return {
      stroke: theme.colour(run.number),
      dash: theme.dash(run.number),
      width: 1.5,
      show: !run.hidden,
      points: { show: false },
      paths: (plot) => ({ stroke: this.linePath(plot, this.lineOf(i)) }),
    };
  }

  lineOf(i) {
    return this.curves[i].smooth ?? this.curves[i].exact;
  }

  // Return the visible places of a curve, with one beyond each edge.
  visible(curve) {
    const [low, high] = this.window;
    return [
      Math.max(0, placeOf(curve.x, low) - 1),
      Math.min(curve.x.length, placeOf(curve.x, high) + 2),
    ];
  }

  // Behind smoothed lines, the exact values are faint.
  drawExactLines(plot) {
    if (!this.curves.some(({ smooth }) => smooth)) return;
    this.clipped(plot, (ctx) => {
      ctx.globalAlpha = 0.35 / Math.sqrt(this.runs.filter((run) => !run.hidden).length);
      ctx.lineWidth = devicePixelRatio;
      this.runs.forEach((run, i) => {
        if (run.hidden || !this.curves[i].smooth) return;
        ctx.strokeStyle = theme.colour(run.number);
        ctx.stroke(this.linePath(plot, this.curves[i].exact));
      });
    });
  }

  // Draw something that stays inside the axes.
  clipped(plot, draw) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    draw(ctx);
    ctx.restore();
  }

  // Return a path with the first, lowest, highest and last point of each pixel column.
  linePath(plot, curve) {
    const path = new Path2D();
    const positive = this.settings.logY;
    const [from, to] = this.visible(curve);
    let column = null, first = true, low = 0, high = 0, last = 0;
    const finish = () => {
      if (column === null) return;
      path.lineTo(column, low);
      path.lineTo(column, high);
      path.lineTo(column, last);
    };
    for (let place = from; place < to; place++) {
      if (positive && curve.y[place] <= 0) continue;
      const x = Math.round(plot.valToPos(curve.x[place], "x", true));
      const y = plot.valToPos(curve.y[place], "y", true);
      if (x !== column) {
        finish();
        if (first) path.moveTo(x, y);
        else path.lineTo(x, y);
        [column, first, low, high] = [x, false, y, y];
      }
      low = Math.min(low, y);
      high = Math.max(high, y);
      last = y;
    }
    finish();
    return path;
  }

  yRange() {
    let low = Infinity, high = -Infinity;
    this.runs.forEach((run, i) => {
      if (run.hidden) return;
      const curve = this.curves[i].exact;
      const [from, to] = this.visible(curve);
      for (let place = from; place < to; place++) {
        const y = curve.y[place];
        if (this.settings.logY && y <= 0) continue;
        if (y < low) low = y;
        if (y > high) high = y;
      }
    });
    if (low > high) return this.settings.logY ? [0.1, 1] : [0, 1];
    if (this.settings.logY) {
      const margin = Math.max((high / low) ** 0.04, 1.001);
      return [low / margin, high * margin];
    }
    const margin = 0.04 * (high - low) || Math.abs(high) * 0.05 || 1;
    return [low - margin, high + margin];
  }

  zoomToSelection(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    const bounds = [left, left + width].map((at) => plot.posToVal(at, "x"));
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.actions.zoomed(...bounds);
  }

  show(low, high) {
    const [first, last] = this.extent;
    const [min, max] = this.window = [low ?? first, high ?? last];
    this.plot.setScale("x", { min, max });
  }

  cursorMoved(plot) {
    const { left } = plot.cursor;
    const x = left >= 0 ? plot.posToVal(left, "x") : null;
    this.actions.moved(this, x);
  }

  choose() {
    const { left } = this.plot.cursor;
    if (left >= 0) this.actions.chosen(this.plot.posToVal(left, "x"));
  }

  // Return each shown run's value nearest to x: {run, row, x, value}.
  valuesAt(x) {
    const found = [];
    this.runs.forEach((run, i) => {
      const { exact } = this.curves[i];
      const place = nearestPlace(exact.x, x);
      if (run.hidden || place < 0) return;
      found.push({ run, row: exact.rows[place], x: exact.x[place], value: exact.y[place] });
    });
    return found;
  }

  // Marks at the edge are whole, so nothing clips them.
  drawMarks(plot) {
    this.runs.forEach((run, i) => {
      if (run.hidden) return;
      this.drawFewPoints(plot, plot.ctx, run, this.lineOf(i));
      if (this.settings.showEvents) this.drawEvents(plot, plot.ctx, run, i);
    });
    this.clipped(plot, (ctx) => this.drawChosenStep(plot, ctx));
  }

  isVisible(x) {
    return x >= this.window[0] && x <= this.window[1];
  }

  // Points that are far apart, such as validation losses, are marked.
  drawFewPoints(plot, ctx, run, curve) {
    const [from, to] = this.visible(curve);
    if (to - from > MOST_MARKS) return;
    ctx.fillStyle = theme.colour(run.number);
    for (let place = from; place < to; place++) {
      const x = plot.valToPos(curve.x[place], "x", true);
      if (!this.isVisible(curve.x[place]) || (this.settings.logY && curve.y[place] <= 0)) continue;
      ctx.beginPath();
      ctx.arc(x, plot.valToPos(curve.y[place], "y", true), 2.5 * devicePixelRatio, 0, 7);
      ctx.fill();
    }
  }

  drawEvents(plot, ctx, run, i) {
    const bottom = plot.bbox.top + plot.bbox.height - 8 * devicePixelRatio;
    for (const event of run.events) {
      const sign = EVENT_SIGNS[event.event];
      if (!sign || event.step < 0) continue; // each run starts
      const x = this.xOfStep(run, event.step);
      if (x === null || !this.isVisible(x)) continue;
      const value = this.valueAt(i, event.step, x);
      if (sign.metrics && (!sign.metrics.includes(this.settings.metric) || value === null)) continue;
      if (sign.metrics && this.settings.logY && value <= 0) continue;
      const y = sign.metrics ? plot.valToPos(value, "y", true) : bottom;
      drawSign(ctx, sign.text, plot.valToPos(x, "x", true), y, theme.colour(run.number));
    }
  }

  // Return a run's value at exactly this step, null if it has none.
  valueAt(i, step, x) {
    const { exact } = this.curves[i];
    const place = nearestPlace(exact.x, x);
    const isThere = place >= 0 && this.runs[i].table[STEP][exact.rows[place]] === step;
    return isThere ? exact.y[place] : null;
  }

  xOfStep(run, step) {
    const row = nearestPlace(run.table[STEP], step);
    const xs = run.table[X_COLUMNS[this.settings.xName]];
    return row < 0 || !xs ? null : xs[row];
  }

  drawChosenStep(plot, ctx) {
    const step = this.settings.chosenStep();
    if (step === null || this.settings.xName !== "step") return;
    const x = plot.valToPos(step, "x", true);
    ctx.strokeStyle = theme.property("--text");
    ctx.setLineDash([2 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(x, plot.bbox.top);
    ctx.lineTo(x, plot.bbox.top + plot.bbox.height);
    ctx.stroke();
  }

  showRuns() {
    this.plot.batch(() => {
      this.runs.forEach((run, i) => this.plot.setSeries(i + 1, { show: !run.hidden }));
      this.show(...this.window);
    });
    this.describe();
  }

  resize() {
    this.plot.setSize({ width: this.width, height: this.height });
  }

  // Say in words what the picture shows.
  describe() {
    const ends = this.runs.map((run, i) => {
      const { exact } = this.curves[i];
      if (run.hidden || !exact.y.length) return null;
      return `${run.name} ends at ${formatNumber(exact.y[exact.y.length - 1])}`;
    });
    const text = ends.filter((end) => end !== null).join("; ");
    this.place.setAttribute("aria-label", `${this.settings.title}: ${text || "no values"}`);
  }

  destroy() {
    this.plot.destroy();
  }
}

const logTicks = { splits: logSplits, filter: (_, ticks) => ticks };

// Return the width of an axis whose labels are these.
function sizeOfLabels(_, labels) {
  return Math.max(58, ...(labels ?? []).map((label) => 18 + 7 * label.length));
}

// Return three to six round numbers between two others.
function roundNumbers(low, high) {
  const rough = (high - low) / 6;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const ticks = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) ticks.push(i * step);
  return ticks;
}

// Return the ticks of a logarithmic axis: powers of ten, with others between them if there are few.
function logSplits(plot, axis, low, high) {
  const decades = Math.log10(high / low);
  if (decades < 0.8) return roundNumbers(low, high);
  const most = axis === 0 ? Math.min(9, plot.width / 50) : 9;
  const factors = [[1, 1.5, 2, 3, 4, 5, 7], [1, 2, 5], [1]]
    .find(({ length }) => length * decades <= most) ?? [1];
  const powers = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++) powers.push(power);
  const apart = Math.ceil(decades / most) || 1;
  const ticks = powers.filter((power) => power % apart === 0)
    .flatMap((power) => factors.map((factor) => Number(`${factor}e${power}`)));
  const inside = ticks.filter((tick) => tick >= low && tick <= high);
  return inside.length > 1 ? inside : [low, (low * high) ** 0.5, high];
}

function drawSign(ctx, text, x, y, colour) {
  ctx.save();
  ctx.font = `${13 * devicePixelRatio}px system-ui`;
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  ctx.lineWidth = 3 * devicePixelRatio;
  ctx.strokeStyle = theme.property("--background");
  ctx.strokeText(text, x, y);
  ctx.fillStyle = colour;
  ctx.fillText(text, x, y);
  ctx.restore();
}

function shortNumber(value) {
  const size = Math.abs(value);
  if (size >= 1e15 || (size > 0 && size < 1e-3)) {
    const [digits, exponent] = value.toExponential(2).split("e");
    return `${Number(digits)}e${Number(exponent)}`;
  }
  for (const [unit, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (size >= unit) return `${Number((value / unit).toPrecision(4))}${name}`;
  return String(Number(value.toPrecision(4)));
}
