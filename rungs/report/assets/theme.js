// Colours of runs, and the switch between dark and light.

const RUN_COLOURS = {
  light: ["#1f5fa8", "#c2410c", "#15803d", "#9333ea", "#b91c1c",
          "#0e7490", "#a16207", "#be185d", "#4d5b6b", "#5b7c0a"],
  dark: ["#6cb0ff", "#ff9a5c", "#5fd38a", "#c99bff", "#ff8080",
         "#56d0e6", "#e6c14d", "#ff8cc6", "#b4c0cc", "#b5d94c"],
};
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];

const theme = {
  name: matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light",

  colour(number) {
    const colours = RUN_COLOURS[theme.name];
    return colours[number % colours.length];
  },

  dash(number) {
    return DASHES[Math.floor(number / RUN_COLOURS.light.length) % DASHES.length];
  },

  property(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  },

  apply(name) {
    theme.name = name;
    document.documentElement.dataset.theme = name;
    byId("theme").textContent = name === "dark" ? "Light" : "Dark";
  },
};

function byId(id) {
  return document.getElementById(id);
}

// Return a new element with properties and children; text is never read as HTML.
function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function formatNumber(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(3);
  return size >= 1000
    ? value.toLocaleString("en", { maximumFractionDigits: 0 })
    : String(Number(value.toPrecision(5)));
}
