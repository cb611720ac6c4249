// Functions shared by the interactive parts of a page. Each element with data-kvlens has its data in its own script element, as
// compressed JSON; text from prompts reaches the page only through textContent, title and aria-label, never as HTML.
"use strict";
const KVLENS = (() => {
  const NEWLINE = "⏎";
  const unpacked = async (element) => { // base64 of gzip
    const bytes = Uint8Array.from(atob(element.textContent), (sign) => sign.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };
  const data = new WeakMap(), dataOf = (element) => data.get(element);
  const unpackData = (root) => Promise.all([...root.querySelectorAll("script.data")].map(async (script) =>
    data.set(script.parentElement, JSON.parse(await unpacked(script)))));
  const ready = unpackData(document); // all other scripts set up their figures then, in their order
  const turns = /[\u0590-\u08ff\u200f\u202a-\u202e\u2066-\u2069\ufb1d-\ufdff\ufe70-\ufeff]/; // right to left
  // like label and running in _text.py
  const withoutWidth = /^\p{Cf}+$/u;
  const codePoint = (sign) => `<U+${sign.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}>`;
  const onABase = (token) => (/^\p{M}/u.test(token) ? "◌" + token : token);
  const withoutBytes = (token) => token.replace(/(?:<0x[0-9A-F]{2}>)+/g, "⋯");
  const running = (token) => (withoutWidth.test(token) ? "⋯" : onABase(withoutBytes(token)));
  const label = (token) => {
    let shown = token.replace(/\n/g, NEWLINE).replace(/ /g, "·").replace(/\t/g, "⇥");
    shown = withoutWidth.test(shown) ? shown.replace(/./gu, codePoint) : onABase(shown);
    return turns.test(shown) ? `\u2068${shown}\u2069` : shown;
  };
  const short = (token, longest) => {
    const signs = [...withoutBytes(token)]; // so that none is cut in two
    return label((signs.length > longest ? [...signs.slice(0, longest - 1), "…"] : signs).join(""));
  };
  // like number and percent in _text.py
  const number = (x, top = x) => {
    if (x === null) return "–";
    const size = Math.abs(top ?? x);
    if (size !== 0 && (size < 1e-3 || size >= 1e5)) return x.toExponential(1).replace(/e([+-])(\d)$/, "e$10$2").replaceAll("-", "−");
    const digits = size === 0 ? 0 : Math.max(0, 2 - Math.floor(Math.log10(size)));
    let shown = x.toFixed(digits); // rounded as Python does, by the binary value; toLocaleString takes much longer
    if (!Number(shown)) shown = shown.replace("-", "");
    return (digits ? shown : shown.replace(/\B(?=(\d{3})+$)/g, ",")).replace("-", "−");
  };
  const percent = (x, least = 0.001) => {
    if (x === null) return number(x);
    if (x !== 0 && Math.abs(x) < least) return `${x > 0 ? "< " : "> −"}${100 * least}\u00a0%`;
    const shown = String(Number((100 * x).toPrecision(3))).replace("-", "−");
    return `${x < 1 && shown === "100" ? "> 99.9" : shown}\u00a0%`;
  };
  const valuesOf = ({ unit, cells }) => Array.from(cells, (sign) => { // as in _quantized.py
    const code = sign.charCodeAt(0) - 35;
    return code < 0 ? null : unit * (code % 2 ? -(code + 1) / 2 : code / 2);
  });
  // the magnitude that gets full color, as in _color.py
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

  // a value as a mix of the paper and a color, as in _color.py; values beyond full color are marked
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

  // the legend of a scale: its ends and the value at full color
  const legend = (top, unit, signed, low = 0) => {
    const box = element("div", "legend"), bar = element("span", signed ? "ramp signed" : "ramp");
    bar.setAttribute("aria-hidden", "true");
    const most = Math.max(Math.abs(low), Math.abs(top));
    box.append(element("span", "", number(signed ? -top : low, most)), bar, element("span", "", `${number(top, most)} ${unit}`));
    return box;
  };

  // tokens as running text, each with its color and a tooltip; `name` says to a screen reader which text this is
  const coloredTokens = (name, tokens, values, top, describe) => {
    const box = element("div", "tokens");
    box.tabIndex = 0; // it scrolls where there are many
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", name);
    tokens.forEach((token, i) => {
      const span = element("span", "none", running(token).replace(/\n/g, NEWLINE + "\n"));
      paint(span, values[i], top);
      span.title = describe(token, i, values[i]);
      box.append(span);
    });
    return box;
  };

  // What is selected in a page: a head ("layer.head"), a prompt token, a text token, a unit of the prompt, and which of these was
  // chosen last (`show`). All figures share it; it stands in the hash of the page's address, so that it survives a reload and can
  // be copied.
  const selection = (() => {
    const names = ["head", "prompt", "text", "unit", "show"], listeners = [];
    const read = () => Object.fromEntries([...new URLSearchParams(location.hash.slice(1))].filter(([name]) => names.includes(name)));
    let now = read();
    const become = (next) => {
      if (names.every((name) => next[name] === now[name])) return;
      const before = now;
      now = next;
      for (const [own, listener] of listeners) if (own.some((name) => next[name] !== before[name])) listener(now);
    };
    window.addEventListener("hashchange", () => location.hash.includes("=") && become(read()));
    return {
      get: () => now,
      set: (change) => {
        const next = Object.fromEntries(Object.entries({ ...now, ...change }).filter(([, value]) => value !== null));
        try { history.replaceState(null, "", `#${new URLSearchParams(next)}`); } catch { /* a notebook's frame has no address */ }
        become(next);
      },
      listen: (own, listener) => listeners.push([own, listener]), // only to changes of these names
    };
  })();

  // whether a selected place in the prompt, "38" or a block such as "36–39", holds a position
  const covers = (place, position) => {
    const [first, last = first] = (place ?? "").split("–");
    return first !== "" && Number(first) <= Number(position) && Number(position) <= Number(last);
  };

  // The map of heads in a figure: the selector of a column, arrow keys, and what choosing a head shows. `show` fills the area
  // below the map and returns a function that redraws it when the page changes its size.
  const mapOfHeads = (figure, known, show) => {
    const select = figure.querySelector("figcaption select"), map = figure.querySelector("table.heat");
    const heads = [...map.querySelectorAll("[data-head]")];
    select?.addEventListener("change", () => {
      const { values, low, top } = dataOf(figure).maps[select.value];
      heads.forEach((head, i) => {
        paint(head, values[i] === null ? null : values[i] - low, top - low);
        head.title = `layer ${head.dataset.layer}, head ${head.dataset.head}: ${select.value} ${number(values[i])}`;
        if (!map.classList.contains("wide")) head.textContent = number(values[i], Math.max(Math.abs(low), Math.abs(top)));
      });
      map.dataset.column = select.value;
      map.caption.replaceChildren(legend(top, select.value, low === 0 && values.some((x) => x < 0), low));
    });
    const place = figure.querySelector(".detail");
    if (!place) return;
    const said = element("p", "unseen");
    said.setAttribute("role", "status");
    figure.append(said);
    let redraw = () => {};
    const choose = (layer, head, quietly) => {
      if (figure.dataset.selected === `${layer}.${head}`) return;
      figure.dataset.selected = `${layer}.${head}`;
      for (const button of heads)
        button.setAttribute("aria-pressed", button.dataset.layer === layer && button.dataset.head === head);
      redraw = show(place, Number(layer), Number(head)) ?? (() => {});
      if (!quietly) said.textContent = `Layer ${layer}, head ${head} is shown below.`;
    };
    const pick = ({ layer, head }) => {
      choose(layer, head);
      selection.set({ head: `${layer}.${head}`, show: "head" });
    };
    const isKnown = (button) => known(button.dataset.layer, button.dataset.head);
    roving(heads, map.querySelectorAll("thead th").length - 1, (i) => isKnown(heads[i]) && pick(heads[i].dataset), null);
    const mayBeFirst = (button) => isKnown(button) && !button.classList.contains("negative");
    const strength = (button) => (mayBeFirst(button) ? parseFloat(button.style.getPropertyValue("--x")) || 0 : -1);
    const first = heads.reduce((a, b) => (strength(b) > strength(a) ? b : a));
    const follow = ({ head = "" }) => {
      const [layer, index] = head.split(".");
      if (known(layer, index)) choose(layer, index, true);
    };
    follow(selection.get());
    if (!figure.dataset.selected && isKnown(first)) choose(first.dataset.layer, first.dataset.head);
    selection.listen(["head"], follow);
    window.addEventListener("resize", () => redraw());
    for (const event of ["beforeprint", "afterprint"]) // canvases too are printed in the light colors
      window.addEventListener(event, () => {
        document.documentElement.classList.toggle("printing", event === "beforeprint");
        redraw();
      });
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw());
  };

  const svg = (name, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };

  return { NEWLINE, ready, unpacked, unpackData, dataOf, label, running, short, number, percent, valuesOf, strongest, sumOf, element, paint, roving, legend, coloredTokens, mapOfHeads, selection, covers, svg };
})();
