// The map of heads with its details, and the frame of a notebook.
"use strict";
(() => {
  const { ready, dataOf, label, short, number, valuesOf, strongest, sumOf, element, legend, coloredTokens, mapOfHeads } = KVLENS;

  // --- one head's pattern, on a canvas: queries of the text downwards, keys of prompt and text across -----------------

  const columnsOf = (data) => ["prompt", "text"].flatMap((part) =>
    data.columns[part].map(({ place, text }) => ({ part, place, text: short(text, 24) })));

  const colorReader = (context) => {
    // let the browser parse the style sheet's colors, in any notation
    const style = getComputedStyle(document.documentElement);
    return (name) => {
      context.fillStyle = style.getPropertyValue(name).trim();
      const hex = context.fillStyle;
      return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
    };
  };

  const layoutOf = (width, nRows, nColumns) => {
    const left = 110, top = 26, gap = 8;
    const cell = Math.min(18, (width - left - gap - 4) / nColumns);
    const row = nRows <= 64 ? 13 : Math.max(3, Math.floor(640 / nRows));
    return { left, top, gap, cell, row, width, height: top + nRows * row + 4 };
  };

  // one pixel for each cell, to be drawn larger: thousands of rectangles would take longer than a click may
  const pixelsOf = (values, width, height, full, paper, positive, negative) => {
    const small = element("canvas"), pixels = new ImageData(width, height);
    Object.assign(small, { width, height });
    values.forEach((x, i) => {
      const strength = Math.min(1, Math.abs(x ?? 0) / full), end = x < 0 ? negative : positive;
      for (let k = 0; k < 3; k++) pixels.data[4 * i + k] = paper[k] + strength * (end[k] - paper[k]); // rounded when stored
      pixels.data[4 * i + 3] = 255;
    });
    small.getContext("2d").putImageData(pixels, 0, 0);
    return small;
  };

  const drawPattern = (canvas, data, columns, values, nPrompt, full, at) => {
    const nRows = data.queries.length;
    const box = layoutOf(canvas.parentElement.clientWidth || 900, nRows, columns.length);
    const ratio = window.devicePixelRatio || 1;
    canvas.width = box.width * ratio;
    canvas.height = box.height * ratio;
    canvas.style.height = box.height + "px";
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const color = colorReader(context);
    const [paper, positive, negative, ink] = ["--cell", "--positive-fill", "--negative-fill", "--muted"].map(color);
    const xOf = (column) => box.left + column * box.cell + (column >= nPrompt ? box.gap : 0);
    const cells = pixelsOf(values, columns.length, nRows, full, paper, positive, negative);
    const high = nRows * box.row;
    context.imageSmoothingEnabled = false;
    for (const [first, last] of [[0, nPrompt], [nPrompt, columns.length]])
      if (last > first) context.drawImage(cells, first, 0, last - first, nRows, xOf(first), box.top, (last - first) * box.cell, high);
    if (box.row > 8) for (let row = 1; row <= nRows; row++) context.clearRect(box.left, box.top + row * box.row - 1, box.width, 1);
    context.fillStyle = `rgb(${ink})`;
    if (box.cell > 5 && box.row > 8) values.forEach((x, i) => { // beyond full color: a corner
      if (Math.abs(x ?? 0) <= 1.0005 * full) return;
      context.fillRect(xOf(i % columns.length) + box.cell - 3, box.top + Math.floor(i / columns.length) * box.row, 3, 3);
    });
    if (at) {
      context.strokeStyle = `rgb(${ink})`;
      context.lineWidth = 1.5;
      context.strokeRect(xOf(at.column), box.top + at.row * box.row, box.cell, box.row);
    }
    context.fillStyle = `rgb(${ink})`;
    context.font = "11px system-ui, sans-serif";
    context.fillText(`prompt, ${data.n_prompt} tokens →`, xOf(0), 16);
    const inText = `text, ${data.text.length} tokens →`;
    const right = box.width - context.measureText(inText).width - 2;
    context.fillText(inText, Math.min(xOf(nPrompt), right), 16);
    if (box.row < 10) context.fillText("text ↓", 4, box.top + 10);
    else {
      context.textAlign = "right";
      context.font = "10px ui-monospace, monospace";
      data.queries.forEach((query, row) =>
        context.fillText(short(data.text[query], 16), box.left - 6, box.top + row * box.row + box.row - 3));
    }
    return box;
  };

  const patternPanel = (data, values, full) => {
    const columns = columnsOf(data);
    const nPrompt = columns.filter((column) => column.part === "prompt").length;
    const panel = element("div", "pattern"), canvas = element("canvas"), readout = element("p", "readout");
    const rest = "Point at a cell or use the arrow keys to read its value.";
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "application");
    canvas.setAttribute("aria-label", "attention of the text's tokens to prompt and text; arrow keys read its cells");
    readout.setAttribute("role", "status");
    readout.textContent = rest;
    panel.append(canvas, readout);
    let box = null, at = null;
    const draw = () => { box = drawPattern(canvas, data, columns, values, nPrompt, full, at); };
    const read = ({ row, column }) => {
      const query = data.queries[row], key = columns[column], value = values[row * columns.length + column];
      readout.textContent =
        `text ${query} “${label(data.text[query])}” attends to ${key.part} ${key.place} “${key.text}”: ${number(value)}`;
    };
    canvas.addEventListener("mousemove", (event) => {
      const x = event.offsetX - box.left, row = Math.floor((event.offsetY - box.top) / box.row);
      const border = nPrompt * box.cell;
      const column = Math.floor((x < border ? x : Math.max(border, x - box.gap)) / box.cell);
      if (x < 0 || row < 0 || row >= data.queries.length || column >= columns.length) return (readout.textContent = rest);
      read({ row, column });
    });
    canvas.addEventListener("mouseleave", () => (readout.textContent = rest));
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
      if (!step) return;
      event.preventDefault();
      const row = (at?.row ?? 0) + (at ? step[0] : 0), column = (at?.column ?? 0) + (at ? step[1] : 0);
      at = { row: Math.max(0, Math.min(data.queries.length - 1, row)), column: Math.max(0, Math.min(columns.length - 1, column)) };
      draw();
      read(at);
    });
    canvas.addEventListener("blur", () => { at = null; draw(); });
    return { panel, draw };
  };

  // --- the heat map of heads --------------------------------------------------------------------------------------

  // one scale for all heads, so that they can be compared
  const scalesOf = (data) => {
    const all = (name) => (data[name] ?? []).flat().flatMap(valuesOf);
    const names = ["pattern", "shares", "bias"], signed = (name) => all(name).some((x) => x < 0);
    return {
      ...Object.fromEntries(names.map((name) => [name, strongest(all(name))])),
      signed: Object.fromEntries(names.map((name) => [name, signed(name)])),
    };
  };

  const showHead = (place, data, scales, layer, headIndex) => {
    const ofHead = (name) => data[name] && valuesOf(data[name][layer][headIndex]);
    const shares = ofHead("shares"), bias = ofHead("bias"), tokens = data.blocks.map((block) => block.text);
    const title = element("h3", "", `Layer ${layer}, head ${headIndex}`);
    const { panel, draw } = patternPanel(data, ofHead("pattern"), scales.pattern);
    const patternTitle = element("h4", "", "Attention pattern of the unconverted model");
    place.replaceChildren(title, patternTitle, panel);
    draw();
    const { signed } = scales, negative = signed.pattern ? "Linear attention weights can be negative (red), and a row need not sum to 1." : "";
    panel.prepend(
      element("p", "note", ["Rows are the text's tokens.", negative, ...data.notes].filter(Boolean).join(" ")),
      legend(scales.pattern, "of the head's attention; the same scale for every head", signed.pattern));
    const most = shares.map((x, i) => [x ?? 0, i]).sort((a, b) => Math.abs(b[0]) - Math.abs(a[0])).slice(0, 5);
    const list = most.map(([x, i]) => `“${label(tokens[i])}” (${data.blocks[i].place}) ${number(x)}`).join(", ");
    place.append(
      element("h4", "", "Prompt tokens by their share of the head's output on the text"),
      element("p", "note", `All together: ${number(data.whole[layer][headIndex])}; the rest comes from the text itself and the shift state. Largest: ${list}.`),
      legend(scales.shares, "of the head's output", signed.shares),
      coloredTokens("prompt tokens, colored by their share of the head's output", tokens, shares, scales.shares, (token, i, x) => `prompt ${data.blocks[i].place} ${label(token)}: ${number(x)}`));
    if (bias) {
      place.append(
        element("h4", "", "Text tokens by the share of the bias in the head's output"),
        element("p", "note", `||z_bias|| / (||z_bias|| + ||z_context||), mean ${number(sumOf(bias) / bias.length)}.`),
        legend(scales.bias, "of the head's output, by size", false),
        coloredTokens("text tokens, colored by the share of the bias", data.text, bias, scales.bias, (token, i, x) => `text ${i} ${label(token)}: ${number(x)}`));
    }
    return draw;
  };

  const setUpHeatMap = (figure) => {
    const data = dataOf(figure).details, scales = data && scalesOf(data);
    const known = (layer, head) => data?.whole[layer]?.[head] !== undefined;
    mapOfHeads(figure, known, (place, layer, head) => showHead(place, data, scales, layer, head));
  };

  // --- the frame of a notebook --------------------------------------------------------------------------------------

  const fitFrame = () => {
    let frame = null;
    try { frame = window.frameElement; } catch { return; } // a frame of another origin keeps its own height
    if (!frame || !frame.hasAttribute("srcdoc")) return;
    const fit = () => { frame.style.height = document.documentElement.offsetHeight + 4 + "px"; };
    fit(); // now, not when the page is first drawn: in a background tab that may be late or never
    new ResizeObserver(fit).observe(document.body);
  };

  ready.then(() => document.querySelectorAll('[data-kvlens="heat-map"]').forEach(setUpHeatMap));
  fitFrame();
})();
