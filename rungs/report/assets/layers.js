// What each layer did: over the steps, over depth at a step, head by head, and what moved.

// `series(run, part)` returns an array {shape, data}: steps, layers, and what `across` makes one
// number of; or null.
const STATISTICS = [
  { title: "update ÷ weight", group: "arrays", series: updateRatio },
  ofArrays("gradient, root mean square", "gradient_rms"),
  ofArrays("update, root mean square", "update_rms"),
  ofArrays("weight, root mean square", "weight_rms"),
  ofArrays("largest singular value", "singular_value"),
  ofActivations("activation, root mean square", "rms"),
  ofActivations("activation, largest value", "largest"),
  { title: "attention: entropy", series: plain("heads/entropy"), across: mean, note: "mean of the heads, in nats", hasHeads: true },
  { title: "attention: largest logit", series: plain("heads/largest_logit"), across: largest, note: "of all heads", hasHeads: true },
  { title: "share of dead units", series: plain("dead_units") },
];
const MOST_MOVES = 12;

function ofArrays(title, name) {
  return { title, group: "arrays", series: (run, part) => decoded(run, `arrays/${part}/${name}`) };
}

function ofActivations(title, name) {
  return { title, group: "activations", series: (run, part) => decoded(run, `activations/${part}/${name}`) };
}

function plain(path) {
  return (run) => decoded(run, path);
}

function updateRatio(run, part) {
  const [update, weight] = ["update_rms", "weight_rms"].map((name) =>
    decoded(run, `arrays/${part}/${name}`));
  if (!update || !weight) return null;
  // an array of zeros, such as a new bias, has no ratio
  const data = update.data.map((value, i) => weight.data[i] === 0 ? NaN : value / weight.data[i]);
  return { shape: update.shape, data, missing: (i) => weight.data[i] === 0 };
}

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

function largest(values) {
  return values.some(Number.isNaN) ? NaN : Math.max(...values);
}

// Return an array of a run, decoded from the upper halves of float32.
function decoded(run, path) {
  const encoded = run.layers?.series[path];
  if (!encoded) return null;
  if (!encoded.data) {
    const halves = new Uint16Array(Uint8Array.from(atob(encoded.base64), (c) => c.charCodeAt(0)).buffer);
    encoded.data = new Float32Array(Uint32Array.from(halves, (half) => half << 16).buffer);
  }
  return encoded;
}

// Return the numbers of a statistic in a run: the names of the layers, "" for a part that belongs to none,
// such as the head, and a function of place and layer.
function numbersOf(run, statistic, part) {
  const found = statistic.series(run, part);
  if (!found) return null;
  const [, layerCount, ...more] = found.shape;
  const size = more.reduce((product, length) => product * length, 1);
  const at = (place, layer) => {
    const first = (place * layerCount + layer) * size;
    if (found.missing?.(first)) return null;
    const values = [...found.data.subarray(first, first + size)];
    return statistic.across ? statistic.across(values) : values[0];
  };
  const heads = (place, layer) => {
    const first = (place * layerCount + layer) * size;
    return found.data.subarray(first, first + size);
  };
  const isOutside = layerCount < layersOf(run);
  const names = Array.from({ length: layerCount }, (_, layer) => (isOutside ? "" : String(layer)));
  return { names, at, heads, headCount: size };
}

function layersOf(run) {
  return Math.max(...Object.values(run.layers.series).map(({ shape }) => shape[1]));
}

// Return a text about a number at a step, of a layer unless it belongs to none.
function labelled(where, name, value) {
  return `${where}${name && `, layer ${name}`}: ${valueText(value)}`;
}

