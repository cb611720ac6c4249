// circuitsvis' attention patterns. Its script is 1.3 MB, so that it stands in the page compressed and is unpacked when it is first
// asked for: by a click, or at once where the page is this picture alone.
"use strict";
(() => {
  const { dataOf } = KVLENS;
  let loading = null;

  const unpacked = async () => {
    const bytes = Uint8Array.from(atob(document.getElementById("circuitsvis").textContent), (sign) => sign.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script"); // the page's policy knows its hash
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  };

  const setUp = (figure, index) => {
    const target = figure.querySelector(":scope > div"), button = figure.querySelector(".draw"), props = dataOf(figure);
    target.id = `circuitsvis-${index}`;
    let width = 0, waiting = null;
    const render = () => { // it measures its width only once, when it is drawn
      if (width === figure.clientWidth) return;
      width = figure.clientWidth;
      target.replaceChildren();
      CircuitsVis.render(target.id, CircuitsVis.AttentionHeads, props);
    };
    const draw = async () => {
      await (loading ??= unpacked());
      button.remove();
      new MutationObserver(() => { // its canvases have a role but no name
        for (const canvas of target.querySelectorAll("canvas:not([aria-label])")) canvas.setAttribute("aria-label", "attention pattern of a head");
      }).observe(target, { childList: true, subtree: true });
      figure.tabIndex = 0; // it scrolls sideways on a small screen
      figure.setAttribute("role", "region");
      figure.setAttribute("aria-label", "attention patterns");
      render();
      window.addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(render, 200); });
    };
    button.addEventListener("click", draw);
    if (document.querySelector("main[data-draw]")) draw();
  };

  document.querySelectorAll('[data-kvlens="attention"]').forEach(setUp);
})();
