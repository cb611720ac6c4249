// Each figure can be saved: its tables and colored texts as CSV, its drawings as SVG, its patterns as PNG, as they are shown.
// The cells can also be copied, for a spreadsheet.
"use strict";
(() => {
  const { ready, element } = KVLENS;
  const STYLES = ["fill", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "paint-order", "font"];

  const visible = (figure, what) => [...figure.querySelectorAll(what)].filter((one) => one.checkVisibility());
  const comma = (cells) => cells.map((text) => (/[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text)).join(",");
  const tab = (cells) => cells.map((text) => text.replace(/\s+/g, " ")).join("\t");
  const textOf = (cell) => (cell.title || cell.textContent.trim() || cell.querySelector("[title]")?.title || "").replace(/^−(?=\d)/, "-");
  const cellsOf = (figure, line) => {
    const tables = visible(figure, "table").map((table) => [...table.rows].map((row) => line([...row.cells].map(textOf))));
    const texts = visible(figure, ".tokens").map((tokens) =>
      [...tokens.querySelectorAll("[title]")].map((token) => line([token.textContent, token.title])));
    return [...tables, ...texts].filter((rows) => rows.length).map((rows) => rows.join("\r\n")).join("\r\n\r\n");
  };
  const svgOf = (picture) => { // with the styles that the page's style sheet gives it
    const copy = picture.cloneNode(true), all = (one) => [one, ...one.querySelectorAll("*")], copies = all(copy);
    all(picture).forEach((one, i) => {
      const style = getComputedStyle(one);
      for (const name of STYLES) copies[i].style.setProperty(name, style.getPropertyValue(name));
    });
    copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    return new XMLSerializer().serializeToString(copy);
  };

  document.addEventListener("copy", (event) => { // a number of a table is copied with all its digits
    const chosen = window.getSelection(), cell = chosen.anchorNode?.parentElement?.closest("td[title]");
    if (!cell || chosen.toString().trim() !== cell.textContent.trim()) return;
    event.clipboardData.setData("text/plain", cell.title);
    event.preventDefault();
  });

  const save = (name, blob) => {
    const link = element("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };
  const WAYS = {
    CSV: { of: "table, .tokens [title]", write: (figure, put) => put(new Blob(["\ufeff", cellsOf(figure, comma)], { type: "text/csv" })) },
    SVG: { of: "svg", write: (figure, put) => visible(figure, "svg").forEach((one) => put(new Blob([svgOf(one)], { type: "image/svg+xml" }))) },
    PNG: { of: "canvas", write: (figure, put) => visible(figure, "canvas").forEach((one) => one.toBlob(put)) },
  };

  const action = (words, label, act) => {
    const button = element("button", "", words);
    button.type = "button";
    button.setAttribute("aria-label", label);
    button.addEventListener("click", () => act(button));
    return button;
  };
  const copyCells = (figure) => async (button) => {
    try {
      await navigator.clipboard.writeText(cellsOf(figure, tab));
      button.textContent = "copied";
    } catch {
      button.textContent = "the browser refuses to copy; save as CSV";
    }
    setTimeout(() => { button.textContent = "copy the table"; }, 2000);
  };

  ready.then(() => document.querySelectorAll("figure.piece").forEach((figure) => {
    if (figure.querySelector('[data-kvlens="attention"]')) return; // circuitsvis'
    const title = figure.querySelector("figcaption")?.firstChild?.textContent.trim() ?? "figure", line = element("p", "save");
    const name = title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "figure";
    for (const [kind, { of, write }] of Object.entries(WAYS)) {
      if (!figure.querySelector(of)) continue;
      const put = (blob) => save(`${name}.${kind.toLowerCase()}`, blob);
      line.append(action(kind, `save as ${kind}: ${title}`, () => write(figure, put)), " ");
    }
    if (!line.childNodes.length) return;
    line.prepend("Save as ");
    if (figure.querySelector(WAYS.CSV.of)) line.append("or ", action("copy the table", `copy the table: ${title}`, copyCells(figure)));
    figure.append(line);
  }));
})();