const layers = {
  step: null,

  shown() {
    return state.runs.filter((run) => !run.hidden && run.layers);
  },

  statistic() {
    return STATISTICS[Number(byId("layer-statistic").value) || 0];
  },

  steps() {
    const found = new Set(layers.shown().flatMap((run) => run.layers.steps));
    return [...found].sort((one, other) => one - other);
  },

  // Return the place of the chosen step in a run's steps.
  placeIn(run) {
    return nearestPlace(run.layers.steps, layers.step);
  },

  drawChoices() {
    const runs = state.runs.filter((run) => run.layers);
    byId("layers").hidden = !runs.length;
    const known = STATISTICS.map((statistic, number) => [statistic, number])
      .filter(([statistic]) => runs.some((run) => layers.parts([run], statistic).length));
    choose("layer-statistic", known.map(([{ title }, number]) => [String(number), title]));
    const parts = layers.parts(runs, layers.statistic());
    const isAlone = parts.length === 1 && parts[0] === "";
    byId("layer-part").parentElement.hidden = isAlone;
    choose("layer-part", parts.map((part) => [part, partTitle(part)]));
  },

  // Return the parts that have a statistic in any of the runs; [""] for one without parts.
  parts(runs, statistic) {
    if (!statistic.group) return runs.some((run) => statistic.series(run)) ? [""] : [];
    const names = new Set(runs.flatMap((run) => Object.keys(run.layers.series)
      .map((path) => path.split("/"))
      .filter(([group]) => group === statistic.group).map(([, name]) => name)));
    return [...names].filter((part) => runs.some((run) => statistic.series(run, part)));
  },

  // Choose the first measurement at a step or after it, which shows what the step did.
  goTo(step, scrolls = false) {
    const steps = layers.steps();
    if (!steps.length) return;
    layers.step = steps[Math.min(placeOf(steps, step), steps.length - 1)];
    layers.draw();
    if (scrolls) byId("layers").scrollIntoView({ block: "start" });
  },

  draw() {
    const steps = layers.steps();
    if (!steps.length) {
      for (const id of ["layer-maps", "layer-depth", "layer-moves"]) byId(id).replaceChildren();
      return;
    }
    const place = layers.step === null ? steps.length - 1 : nearestPlace(steps, layers.step);
    layers.step = steps[place];
    const slider = byId("layer-step");
    [slider.max, slider.value] = [String(steps.length - 1), String(place)];
    slider.setAttribute("aria-valuetext", `step ${layers.step}`);
    byId("layer-step-value").textContent = formatNumber(layers.step);
    const statistic = layers.statistic();
    const found = layers.shown().map((run) => [run, numbersOf(run, statistic, byId("layer-part").value)])
      .filter(([, numbers]) => numbers);
    layers.drawMaps(statistic, found);
    layers.drawDepth(statistic, found);
    layers.drawMoves();
  },

  drawMaps(statistic, found) {
    const [all, later] = [0, 1].map((first) =>
      found.flatMap(([run, numbers]) => everyNumber(run, numbers, first && firstColoured(run))));
    const scale = new ColourScale(later, all);
    byId("layer-scale").replaceChildren(
      scale.legend(), statistic.note ? element("small", {}, statistic.note) : "");
    const panels = found.map(([run, numbers]) => layers.panel(run, numbers.names, {
      columns: run.layers.steps.map((step) => shortNumber(step)), columnLabel: "step",
      valueAt: numbers.at, scale, chosen: layers.placeIn(run),
      title: `${statistic.title} of ${run.name} by step and layer`,
    }, (column, layer) => labelled(`step ${formatNumber(run.layers.steps[column])}`, numbers.names[layer],
      numbers.at(column, layer)), (column) => layers.goTo(run.layers.steps[column])));
    byId("layer-maps").replaceChildren(...panels.map(({ figure }) => figure));
    panels.forEach(({ fill }) => fill());
  },

  // Return a figure with a heat map; `fill` draws it once its width is known.
  panel(run, rows, map, text, clicked) {
    const place = element("div", {});
    const swatch = element("span", { className: "swatch" });
    swatch.style.background = theme.colour(run.number);
    const note = element("small", {}, "\u00a0");
    const figure = element("figure", { "data-run": run.name },
      element("figcaption", {}, element("span", {}, swatch, ` ${run.name}`), note), place);
    const rowLabel = rows[0] && "layer";
    const pointed = (at) => { note.textContent = at ? text(...at) : "\u00a0"; };
    const fill = () =>
      place.replaceChildren(heatMap({ ...map, rows, rowLabel }, place.clientWidth, { pointed, clicked }));
    return { figure, fill };
  },

  drawDepth(statistic, found) {
    const panels = [];
    if (statistic.hasHeads) {
      const values = found.flatMap(([run, { names, heads }]) =>
        names.map((_, layer) => [...heads(layers.placeIn(run), layer)]).flat());
      const scale = new ColourScale(values);
      for (const [run, { names, heads, headCount }] of found) {
        const place = layers.placeIn(run);
        const columns = Array.from({ length: headCount }, (_, head) => String(head));
        const valueAt = (head, layer) => heads(place, layer)[head];
        const title = `${statistic.title} of ${run.name} by head and layer`;
        panels.push(layers.panel(run, names,
          { columns, columnLabel: `head, at step ${formatNumber(run.layers.steps[place])}`, valueAt, scale, chosen: null, title },
          (head, layer) => `layer ${layer}, head ${head}: ${valueText(valueAt(head, layer))}`,
          () => {}));
      }
    }
    const profile = element("div", { className: "chart", role: "img" });
    profile.setAttribute("aria-label", `${statistic.title} over depth at step ${layers.step}`);
    const figure = element("figure", {}, element("figcaption", {},
      element("span", {}, `${statistic.title} over depth, at step ${formatNumber(layers.step)}`)), profile);
    const deep = found.filter(([, { names }]) => names[0]);
    byId("layer-depth").replaceChildren(...(deep.length ? [figure] : []), ...panels.map((panel) => panel.figure));
    panels.forEach(({ fill }) => fill());
    if (deep.length) drawProfile(profile, deep);
  },

  drawMoves() {
    const moves = layers.shown().flatMap(movesOf).sort((one, other) => other.size - one.size);
    const rows = moves.slice(0, MOST_MOVES).map(({ run, ...move }) => {
      const button = element("button", { type: "button" }, move.what);
      button.addEventListener("click", () => layers.choose(move));
      const factor = move.before === 0 || !Number.isFinite(move.after) ? "" :
        `× ${shortNumber(Number((move.after / move.before).toPrecision(3)))}`;
      return element("tr", { "data-run": run.name }, element("th", { scope: "row" }, run.name),
        element("td", { className: "number" }, move.layer || "–"), element("td", {}, button),
        ...[valueText(move.before), valueText(move.after), factor].map((text) =>
          element("td", { className: "number" }, text)));
    });
    const heads = ["run", "layer", "what", "before", "after", "change"].map((name) =>
      element("th", { scope: "col" }, name));
    byId("layer-moves").replaceChildren(
      element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows));
    const runs = layers.shown().filter((run) => layers.placeIn(run) > 0);
    const spans = new Set(runs.map((run) => run.layers.steps.slice(layers.placeIn(run) - 1)
      .slice(0, 2).map(formatNumber).join(" to ")));
    byId("layer-moves-heading").textContent = spans.size
      ? `What moved most from step ${[...spans].join(", ")}` : "No measurement before this one";
  },

  choose(move) {
    byId("layer-statistic").value = String(move.statistic);
    layers.drawChoices();
    byId("layer-part").value = move.part;
    layers.draw();
  },
};

