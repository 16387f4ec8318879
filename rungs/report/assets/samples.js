// What the models said to the prompts of their runs, checkpoint by checkpoint.

const samples = {
  place: null,

  shown() {
    return state.runs.filter((run) => !run.hidden && run.samples.length);
  },

  matching(run) {
    const [item, kind] = [byId("prompt").value, byId("sample-kind").value];
    return run.samples.filter((sample) => sample.item === item && sample.kind === kind);
  },

  steps() {
    const found = new Set(samples.shown().flatMap((run) => samples.matching(run).map((s) => s.step)));
    return [...found].sort((one, other) => one - other);
  },

  step() {
    const steps = samples.steps();
    if (!steps.length) return null;
    return steps[Math.min(samples.place ?? steps.length - 1, steps.length - 1)];
  },

  drawChoices() {
    const all = state.runs.flatMap((run) => run.samples);
    byId("samples").hidden = !all.length;
    for (const [id, key] of [["prompt", "item"], ["sample-kind", "kind"]]) {
      const [values, chosen] = [[...new Set(all.map((sample) => sample[key]))], byId(id).value];
      byId(id).replaceChildren(
        ...values.map((value) => element("option", { value }, value || "(empty)")));
      if (values.includes(chosen)) byId(id).value = chosen;
    }
  },

  goTo(step) {
    const steps = samples.steps();
    if (!steps.length) return;
    samples.place = nearestPlace(steps, step);
    samples.draw();
  },

  draw() {
    const steps = samples.steps();
    const slider = byId("sample-step");
    slider.max = String(Math.max(steps.length - 1, 0));
    slider.value = String(samples.place ?? steps.length - 1);
    const step = samples.step();
    byId("sample-step-value").textContent = step === null ? "–" : formatNumber(step);
    slider.setAttribute("aria-valuetext", step === null ? "none" : `step ${step}`);
    byId("sample-texts").replaceChildren(
      ...samples.shown().map((run) => samples.panel(run, step)));
    charts.redraw();
  },

  // Return what a run said at its last checkpoint up to a step, with what changed before it.
  panel(run, step) {
    const texts = samples.matching(run).filter((sample) => sample.step <= step);
    const [now, before] = [texts[texts.length - 1], texts[texts.length - 2]];
    const swatch = element("span", { className: "swatch" });
    swatch.style.background = theme.colour(run.number);
    const head = element("h3", {}, swatch, ` ${run.name}`);
    if (!now) return element("article", {}, head, element("p", {}, "nothing yet"));
    const words = element("p", { className: "said" }, element("span", { className: "prompt" }, now.prompt),
      ...(now.turns ? turns(now) : marked(before?.text ?? now.text, now.text)));
    const note = before && !now.turns ? `step ${formatNumber(now.step)}, marked: what differs from step ` +
      formatNumber(before.step) : `step ${formatNumber(now.step)}`;
    return element("article", { "data-run": run.name }, head, words, element("small", {}, note));
  },
};

// Return what a model wrote in each turn, and what it saw.
function turns(sample) {
  return sample.turns.flatMap(([wrote, reply]) => [
    wrote, ...(reply ? [element("span", { className: "reply", title: "a reply" }, reply)] : [])]);
}

// Return the words of a text, those that are not in the longest common part with `before` marked.
function marked(before, now) {
  const [old, words] = [before, now].map((one) => one.split(/(\s+)/));
  const kept = commonPlaces(old, words);
  return words.map((word, place) =>
    kept.has(place) || !word.trim() ? word : element("mark", {}, word));
}

// Return the places in `words` of a longest common subsequence.
function commonPlaces(old, words) {
  const width = words.length + 1;
  const lengths = new Uint16Array((old.length + 1) * width);
  for (let i = old.length - 1; i >= 0; i--)
    for (let j = words.length - 1; j >= 0; j--)
      lengths[i * width + j] = old[i] === words[j]
        ? lengths[(i + 1) * width + j + 1] + 1
        : Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);
  const places = new Set();
  for (let i = 0, j = 0; i < old.length && j < words.length; ) {
    if (old[i] === words[j]) { places.add(j); i++; j++; }
    else if (lengths[(i + 1) * width + j] >= lengths[i * width + j + 1]) i++;
    else j++;
  }
  return places;
}
