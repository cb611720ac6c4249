// Induction arcs: prompt and text on one line, and a strip of the heads' scores that filters them.
"use strict";
(() => {
  const { ready, dataOf, label, short, number, element, paint, roving, legend, strongest, selection, svg } = KVLENS;
  const STEP = 15, LABELS = 96;

  const tokensOf = (picture, data, base) => data.tokens.forEach((token, i) => {
    const x = STEP * (i + 0.5);
    const text = svg("text", { x, y: base + 8, transform: `rotate(90 ${x} ${base + 8})`, class: i < data.n_prompt ? "of-prompt" : "of-text" });
    const gap = i > 0 && i !== data.n_prompt && data.places[i] !== data.places[i - 1] + 1;
    text.textContent = (gap ? "⋯ " : "") + short(token, 13);
    text.append(svg("title", {}, `${i < data.n_prompt ? "prompt" : "text"} ${data.places[i]} “${label(token)}”`));
    picture.append(text);
  });

  const arc = ([layer, head, query, key, share, shifted], data, base) => {
    const x1 = STEP * (query + 0.5), x2 = STEP * (key + 0.5), width = Math.max(0.6, 7 * Math.abs(share ?? 0));
    const height = Math.min(base - 8, (x1 - x2) / 2);
    const path = svg("path", {
      d: `M ${x1} ${base} C ${x1} ${base - 1.33 * height} ${x2} ${base - 1.33 * height} ${x2} ${base}`,
      "stroke-width": width, class: `arc${shifted ? " shifted" : ""}${share < 0 ? " less" : ""}`,
    });
    path.append(svg("title", {}, `layer ${layer} head ${head}: “${label(data.tokens[query])}” (text ${data.places[query]}) attends to ` +
      `“${label(data.tokens[key])}” (prompt ${data.places[key]}), ${number(share)}${shifted ? ", by its key shift" : ""}`));
    return path;
  };

  const setUp = (figure) => {
    const data = dataOf(figure), place = figure.querySelector(".arcs");
    const longest = Math.max(1, ...data.arcs.map((a) => a[2] - a[3]));
    const base = Math.min(320, Math.max(60, (STEP * longest) / 2)) + 10;
    const wide = STEP * data.tokens.length, high = base + LABELS;
    const picture = svg("svg", { width: wide, height: high, viewBox: `0 0 ${wide} ${high}`, role: "img" });
    picture.setAttribute("aria-label", `${data.arcs.length} induction arcs over ${data.tokens.length} tokens`);
    const curves = svg("g", {}), border = STEP * data.n_prompt;
    picture.append(svg("line", { x1: border, x2: border, y1: 0, y2: base + LABELS, class: "axis" }), curves);
    tokensOf(picture, data, base);
    const strip = element("div", "strip"), scroll = element("div", "scroll"), status = element("p", "readout");
    status.setAttribute("role", "status");
    strip.setAttribute("role", "group");
    strip.setAttribute("aria-label", "heads by induction score; choose which ones are drawn");
    const top = strongest(data.scores.map((s) => s[2]));
    const best = data.scores.reduce((a, b) => ((b[2] ?? 0) > (a[2] ?? 0) ? b : a), data.scores[0]);
    const chosen = new Set([`${best[0]}.${best[1]}`]);
    const buttons = data.scores.map(([layer, head, score]) => {
      const button = element("button", "head wide", `L${layer} H${head}`);
      button.type = "button";
      paint(button, score, top);
      button.title = `L${layer} H${head}: induction score ${number(score)}`;
      button.setAttribute("aria-label", button.title);
      strip.append(button);
      return button;
    });
    const draw = () => {
      const shown = data.arcs.filter((a) => chosen.has(`${a[0]}.${a[1]}`));
      curves.replaceChildren(...shown.map((a) => arc(a, data, base)));
      buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(chosen.has(`${data.scores[i][0]}.${data.scores[i][1]}`))));
      status.textContent = `${shown.length} arcs of ${chosen.size} ${chosen.size === 1 ? "head" : "heads"}.`;
      figure.dataset.arcs = shown.length;
    };
    const toggle = (i) => {
      const key = `${data.scores[i][0]}.${data.scores[i][1]}`;
      if (!chosen.delete(key)) chosen.add(key);
      draw();
    };
    const follow = ({ head }) => {
      if (!data.scores.some(([layer, index]) => `${layer}.${index}` === head) || (chosen.size === 1 && chosen.has(head))) return;
      chosen.clear();
      chosen.add(head);
      draw();
    };
    scroll.append(picture);
    scroll.tabIndex = 0;
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", "induction arcs, scrolls sideways");
    place.append(legend(top, "induction score", data.scores.some((s) => s[2] < 0)), strip, scroll, status);
    roving(buttons, 0, toggle, () => { chosen.clear(); draw(); });
    draw();
    follow(selection.get());
    selection.listen(["head"], follow);
    scroll.scrollLeft = wide; // scroll to the text, where the arcs start
  };

  ready.then(() => document.querySelectorAll('[data-kvlens="arcs"]').forEach(setUp));
})();
