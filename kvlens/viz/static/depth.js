// Layer by layer: a grid of depths (rows) and text tokens (columns), the text above it, the mean of each row next to it.
"use strict";
(() => {
  const { ready, dataOf, label, short, number, element, paint, roving, legend, selection, svg } = KVLENS;

  const meanCurve = (data, rowHeight) => {
    const width = 120, height = rowHeight * data.layers.length;
    const top = Math.max(...data.means.map((x) => Math.abs(x ?? 0)), 1e-12);
    const x = (value) => width / 2 + ((value ?? 0) / top) * (width / 2 - 8);
    const y = (row) => rowHeight * (data.layers.length - 1 - row) + rowHeight / 2;
    const picture = svg("svg", { width, height, role: "img", class: "curve" });
    const ends = data.means[data.means.length - 1];
    picture.append(
      svg("title", {}, `mean loss that the prompt saves, by depth; at the end ${number(ends)} nats`),
      svg("line", { x1: width / 2, x2: width / 2, y1: 0, y2: height, class: "axis" }),
      svg("polyline", { points: data.means.map((value, row) => `${x(value)},${y(row)}`).join(" "), class: "line" }));
    data.means.forEach((value, row) => picture.append(svg("circle", { cx: x(value), cy: y(row), r: 2.5, class: "dot" })));
    return picture;
  };

  const setUp = (figure) => {
    const data = dataOf(figure), place = figure.querySelector(".depth"), rowHeight = 20;
    const rows = data.layers.length, columns = data.tokens.length;
    const readout = element("p", "readout", "Point at a cell, or move with the arrow keys, to read it.");
    readout.setAttribute("role", "status");
    const frame = element("div", "depth-frame"), scroll = element("div", "scroll"), table = element("table", "depth-grid");
    const caption = element("caption", "hidden", "loss that the prompt saves: depths down, text tokens across");
    const head = element("tr"), cells = [];
    head.append(element("td", "corner"));
    data.tokens.forEach((token) => {
      const th = element("th", "sideways");
      th.scope = "col";
      th.append(element("span", "", short(token, 14)));
      head.append(th);
    });
    table.append(caption, head);
    for (let row = rows - 1; row >= 0; row--) { // the deepest on top, as the residual stream is drawn
      const tr = element("tr"), depth = data.layers[row];
      const th = element("th", "", String(depth));
      th.scope = "row";
      tr.append(th);
      for (let column = 0; column < columns; column++) {
        const cell = element("td"), button = element("button", "cell"), value = data.change[row][column];
        button.type = "button";
        paint(button, value, data.top); // positive: the prompt helps, hence blue
        const said = `after ${depth} layers, text ${data.positions[column]} “${label(data.tokens[column])}”: ` +
          (value === null ? "no next token" : `${number(value)} nats saved`) +
          `; expects “${label(data.with[row][column])}” with, “${label(data.without[row][column])}” without`;
        button.setAttribute("aria-label", said);
        button.title = said;
        button.addEventListener("mouseenter", () => (readout.textContent = said));
        button.addEventListener("focus", () => (readout.textContent = said));
        cell.append(button);
        tr.append(cell);
        cells.push(button);
      }
      table.append(tr);
    }
    scroll.append(table);
    const aside = element("div", "curve-box");
    aside.append(element("span", "note", "mean"), meanCurve(data, rowHeight));
    frame.append(scroll, aside);
    const scale = element("div", "scale"), box = legend(data.top ?? 0, "nats saved", true);
    box.firstChild.textContent = `${number(data.top ?? 0)} nats lost`;
    scale.append(box);
    place.append(scale, frame, readout);
    const follow = ({ text }) => cells.forEach((cell, i) => cell.classList.toggle("of-chosen", String(data.positions[i % columns]) === text));
    roving(cells, columns, (i) => selection.set({ text: String(data.positions[i % columns]), show: "text" }), null);
    follow(selection.get());
    selection.listen(["text"], follow);
  };

  ready.then(() => document.querySelectorAll('[data-kvlens="depth"]').forEach(setUp));
})();
