// Switches the runs on and off.

function drawRunList() {
  const entries = state.runs.map((run) => {
    const box = element("input", { type: "checkbox", checked: !run.hidden });
    box.addEventListener("change", () => toggleRun(run, !box.checked));
    const swatch = element("span", { className: "swatch" });
    swatch.style.background = theme.colour(run.number);
    const only = element("button", { type: "button", className: "only" }, "only");
    only.setAttribute("aria-label", `Show only ${run.name}`);
    only.addEventListener("click", () => showOnly(run));
    const size = run.steps ? `${formatNumber(run.steps)} steps` : "no steps yet";
    return element("li", { "data-run": run.name },
      element("label", { title: run.path }, box, swatch, element("span", {}, run.name)),
      element("small", {}, size), only);
  });
  byId("run-list").replaceChildren(...entries);
}

function toggleRun(run, isHidden) {
  run.hidden = isHidden;
  charts.all.forEach((chart) => chart.showRuns());
  samples.draw();
  layers.draw();
}

function showOnly(chosen) {
  const isAlone = state.runs.every((run) => run.hidden === (run !== chosen));
  for (const run of state.runs) run.hidden = !isAlone && run !== chosen;
  charts.all.forEach((chart) => chart.showRuns());
  drawRunList();
  samples.draw();
  layers.draw();
}
