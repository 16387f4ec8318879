// What a model does with a text, and what the reader has chosen of it.

const look = JSON.parse(byId("data").textContent);
const length = look.tokens.length;
const rowsOf = (length * (length + 1)) / 2;
const weightBytes = Uint8Array.from(atob(look.weights), (character) => character.charCodeAt(0));
const chosen = { token: Math.max(length - 2, 0), layer: 0, head: 0 };

// Return how much a head attends from a token to one that is not after it, from 0 to 1.
function weightOf(layer, head, from, to) {
  const first = (layer * look.heads + head) * rowsOf;
  return weightBytes[first + (from * (from + 1)) / 2 + to] / 255;
}

function percent(share) {
  return share >= 0.095 ? `${Math.round(100 * share)} %` : `${Number((100 * share).toPrecision(1))} %`;
}

function nats(loss) {
  return `${loss.toFixed(2)} nats`;
}

// Colour an element by a share from 0 to 1; below 0 with the other colour.
function shade(one, share) {
  one.classList.add("shaded");
  one.classList.toggle("less", share < 0);
  one.style.setProperty("--share", Math.min(Math.abs(share), 1).toFixed(3));
  return one;
}

function levelName(level) {
  return level ? `layer ${level - 1}` : "embedding";
}
