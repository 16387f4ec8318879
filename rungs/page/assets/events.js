// What happened to the runs: signs on the charts, and a table.

const EVENT_SIGNS = {
  start: { text: "▲" },
  failure: { text: "✖" },
  stall: { text: "⏸" },
  dropped: { text: "✕" },
  spike: { text: "⚡\uFE0E", metrics: ["train_loss", "gradient_norm"] },
  best: { text: "★", metrics: ["train_loss", "validation_loss"] },
};

function drawEvents() {
  const rows = state.runs.flatMap((run) => run.events.map((event) => element("tr", {},
    element("th", { scope: "row" }, run.name),
    element("td", { className: "number" }, event.step < 0 ? "–" : formatNumber(event.step)),
    element("td", {}, `${EVENT_SIGNS[event.event]?.text ?? ""} ${event.text}`),
    element("td", {}, event.time ? event.time.replace("T", " ").replace("+00:00", " UTC") : ""))));
  byId("events").hidden = !rows.length;
  const heads = ["run", "step", "event", "time"].map((name) =>
    element("th", { scope: "col" }, name));
  byId("events-table").replaceChildren(
    element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows));
}
