// The likeliest next tokens after each layer: all of them for the chosen token, the first everywhere.

const predictions = {
  candidate(level, at, place) {
    const { texts, tokens, probabilities } = look.predictions;
    return { text: texts[tokens[level][at][place]], probability: probabilities[level][at][place] };
  },

  drawLens() {
    const header = element("tr", {}, element("th"), ...look.tokens.map((token) => element("th", { textContent: token })));
    const rows = look.predictions.tokens.map((_, level) => {
      const cells = look.tokens.map((_, at) => {
        const { text, probability } = predictions.candidate(level, at, 0);
        const button = element("button", {
          type: "button", textContent: text, title: percent(probability), tabIndex: -1,
          onclick: () => choose({ token: at }),
        });
        return element("td", {}, shade(button, probability));
      });
      return element("tr", {}, element("th", { textContent: levelName(level), scope: "row" }), ...cells);
    });
    byId("lens-table").replaceChildren(element("thead", {}, header), element("tbody", {}, ...rows));
  },

  update() {
    const at = chosen.token;
    const rows = look.predictions.tokens.map((candidates, level) => {
      const cells = candidates[at].map((_, place) => {
        const { text, probability } = predictions.candidate(level, at, place);
        const name = element("span", { textContent: text, className: text === look.chosen[at] ? "came" : "" });
        return shade(element("td", {}, name, element("small", { textContent: percent(probability) })), probability);
      });
      const came = percent(Math.exp(look.predictions.chosen[level][at]));
      return element(
        "tr", {}, element("th", { textContent: levelName(level), scope: "row" }),
        element("td", { className: "number", textContent: came }), ...cells,
      );
    });
    const titles = ["", "next token", "likeliest", ...["2nd", "3rd", "4th", "5th"]];
    const header = titles.slice(0, 2 + look.candidates).map((title) => element("th", { textContent: title }));
    byId("candidates").replaceChildren(
      element("thead", {}, element("tr", {}, ...header)), element("tbody", {}, ...rows),
    );
    for (const row of byId("lens-table").rows)
      [...row.cells].slice(1).forEach((cell, column) => cell.classList.toggle("here", column === at));
  },
};