// Give a menu its options, [value, text] each; what was chosen stays.
function choose(id, options) {
  const chosen = byId(id).value;
  byId(id).replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
  if (options.some(([value]) => value === chosen)) byId(id).value = chosen;
}

function partTitle(part) {
  return part === "all" ? "all arrays of a layer" : part.replaceAll("_", " ");
}

function valueText(value) {
  if (value === null) return "–";
  return Number.isFinite(value) ? shortNumber(Number(value.toPrecision(3))) : "not finite";
}

function everyNumber(run, { names, at }, first = 0) {
  return run.layers.steps.slice(first).flatMap((_, place) =>
    names.map((__, layer) => at(first + place, layer)));
}

// Return the first measurement that colours are for. Those of step 0 differ by so much that they would leave
// the others alike.
function firstColoured(run) {
  return Number(run.layers.steps[0] === 0 && run.layers.steps.length > 1);
}

// Return how the numbers of a run changed since the measurement before. Changes of numbers far below their
// largest one are noise, and so are gradients of biases.
function movesOf(run) {
  const place = layers.placeIn(run);
  if (place < 1) return [];
  const found = STATISTICS.flatMap((statistic, number) => layers.parts([run], statistic)
    .filter((part) => !part.endsWith(".bias")).flatMap((part) => {
      const numbers = numbersOf(run, statistic, part);
      const sizes = everyNumber(run, numbers).filter(Number.isFinite).map(Math.abs);
      const least = 0.02 * sizes.reduce((one, other) => Math.max(one, other), 0);
      const what = part ? `${statistic.title}: ${partTitle(part)}` : statistic.title;
      return numbers.names.map((name, layer) => {
        const [before, after] = [place - 1, place].map((at) => numbers.at(at, layer));
        return { run, what, statistic: number, part, layer: name, before, after,
                 size: sizeOfMove(before, after, least) };
      });
    }));
  return found.filter(({ size }) => size > 0);
}

function sizeOfMove(before, after, least) {
  if (before === null || after === null || !Number.isFinite(before)) return 0;
  if (!Number.isFinite(after)) return Infinity;
  return Math.abs(Math.log(Math.max(Math.abs(after), least) / Math.max(Math.abs(before), least))) || 0;
}

// Draw the values of each run over its layers.
function drawProfile(place, found) {
  const count = Math.max(0, ...found.map(([, numbers]) => numbers.names.length));
  const depth = Array.from({ length: count }, (_, layer) => layer);
  const lines = found.map(([run, numbers]) => depth.map((layer) => {
    const value = layer < numbers.names.length ? numbers.at(layers.placeIn(run), layer) : null;
    return Number.isFinite(value) ? value : null;
  }));
  const values = lines.flat().filter((value) => value !== null);
  const isLog = values.length > 0 && Math.min(...values) > 0 && Math.max(...values) > 10 * Math.min(...values);
  const grid = { stroke: theme.property("--grid"), width: 1 };
  const axis = { stroke: theme.property("--text"), grid, ticks: grid, font: "12px system-ui" };
  const texts = (_, ticks) => ticks.map((tick) => (tick === null ? "" : shortNumber(tick)));
  new uPlot({
    width: Math.max(240, place.clientWidth), height: 240,
    legend: { show: false }, cursor: { show: false },
    scales: { x: { time: false, range: () => [-0.5, count - 0.5] }, y: { distr: isLog ? 3 : 1 } },
    axes: [
      { ...axis, values: texts, incrs: [1, 2, 5, 10, 20, 50], label: "layer", labelSize: 18, labelFont: "12px system-ui", size: 34 },
      { ...axis, values: texts, ...(isLog && logTicks), size: sizeOfLabels },
    ],
    series: [{}, ...found.map(([run]) => ({
      stroke: theme.colour(run.number), dash: theme.dash(run.number), width: 1.5,
      points: { show: true, size: 6, fill: theme.colour(run.number) },
    }))],
  }, [depth, ...lines], place);
}
