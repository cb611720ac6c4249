// The list of contents: going to a section leaves what is selected in the address, which a button copies.
"use strict";
document.querySelectorAll("nav.contents").forEach((contents) => {
  const copy = KVLENS.element("button", "copy", "Copy link"), said = KVLENS.element("span", "unseen");
  copy.type = "button";
  said.setAttribute("role", "status");
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(location.href);
      copy.textContent = said.textContent = "Link copied";
    } catch {
      copy.textContent = said.textContent = "Copy the address above";
    }
    setTimeout(() => { copy.textContent = "Copy link"; }, 2000);
  });
  contents.append(copy, said);
  contents.addEventListener("click", (event) => {
    const link = event.target.closest("a"), section = link && document.querySelector(link.hash);
    if (!section) return;
    event.preventDefault();
    section.tabIndex = -1;
    section.focus({ preventScroll: true });
    section.scrollIntoView();
  });
  KVLENS.ready.then(() => { // the figures above it have grown
    document.getElementById(location.hash.slice(1))?.scrollIntoView();
  });
});
