// From units of the prompt to the answer: where they are held, and which heads read them. Every line, and every combination of
// switches, is one intervention that was measured before.
"use strict";
(() => {
  const { dataOf, label, running, number, percent, element, roving, selection, svg } = KVLENS;
  const ROW = 17, PAD = 7, GAP = 12, TOP = 30, THICKEST = 16;

  const listed = (names) => (names.length > 1 ? `${names.slice(0, -1).join(", ")} and ${names.at(-1)}` : names[0]);

  // words in lines of about so many letters, at most so many lines
  const widthOf = (text) => [...text].reduce((sum, sign) => sum + (sign.codePointAt(0) >= 0x2e80 ? 2 : 1), 0);
  const lines = (text, letters, most) => {
    const found = [""];
    for (const word of text.split(/(?<=\s)|(?=[\u2e80-\u9fff\uac00-\ud7a3])/u))
      for (const part of word.match(new RegExp(`.{1,${Math.max(4, letters)}}`, "gsu")) ?? []) {
        if (widthOf(found.at(-1) + part.trimEnd()) > letters && found.at(-1)) found.push("");
        found[found.length - 1] += part;
      }
    const kept = found.map((line) => line.trim()).filter(Boolean).slice(0, most);
    if (found.length > most) kept[most - 1] = kept[most - 1].slice(0, Math.max(1, letters - 1)) + "…";
    return kept;
  };

  const shown = (token) => (token.trim() ? running(token.trim()) : label(token));
  const capital = (text) => text[0].toUpperCase() + text.slice(1);
  const cut = (text, letters) => ([...text].length > letters ? [...text].slice(0, letters - 1).join("") + "…" : text);

  const setUp = (figure) => {
    const data = dataOf(figure), place = figure.querySelector(".flow"), numbers = figure.querySelector(".numbers");
    const measures = figure.querySelector("figcaption select"), status = element("p", "said"), told = element("p", "note");
    const slider = element("input"), limit = element("output"), controls = element("p", "controls"), picture = element("div");
    const on = element("button", "", "Switch everything on"), asTable = element("button", "", "Show as a table");
    const named = {
      u: () => data.causes,
      p: (position) => (data.positions[position] === null ? "the shift state" : `position ${position} “${shown(data.positions[position])}”`),
      h: (head) => data.heads[head],
    };
    const nameOf = (id) => named[id[0]](id.slice(1));
    let pinned = new Set(), off = new Set();

    const state = (heads, positions, inside, others) =>
      data.states[`${heads.join("+")}|${positions.join("+")}|${inside ? 1 : 0}|${others ? 1 : 0}`];
    const everything = state([], [], false, true), whole = () => everything[0];
    const largest = Math.max(1e-12, Math.abs(everything[0])); // as wide as a line gets
    const strength = (positions, heads) => {
      const alone = measures.value === "alone", found = state(heads, positions, positions.length && heads.length, alone);
      return alone ? whole() - found[0] : found[0];
    };
    const partsOf = (id) => (id[0] === "p" ? [[id.slice(1)], []] : [[], [id.slice(1)]]);

    const order = { h: Object.keys(data.heads), p: Object.keys(data.positions) };
    const edgesOf = () => [
      ...order.p.map((p) => ["u", `p${p}`, strength([p], [])]),
      ...order.p.flatMap((p) => order.h.map((h) => [`p${p}`, `h${h}`, strength([p], [h])])),
      ...order.h.map((h) => [`h${h}`, "answer", strength([], [h])]),
    ];

    // what the switches say together
    const result = () => {
      if (off.has("u")) return everything;
      const among = (kind) => order[kind].filter((code) => off.has(kind + code));
      return state(among("h"), among("p"), false, false);
    };

    const draw = () => {
      const focused = picture.contains(document.activeElement) ? document.activeElement.dataset.id : null;
      const wide = Math.max(340, place.clientWidth || 900), narrow = wide < 560, font = narrow ? 11 : 12.5, letter = font * 0.56;
      const widths = (narrow ? [0.27, 0.2, 0.195, 0.225] : [0.3, 0.14, 0.12, 0.17]).map((part) => part * (wide - 4));
      const between = (wide - 4 - widths.reduce((a, b) => a + b)) / 3;
      const left = widths.map((_, i) => widths.slice(0, i).reduce((a, b) => a + b + between, 2));
      const edges = edgesOf(), strongest = Math.max(...edges.map(([, , value]) => Math.abs(value)), 1e-12);
      const least = strongest * (slider.value / 100) ** 2, total = whole();
      const visible = edges.filter(([, , value]) => Math.abs(value) >= least);
      limit.textContent = edges.length ? `${number(least)} nats` : "";
      figure.querySelectorAll("[data-measure]").forEach((note) => { note.hidden = note.dataset.measure !== measures.value; });

      const ids = (kind) => order[kind].map((code) => kind + code);
      const columns = [["u"], ids("p"), ids("h"), ["answer"]];
      const textOf = (id, i) => {
        const letters = Math.floor((widths[i] - 2 * PAD) / letter);
        if (id[0] === "u") return lines(running(data.cause), letters, narrow ? 6 : 5);
        if (id[0] === "h") return lines(data.heads[id.slice(1)], letters, 2);
        return [cut(shown(data.positions[id.slice(1)] ?? "shift state"), letters)];
      };
      const boxes = {}, rowsOf = (id, i) => (id === "answer" ? (narrow ? 7 : 5) : textOf(id, i).length + 1);
      const heights = columns.map((column, i) => column.map((id) => rowsOf(id, i) * ROW + 2 * PAD));
      const tallest = Math.max(...heights.map((column) => column.reduce((a, b) => a + b + GAP, 0)));
      columns.forEach((column, i) => {
        let y = TOP + (tallest - heights[i].reduce((a, b) => a + b + GAP, 0)) / 2;
        column.forEach((id, j) => {
          boxes[id] = { x: left[i], y, w: widths[i], h: heights[i][j], column: i };
          y += heights[i][j] + GAP;
        });
      });
      const high = TOP + tallest + 2 * ROW;
      const drawing = svg("svg", { viewBox: `0 0 ${wide} ${high}`, width: wide, height: high, role: "group", "font-size": font });
      drawing.setAttribute("aria-label", "flow from the prompt to the answer; arrow keys move, Enter pins, Space switches off");
      const headings = narrow ? ["cause", "position", "head", "answer"] : data.columns;
      headings.forEach((name, i) => drawing.append(svg("text", { x: left[i], y: 14, class: "column" }, name)));

      const hot = (ends) => ends.some((id) => pinned.has(id) && id[0] !== "u");
      const anyHot = [...pinned].some((id) => id[0] !== "u");
      const line = (from, to, value, path) => {
        const dim = off.has(from) || off.has(to) || (anyHot && !hot([from, to])) ? " dim" : "";
        const share = Math.min(1, Math.abs(value) / largest);
        const made = svg("path", { d: path, class: `edge${value < 0 ? " less" : ""}${dim}`, "stroke-width": Math.max(1, THICKEST * share) });
        const what = measures.value === "alone" ? "effect of it alone" : "effect of exchanging it", ends = [from, to].filter((id) => "ph".includes(id[0]));
        const said = ends.length ? `${ends.map(nameOf).join(" in ")}: ${what}` : `total effect of ${nameOf(from)}`;
        made.append(svg("title", {}, `${said}, ${number(value)} nats`));
        return made;
      };
      const texts = [], middle = (id) => boxes[id].y + boxes[id].h / 2;
      const port = (own, side, other) => { // the lines at one side of a node, from top to bottom as their other ends are
        const ends = visible.filter((edge) => edge[side] === own).map((edge) => edge[1 - side]).sort((a, b) => middle(a) - middle(b));
        return middle(own) + (ends.indexOf(other) - (ends.length - 1) / 2) * Math.min(12, (boxes[own].h - 10) / ends.length);
      };
      visible.forEach(([from, to, value]) => {
        const x1 = boxes[from].x + boxes[from].w, x2 = boxes[to].x, y1 = port(from, 0, to), y2 = port(to, 1, from), bend = (x2 - x1) / 2;
        drawing.append(line(from, to, value, `M ${x1} ${y1} C ${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`));
        if (from[0] !== "p" || narrow || (anyHot ? !hot([from, to]) : Math.abs(value) < 0.25 * strongest)) return;
        const t = 0.24, x = x1 + (x2 - x1) * (1.5 * t * (1 - t) + t ** 3), y = y1 + (y2 - y1) * t * t * (3 - 2 * t);
        texts.push(svg("text", { x, y: y + 4, class: "value", "text-anchor": "middle" }, number(value))); // others stand in the nodes
      });
      const source = boxes.u, { answer } = boxes, below = high - 1.4 * ROW;
      const x1 = source.x + source.w / 2, x2 = answer.x + answer.w / 2, down = `M ${x1} ${source.y + source.h} C ${x1} ${below} ${x1} ${below}`;
      const up = `C ${x2} ${below} ${x2} ${below} ${x2} ${answer.y + answer.h}`;
      drawing.append(line("u", "answer", total, `${down} ${x1 + 40} ${below} L ${x2 - 40} ${below} ${up}`));
      texts.push(svg("text", { x: wide / 2, y: below + 4, class: "value", "text-anchor": "middle" }, `in total ${number(total)} nats`));
      drawing.append(...texts);

      const items = [], actions = [];
      const item = (id, group, act, other) => {
        group.dataset.id = id;
        group.addEventListener("keydown", (event) => {
          if (event.key !== "Enter" && event.key !== " ") return;
          event.preventDefault();
          (event.key === "Enter" ? act : other)();
        });
        items.push(group);
        actions.push(act);
      };
      for (const [id, box] of Object.entries(boxes)) {
        if (id === "answer") continue;
        const look = `node${pinned.has(id) || id === "u" ? " pinned" : ""}${off.has(id) ? " off" : ""}`;
        const group = svg("g", { class: look, role: "button" });
        const value = id === "u" ? whole() : strength(...partsOf(id));
        group.setAttribute("aria-pressed", String(pinned.has(id)));
        group.append(svg("rect", { x: box.x, y: box.y, width: box.w, height: box.h, rx: 5 }));
        const said = textOf(id, box.column);
        said.forEach((text, i) => group.append(svg("text", { x: box.x + PAD, y: box.y + PAD + 12 + ROW * i }, text)));
        const where = id[0] === "p" && id !== "pshift_state" && !narrow ? ` at ${id.slice(1)}` : "";
        const beneath = { x: box.x + PAD, y: box.y + PAD + 12 + ROW * said.length, class: "number" };
        group.append(svg("text", beneath, `${number(value ?? null)}${where}`));
        group.append(svg("title", {}, describe(id))); // its accessible name as well
        const toggle = svg("g", { class: "switch", role: "switch", "aria-checked": String(!off.has(id)), "aria-label": `switch ${nameOf(id)}` });
        const sx = box.x + box.w - 31, sy = box.y + box.h - 22;
        toggle.append(
          svg("rect", { x: sx - 3, y: sy - 6, width: 32, height: 26, class: "area" }),
          svg("rect", { x: sx, y: sy, width: 24, height: 14, rx: 7, class: "slot" }),
          svg("circle", { cx: off.has(id) ? sx + 7 : sx + 17, cy: sy + 7, r: 5, class: "knob" }),
          svg("title", {}, off.has(id) ? "switch on" : "switch off"));
        drawing.append(group, toggle);
        const pin = () => choose(id), flip = () => turn(id);
        item(id, group, pin, flip);
        item(`switch ${id}`, toggle, flip, flip);
      }
      drawing.append(...answerBox(boxes.answer, Math.floor((boxes.answer.w - 2 * PAD) / letter), narrow ? ROW : 0));
      picture.replaceChildren(drawing);
      roving(items, 0, (i) => actions[i](), () => off.size && store(new Set()));
      items.find((one) => one.dataset.id === focused)?.focus({ preventScroll: true });
      tell();
    };

    // the two answers with bars; `down` is how far the percentages stand below the names
    const answerBox = (box, letters, down) => {
      const found = result(), made = [svg("rect", { x: box.x, y: box.y, width: box.w, height: box.h, rx: 5, class: "answer" })];
      [[data.answer, found[1]], found.length > 4 ? found.slice(4) : [data.rival, found[2]]].forEach(([name, p], i) => {
        const x = box.x + PAD, y = box.y + PAD + 12 + (2.5 * ROW + down) * i, w = box.w - 2 * PAD;
        const said = percent(p), below = down ? ROW : 0;
        made.push(
          svg("text", { x, y, class: i ? "" : "strong" }, cut(running(name), Math.max(3, below ? letters : letters - said.length - 1))),
          svg("text", { x: x + w, y: y + below, class: "number", "text-anchor": "end" }, said));
        made.push(
          svg("rect", { x, y: y + below + 6, width: w, height: 8, class: "empty" }),
          svg("rect", { x, y: y + below + 6, width: Math.max(1, p * w), height: 8, class: "full" }));
      });
      return made;
    };

    const says = (found) => { // of one state
      const p = `“${data.answer}” ${percent(found[1])}`, other = `“${data.rival}” ${percent(found[2])}`;
      if (found.length < 5) return `${p}, ${other}`;
      return `${p}${found[4] === data.rival ? "" : `, ${other}`}, and the model says “${found[4]}” (${percent(found[5])})`;
    };
    const describe = (id) => {
      if (id === "u") return `${capital(data.causes)}, “${running(data.cause)}”: without it the answer is ${everything[3]}: ${says(everything)}.`;
      const [positions, heads] = partsOf(id);
      const lost = state(heads, positions, false, false), alone = state(heads, positions, false, true);
      return `${capital(nameOf(id))}: if only it reads the prompt without ${data.causes}, the answer is ${lost[3]}: ${says(lost)}. ` +
        `If only it reads the whole prompt, and all others read it without ${data.causes}, the answer is ${alone[3]}: ${says(alone)}.`;
    };

    const tell = () => {
      const found = result(), names = [...off].sort((a, b) => nameOf(a).localeCompare(nameOf(b))).map(nameOf);
      const gone = off.has("u") && [...off].some((id) => id[0] !== "u");
      const idle = gone ? ` Without ${data.causes} the switches of positions and heads change nothing.` : "";
      const before = names.length ? `With ${listed(names)} switched off the answer is ${found[3]}` : "With everything switched on";
      status.textContent = `${before}: ${says(found)}.${idle}`;
      told.textContent = [...pinned].map(describe).join(" ");
      on.hidden = !off.size;
      figure.dataset.off = [...off].join(" ");
    };

    const store = (next) => selection.set({ off: next.size ? [...next].join(",") : null });
    const turn = (id) => {
      const next = new Set(off);
      if (!next.delete(id)) next.add(id);
      store(next);
    };
    const choose = (id) => {
      const kind = { h: "head", p: "prompt" }[id[0]], value = id.slice(1);
      if (!/^(h\d+\.\d+|p\d+)$/.test(id)) { // no other figure knows it
        if (!pinned.delete(id)) pinned.add(id);
        return draw();
      }
      selection.set(pinned.has(id) ? { [kind]: null, show: null } : { [kind]: value, show: kind });
    };
    const known = (id) => id === "u" || (order[id[0]]?.includes(id.slice(1)) ?? false);
    const follow = (selected) => {
      const at = order.p.find((position) => KVLENS.covers(selected.prompt, position));
      const pins = [selected.head && `h${selected.head}`, at && `p${at}`];
      const own = [...pinned].filter((id) => !/^(h\d+\.\d+|p\d+)$/.test(id));
      pinned = new Set([...pins.filter((id) => id && known(id)), ...own]);
      off = new Set((selected.off ?? "").split(",").filter((id) => id && known(id)));
      draw();
    };

    slider.type = "range";
    Object.assign(slider, { min: 0, max: 100, value: 32 });
    slider.setAttribute("aria-label", "hide lines weaker than");
    const wrapped = element("label", "", "hide lines weaker than ");
    wrapped.append(slider, " ", limit);
    for (const button of [on, asTable]) button.type = "button";
    status.setAttribute("role", "status");
    controls.append(wrapped, asTable);
    const now = element("p", "now");
    now.append(on);
    place.append(controls, picture, status, now, told);
    numbers.classList.add("unseen"); // still read by screen readers, printed, and saved as CSV
    asTable.addEventListener("click", () => {
      asTable.textContent = numbers.classList.toggle("unseen") ? "Show as a table" : "Hide the table";
    });
    on.addEventListener("click", () => store(new Set()));
    slider.addEventListener("input", draw);
    measures.addEventListener("change", draw);
    let before = place.clientWidth;
    window.addEventListener("resize", () => {
      if (place.clientWidth !== before) draw();
      before = place.clientWidth;
    });
    follow(selection.get());
    selection.listen(["head", "prompt", "off"], follow);
  };

  document.querySelectorAll('[data-kvlens="flow"]').forEach(setUp);
})();
