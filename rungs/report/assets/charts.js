// All charts, which zoom together.

const USUAL_METRICS = [
  PASS_AT_1, "reward", "train_loss", "validation_loss", "bits_per_byte", "learning_rate", "gradient_norm",
  "tokens_per_second", "correct", "mean_tokens", "entropy",
];
const PER_BYTE = "bits_per_byte"; // drawn by default only if losses are not comparable
const LOGARITHMIC = ["train_loss", "validation_loss", "bits_per_byte", "gradient_norm"];

const charts = {
  all: [],
  zoom: [null, null],
  switched: new Map(), // by metric, whether the reader wants it
  axes: new Map(), // by chart, whether the reader wants a logarithmic one

  get settings() {
    return {
      xName: byId("x-axis").value,
      logX: byId("log-x").checked,
      smoothing: Number(byId("smoothing").value),
      showEvents: byId("show-events").checked,
    };
  },

  metrics() {
    const found = new Set(state.runs.flatMap((run) => Object.keys(run.table)));
    const isDrawn = (name) => !state.notDrawn.includes(name) && !name.startsWith("start_validation.");
    return [...found].filter(isDrawn).sort(byPlace);
  },

  chosen() {
    const isPolicy = (run) => "reward" in run.table; // whose loss says little
    const isLeftOut = { [PER_BYTE]: !state.caution, train_loss: state.runs.every(isPolicy) };
    const isUsual = (name) => USUAL_METRICS.includes(name) && !isLeftOut[name];
    return charts.metrics().filter((name) => charts.switched.get(name) ?? isUsual(name));
  },

  isLogarithmic(metric) {
    const isNegative = (run) => run.table[metric]?.some((value) => value < 0);
    return LOGARITHMIC.includes(metric) && !state.runs.some(isNegative);
  },

  // Draw everything anew.
  draw() {
    charts.all.forEach((chart) => chart.destroy());
    charts.all = [];
    const grid = byId("chart-grid");
    grid.replaceChildren();
    for (const metric of charts.chosen()) charts.add(grid, metric, titleOf(metric), {});
    const loss = lossToCompare();
    const isKnown = state.runs.some((run) => run.table.flops);
    if (loss && isKnown)
      charts.add(grid, loss, `${titleOf(loss)} against compute`, {
        xName: "flops", logX: true, isAlone: true,
      });
    if (!charts.all.length) grid.append(element("p", {}, "No steps are recorded yet."));
    charts.show();
  },

  add(grid, metric, title, own) {
    const key = own.isAlone ? `${metric} alone` : metric;
    const isLog = charts.axes.get(key) ?? charts.isLogarithmic(metric);
    const box = element("input", { type: "checkbox", checked: isLog });
    box.addEventListener("change", () => {
      charts.axes.set(key, box.checked);
      charts.draw();
    });
    const place = element("div", { className: "chart", tabIndex: 0, role: "img" });
    const head = element("figcaption", {}, element("span", {}, title),
                         element("label", {}, box, " log"));
    grid.append(element("figure", { "data-metric": key }, head, place));
    const settings = {
      ...charts.settings, metric, title, logY: isLog,
      chosenStep: () => samples.step(), ...own,
    };
    const chart = new Chart(place, state.runs, settings, charts.actions(own.isAlone));
    place.addEventListener("keydown", (event) => charts.pressed(event, chart));
    place.addEventListener("blur", () => readout.hide());
    charts.all.push(chart);
  },

  actions(isAlone) {
    return {
      zoomed: (low, high) => isAlone ? charts.zoomAlone(low, high) : charts.zoomTo(low, high),
      reset: () => isAlone ? charts.zoomAlone(null, null) : charts.zoomTo(null, null),
      moved: (chart, x) => readout.show(chart, x),
      chosen: (x) => {
        if (charts.settings.xName !== "step" || isAlone) return;
        samples.goTo(x);
        layers.goTo(x);
      },
    };
  },

  get linked() {
    return charts.all.filter((chart) => !chart.settings.isAlone);
  },

  zoomAlone(low, high) {
    charts.all.filter((chart) => chart.settings.isAlone).forEach((chart) => chart.show(low, high));
  },

  zoomTo(low, high) {
    charts.zoom = [low, high];
    charts.show();
  },

  show() {
    const [low, high] = charts.zoom[0] === null ? charts.extent() : charts.zoom;
    charts.linked.forEach((chart) => chart.show(low, high));
  },

  // Return the first and last x of all charts, so that they have the same axis.
  extent() {
    const extents = charts.linked.filter((chart) => chart.curves.some(({ exact }) => exact.x.length))
      .map((chart) => chart.extent);
    if (!extents.length) return [null, null];
    return [Math.min(...extents.map(([low]) => low)), Math.max(...extents.map(([, high]) => high))];
  },

  // Zoom around the middle: factor below 1 is nearer.
  zoomBy(factor, around = 0.5) {
    const { logX } = charts.settings;
    const [first, last] = charts.extent();
    if (first === null) return;
    const [to, from] = logX ? [Math.log, Math.exp] : [Number, Number];
    const [low, high] = (charts.zoom[0] === null ? [first, last] : charts.zoom).map((x) => to(x));
    const centre = low + around * (high - low);
    const [newLow, newHigh] = [low - centre, high - centre].map((part) => centre + factor * part);
    const bounds = [Math.max(from(newLow), first), Math.min(from(newHigh), last)];
    if (bounds[0] <= first && bounds[1] >= last) charts.zoomTo(null, null);
    else charts.zoomTo(...bounds);
  },

  pressed(event, chart) {
    const { plot } = chart;
    const width = plot.over.clientWidth;
    const at = plot.cursor.left >= 0 ? plot.cursor.left : width / 2;
    const step = event.shiftKey ? width / 10 : width / 100;
    const moves = { ArrowLeft: -step, ArrowRight: step, Home: -width, End: width };
    if (event.key in moves) {
      const left = Math.min(width, Math.max(0, at + moves[event.key]));
      plot.setCursor({ left, top: plot.over.clientHeight / 2 });
    } else if (event.key === "+" || event.key === "=") charts.zoomBy(0.5, at / width);
    else if (event.key === "-") charts.zoomBy(2, at / width);
    else if (event.key === "0" || event.key === "Escape") charts.zoomTo(null, null);
    else if (event.key === "Enter") chart.choose();
    else return;
    event.preventDefault();
  },

  redraw() {
    charts.all.forEach((chart) => chart.plot.redraw(false));
  },
};

function byPlace(one, other) {
  const places = [one, other].map((name) => {
    const place = USUAL_METRICS.indexOf(name);
    return place < 0 ? USUAL_METRICS.length : place;
  });
  return places[0] - places[1] || one.localeCompare(other, "en", { numeric: true });
}

function titleOf(metric) {
  const [name, ...part] = metric.split(".");
  const words = name.replaceAll("_", " ");
  return part.length ? `${words}: ${part.join(".").replace(/^pass_at\./, "pass@")}` : words;
}

function lossToCompare() {
  const metrics = charts.metrics();
  if (metrics.includes("reward")) return undefined;
  const losses = ["validation_loss", "train_loss"];
  return (state.caution ? [PER_BYTE, ...losses] : losses).find((name) => metrics.includes(name));
}

function drawMetricChoice() {
  const chosen = charts.chosen();
  const boxes = charts.metrics().map((name) => {
    const box = element("input", { type: "checkbox", checked: chosen.includes(name) });
    box.addEventListener("change", () => {
      charts.switched.set(name, box.checked);
      charts.draw();
    });
    return element("label", {}, box, ` ${titleOf(name)}`);
  });
  byId("metrics").replaceChildren(element("legend", {}, "Metrics to draw"), ...boxes);
}
