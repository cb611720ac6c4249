"""An explanation as a part of a page, for notebooks and reports: works offline, and without scripts shows everything in a list.

The response is shown with its words shaded by how much they depend on the prompt; a click on a claim shows the units that it
falls without, a click on a unit what the model says without it. Below is a strip of layers.
"""

import html
import itertools
import json
from typing import Any

from .sentences import paragraphs, percent, quoted

MOST_SHADE = 8.0
"""Nats from which on a word or a unit has the full color."""
_ids = itertools.count()
STYLE = """
.kvx{font:15px/1.5 system-ui,sans-serif;color:#1a1a1a;max-width:60rem}.kvx h4{margin:1.1em 0 .3em;font-size:1em}
.kvx .box{border:1px solid #ccc;border-radius:6px;padding:.6em .8em;background:#fff}
.kvx .w{border-radius:3px;padding:0 .1em}.kvx button.c{font:inherit;border:0;border-bottom:2px solid #b3541e;border-radius:3px;
padding:0 .15em;cursor:pointer;color:inherit}.kvx button.c[aria-pressed=true]{outline:2px solid #b3541e}
.kvx .u{display:block;width:100%;text-align:left;font:inherit;border:0;border-left:4px solid transparent;padding:.2em .5em;
margin:.15em 0;cursor:pointer;border-radius:3px;color:inherit}.kvx .u[aria-pressed=true]{border-left-color:#b3541e}
.kvx .u small,.kvx .note{color:#555}.kvx .u b{float:right;font-weight:600}.kvx .says{min-height:2.6em}
.kvx .strip{display:flex;gap:1px;align-items:flex-end;height:64px}.kvx .strip div{flex:1;background:#b3541e;min-height:1px}
.kvx .axis{display:flex;gap:1px;font-size:11px;color:#555}.kvx .axis span{flex:1;text-align:center}
"""
SCRIPT = """
(function(){const root=document.getElementById(ID),data=DATA;let claim=data.about;
const q=(s)=>root.querySelector(s),shade=(x)=>'rgba(224,122,52,'+Math.max(0,Math.min(1,x/MOST)*.85).toFixed(3)+')';
function units(){root.querySelectorAll('.u').forEach((b,i)=>{const s=data.rows[claim][i];b.style.background=shade(s.nats);
b.querySelector('b').textContent=s.label;b.setAttribute('aria-pressed','false')});q('.says').textContent=data.hint;
root.querySelectorAll('button.c').forEach(b=>b.setAttribute('aria-pressed',String(+b.dataset.claim===claim)))}
root.querySelectorAll('button.c').forEach(b=>b.onclick=()=>{claim=+b.dataset.claim;units()});
root.querySelectorAll('.u').forEach((b,i)=>b.onclick=()=>{root.querySelectorAll('.u').forEach(x=>x.setAttribute('aria-pressed',
'false'));b.setAttribute('aria-pressed','true');q('.says').textContent=data.rows[claim][i].says});units()})();
"""


def page_part(found: Any) -> str:
    """The HTML of an explanation."""
    name = f"kvx{next(_ids)}"
    told = "".join(
        f"<p>{html.escape(' '.join(sentence.text for sentence in paragraph))}</p>" for paragraph in paragraphs(found)
    )
    script = SCRIPT.replace("ID", json.dumps(name), 1).replace("DATA", _json(_data(found)), 1).replace("MOST", str(MOST_SHADE))
    return (
        f"<style>{STYLE}</style><div class='kvx' id='{name}'><h4>The model answers</h4>"
        f"<div class='box response'>{_response(found)}</div>"
        "<p class='note'>The darker a word, the more of its log-probability is gone without the prompt's parts. Underlined words "
        "are claims: choose one.</p>"
        f"<div class='told'>{told}</div><h4>The prompt's parts: what the claim loses without each, in nats</h4>"
        f"<div class='box'>{_units(found)}</div><p class='box says' aria-live='polite'></p>{_strip(found)}</div>"
        f"<script>{script}</script>"
    )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")


def _shade(nats: float) -> str:
    return f"background:rgba(224,122,52,{0.85 * max(0.0, min(1.0, nats / MOST_SHADE)):.3f})"


def _response(found: Any) -> str:
    """The words as they stand in the response, shaded; those of a claim are a button."""
    text, at, parts = found.response, 0, []
    for word in found.words.itertuples():
        place = text.find(word.text, at)
        if place < 0:
            continue
        parts.append(html.escape(text[at:place]))
        at = place + len(word.text)
        shown = html.escape(word.text)
        if word.claim >= 0 and not found.is_whole:
            parts.append(f"<button class='c' data-claim='{word.claim}' style='{_shade(word.nats)}'>{shown}</button>")
        else:
            parts.append(f"<span class='w' style='{_shade(word.nats)}' title='{word.nats:.1f} nats'>{shown}</span>")
    return "".join(parts) + html.escape(text[at:])


def _units(found: Any) -> str:
    return "".join(
        f"<button class='u'><b></b><small>{html.escape(row.name)}</small> {html.escape(' '.join(row.unit_text.split()))}</button>"
        for row in found.units.rename(columns={"name": "name"}).itertuples(index=False)
    )


def _data(found: Any) -> dict[str, Any]:
    """Of each claim and unit the fall, what it is labelled with, and what is said without the unit."""
    table = found.statements
    each = table[(table["about"] == "units") & (table["role"] == "each") & (table["positions"] == "kept")]
    causes = [set(map(int, filter(None, cause.split("+")))) for cause in found.claims["cause"]]
    rows = []
    for claim, of_claim in each.groupby("claim"):
        named = found.claims["text"][claim]
        rows.append(
            [
                {
                    "nats": round(row.nats, 3),
                    "label": f"{row.nats:+.1f}" + (f" {row.verdict}" if row.verdict not in ("same words",) else ""),
                    "says": _says(found.units["name"][int(row.parts)], named, row, int(row.parts) in causes[claim]),
                }
                for row in of_claim.itertuples()
            ]
        )
    return {"about": found.about, "rows": rows, "hint": "Choose a part of the prompt to read what the model says without it."}


def _says(unit: str, claim: str, row: Any, is_cause: bool) -> str:
    said = f"the model says {quoted(row.says, 600)}" if isinstance(row.says, str) else f"the model says the {row.verdict}"
    p = f"{percent(row.p_before)} → {percent(row.p_after)}"
    return f"Without {unit}, {said}. {claim!r}: {row.verdict}, {p}." + (" It is a cause." if is_cause else "")


def _strip(found: Any) -> str:
    """A bar for each layer: what the claim loses when that layer alone reads the prompt without the cause."""
    singles = found.rows("layers", "each")
    if not len(singles):
        return ""
    top = max(0.5, float(singles["nats"].max()))
    bars = "".join(
        f"<div style='height:{100 * max(0.0, row.nats) / top:.1f}%;opacity:{1 if row.verdict in ('lost', 'partly') else 0.45}' "
        f"title='layer {row.parts}: {row.nats:+.2f} nats, {row.verdict}'></div>"
        for row in singles.itertuples()
    )
    axis = "".join(f"<span>{i if i % 5 == 0 or i == len(singles) - 1 else ''}</span>" for i in range(len(singles)))
    return (
        f"<h4>Layers: what {html.escape(repr(found.claim))} loses when that layer alone reads the prompt without the cause</h4>"
        f"<div class='strip' role='img' aria-label='falls by layer'>{bars}</div><div class='axis'>{axis}</div>"
        f"<p class='note'>Highest bar: {top:.1f} nats. Full color: the claim is lost. {len(singles)} layers were tried.</p>"
    )
