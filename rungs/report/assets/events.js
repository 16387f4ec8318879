// What happened to the runs: signs on the charts, and a table.

const EVENT_SIGNS = {
  start: { text: "▲" },
  failure: { text: "✖" },
  stall: { text: "⏸" },
  dropped: { text: "✕" },
  warning: { text: "⚠\uFE0E" },
  spike: { text: "⚡\uFE0E", metrics: ["train_loss", "gradient_norm"] },
  best: { text: "★", metrics: ["train_loss", "validation_loss", PASS_AT_1] },
};

// Return the step of an event; if the run has layers, as a button that shows them around it.
function stepOf(run, event) {
  if (event.step < 0) return ["–"];
  if (!run.layers) return [formatNumber(event.step)];
  const button = element("button", { type: "button" }, formatNumber(event.step));
  button.setAttribute("aria-label", `Show the layers around step ${event.step} of ${run.name}`);
  button.addEventListener("click", () => layers.goTo(event.step, true));
  return [button];
}

function drawEvents() {
  const rows = state.runs.flatMap((run) => run.events.map((event) => element("tr", {},
    element("th", { scope: "row" }, run.name),
    element("td", { className: "number" }, ...stepOf(run, event)),
    element("td", {}, `${EVENT_SIGNS[event.event]?.text ?? ""} ${event.text}`),
    element("td", {}, event.time ? event.time.replace("T", " ").replace("+00:00", " UTC") : ""))));
  byId("events").hidden = !rows.length;
  const heads = ["run", "step", "event", "time"].map((name) =>
    element("th", { scope: "col" }, name));
  byId("events-table").replaceChildren(
    element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows));
}
