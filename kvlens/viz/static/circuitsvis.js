// circuitsvis' attention patterns. Its script is 1.3 MB: it stands in the page compressed, and is unpacked when it is asked for, by a
// click, or at once where the page is this picture alone.
"use strict";
(() => {
  let loading = null, n = 0;

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

  // one of its components in `target`, as wide as that is; it may be put into the page after the call
  const show = async (target, component, props, name) => {
    await (loading ??= load());
    target.id = `circuitsvis-${(n += 1)}`;
    new MutationObserver(() => { // its canvases have a role but no name
      for (const canvas of target.querySelectorAll("canvas:not([aria-label])")) canvas.setAttribute("aria-label", name);
    }).observe(target, { childList: true, subtree: true });
    let width = 0, waiting = null;
    const render = () => { // it measures its width only once, when it is drawn
      if (width === target.clientWidth || !target.isConnected) return;
      width = target.clientWidth;
      target.replaceChildren();
      CircuitsVis.render(target.id, CircuitsVis[component], props);
    };
    render();
    window.addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(render, 200); });
  };
  KVLENS.circuitsvis = show;

  const setUp = (figure) => {
    const target = figure.querySelector(":scope > div"), button = figure.querySelector(".draw");
    const draw = async () => {
      button.disabled = true;
      await ready;
      const props = drawn(dataOf(figure));
      await (loading ??= load());
      button.remove();
      figure.tabIndex = 0; // it scrolls sideways on a small screen
      figure.setAttribute("role", "region");
      figure.setAttribute("aria-label", "attention patterns");
      show(target, "AttentionHeads", props, "attention pattern of a head");
    };
    button.addEventListener("click", draw);
    if (document.querySelector("main[data-draw]")) draw();
  };

  document.querySelectorAll('[data-kvlens="attention"]').forEach(setUp);
})();
