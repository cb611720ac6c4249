// A circuit as a graph: layers from bottom to top, tokens from left to right, a slider for its size, and what a chosen node reads
// and writes to.
"use strict";
(() => {
  const { ready, dataOf, label, short, number, valuesOf, strongest, element, coloredTokens, selection, svg } = KVLENS;
  const INPUTS = { q: "queries", k: "keys", v: "values", mlp: "MLP", logits: "logits" };
  const LISTED = 12, ROW = [30, 46], SLOT = [28, 104], GAP = [11, 15];

  const nameOf = ({ name, head }) => (head >= 0 ? `head ${name}` : name);
  const nodesOf = (data) => data.nodes.map(([name, layer, head, estimate, column], i) => ({ i, name, layer, head, estimate, column }));
  const edgesOf = (data) => data.edges.map(([from, to, input, estimate, fall, since]) => ({ from, to, input, estimate, fall, since }));

  // --- the drawing ------------------------------------------------------------------------------------------------

  // where things stand, in pixels; a wide circuit scrolls
  const boxOf = (width, stop, longest) => {
    const left = 34, right = 8, top = 24, n = stop.columns.reduce((sum, [, fullest]) => sum + fullest, 0);
    const gap = GAP[Number(width > 600)], gaps = gap * stop.columns.filter(([, fullest]) => !fullest).length;
    const slot = Math.max(SLOT[0], Math.min(SLOT[1], (width - left - right - gaps) / Math.max(1, n)));
    const row = Math.max(ROW[0], Math.min(ROW[1], 620 / Math.max(1, stop.layers.length)));
    const columns = new Map();
    let edge = left;
    for (const [column, fullest] of stop.columns) {
      columns.set(column, { left: edge, right: (edge += fullest ? slot * fullest : gap), fullest });
    }
    const y = (at) => top + (stop.layers.length - 1 - at) * row, floor = y(0);
    const x = (column, at) => columns.get(column).left + slot / 2 + at * slot * (columns.get(column).fullest - 1);
    return { slot, row, x, y, left, columns, width: edge + right, floor, height: floor + row / 2 + 12 + 6.2 * longest };
  };

  // from a writer's top to a reader's bottom; to queries at its left, to values at its right; around what stands between
  const SIDE = { q: -0.55, k: 0, v: 0.55, mlp: 0, logits: 0 };
  const curve = (a, b, input, box) => {
    const x = b.x + SIDE[input] * b.r, y = b.y + b.r * (SIDE[input] ? 0.8 : 1), high = a.y - a.r - y;
    const straight = Math.abs(b.x - a.x) < box.slot / 2 && high > box.row, out = straight ? Math.min(0.55 * box.slot, 0.12 * high) : 0;
    const aside = out * (input === "q" || input === "k" ? -1 : 1), bend = 0.5 * high;
    return `M${a.x.toFixed(1)} ${(a.y - a.r).toFixed(1)}C${(a.x + 2 * aside).toFixed(1)} ${(a.y - a.r - bend).toFixed(1)} ` +
      `${(x + 2 * aside).toFixed(1)} ${(y + bend).toFixed(1)} ${x.toFixed(1)} ${y.toFixed(1)}`;
  };

  const readerOf = (edge, nodes) => {
    const names = edge.to.map((i) => nameOf(nodes[i]));
    if (!"qkv".includes(edge.input)) return names.join(", ");
    return `the ${INPUTS[edge.input]} of ${names.join(", ")}`;
  };
  const sayEdge = (edge, nodes) => `${nameOf(nodes[edge.from])} → ${readerOf(edge, nodes)}: estimate ${number(edge.estimate)}` +
    (edge.fall === null ? "" : `, in a run without it the metric falls by ${number(edge.fall)}`);
  const sayNode = (node, data) => (node.estimate === null ? nameOf(node)
    : `${nameOf(node)}: estimate ${number(node.estimate)}, most of it at “${label(data.columns[node.column])}”`);

  const drawEdges = (edges, at, nodes, box, most) => {
    const group = svg("g", { "aria-hidden": "true", "stroke-opacity": Math.max(0.25, Math.min(0.6, 6 / Math.sqrt(edges.length))).toFixed(2) });
    for (const edge of edges) {
      const from = at.get(edge.from), to = edge.to.filter((i) => at.has(i));
      const path = svg("path", {
        d: to.map((i) => curve(from, at.get(i), edge.input, box)).join(""),
        class: `edge to-${edge.input}${edge.estimate < 0 ? " less" : ""}`,
        "stroke-width": (0.7 + 5 * Math.sqrt(Math.abs(edge.estimate) / most)).toFixed(2),
      });
      edge.path = path;
      group.append(path);
    }
    return group;
  };

  const drawNode = (node, { x, y, r }, data, most, box) => {
    const made = svg("g", { class: "node", role: "button", tabindex: "-1", transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})` });
    made.setAttribute("aria-label", sayNode(node, data));
    made.setAttribute("aria-pressed", "false");
    const kind = node.estimate === null ? "none" : node.estimate < 0 ? "negative" : "positive";
    const wide = Math.max(r, 3.1 * node.name.length + 2); // as wide as its name
    const shape = node.head >= 0 ? svg("circle", { r }) : svg("rect", { x: -wide, y: -r, width: 2 * wide, height: 2 * r, rx: 4 });
    shape.setAttribute("class", `shape ${kind}`);
    shape.style.setProperty("--x", `${(25 + 75 * Math.abs(node.estimate ?? 0) / most).toFixed(1)}%`);
    made.append(shape, svg("text", { y: 3.5 }, node.name));
    return made;
  };

  const axes = (stop, data, box) => {
    const group = svg("g", { class: "axes" });
    stop.layers.forEach((layer, row) => {
      const y = box.y(row), isLayer = layer >= 0 && layer < data.n_layers;
      group.append(svg("line", { x1: box.left, x2: box.width, y1: y, y2: y, class: "axis" }));
      if (isLayer) group.append(svg("text", { x: box.left - 8, y: y + 4, class: "of-layer" }, String(layer)));
    });
    group.append(svg("text", { x: 0, y: 10, class: "of-layers" }, "layer"));
    for (const [column, { left, right }] of box.columns) {
      const x = (left + right) / 2 - 4, y = box.floor + box.row / 2 + 6;
      group.append(svg("line", { x1: left, x2: left, y1: 6, y2: y + 8, class: "axis column" }));
      const text = svg("text", { x, y, transform: `rotate(90 ${x} ${y})`, class: "of-token" }, short(data.columns[column], 13));
      text.append(svg("title", {}, label(data.columns[column])));
      group.append(text);
    }
    return group;
  };

  // --- a chosen node ----------------------------------------------------------------------------------------------

  const panel = (title, ...parts) => {
    const made = element("div", "panel");
    made.append(element("h4", "", title), ...parts);
    return made;
  };

  const table = (title, heads, rows) => {
    const made = element("table", "plain"), head = element("thead"), line = element("tr"), body = element("tbody");
    for (const words of heads) line.append(Object.assign(element("th", "", words), { scope: "col" }));
    head.append(line);
    const isNumber = (cell) => typeof cell === "number" || cell === null;
    const tops = heads.map((_, k) => Math.max(...rows.map((cells) => (isNumber(cells[k]) ? Math.abs(cells[k]) : 0))));
    for (const cells of rows) {
      const row = element("tr");
      cells.forEach((cell, k) => {
        const place = element("td", isNumber(cell) ? "right" : "");
        place.append(isNumber(cell) ? number(cell, tops[k]) : cell);
        row.append(place);
      });
      body.append(row);
    }
    made.append(head, body);
    const scroll = element("div", "scroll");
    scroll.tabIndex = 0;
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", title);
    scroll.append(made);
    return scroll;
  };

  const edgeTable = (title, edges, ends, heads, run) => {
    const most = [...edges].sort((a, b) => Math.abs(b.estimate) - Math.abs(a.estimate)).slice(0, LISTED);
    if (!most.length) return [];
    const rows = most.map((edge) => [...ends(edge), INPUTS[edge.input], edge.estimate, ...(run ? [edge.fall] : [])]);
    const whole = edges.length > LISTED ? `${title}: the largest ${LISTED} of ${edges.length}` : title;
    return [panel(whole, table(whole, [...heads, "through", "estimate", ...(run ? ["fall in a run"] : [])], rows))];
  };

  const attentionOf = (node, data) => {
    const pattern = data.patterns[node.name];
    if (!pattern) return [];
    const n = data.tokens.length, values = valuesOf(pattern), target = element("div"), paper = element("div", "paper one-head");
    const props = {
      tokens: data.tokens.map(label), attention: data.tokens.map((_, i) => values.slice(i * n, (i + 1) * n)),
      minValue: -1, maxValue: 1, positiveColor: "#1d5fa8", negativeColor: "#c0392b", showAxisLabels: true, maskUpperTri: true,
    };
    paper.append(target);
    KVLENS.circuitsvis(target, "AttentionPattern", props, `attention of ${nameOf(node)}`); // which waits until it is in the page
    return [panel("What it attends to", paper)];
  };

  const reasonsOf = (node, data, choice) => {
    const reason = data.reasons[node.name];
    if (!reason) return [];
    const [query, key] = [reason.query, reason.key].map((i) => `“${label(data.tokens[i])}” (${i})`);
    const note = element("p", "note", `${number(reason.attention)} of its attention. Shares of the score, less the mean score of the other keys, by who wrote what the head reads:`);
    const of = (side) => table(`by who wrote the ${side}`, [`wrote the ${side}`, "share", "fall in a run without it"],
      reason.rows.filter(([one]) => one === side).map(([, writer, share, run]) => [choice(writer), share, run]));
    return [panel(`Why ${query} attends to ${key}`, note, of("key"), of("query"))];
  };

  const setUp = (figure) => {
    const data = dataOf(figure), nodes = nodesOf(data), edges = edgesOf(data), place = figure.querySelector(".circuit");
    const byName = new Map(nodes.map((node) => [node.name, node])), run = edges.some((edge) => edge.fall !== null);
    const most = strongestOf(edges), mostNode = strongestOf(nodes);
    const slider = element("input"), said = element("output"), scroll = element("div", "scroll"), readout = element("p", "readout");
    const picture = svg("svg", { role: "group", class: "graph" }), detail = element("div", "detail");
    const rest = "Point at a node or an edge for its numbers; arrow keys move among nodes, Enter chooses, Escape clears.";
    let now = data.first, chosen = null, shown = [], at = new Map(), drawn = new Map();

    Object.assign(slider, { type: "range", min: 0, max: data.stops.length - 1, step: 1, value: now });
    slider.setAttribute("aria-label", "number of edges");
    readout.setAttribute("role", "status");
    readout.textContent = rest;
    detail.tabIndex = -1;

    const words = (stop) => `${stop.n_edges.toLocaleString("en")} edges, ${stop.n_nodes} nodes: faithfulness ${number(stop.faithfulness)} ` +
      `(metric ${number(stop.metric)}; clean ${number(data.clean)}, corrupted ${number(data.corrupted)})`;

    const choice = (name) => {
      const node = byName.get(name);
      if (!node || !at.has(node.i)) return element("span", "", name);
      const button = element("button", "way", name);
      button.type = "button";
      button.setAttribute("aria-label", `choose ${nameOf(node)}`);
      button.addEventListener("click", () => { choose(node); detail.focus(); });
      return button;
    };
    const choices = (list) => {
      const span = element("span");
      list.forEach((i, k) => span.append(k ? ", " : "", choice(nodes[i].name)));
      return span;
    };

    const readersOf = (edge) => choices(edge.to.filter((i) => at.has(i)));
    const tell = () => {
      const panels = element("div", "panels");
      if (!chosen) {
        panels.append(...edgeTable("Edges", shown, (edge) => [choices([edge.from]), readersOf(edge)], ["writer", "reader"], run));
        return detail.replaceChildren(element("h3", "", "The circuit"), panels);
      }
      const node = chosen, title = nameOf(node), own = data.by_position[node.i];
      detail.replaceChildren(element("h3", "", title[0].toUpperCase() + title.slice(1)));
      if (own) {
        const values = valuesOf(own), other = data.corrupted_tokens;
        const corrupted = (token, i) => (other[i] === token ? "" : `; corrupted: ${other[i] === null ? "hidden" : label(other[i])}`);
        const says = (token, i, x) => `${i} ${label(token)}: ${number(x)}${corrupted(token, i)}`;
        detail.append(
          element("p", "note", `Estimate ${number(node.estimate)}: by so much the metric falls with its output corrupted, to first order. By token:`),
          coloredTokens(`tokens, colored by the estimate of ${title}`, data.tokens, values, strongest(values), says));
      }
      panels.append(
        ...edgeTable("What it reads", shown.filter((edge) => edge.to.includes(node.i)), (edge) => [choices([edge.from])], ["writer"], run),
        ...edgeTable("Who reads it", shown.filter((edge) => edge.from === node.i), (edge) => [readersOf(edge)], ["reader"], run),
        ...attentionOf(node, data), ...reasonsOf(node, data, choice));
      detail.append(panels);
    };

    const mark = () => {
      const near = new Set(chosen ? [chosen.i] : []);
      for (const edge of shown) {
        const touches = chosen && (edge.from === chosen.i || edge.to.includes(chosen.i));
        edge.path.classList.toggle("far", Boolean(chosen) && !touches);
        if (touches) for (const i of [edge.from, ...edge.to]) near.add(i);
      }
      for (const [i, group] of drawn) {
        group.setAttribute("aria-pressed", String(chosen?.i === i));
        group.classList.toggle("far", Boolean(chosen) && !near.has(i));
      }
      figure.dataset.chosen = chosen?.name ?? "";
    };

    const choose = (node, quietly) => {
      chosen = node && at.has(node.i) ? node : null;
      mark();
      tell();
      if (!quietly && chosen) readout.textContent = `${sayNode(chosen, data)}. It is shown below.`;
      if (!quietly && chosen?.head >= 0) selection.set({ head: chosen.name, show: "head" });
    };

    // the nearest node in the direction of an arrow
    const step = (from, dx, dy) => {
      const here = at.get(from), score = ([, to]) => {
        const along = (to.x - here.x) * dx + (to.y - here.y) * dy, across = Math.abs((to.x - here.x) * dy) + Math.abs((to.y - here.y) * dx);
        return along > 1 ? along + 3 * across : Infinity;
      };
      const best = [...at].map((entry) => [score(entry), entry[0]]).sort((a, b) => a[0] - b[0])[0];
      return best && best[0] < Infinity ? best[1] : from;
    };
    const ARROWS = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };
    const focus = (i) => {
      for (const group of drawn.values()) group.setAttribute("tabindex", "-1");
      drawn.get(i).setAttribute("tabindex", "0");
    };
    const listen = (group, node) => {
      group.addEventListener("click", () => { focus(node.i); choose(chosen === node ? null : node); });
      group.addEventListener("focus", () => { focus(node.i); readout.textContent = sayNode(node, data); });
      group.addEventListener("mouseenter", () => (readout.textContent = sayNode(node, data)));
      group.addEventListener("keydown", (event) => {
        if (event.key in ARROWS) drawn.get(step(node.i, ...ARROWS[event.key])).focus();
        else if (event.key === "Enter" || event.key === " ") choose(chosen === node ? null : node);
        else if (event.key === "Escape") choose(null);
        else return;
        event.preventDefault();
      });
    };

    const draw = () => {
      const began = performance.now(), stop = data.stops[now];
      const longest = Math.max(3, ...stop.columns.map(([column]) => Math.min(13, [...data.columns[column]].length)));
      const box = boxOf(place.clientWidth || 900, stop, longest);
      for (const [name, value] of [["width", box.width], ["height", box.height], ["viewBox", `0 0 ${box.width} ${box.height}`]]) picture.setAttribute(name, value);
      picture.setAttribute("aria-label", `circuit of ${words(stop)}`);
      const [small, large] = [0.33 * box.row, 0.5 * Math.min(box.row, box.slot) - 1];
      at = new Map(stop.places.map(([i, row, x]) => {
        const r = small + (large - small) * Math.sqrt(Math.abs(nodes[i].estimate ?? 0) / mostNode);
        return [i, { x: box.x(nodes[i].column, x), y: box.y(row), r }];
      }));
      shown = edges.filter((edge) => edge.since <= now);
      const least = [...shown].sort((a, b) => Math.abs(a.estimate) - Math.abs(b.estimate)); // large ones over small ones
      picture.replaceChildren(axes(stop, data, box), drawEdges(least, at, nodes, box, most));
      for (const edge of shown) {
        edge.path.append(svg("title", {}, sayEdge(edge, nodes)));
        edge.path.addEventListener("mouseenter", () => (readout.textContent = sayEdge(edge, nodes)));
      }
      drawn = new Map();
      for (const [i, there] of at) {
        const group = drawNode(nodes[i], there, data, mostNode, box);
        listen(group, nodes[i]);
        drawn.set(i, group);
        picture.append(group);
      }
      if (drawn.size) focus((chosen && at.has(chosen.i) ? chosen : nodes[stop.places[0][0]]).i);
      said.textContent = words(stop);
      slider.setAttribute("aria-valuetext", words(stop));
      figure.dataset.edges = shown.length;
      choose(chosen, true);
      figure.dataset.ms = (performance.now() - began).toFixed(1);
    };

    slider.addEventListener("input", () => { now = Number(slider.value); draw(); });
    picture.addEventListener("mouseleave", () => (readout.textContent = rest));
    const legend = element("div", "legend kinds");
    for (const [kind, name] of Object.entries(INPUTS)) {
      legend.append(element("span", `key to-${kind}`), element("span", "", kind === "mlp" ? "MLPs" : name));
    }
    const controls = element("div", "controls");
    if (data.stops.length > 1) controls.append(slider);
    controls.append(said);
    scroll.tabIndex = 0;
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", "circuit, may scroll sideways");
    scroll.append(picture);
    place.append(controls, legend, scroll, readout, detail);
    draw();
    const follow = ({ head = "" }) => {
      const node = byName.get(head);
      if (node && node !== chosen && at.has(node.i)) choose(node, true);
    };
    follow(selection.get());
    selection.listen(["head"], follow);
    scroll.scrollLeft = scroll.scrollWidth; // where a narrow screen cuts it, to the logits
    let width = place.clientWidth;
    new ResizeObserver(() => {
      if (place.clientWidth !== width) setTimeout(draw);
      width = place.clientWidth;
    }).observe(place);
  };
  const strongestOf = (list) => Math.max(...list.map(({ estimate }) => Math.abs(estimate ?? 0))) || 1;

  ready.then(() => document.querySelectorAll('[data-kvlens="circuit"]').forEach(setUp));
})();
