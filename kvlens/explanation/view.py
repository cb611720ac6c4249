"""An explanation as a part of a page, for notebooks and reports.

The response is shown with its words shaded by how much they depend on the prompt. Choosing a claim shades the prompt's parts by
what the claim loses without each; choosing a part shows what the model says without it. Below is a strip of layers.
"""

from typing import Any

from kvlens.explanation.exchanges import GROUPS
from kvlens.explanation.sentences import MEANINGS, cut_off, listed, paragraphs, percent, quoted
from kvlens.explanation.verdicts import GONE
from kvlens.viz import Piece
from kvlens.viz._text import data_script, html_text

FULL_SHADE = 8.0
"""Nats from which on a word or a part has the full color."""


def explanation_view(found: Any, title: str = "why the model said that") -> Piece:
    """Draw an explanation.

    Args:
        found: a :class:`kvlens.explanation.Explained`.
        title: of its own file.
    """
    told = "".join(
        f'<p class="found">{html_text(" ".join(sentence.text for sentence in paragraph))}</p>'
        for paragraph in paragraphs(found)
    )
    meanings = "".join(f"<dt>{html_text(word)}</dt><dd>{html_text(meaning)}</dd>" for word, meaning in MEANINGS)
    body = (
        '<figure class="piece explained" data-kvlens="explained">'
        f"<figcaption>The model answers{cut_off(found.cut_after)}</figcaption>"
        f'<div class="tokens response">{_response(found)}</div>'
        '<p class="note">The darker a word, the more of its log-probability is gone without the parts of the prompt. '
        f"Underlined: words that depend on them; choose one.</p>{told}"
        f'<h3>The parts of the prompt, and what is lost without each</h3><div class="sources">{_units(found)}</div>'
        f'<p class="says" role="status"></p>{_strip(found)}{_positions(found)}'
        f"<details><summary>What the words mean</summary><dl>{meanings}</dl></details>"
        f"{data_script(_data(found))}</figure>"
    )
    return Piece(title, body)


def _shade(nats: float) -> str:
    share = max(0.0, min(1.0, nats / FULL_SHADE))
    return f"background:color-mix(in srgb, var(--positive-fill) {round(100 * share)}%, transparent)"


def _response(found: Any) -> str:
    """The words as they stand in the response, shaded; those of a claim are buttons."""
    text, at, parts = found.response, 0, []
    for word in found.words.itertuples():
        place = text.find(word.text, at)
        if place < 0:
            continue
        parts.append(html_text(text[at:place]))
        at = place + len(word.text)
        of_claim = f' data-claim="{word.claim}" class="in-claim"' if word.claim >= 0 and not found.is_whole else ""
        tag = "button" if of_claim else "span"
        title = f"falls by {word.nats:.1f} nats without all parts"
        parts.append(f'<{tag}{of_claim} style="{_shade(word.nats)}" title="{title}">{html_text(word.text)}</{tag}>')
    return "".join(parts) + html_text(text[at:])


def _units(found: Any) -> str:
    return "".join(
        f'<button class="source" data-unit="{row["unit"]}" data-start="{row["start"]}" data-stop="{row["stop"]}">'
        f'<span class="unit">{html_text(row["name"])}</span> {html_text(" ".join(row["unit_text"].split()))} '
        '<b class="effect"></b></button>'
        for row in found.units.to_dict("records")
    )


def _data(found: Any) -> dict[str, Any]:
    """Of each claim and unit the fall, what it is labelled with, and what is said without the unit."""
    runs = found.statements.query("about == 'units' and role in ('each', 'group') and positions == 'kept'")
    causes = [set(map(int, filter(None, cause.split("+")))) for cause in found.claims["cause"]]
    claims = []
    for claim, rows in runs.groupby("claim"):
        named = found.named if claim == found.about else repr(found.claims["text"][claim])
        of_unit = {int(unit): row for row in rows.itertuples() for unit in row.parts.split("+") if row.role == "group"}
        of_unit |= {int(row.parts): row for row in rows.itertuples() if row.role == "each"}
        claims.append([_entry(found, named, unit, of_unit[unit], unit in causes[claim]) for unit in range(len(found.units))])
    return {"about": found.about, "full": FULL_SHADE, "claims": claims}


def _entry(found: Any, named: str, unit: int, row: Any, is_cause: bool) -> dict[str, Any]:
    if row.role == "each":
        label = f"{round(row.nats, 1) + 0.0:.1f} nats, {row.verdict}"
        return {
            "nats": round(float(row.nats), 3),
            "label": label,
            "says": _says(found.units["name"][unit], named, row, is_cause),
        }
    group = found.units["group"][unit]
    says = f"{found.units['name'][unit]} was not removed by itself. {_says(f'all of {group}', named, row, False)}"
    return {"nats": 0.0, "label": f"without all of {group}: {row.verdict}", "says": says}


def _says(unit: str, claim: str, row: Any, is_cause: bool) -> str:
    said = f"the model says {quoted(row.says, 600)}" if isinstance(row.says, str) else f"the model says the {row.verdict}"
    cause = " It is a cause: the claim is also lost when the gap is closed." if is_cause else ""
    return f"Without {unit}, {said}. {claim}: {row.verdict}, {percent(row.p_before)} to {percent(row.p_after)}.{cause}"


def _strip(found: Any) -> str:
    """A bar for each layer: what the claim loses when that layer alone reads the prompt without the cause."""
    singles = found.rows("layers", "each")
    if not len(singles):
        return ""
    highest = max(0.0, float(singles["nats"].max()))
    top = max(0.5, highest)
    bars = "".join(
        f'<div class="layer{" lost" if row.verdict in GONE else ""}" style="height:{100 * max(0.0, row.nats) / top:.1f}%" '
        f'title="layer {row.parts}: {row.nats:+.2f} nats, {row.verdict}"></div>'
        for row in singles.itertuples()
    )
    without = html_text(listed(found.units["name"][unit] for unit in found.cause))
    last, n_lost = len(singles) - 1, int(singles["verdict"].isin(GONE).sum())
    lost = "In the darker ones the claim is lost." if n_lost else "None of them alone loses the claim."
    axis = "".join(f"<span>{i if i % 5 == 0 or i == last else ''}</span>" for i in range(len(singles)))
    return (
        f"<h3>Layers: what {html_text(found.named)} loses when that layer alone reads the prompt without {without}</h3>"
        f'<div class="layers" role="img" aria-label="falls by layer, the highest {highest:.2f} nats">{bars}</div>'
        f'<div class="axis">{axis}</div><p class="note">All {len(singles)} layers were tried one by one. Highest bar: '
        f"{highest:.2g} nats. {lost}</p>"
    )


def _positions(found: Any) -> str:
    """A row for each group of positions: what the claim loses when it holds what the prompt without the cause leaves there."""
    each = found.rows("positions", "each")
    if not len(each):
        return ""
    rows = "".join(
        f'<tr><th scope="row">{html_text(GROUPS[row.parts])}</th><td style="{_shade(row.nats)}">{row.nats:.1f} nats, '
        f"{row.verdict}</td></tr>"
        for row in each.itertuples()
    )
    return (
        f"<h3>Positions: what {html_text(found.named)} loses when they are read from the prompt without the cause</h3>"
        f'<table class="positions">{rows}</table><p class="note">In all layers at once. Positions before the cause are '
        "equal in both prompts.</p>"
    )
