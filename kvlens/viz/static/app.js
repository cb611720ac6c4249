// `kvlens app`: asks the server, shows line by line what it tells, and gives every part of the prompt a switch. The explanation
// itself is HTML that the server escaped, as in pages; all other text reaches the page through textContent.
"use strict";
KVLENS.ready.then(() => {
  const { element } = KVLENS, find = (what) => document.querySelector(what);
  const form = find("form"), status = find(".state"), result = find(".result"), stop = find(".stop");
  const told = find(".told"), answer = told.querySelector(".response"), known = told.querySelector("ul");
  const LEFT = "What you typed is still here.";
  let name = null, going = null;
  const off = new Set(); // parts of the prompt that are switched off

  const say = (text, kind = "") => { status.textContent = text; status.dataset.kind = kind; };
  const ended = (text, kind) => { say(text, kind); stop.disabled = true; };

  // the lines of a response, one by one
  async function* linesOf(response) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n");
      rest = parts.pop();
      for (const part of parts) yield JSON.parse(part);
    }
  }

  // One run at a time: a new one stops the one before. What becomes known has a function in `shows`.
  const run = async (path, given, shows) => {
    going?.abort();
    const mine = (going = new AbortController());
    let last = "The server ended it.", kind = "error";
    stop.disabled = false;
    say("Asking …");
    try {
      const headers = { "Content-Type": "application/json" };
      const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(given), signal: mine.signal });
      if (!response.ok) throw new Error(await response.text());
      const warned = [];
      for await (const line of linesOf(response)) {
        if (going !== mine) return;
        if (line.status) say(line.done ? `${line.status}: ${Math.round(100 * line.done)} %` : line.status);
        if (line.warning) warned.push(line.warning);
        if (line.error) throw new Error(line.error);
        for (const [what, show] of Object.entries(shows)) if (what in line) await show(line[what]);
        if (line.found || line.without) [last, kind] = [warned.join(" "), ""];
      }
    } catch (error) {
      if (going !== mine) return;
      const away = error instanceof TypeError ? "The server does not answer; is kvlens app still running?" : error.message;
      last = `${mine.signal.aborted ? "Stopped." : away} ${LEFT}`;
      kind = mine.signal.aborted ? "" : "error";
    }
    if (going !== mine) return;
    going = null;
    ended(last, kind);
  };

  const show = async (found) => {
    name = found.name;
    result.innerHTML = `<h2>The answer</h2>${found.html}`;
    await KVLENS.unpackData(result);
    KVLENS.setUpExplained(result);
    told.hidden = true;
    addSwitches();
    if (off.size) await switchOff();
  };

  // --- switches -----------------------------------------------------------------------------------------------------

  const addSwitches = () => {
    const parts = result.querySelector(".sources");
    for (const part of [...parts.querySelectorAll(".source")]) {
      const row = element("div", "switched"), unit = Number(part.dataset.unit), box = element("input");
      box.type = "checkbox";
      box.checked = !off.has(unit);
      box.setAttribute("aria-label", `${part.querySelector(".unit").textContent} is read`);
      box.addEventListener("change", () => {
        if (box.checked) off.delete(unit); else off.add(unit);
        switchOff();
      });
      part.replaceWith(row);
      row.append(box, part);
    }
    const place = element("div", "without");
    place.setAttribute("role", "region");
    place.setAttribute("aria-label", "What is said without the parts that are switched off");
    parts.before(element("p", "note", "Switch parts off to read what the model says without them."));
    result.querySelector(".says").after(place);
  };

  const switchOff = () => {
    const place = result.querySelector(".without");
    if (!off.size) {
      going?.abort();
      going = null;
      ended("");
      return place.replaceChildren();
    }
    return run("without", { name, units: [...off] }, { without: (sentences) => {
      const all = element("button", "way", "Switch all on");
      all.type = "button";
      all.addEventListener("click", () => {
        off.clear();
        result.querySelectorAll(".switched input").forEach((box) => { box.checked = true; });
        switchOff();
      });
      place.replaceChildren(...sentences.map(({ text, rows }, i) => {
        const line = element("p", i ? "found" : "tokens response", text);
        line.dataset.rows = rows.join(" "); // of the table `statements`
        return line;
      }), all);
    } });
  };

  // --- what people do -----------------------------------------------------------------------------------------------

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const { model, system, question } = form.elements;
    const documents = [...form.querySelectorAll("[name=document]")].map((box) => box.value);
    answer.textContent = "";
    known.replaceChildren();
    told.hidden = true;
    run("ask", { model: Number(model.value), system: system.value, documents, question: question.value }, {
      answer: (text) => { told.hidden = false; answer.textContent = text; },
      line: (text) => known.append(element("li", "", text)),
      found: (found) => { off.clear(); return show(found); },
    });
  });
  stop.addEventListener("click", () => going?.abort());
  find(".more").addEventListener("click", () => {
    const label = element("label", "", "Document "), box = element("textarea");
    [box.name, box.rows] = ["document", 4];
    label.append(box);
    find(".documents").append(label);
    box.focus();
  });
  result.addEventListener("click", (event) => {
    const chosen = event.target.closest("[data-claim]");
    if (!chosen || !name) return;
    const claim = chosen.dataset.claim, again = () => result.querySelector(`[data-claim="${claim}"]`).focus();
    run("about", { name, claim: Number(claim) }, { found: (found) => { const done = show(found); done.then(again); return done; } });
  });
});
