// Heads as steps of learning: choosing a head in the map shows the contribution of each demonstration to its step and output.
"use strict";
(() => {
  const { ready, dataOf, label, number, percent, valuesOf, strongest, element, legend, coloredTokens, mapOfHeads } = KVLENS;
  const share = (x) => percent(x, 0); // even very small ones: there may be thousands of tokens
  const COLUMNS = ["position", "demonstration", "of the step", "of the output", "attention", "cosine before", "after"];

  const tableOf = (data, rows) => {
    const scroll = element("div", "scroll"), table = element("table", "plain"), head = element("tr");
    COLUMNS.forEach((name) => {
      const th = element("th", name === "demonstration" ? "" : "right", name);
      th.scope = "col";
      head.append(th);
    });
    table.append(head);
    rows.forEach(([place, token, step, output, weight, before, after]) => {
      const row = element("tr");
      row.append(element("td", "right", String(place)), element("td", "", label(token)));
      [share(step), share(output), number(weight), number(before), number(after)]
        .forEach((text) => row.append(element("td", "right", text)));
      table.append(row);
    });
    scroll.tabIndex = 0;
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", "demonstrations with the largest contributions");
    scroll.append(table);
    return scroll;
  };

  const colored = (data, values, top, what) =>
    coloredTokens(`demonstrations, colored by their share of the ${what}`, data.blocks.map((block) => block.text), values, top,
      (token, i, x) => `${data.blocks[i].place} ${label(token)}: ${share(x)} of the ${what}`);

  const setUp = (figure) => {
    const data = dataOf(figure), per = data.block > 1 ? ", mean per token" : "";
    const heads = Object.values(data.heads).flatMap((layer) => Object.values(layer));
    const all = (name) => heads.flatMap((head) => valuesOf(head[name]));
    const tops = { step: strongest(all("step")), output: strongest(all("output")) };
    const signed = heads.some((head) => valuesOf(head.output).some((x) => x < 0));
    const show = (place, layer, index) => {
      const head = data.heads[layer][index];
      place.replaceChildren(
        element("h3", "", `Layer ${layer}, head ${index}: its demonstrations`),
        element("p", "note", `The step on all ${data.n} demonstrations makes up ${share(head.whole)} of the output at “${label(data.query)}”.`),
        tableOf(data, head.most),
        element("h4", "", "Contribution of each demonstration to the step"),
        element("p", "note", "|v| √κ(k, k), the size of the term that a demonstration adds to W, as a share of the sum over all of them."),
        legend(100 * tops.step, `% of the step${per}; the same scale for every head`, false),
        colored(data, valuesOf(head.step), tops.step, "step"),
        element("h4", "", "Contribution of each demonstration to the output"),
        element("p", "note", "The projection of a demonstration's contribution on the head's output, as a share of the output."),
        legend(100 * tops.output, `% of the output${per}; the same scale for every head`, signed),
        colored(data, valuesOf(head.output), tops.output, "output"));
    };
    mapOfHeads(figure, (layer, head) => data.heads[layer]?.[head] !== undefined, show);
  };

  ready.then(() => document.querySelectorAll('[data-kvlens="dual"]').forEach(setUp));
})();
