// The table of the keys in which runs differ, with their figures and scores. It sorts by any column.

const FIGURES = [
  ["steps", (run) => run.steps],
  ["tokens", (run) => run.figures.tokens_seen],
  ["train loss", (run) => run.figures.train_loss],
  ["validation loss", (run) => run.figures.validation_loss],
  ["best loss", ({ figures }) => figures["best.validation_loss"] ?? figures["best.train_loss"]],
  ["pass@1", (run) => run.figures[PASS_AT_1]],
  ["best pass@1", (run) => run.figures[`best.${PASS_AT_1}`]],
  ["best at step", (run) => run.figures.best_step],
  ["bits per byte", (run) => run.figures.bits_per_byte],
  ["reward", (run) => run.figures.reward],
  ["correct", (run) => run.figures.correct],
  ["tokens/s", (run) => run.figures.mean_tokens_per_second],
  ["seconds", (run) => run.figures.seconds],
  ["FLOPs", (run) => run.flopsPerToken && run.figures.tokens_seen
    ? run.flopsPerToken * run.figures.tokens_seen : null],
];

const LONG = 32; // characters of a text that makes its column wide

const results = {
  sortedBy: null,
  isDescending: false,

  columns() {
    const keys = Object.entries(state.differences).map(([key, values]) => [
      key, (run) => values[run.name],
    ]);
    const scores = new Set(state.runs.flatMap((run) => run.scores.map(scoreName)));
    const ofScores = [...scores].map((name) => [
      name, (run) => run.scores.find((score) => scoreName(score) === name)?.value,
    ]);
    const figures = FIGURES.filter(([, value]) => state.runs.some((run) => isKnown(value(run))));
    return [["run", (run) => run.name], ...keys, ...figures, ...ofScores];
  },

  draw() {
    const columns = results.columns();
    const heads = columns.map(([name, value]) => {
      const button = element("button", { type: "button" }, name);
      button.addEventListener("click", () => results.sortBy(name));
      const head = element("th", { scope: "col" }, button);
      if (typeof state.runs.map(value).find(isKnown) === "number") head.className = "number";
      if (name === results.sortedBy)
        head.setAttribute("aria-sort", results.isDescending ? "descending" : "ascending");
      return head;
    });
    const rows = results.sorted(columns).map((run) => element("tr", { "data-run": run.name },
      ...columns.map(([, value], i) => cell(value(run), i === 0))));
    byId("results-table").replaceChildren(
      element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows));
  },

  sortBy(name) {
    results.isDescending = results.sortedBy === name && !results.isDescending;
    results.sortedBy = name;
    results.draw();
    const heads = [...byId("results-table").querySelectorAll("th button")];
    heads.find((button) => button.textContent === name)?.focus();
  },

  sorted(columns) {
    const column = columns.find(([name]) => name === results.sortedBy);
    if (!column) return state.runs;
    const sign = results.isDescending ? -1 : 1;
    return [...state.runs].sort((one, other) => {
      const [a, b] = [column[1](one), column[1](other)];
      if (!isKnown(a) || !isKnown(b)) return isKnown(b) - isKnown(a);
      if (typeof a === "number" && typeof b === "number") return sign * (a - b);
      return sign * text(a).localeCompare(text(b), "en", { numeric: true });
    });
  },
};

function scoreName(score) {
  return `${score.task} ${score.metric}`;
}

function isKnown(value) {
  return value !== null && value !== undefined;
}

// Return a value as text; JSON gets spaces, at which a browser can break the line.
function text(value) {
  if (typeof value === "string") return value;
  return JSON.stringify(value)
    .replace(/("(?:\\.|[^"\\])*")|[,:]/g, (mark, quoted) => quoted ?? `${mark} `);
}

function cell(value, isHead) {
  const shown = typeof value === "number" ? formatNumber(value) : isKnown(value) ? text(value) : "–";
  const made = element(isHead ? "th" : "td", {}, shown);
  if (isHead) made.scope = "row";
  if (typeof value === "number") made.className = "number";
  else if (shown.length > LONG) made.className = "long";
  return made;
}
