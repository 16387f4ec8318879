// Puts the page together.

const state = JSON.parse(byId("data").textContent);
state.runs.forEach((run, number) => Object.assign(decodeRun(run), { number, hidden: false }));

function drawAll() {
  const names = state.runs.map((run) => run.name);
  const title = names.length > 4 ? `${names.length} runs` : names.join(", ");
  byId("title").textContent = document.title = title;
  byId("title").title = names.join(", ");
  byId("caution").textContent = state.caution ?? "";
  byId("caution").hidden = !state.caution;
  samples.drawChoices();
  layers.drawChoices();
  drawRunList();
  charts.draw();
  drawMetricChoice();
  results.draw();
  drawLineage();
  drawEvents();
  samples.draw();
  layers.draw();
}

function showSmoothing() {
  const percent = Number(byId("smoothing").value);
  byId("smoothing-value").textContent = percent ? `mean of ${percent} % of the steps` : "off";
}

function listen() {
  const redraw = () => charts.draw();
  for (const id of ["x-axis", "log-x", "show-events"]) byId(id).addEventListener("change", redraw);
  for (const id of ["x-axis", "log-x"])
    byId(id).addEventListener("change", () => charts.zoomTo(null, null));
  byId("smoothing").addEventListener("input", () => {
    showSmoothing();
    redraw();
  });
  byId("zoom-in").addEventListener("click", () => charts.zoomBy(0.5));
  byId("zoom-out").addEventListener("click", () => charts.zoomBy(2));
  byId("zoom-reset").addEventListener("click", () => charts.zoomTo(null, null));
  byId("theme").addEventListener("click", () => {
    theme.apply(theme.name === "dark" ? "light" : "dark");
    drawAll();
  });
  for (const id of ["prompt", "sample-kind"])
    byId(id).addEventListener("change", () => samples.draw());
  byId("sample-step").addEventListener("input", () => {
    samples.place = Number(byId("sample-step").value);
    samples.draw();
  });
  byId("layer-statistic").addEventListener("change", () => {
    layers.drawChoices();
    layers.draw();
  });
  byId("layer-part").addEventListener("change", () => layers.draw());
  byId("layer-step").addEventListener("input", () =>
    layers.goTo(layers.steps()[Number(byId("layer-step").value)]));
  addEventListener("resize", () => {
    charts.all.forEach((chart) => chart.resize());
    layers.draw();
  });
}

theme.apply(theme.name);
showSmoothing();
drawAll();
listen();
if (state.version !== null) watch();
