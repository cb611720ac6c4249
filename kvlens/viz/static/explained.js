// An explanation: choosing a claim shades the prompt's parts by what it loses without them; choosing a part tells what is said then.
"use strict";
KVLENS.setUpExplained = (root) => root.querySelectorAll('[data-kvlens="explained"]').forEach((figure) => {
  const { dataOf, selection } = KVLENS, data = dataOf(figure), says = figure.querySelector(".says");
  const words = [...figure.querySelectorAll("[data-claim]")], sources = [...figure.querySelectorAll(".source")];
  let claim = data.about;
  const shade = (nats) => {
    const share = Math.max(0, Math.min(1, nats / data.full));
    return `color-mix(in srgb, var(--positive-fill) ${Math.round(100 * share)}%, transparent)`;
  };
  const choose = (chosen, part = null) => {
    claim = chosen;
    words.forEach((word) => word.setAttribute("aria-pressed", String(Number(word.dataset.claim) === claim)));
    sources.forEach((source, i) => {
      const row = data.claims[claim][i];
      source.style.background = shade(row.nats);
      source.querySelector(".effect").textContent = row.label;
      source.setAttribute("aria-pressed", String(i === part));
    });
    says.textContent = part === null ? "Choose a part to read what the model says without it." : data.claims[claim][part].says;
  };
  words.forEach((word) => word.addEventListener("click", () => choose(Number(word.dataset.claim))));
  sources.forEach((source, i) => source.addEventListener("click", () => {
    choose(claim, i);
    selection.set({ unit: source.dataset.unit, show: "unit" });
  }));
  choose(claim);
});
KVLENS.ready.then(() => KVLENS.setUpExplained(document));
