// What the interactive parts of a page share. Each element with data-kvlens holds its data as JSON in a script element of its
// own; text from prompts reaches the page through textContent, title and aria-label alone, never as HTML.
"use strict";
const KVLENS = (() => {
  const NEWLINE = "⏎";
  const dataOf = (element) => {
    const script = element.querySelector(':scope > script[type="application/json"]');
    return script && JSON.parse(script.textContent);
  };
  const turns = /[\u0590-\u08ff\u200f\u202a-\u202e\u2066-\u2069\ufb1d-\ufdff\ufe70-\ufeff]/; // right to left
  const label = (token) => {
    const shown = token.replace(/\n/g, NEWLINE).replace(/ /g, "·").replace(/\t/g, "⇥");
    return turns.test(shown) ? `\u2068${shown}\u2069` : shown;
  };
  const number = (x) => (x === null ? "–" : String(Number(x.toPrecision(3))).replace("-", "−"));
  const valuesOf = (quantised) => quantised.cells.map((cell) => (cell === null ? null : cell * quantised.unit));
  // the magnitude that gets full colour, as in _colour.py
  const strongest = (values) => {
    const sizes = values.map((x) => Math.abs(x ?? 0)).filter((x) => x > 0).sort((a, b) => a - b);
    return sizes.length ? sizes[Math.ceil(0.98 * sizes.length) - 1] : 1;
  };
  const sumOf = (values) => values.reduce((sum, x) => sum + (x ?? 0), 0);

  const element = (name, className, text) => {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };

  // a value as a mix of the paper and a colour, as in _colour.py; what lies beyond full colour is marked
  const paint = (target, value, top) => {
    target.classList.remove("positive", "negative", "none", "clipped");
    if (value === null || value === undefined) return target.classList.add("none");
    const strength = top > 0 ? Math.abs(value) / top : 0;
    target.classList.add(value < 0 ? "negative" : "positive");
    if (strength > 1.0005) target.classList.add("clipped");
    target.style.setProperty("--x", (100 * Math.min(1, strength)).toFixed(1) + "%");
  };

  // One tab stop for a group of elements; arrow keys move among them. `across` is the number of elements in a row, or 0 for a line.
  const roving = (items, across, choose, clear) => {
    if (!items.length) return;
    let current = 0;
    const go = (to) => {
      if (to < 0 || to >= items.length) return;
      items[current].tabIndex = -1;
      current = to;
      items[current].tabIndex = 0;
      items[current].focus();
    };
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: across || 1, ArrowUp: -(across || 1) };
    items.forEach((item, i) => {
      item.tabIndex = i === 0 ? 0 : -1;
      item.addEventListener("focus", () => { items[current].tabIndex = -1; current = i; item.tabIndex = 0; });
      item.addEventListener("keydown", (event) => {
        if (event.key in moves) go(i + moves[event.key]);
        else if (event.key === "Home") go(0);
        else if (event.key === "End") go(items.length - 1);
        else if (event.key === "Escape" && clear) clear();
        else return;
        event.preventDefault();
      });
      item.addEventListener("click", () => choose(i));
    });
  };

  // a scale: its ends and what full colour means, in words and in colour
  const legend = (top, unit, signed) => {
    const box = element("div", "legend"), bar = element("span", signed ? "ramp signed" : "ramp");
    bar.setAttribute("aria-hidden", "true");
    box.append(element("span", "", signed ? number(-top) : "0"), bar, element("span", "", `${number(top)} ${unit}`));
    return box;
  };

  const svg = (name, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };

  return { NEWLINE, dataOf, label, number, valuesOf, strongest, sumOf, element, paint, roving, legend, svg };
})();
