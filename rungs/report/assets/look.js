// Puts the page together.

function choose(change) {
  Object.assign(chosen, change);
  for (const part of [text, predictions, contributions]) part.update();
  if (look.layers) attention.update();
}

function listen() {
  byId("colouring").addEventListener("change", () => text.update());
  byId("lens").addEventListener("toggle", () => {
    if (!byId("lens-table").rows.length) predictions.drawLens();
    predictions.update();
  });
  byId("theme").addEventListener("click", () => {
    theme.apply(theme.name === "dark" ? "light" : "dark");
    if (look.layers) attention.paintAll();
    choose({});
  });
}

theme.apply(theme.name);
byId("title").textContent = document.title = `Inside ${look.name}`;
byId("status").textContent = look.checkpoint;
byId("attention").hidden = !look.layers;
if (!look.layers) byId("colouring").lastElementChild.remove();
text.draw();
if (look.layers) attention.draw();
choose({});
listen();
