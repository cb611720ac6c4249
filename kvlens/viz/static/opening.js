// The opening of a report: a switch between the effects of removing a unit of the prompt and of hiding it.
"use strict";
document.querySelectorAll('[data-kvlens="opening"]').forEach((figure) => {
  const select = figure.querySelector("select"), texts = [...figure.querySelectorAll("[data-column]")];
  select.addEventListener("change", () => texts.forEach((text) => { text.hidden = text.dataset.column !== select.value; }));
});
