// Heads as steps of learning: choosing a head in the map shows what each demonstration gives to its step and to its output.
"use strict";
(() => {
  const { dataOf, label, number, percent, valuesOf, strongest, element, legend, coloredTokens, mapOfHeads } = KVLENS;
  const share = (x) => percent(x, 0); // however small: there may be thousands
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
    scroll.setAttribute("aria-label", "demonstrations that give most");
    scroll.append(table);
    return scroll;
  };

  const colored = (data, values, top, what) =>
    coloredTokens(data.blocks.map((block) => block.text), values, top,
      (token, i, x) => `${data.blocks[i].place} ${label(token)}: ${share(x)} of the ${what}`);

  const setUp = (figure) => {
    const data = dataOf(figure), per = data.block > 1 ? ", mean per token" : "";
    const heads = Object.values(data.heads).flatMap((layer) => Object.values(layer));
    const all = (name) => heads.flatMap((head) => valuesOf(head[name]));
    const tops = { step: strongest(all("step")), output: strongest(all("output")) };
    const signed = heads.some((head) => head.output.cells.some((cell) => cell < 0));
    const show = (place, layer, index) => {
      const head = data.heads[layer][index];
      place.replaceChildren(
        element("h3", "", `Layer ${layer}, head ${index}: its demonstrations`),
        element("p", "note", `Of the output at “${label(data.query)}” the step on all ${data.n} makes ${share(head.whole)}.`),
        tableOf(data, head.most),
        element("h4", "", "What each gives to the step"),
        element("p", "note", "Its share of |v| √κ(k, k), the size of what it adds to W, over the sum of all."),
        legend(100 * tops.step, `% of the step${per}; the same scale for every head`, false),
        colored(data, valuesOf(head.step), tops.step, "step"),
        element("h4", "", "What each gives to the output"),
        element("p", "note", "The part of the head's output, along it, that its part of the step makes."),
        legend(100 * tops.output, `% of the output${per}; the same scale for every head`, signed),
        colored(data, valuesOf(head.output), tops.output, "output"));
    };
    mapOfHeads(figure, (layer, head) => data.heads[layer]?.[head] !== undefined, show);
  };

  document.querySelectorAll('[data-kvlens="dual"]').forEach(setUp);
})();
