// The opening of a report: a switch between the effects that color the prompt. Choosing a unit of it selects the unit in the whole
// page; choosing a single token selects its position.
"use strict";
document.querySelectorAll('[data-kvlens="opening"]').forEach((figure) => {
  const { roving, selection } = KVLENS;
  const select = figure.querySelector("select"), texts = [...figure.querySelectorAll("[data-column]")];
  select.addEventListener("change", () => texts.forEach((text) => { text.hidden = text.dataset.column !== select.value; }));
  const all = texts.map((text) => [...text.querySelectorAll("[data-unit], [data-prompt]")]);
  const keyOf = (span) => (span.dataset.unit === undefined ? ["prompt", span.dataset.prompt] : ["unit", span.dataset.unit]);
  const choose = (span) => {
    const [kind, key] = keyOf(span);
    selection.set(selection.get()[kind] === key ? { [kind]: null, show: null } : { [kind]: key, show: kind });
  };
  const follow = (selected) => all.flat().forEach((span) => {
    const [kind, key] = keyOf(span);
    span.setAttribute("aria-pressed", String(selected[kind] === key));
  });
  for (const spans of all) {
    spans.forEach((span) => {
      span.setAttribute("role", "button");
      span.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        choose(span);
      });
    });
    roving(spans, 0, (i) => choose(spans[i]), () => selection.set({ unit: null, show: null }));
  }
  follow(selection.get());
  selection.listen(["unit", "prompt"], follow);
});
