// Prompt -> heads -> next token: three panels that show one quantity, the share of a prompt token, through a head, in the
// attention output at a text token. Choosing in one panel recolors the other two.
"use strict";
(() => {
  const { NEWLINE, ready, dataOf, label, running, number, percent, valuesOf, strongest, element, paint, roving, legend, selection, covers } = KVLENS;
  const share = (x) => percent(x, 0); // even very small ones: there may be thousands of tokens

  const matrix = (quantized, nColumns) => {
    const values = valuesOf(quantized);
    return { row: (i) => values.slice(i * nColumns, (i + 1) * nColumns), column: (j) => values.filter((_, k) => k % nColumns === j), values };
  };

  const panel = (title, name) => {
    const box = element("section", `panel ${name}`);
    const heading = element("h3", "", title), note = element("p", "note"), scale = element("div", "scale");
    box.append(heading, note, scale);
    return { box, note, scale };
  };

  const tokenButtons = (box, tokens, part) => {
    const list = element("div", "tokens");
    list.setAttribute("role", "group");
    list.setAttribute("aria-label", `${part} tokens`);
    const buttons = tokens.map((token, i) => {
      const button = element("button", "token", running(token).replace(/\n/g, NEWLINE));
      button.type = "button";
      list.append(button, "\n".repeat((token.match(/\n/g) ?? []).length)); // the line ends after the button that shows it
      return button;
    });
    box.append(list);
    return buttons;
  };

  const headButtons = (box, nLayers, nHeads) => {
    const scroll = element("div", "scroll"), table = element("table", nHeads > 16 ? "grid small" : "grid"), buttons = [];
    const first = element("tr");
    first.append(element("td", "corner", ""));
    for (let head = 0; head < nHeads; head++) {
      const th = element("th", "", String(head));
      th.scope = "col";
      first.append(th);
    }
    table.append(first);
    for (let layer = 0; layer < nLayers; layer++) {
      const row = element("tr"), th = element("th", "", String(layer));
      th.scope = "row";
      row.append(th);
      for (let head = 0; head < nHeads; head++) {
        const cell = element("td"), button = element("button", "head");
        button.type = "button";
        cell.append(button);
        row.append(cell);
        buttons.push(button);
      }
      table.append(row);
    }
    scroll.append(table);
    box.append(scroll);
    return buttons;
  };

  // the same head is selected in the figures below; a link to each
  const BELOW = { "heat-map": "its attention pattern", dual: "what each prompt token contributes to its gradient step" };
  const waysBelow = (place) => {
    const links = Object.entries(BELOW).flatMap(([kind, what]) => {
      const figure = document.querySelector(`figure[data-kvlens="${kind}"]:has(.detail)`);
      if (!figure) return [];
      const button = element("button", "way", what);
      button.type = "button";
      button.addEventListener("click", () => {
        const map = figure.querySelector(".detail");
        map.tabIndex = -1;
        map.focus({ preventScroll: true });
        map.scrollIntoView({ block: "start" });
      });
      return [button];
    });
    if (!links.length) return place.replaceChildren();
    const line = element("p", "note", "Further down: ");
    links.forEach((link, i) => line.append(...(i ? ["; ", link] : [link])));
    place.replaceChildren(line);
  };

  const nextTokens = (place, data, chosen) => {
    place.replaceChildren();
    if (chosen === null) return place.append(element("p", "note", "Choose a text token to see the most probable next tokens."));
    const table = element("table", "plain"), head = element("tr"), conditions = Object.keys(data.next);
    head.append(element("th", "", "rank"));
    conditions.forEach((name) => {
      const th = element("th", "", name);
      th.scope = "col";
      head.append(th);
    });
    table.append(head);
    const follows = data.text[chosen + 1];
    for (let rank = 0; rank < data.next[conditions[0]][chosen].length; rank++) {
      const row = element("tr");
      const th = element("th", "", String(rank + 1));
      th.scope = "row";
      row.append(th);
      conditions.forEach((name) => {
        const [token, probability] = data.next[name][chosen][rank];
        const cell = element("td", "", `${label(token)}  ${percent(probability)}`);
        if (token === follows) cell.className = "hit";
        row.append(cell);
      });
      table.append(row);
    }
    const what = `The most probable next tokens after “${label(data.text[chosen])}” (text ${chosen})` +
      (follows === undefined ? "." : `; the text continues with “${label(follows)}”, shown in bold.`);
    place.append(element("p", "note", what), table);
  };

  const setUp = (figure) => {
    const data = dataOf(figure), nHeads = data.n_heads, nPrompt = data.blocks.length, nText = data.text.length;
    const byPrompt = matrix(data.by_prompt, nPrompt), byText = matrix(data.by_text, nText), between = matrix(data.between, nPrompt);
    const total = (m, n, size) => Array.from({ length: n }, (_, i) => m.row(i).reduce((a, x, j) => a + (x ?? 0) * (size ? size[j] : 1), 0));
    const mean = (m, n) => Array.from({ length: n }, (_, j) => m.column(j).reduce((a, x) => a + (x ?? 0), 0));
    const all = {
      heads: total(byText, data.n_layers * nHeads).map((x) => x / nText),
      prompt: mean(byPrompt, nPrompt),
      text: mean(byText, nText),
    };
    // one scale per quantity, independent of what is chosen
    const tops = {
      "all/heads": strongest(all.heads), "all/prompt": strongest(all.prompt), "all/text": strongest(all.text),
      "prompt/heads": strongest(byPrompt.values), "prompt/text": strongest(between.values),
      "head/prompt": strongest(byPrompt.values), "head/text": strongest(byText.values),
      "text/prompt": strongest(between.values), "text/heads": strongest(byText.values),
    };
    const place = figure.querySelector(".linked");
    const prompt = panel("Prompt", "prompt"), heads = panel("Heads: layers down, heads across", "heads"), text = panel("Text", "text");
    const status = element("p", "readout"), expected = element("div", "next");
    status.setAttribute("role", "status");
    expected.setAttribute("aria-live", "polite");
    place.append(prompt.box, heads.box, text.box);
    figure.append(status, expected);
    const promptButtons = tokenButtons(prompt.box, data.blocks.map((block) => block.text), "prompt");
    const coloring = coloringChoice(heads, data);
    const headCells = headButtons(heads.box, data.n_layers, nHeads);
    const textButtons = tokenButtons(text.box, data.text, "text");
    for (const button of [...promptButtons, ...headCells, ...textButtons]) button.setAttribute("aria-pressed", "false");
    let kind = null, index = null;

    // how many tokens of a unit of the prompt each block has; the opening says which they are
    const inUnit = (unit) => {
      const found = unit !== undefined && document.querySelector(`[data-unit="${CSS.escape(unit)}"][data-start]`);
      if (!found) return null;
      const { start, stop } = found.dataset;
      return data.blocks.map((_, i) => Math.max(0, Math.min(stop, (i + 1) * data.block) - Math.max(start, i * data.block)));
    };

    const color = (buttons, values, top, name) => buttons.forEach((button, i) => {
      paint(button, values[i], top);
      const said = `${name(i)}: ${values[i] === null || values[i] === undefined ? "no value" : share(values[i])}`;
      button.title = said;
      button.setAttribute("aria-label", said);
    });
    const promptNames = data.blocks.map(({ place, text }) => `prompt ${place} “${label(text)}”`);
    const textNames = data.text.map((token, i) => `text ${i} “${label(token)}”`);
    const names = {
      prompt: (i) => promptNames[i],
      heads: (i) => `layer ${Math.floor(i / nHeads)} head ${i % nHeads}`,
      text: (i) => textNames[i],
    };
    let pressed = null;
    const press = (button) => {
      pressed?.setAttribute("aria-pressed", "false");
      button?.setAttribute("aria-pressed", "true");
      pressed = button ?? null;
    };
    const scaleOf = (part, top, unit) => part.scale.replaceChildren(legend(100 * top, `% ${unit}`, true));
    const draw = () => {
      const values = { ...all }, from = kind ?? "all";
      if (kind === "prompt") { values.heads = byPrompt.column(index); values.text = between.column(index); }
      if (kind === "unit") { values.heads = total(byPrompt, data.n_layers * nHeads, inUnit(index)); values.text = total(between, nText, inUnit(index)); }
      if (kind === "head") { values.prompt = byPrompt.row(index); values.text = byText.row(index); }
      if (kind === "text") { values.prompt = between.row(index); values.heads = byText.column(index); }
      const per = data.block > 1 ? "per token" : "";
      for (const [name, buttons, part] of [["prompt", promptButtons, prompt], ["heads", headCells, heads], ["text", textButtons, text]]) {
        const top = tops[`${from}/${name}`] ?? tops[`all/${name}`];
        color(buttons, values[name], top, names[name]);
        scaleOf(part, top, name === "prompt" ? per : "");
      }
      press(buttonsOf[kind]?.[index]);
      if ((kind === null || kind === "head") && coloring.value() !== null) colorHeads(coloring.value());
      status.textContent = said(values);
      if (kind === "head") waysBelow(expected);
      else nextTokens(expected, data, kind === "text" ? index : null);
    };
    const colorHeads = (name) => { // by quantities other than the prompt's shares
      const chosen = data.colorings[name], numbers = valuesOf(chosen), real = numbers.filter((x) => x !== null);
      const low = chosen.without_zero && real.length ? Math.min(...real) : 0;
      const top = chosen.without_zero && real.length ? Math.max(...real) : strongest(numbers);
      headCells.forEach((button, i) => {
        paint(button, numbers[i] === null ? null : numbers[i] - low, top - low);
        button.title = `${names.heads(i)}: ${name} ${number(numbers[i])}`;
        button.setAttribute("aria-label", button.title);
      });
      heads.scale.replaceChildren(legend(top, name, low === 0 && numbers.some((x) => x < 0), low));
    };
    const best = (values, name, n) => values.map((x, i) => [x ?? 0, i]).sort((a, b) => Math.abs(b[0]) - Math.abs(a[0])).slice(0, n)
      .map(([x, i]) => `${name(i)} ${share(x)}`).join(", ");
    const said = (values) => {
      if (kind === null) return `Nothing chosen: means over the text. Largest for ${best(all.heads, names.heads, 3)}.`;
      if (kind === "prompt") return `${names.prompt(index)}: largest share in ${best(values.heads, names.heads, 3)}.`;
      if (kind === "unit") return `The tokens of unit ${Number(index) + 1} together: largest share in ${best(values.heads, names.heads, 3)}.`;
      if (kind === "head") return `${names.heads(index)}: reads most from ${best(values.prompt, names.prompt, 3)}; largest share at ${best(values.text, names.text, 3)}.`;
      return `${names.text(index)}: largest share through ${best(values.heads, names.heads, 3)}; from ${best(values.prompt, names.prompt, 3)}.`;
    };
    const keys = { prompt: (i) => String(data.blocks[i].place), head: (i) => `${Math.floor(i / nHeads)}.${i % nHeads}`, text: String };
    const show = (what, i) => {
      [kind, index] = [what, i];
      figure.dataset.chosen = kind === null ? "" : `${kind} ${index}`;
      draw();
    };
    const clear = () => { show(null, null); selection.set({ show: null }); };
    const choose = (what) => (i) => {
      if (kind === what && index === i) return clear();
      show(what, i);
      selection.set({ [what]: keys[what](i), show: what });
    };
    const buttonsOf = { prompt: promptButtons, head: headCells, text: textButtons };
    const follow = (selected) => { // what was chosen elsewhere, or stands in the address
      const what = selected.show, own = inUnit(selected.unit);
      promptButtons.forEach((button, i) => button.classList.toggle("of-unit", Boolean(own?.[i])));
      if (what === "unit" && own) return kind === what && index === selected.unit ? undefined : show(what, selected.unit);
      if (kind === "unit") show(null, null);
      const holds = (i) => keys[what](i) === selected[what] || (what === "prompt" && covers(keys[what](i), selected[what]));
      const i = buttonsOf[what]?.findIndex((_, i) => holds(i)) ?? -1;
      if (i < 0 || (kind === what && index === i)) return;
      show(what, i);
      const button = buttonsOf[what][i], box = button.closest(".tokens");
      if (box) box.scrollTop = button.offsetTop - box.offsetTop - box.clientHeight / 2;
    };
    roving(promptButtons, 0, choose("prompt"), clear);
    roving(headCells, nHeads, choose("head"), clear);
    roving(textButtons, 0, choose("text"), clear);
    coloring.listen(() => { if (kind !== "head") clear(); else draw(); });
    prompt.note.textContent = data.block > 1 ? `${data.n_prompt} tokens in blocks of ${data.block}; colors are means per token. The text of long blocks is abbreviated.` : `${data.n_prompt} tokens.`;
    text.note.textContent = data.note;
    show("text", data.text.length - 1); // show the next-token predictions at once
    follow(selection.get());
    selection.listen(["head", "prompt", "text", "unit", "show"], follow);
  };

  const coloringChoice = (heads, data) => {
    const names = Object.keys(data.colorings);
    if (!names.length) return { value: () => null, listen: () => {} };
    const select = element("select");
    select.setAttribute("aria-label", "what the heads show when no token is chosen");
    select.append(element("option", "", "share of the prompt"), ...names.map((name) => element("option", "", name)));
    heads.note.append(select);
    return { value: () => (select.selectedIndex ? names[select.selectedIndex - 1] : null), listen: (f) => select.addEventListener("change", f) };
  };

  ready.then(() => document.querySelectorAll('[data-kvlens="linked"]').forEach(setUp));
})();
