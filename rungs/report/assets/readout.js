// The values of all shown runs at the cursor.

const readout = {
  timer: null,

  show(chart, x) {
    charts.all.forEach((other) => {
      if (other !== chart) other.plot.root.classList.remove("active");
    });
    if (x === null) return readout.hide();
    const { xName, title } = chart.settings;
    const values = chart.valuesAt(x).sort((one, other) => other.value - one.value);
    if (!values.length) return readout.hide();
    const rows = values.map(({ run, row, value, x: at }) => {
      const swatch = element("span", { className: "swatch" });
      swatch.style.background = theme.colour(run.number);
      const step = run.table[STEP][row];
      const place = xName === "step" ? "" : ` (${formatNumber(at)})`;
      return element("tr", { "data-run": run.name, "data-step": step, "data-value": value },
        element("td", {}, swatch, ` ${run.name}`),
        element("td", {}, formatNumber(value)),
        element("td", {}, `step ${formatNumber(step)}${place}`));
    });
    const panel = byId("readout");
    panel.replaceChildren(
      element("strong", {}, title), element("table", {}, element("tbody", {}, ...rows)));
    panel.hidden = false;
    readout.place(panel, chart);
  },

  place(panel, chart) {
    const box = chart.plot.over.getBoundingClientRect();
    const left = box.left + chart.plot.cursor.left;
    const isRight = left > innerWidth / 2;
    const x = isRight ? left - panel.offsetWidth - 16 : left + 16;
    panel.style.left = `${Math.max(4, Math.min(x, innerWidth - panel.offsetWidth - 4))}px`;
    const y = Math.min(box.top, innerHeight - panel.offsetHeight - 4);
    panel.style.top = `${Math.max(4, y)}px`;
  },

  hide() {
    byId("readout").hidden = true;
  },
};
