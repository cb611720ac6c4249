"""An explanation as a text, and as a page.

The page shows the response with its words shaded by how much they depend on the prompt. Choosing a claim shades the prompt's
parts by what the claim loses without each; choosing a part shows what the model says without it. Below is a strip of layers.
"""

from typing import Any

from kvlens.explanation.claims import GONE
from kvlens.explanation.exchanges import POSITION_GROUPS
from kvlens.explanation.explained import Findings
from kvlens.explanation.explaining import SEPARATOR
from kvlens.explanation.presentation import (
    MEANINGS,
    answered,
    asked,
    cut_off,
    is_range,
    kept_in_words,
    layers_named,
    listed,
    odds,
    paragraphs,
    quoted,
)
from kvlens.explanation.sources import FULL_SHADE, marked_response, shade, source_list, sources_in_words
from kvlens.viz import Piece
from kvlens.viz._text import data_script, html_text

NO_BREAK = "\N{NO-BREAK SPACE}"


class Explained(Findings):
    """What :func:`kvlens.explain` found, with the attributes and tables of :class:`Findings`: printed, it tells them in
    sentences, and in a notebook it draws them."""

    def __str__(self) -> str:
        return in_words(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return explanation_view(self)._repr_html_()


def in_words(found: Findings) -> str:
    """The response with its sources, what is never removed, and the paragraphs, as text."""
    texts = [" ".join(sentence.text for sentence in paragraph) for paragraph in paragraphs(found)]
    sources = "\n".join(map(str, sources_in_words(found)))
    opening = asked(found.question), answered(found.marked, found.cut_after)
    return "\n\n".join(filter(None, [*opening, sources, kept_in_words(found), *texts]))


def explanation_view(found: Findings, *, with_question: bool = True) -> Piece:
    """Draw an explanation.

    Args:
        found: of :func:`kvlens.explain`.
        with_question: whether it stands above the answer, where nothing else says what it was.
    """
    question = f'<p class="found">{html_text(asked(found.question))}</p>' if with_question and found.question else ""
    told = "".join(
        f'<p class="found">{html_text(text.replace(" %", NO_BREAK + "%"))}</p>'
        for text in (kept_in_words(found), *(" ".join(each.text for each in paragraph) for paragraph in paragraphs(found)))
    )
    meanings = "".join(f"<dt>{html_text(word)}</dt><dd>{html_text(meaning)}</dd>" for word, meaning in MEANINGS)
    lines = sources_in_words(found)
    body = (
        f'<figure class="piece explained" data-kvlens="explained">{question}'
        f"<figcaption>The model answers{cut_off(found.cut_after)}</figcaption>"
        f'<div class="tokens response">{marked_response(found, lines)}</div>{source_list(found, lines)}'
        '<p class="note">The stronger the color of a word, the more of its log-probability is gone without the parts of the '
        f"prompt. Underlined: words that depend on them; choose one. Dotted: words without a source.</p>{told}"
        f"<h3>The parts of the prompt, and what is lost without each</h3>{_without_numbers(found)}"
        f'<div class="sources">{_units(found)}</div>'
        f'<p class="says" role="status"></p>{_strip(found)}{_positions(found)}'
        f"<details><summary>What the words mean</summary><dl>{meanings}</dl></details>"
        f"{data_script(_data(found))}</figure>"
    )
    return Piece("why the model said that", body)


def _without_numbers(found: Findings) -> str:
    """The note on parts that were not removed by themselves."""
    if found.units["alone"].all():
        return ""
    return '<p class="note">Those without a number were not removed by themselves.</p>'


def _units(found: Findings) -> str:
    return "".join(
        f'<button class="source" data-unit="{row["unit"]}" data-start="{row["start"]}" data-stop="{row["stop"]}">'
        f'<span class="unit">{html_text(row["name"])}</span> {html_text(" ".join(row["unit_text"].split()))} '
        '<b class="effect"></b></button>'
        for row in found.units.to_dict("records")
    )


def _data(found: Findings) -> dict[str, Any]:
    """The fall, the label and what is said without the unit, for each claim and unit."""
    runs = found.statements.query("about == 'units' and role in ('each', 'group') and gap == 'kept'")
    causes = [set(map(int, filter(None, cause.split("+")))) for cause in found.claims["cause"]]
    claims = []
    for claim, rows in runs.groupby("claim"):
        named = found.named if claim == found.about else repr(found.claims["text"][claim])
        of_unit = {int(unit): row for row in rows.itertuples() for unit in row.parts.split("+") if row.role == "group"}
        of_unit |= {int(row.parts): row for row in rows.itertuples() if row.role == "each"}
        units = range(len(found.units))
        claims.append([_entry(found, named, unit, of_unit.get(unit), unit in causes[claim]) for unit in units])
    return {"about": found.about, "full": FULL_SHADE, "claims": claims}


def _entry(found: Findings, named: str, unit: int, row: Any, is_cause: bool) -> dict[str, Any]:
    name = found.units["name"][unit]
    if row is None:
        return {"nats": 0.0, "label": "", "says": f"{name} was not removed: the budget had no room for it."}
    if row.role == "each":
        label = f"{round(row.nats, 1) + 0.0:.1f} nats, {row.verdict}"
        return {"nats": round(float(row.nats), 3), "label": label, "says": _says(name, named, row, is_cause)}
    together = f"these {row.parts.count('+') + 1} parts"
    says = f"{name} was not removed by itself, but with others. {_says(together, named, row, False)}"
    return {"nats": 0.0, "label": "", "says": says}


def _says(unit: str, claim: str, row: Any, is_cause: bool) -> str:
    said = f"the model says {quoted(row.says, 600)}" if isinstance(row.says, str) else f"the model says the {row.verdict}"
    cause = " It is a cause: the claim is also lost when the gap is closed." if is_cause else ""
    return f"Without {unit}, {said}. {claim}: {row.verdict}, {odds(row)}.{cause}"


def _strip(found: Findings) -> str:
    """A bar for each layer: what the claim loses when the smallest range with it reads the prompt without the cause."""
    smallest = smallest_ranges(found)
    if not smallest:
        return ""
    highest = max(0.0, *(float(row.nats) for row in smallest))
    top = max(0.5, highest)
    bars = "".join(
        f'<div class="layer{" lost" if row.verdict in GONE else ""}" style="height:{100 * max(0.0, row.nats) / top:.1f}%" '
        f'title="{layers_named(row.parts)}: {row.nats:+.2f} nats, {row.verdict}"></div>'
        for row in smallest
    )
    without = html_text(listed(found.units["name"][unit] for unit in found.cause))
    last, are_single = len(smallest) - 1, all(SEPARATOR not in row.parts for row in smallest)
    is_lost = any(row.verdict in GONE for row in smallest)
    lost = "Where the color is strong, the claim is lost." if is_lost else "None of them alone loses the claim."
    how = f"All {last + 1} layers were tried one by one." if are_single else "Neighbors of one height were tried together."
    axis = "".join(f"<span>{i if i % 5 == 0 or i == last else ''}</span>" for i in range(len(smallest)))
    which = "that layer" if are_single else "the range"
    return (
        f"<h3>Layers: what {html_text(found.named)} loses when {which} alone reads the prompt without {without}</h3>"
        f'<div class="layers" role="img" aria-label="falls by layer, the highest {highest:.2f} nats">{bars}</div>'
        f'<div class="axis">{axis}</div><p class="note">{how} Highest bar: {highest:.2g} nats. {lost}</p>'
    )


def smallest_ranges(found: Findings) -> list[Any]:
    """The statement on the smallest range of layers with each layer that was tried."""
    tried = [row for row in found.rows("layers", "each", "together").itertuples() if is_range(row.parts)]
    layers = range(found.n_layers if tried else 0)
    return [min((row for row in tried if str(i) in row.parts.split("+")), key=lambda row: row.parts.count("+")) for i in layers]


def _positions(found: Findings) -> str:
    """A row for each group of positions: what the claim loses when it holds what the prompt without the cause leaves there."""
    each = found.rows("positions", "each")
    if not len(each):
        return ""
    rows = "".join(
        f'<tr><th scope="row">{html_text(POSITION_GROUPS[row.parts])}</th><td style="{shade(row.nats)}">{row.nats:.1f} nats, '
        f"{row.verdict}</td></tr>"
        for row in each.itertuples()
    )
    return (
        f"<h3>Positions: what {html_text(found.named)} loses when they are read from the prompt without the cause</h3>"
        f'<table class="positions">{rows}</table><p class="note">In all layers at once. Positions before the cause are '
        "equal in both prompts.</p>"
    )
