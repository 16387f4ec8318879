// With --watch: asks the server for runs that have new steps.

const SECONDS_BETWEEN = 2;

async function watch() {
  let { version } = state;
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, SECONDS_BETWEEN * 1000));
    try {
      const response = await fetch(`changes?since=${version}`);
      const changes = await response.json();
      version = changes.version;
      if (changes.runs.length) update(changes);
      byId("status").textContent = "Live";
    } catch {
      byId("status").textContent = "The server has stopped: these are the last steps it sent.";
    }
  }
}

// Replace the runs that have changed; zoom, switches and scroll position stay.
function update(changes) {
  state.differences = changes.differences;
  for (const changed of changes.runs) {
    const place = state.runs.findIndex((run) => run.name === changed.name);
    const { number, hidden } = state.runs[place];
    state.runs[place] = Object.assign(decodeRun(changed), { number, hidden });
  }
  keepFocus(drawAll);
}

// Draw, then focus what took the place of the element that had the focus.
function keepFocus(draw) {
  const focused = document.activeElement;
  const box = focused?.closest("[data-metric], [data-run]");
  const wanted = [...(box?.querySelectorAll("*") ?? [])].indexOf(focused);
  draw();
  if (wanted < 0) return;
  const key = "metric" in box.dataset ? "metric" : "run";
  const again = [...document.querySelectorAll(`${box.tagName}[data-${key}]`)]
    .find((other) => other.dataset[key] === box.dataset[key]);
  again?.querySelectorAll("*")[wanted]?.focus({ preventScroll: true });
}
