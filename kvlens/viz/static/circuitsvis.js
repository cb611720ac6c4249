// circuitsvis' attention patterns. Its script is 1.3 MB: it stands in the page compressed, and is unpacked when it is asked for, by a
// click, or at once where the page is this picture alone.
"use strict";
(() => {
  let loading = null;

  const { ready, unpacked, dataOf, valuesOf } = KVLENS;
  const load = async () => {
    const script = document.createElement("script"); // the page's policy knows its hash
    script.textContent = await unpacked(document.getElementById("circuitsvis"));
    document.head.append(script);
  };

  const drawn = ({ attention, ...props }) => { // [head][query][key]
    const values = valuesOf(attention), { length } = props.tokens;
    const row = (i) => values.slice(i * length, (i + 1) * length);
    return { ...props, attention: props.attentionHeadNames.map((_, head) => props.tokens.map((_, i) => row(head * length + i))) };
  };

  const setUp = (figure, index) => {
    const target = figure.querySelector(":scope > div"), button = figure.querySelector(".draw");
    target.id = `circuitsvis-${index}`;
    let width = 0, waiting = null, props = null;
    const render = () => { // it measures its width only once, when it is drawn
      if (width === figure.clientWidth) return;
      width = figure.clientWidth;
      target.replaceChildren();
      CircuitsVis.render(target.id, CircuitsVis.AttentionHeads, props);
    };
    const draw = async () => {
      button.disabled = true;
      await Promise.all([ready, (loading ??= load())]);
      props = drawn(dataOf(figure));
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
