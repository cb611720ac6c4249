// Each figure can be saved: its tables and colored texts as CSV, its drawings as SVG, its patterns as PNG, as they are shown.
"use strict";
(() => {
  const { element } = KVLENS;
  const STYLES = ["fill", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "font"];

  const visible = (figure, what) => [...figure.querySelectorAll(what)].filter((one) => one.checkVisibility());
  const line = (cells) => cells.map((text) => (/[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text)).join(",");
  const textOf = (cell) => (cell.textContent.trim() || cell.querySelector("[title]")?.title || "").replace(/^−(?=\d)/, "-");
  const csvOf = (figure) => {
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

  const save = (name, blob) => {
    const link = element("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };
  const WAYS = {
    CSV: { of: "table, .tokens [title]", write: (figure, put) => put(new Blob(["\ufeff", csvOf(figure)], { type: "text/csv" })) },
    SVG: { of: "svg", write: (figure, put) => visible(figure, "svg").forEach((one) => put(new Blob([svgOf(one)], { type: "image/svg+xml" }))) },
    PNG: { of: "canvas", write: (figure, put) => visible(figure, "canvas").forEach((one) => one.toBlob(put)) },
  };

  document.querySelectorAll("figure.piece").forEach((figure) => {
    if (figure.querySelector('[data-kvlens="attention"]')) return; // circuitsvis'
    const title = figure.querySelector("figcaption")?.firstChild?.textContent.trim() ?? "figure", line = element("p", "save");
    const name = title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "figure";
    for (const [kind, { of, write }] of Object.entries(WAYS)) {
      if (!figure.querySelector(of)) continue;
      const button = element("button", "", kind);
      button.type = "button";
      button.setAttribute("aria-label", `save as ${kind}: ${title}`);
      button.addEventListener("click", () => write(figure, (blob) => save(`${name}.${kind.toLowerCase()}`, blob)));
      line.append(button, " ");
    }
    if (line.childNodes.length) line.prepend("Save as ");
    if (line.childNodes.length) figure.append(line);
  });
})();
