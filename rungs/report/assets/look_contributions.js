// What each head and feed-forward layer adds to the logit of the token after the chosen one.

const contributions = {
  signed(value) {
    return `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`;
  },

  cell(value, most, chooses) {
    const shown = contributions.signed(value);
    const inside = chooses
      ? element("button", { type: "button", textContent: shown, onclick: () => choose(chooses) })
      : shown;
    return shade(element("td", {}, inside), value / most);
  },

  update() {
    const at = chosen.token;
    const { logits, embedding, heads, feedForward, biases } = look.contributions;
    const ofHeads = heads.map((layer) => layer.map((head) => head[at]));
    const others = [embedding[at], biases[at], ...feedForward.map((layer) => layer[at])];
    const most = Math.max(1e-9, ...[...others, ...ofHeads.flat()].map(Math.abs));
    const hasFeedForward = feedForward.length > 0;
    const titles = ["", ...Array.from({ length: look.heads }, (_, head) => `head ${head}`)];
    if (hasFeedForward) titles.push("feed-forward");
    const rows = ofHeads.map((values, layer) => {
      const cells = values.map((value, head) => contributions.cell(value, most, { layer, head }));
      if (hasFeedForward) cells.push(contributions.cell(feedForward[layer][at], most));
      return element("tr", {}, element("th", { textContent: `layer ${layer}`, scope: "row" }), ...cells);
    });
    const header = titles.map((title) => element("th", { textContent: title }));
    byId("parts").replaceChildren(
      ...(rows.length ? [element("thead", {}, element("tr", {}, ...header))] : []), element("tbody", {}, ...rows),
    );
    const next = element("code", { textContent: look.chosen[at] });
    byId("sum").replaceChildren(
      "The logit of ", next, ` is ${logits[at].toFixed(2)}: ${contributions.signed(embedding[at])} from the embedding, `,
      `${contributions.signed(biases[at])} from biases, the rest from the layers.`,
    );
  },
};
