// The attention maps: a small one of each head, and the chosen one large.

const MOST_LABELS = 24;

const attention = {
  draw() {
    const layers = [];
    for (let layer = 0; layer < look.layers; layer++) {
      const heads = [];
      for (let head = 0; head < look.heads; head++) {
        const canvas = element("canvas");
        heads.push(element(
          "button", { type: "button", className: "head", onclick: () => choose({ layer, head }) },
          canvas, `head ${head}`,
        ));
      }
      layers.push(element("div", { className: "layer" }, element("span", { textContent: `layer ${layer}` }), ...heads));
    }
    byId("heads").replaceChildren(...layers);
    const map = byId("map-canvas");
    map.addEventListener("pointermove", (event) => attention.read(event));
    map.addEventListener("pointerleave", () => attention.describe());
    map.addEventListener("click", (event) => choose({ token: attention.placeOf(event)[0] }));
    attention.paintAll();
  },

  paintAll() {
    const pixels = attention.colours();
    [...byId("heads").querySelectorAll("canvas")].forEach((canvas, number) =>
      attention.paint(canvas, pixels, Math.floor(number / look.heads), number % look.heads),
    );
  },

  // Return the colours of the weights 0 to 255, by the theme.
  colours() {
    const [none, all] = ["--background", "--accent"].map((name) =>
      theme.property(name).match(/[0-9a-f]{2}/gi).map((part) => parseInt(part, 16)),
    );
    return Array.from({ length: 256 }, (_, weight) => {
      const share = Math.sqrt(weight / 255);
      return none.map((from, part) => from + share * (all[part] - from));
    });
  },

  paint(canvas, colours, layer, head) {
    canvas.width = canvas.height = length;
    const context = canvas.getContext("2d");
    const image = context.createImageData(length, length);
    for (let from = 0; from < length; from++)
      for (let to = 0; to <= from; to++) {
        const colour = colours[Math.round(255 * weightOf(layer, head, from, to))];
        image.data.set([...colour, 255], 4 * (from * length + to));
      }
    context.putImageData(image, 0, 0);
  },

  update() {
    const { layer, head } = chosen;
    [...byId("heads").querySelectorAll("button")].forEach((button, number) =>
      button.setAttribute("aria-pressed", number === layer * look.heads + head),
    );
    const map = byId("map-canvas");
    attention.paint(map, attention.colours(), layer, head);
    attention.label("map-rows");
    attention.label("map-columns");
    byId("map-row").style.setProperty("--at", chosen.token / length);
    byId("map-row").style.setProperty("--height", 1 / length);
    byId("map-title").textContent = `layer ${layer} head ${head}`;
    map.setAttribute("aria-label", `Attention map of layer ${layer} head ${head}`);
    attention.describe();
  },

  // Write the tokens along a side of the map, as many as fit, and the chosen one always.
  label(side) {
    const every = Math.ceil(length / MOST_LABELS);
    const isShown = (_, at) => at === chosen.token || (at % every === 0 && Math.abs(at - chosen.token) >= every);
    const labels = look.tokens.map((textContent, at) => {
      const label = element("span", { textContent, className: at === chosen.token ? "chosen" : "" });
      label.style.setProperty("--at", (at + 0.5) / length);
      return label;
    });
    byId(side).replaceChildren(...labels.filter(isShown));
  },

  placeOf(event) {
    const box = byId("map-canvas").getBoundingClientRect();
    const share = (where, first, size) => Math.min(Math.floor(((where - first) / size) * length), length - 1);
    return [share(event.clientY, box.top, box.height), share(event.clientX, box.left, box.width)];
  },

  // Say what the chosen token attends to most.
  describe() {
    const weights = look.tokens.slice(0, chosen.token + 1).map((_, to) => [text.attended(to), to]);
    const most = weights.sort((one, other) => other[0] - one[0]).slice(0, 3);
    const parts = most.map(([weight, to]) => `"${look.tokens[to]}" (token ${to}) ${percent(weight)}`);
    byId("map-readout").textContent = `Token ${chosen.token}, "${look.tokens[chosen.token]}", attends to ${parts.join(", ")}.`;
  },

  read(event) {
    const [from, to] = attention.placeOf(event);
    const weight = to <= from ? percent(weightOf(chosen.layer, chosen.head, from, to)) : "nothing: it comes later";
    byId("map-readout").textContent =
      `From token ${from}, "${look.tokens[from]}", to token ${to}, "${look.tokens[to]}": ${weight}.`;
  },
};
