// The tokens of the text; one of them is chosen.

const text = {
  draw() {
    const buttons = look.tokens.map((token, at) =>
      element("button", {
        type: "button", role: "option", textContent: token, tabIndex: -1,
        onclick: () => choose({ token: at }),
      }),
    );
    byId("tokens").replaceChildren(...buttons);
    byId("tokens").addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move) return;
      event.preventDefault();
      choose({ token: Math.min(Math.max(chosen.token + move, 0), length - 1) });
      byId("tokens").children[chosen.token].focus();
    });
  },

  update() {
    const byLoss = byId("colouring").value === "loss";
    const most = byLoss ? Math.max(1, ...look.losses) : 1;
    [...byId("tokens").children].forEach((button, at) => {
      const isChosen = at === chosen.token;
      button.setAttribute("aria-selected", isChosen);
      button.tabIndex = isChosen ? 0 : -1;
      shade(button, (byLoss ? look.losses[at - 1] ?? 0 : text.attended(at)) / most);
      button.title = at ? `loss ${nats(look.losses[at - 1])}` : "the first token has no loss";
    });
    byId("scale-low").textContent = byLoss ? "0" : "0 %";
    byId("scale-high").textContent = byLoss ? nats(most) : "100 %";
    byId("chosen").replaceChildren(...text.sentence());
  },

  attended(at) {
    return look.layers && at <= chosen.token
      ? weightOf(chosen.layer, chosen.head, chosen.token, at)
      : 0;
  },

  sentence() {
    const at = chosen.token;
    const [code, next] = [look.tokens[at], look.chosen[at]].map((token) =>
      element("code", { textContent: token }),
    );
    const probability = percent(Math.exp(look.predictions.chosen[look.layers][at]));
    return at < length - 1
      ? ["After ", code, ` came `, next, `: the model gave it ${probability}, a loss of ${nats(look.losses[at])}.`]
      : ["After ", code, ", the last token, the likeliest is ", next, ` with ${probability}.`];
  },
};
