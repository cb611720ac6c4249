"""Generated text in several conditions, side by side, marked from where each differs from the first."""

from collections.abc import Mapping

from kvlens.checks import checked
from kvlens.viz._text import html_text
from kvlens.viz.piece import Piece


@checked
def generated_text(conditions: Mapping[str, str], *, start: str = "", title: str = "generated text") -> Piece:
    """One card per condition; from the first character that differs from the first condition on, the text is marked.

    Args:
        conditions: name -> generated text; the first one (usually ``with_prompt``) is the reference for the others.
        start: the text that all of them continue, shown before each.
        title: title above the cards.
    """
    reference = next(iter(conditions.values()))
    cards = "".join(_card(name, text, reference, start, i > 0) for i, (name, text) in enumerate(conditions.items()))
    body = f'<figure class="piece"><figcaption>{html_text(title)}</figcaption><div class="cards">{cards}</div></figure>'
    return Piece(title, body)


def _card(name: str, text: str, reference: str, start: str, compare: bool) -> str:
    common = next((i for i, (a, b) in enumerate(zip(text, reference, strict=False)) if a != b), min(len(text), len(reference)))
    different = compare and text != reference
    same, other = (text[:common], text[common:]) if different else (text, "")
    verdict = ("differs" if different else "the same") if compare else ""
    return (
        f'<div class="card"><h3>{html_text(name.replace("_", " "))}<span class="unit">{verdict}</span></h3>'
        f'<pre><span class="start">{html_text(start)}</span>{html_text(same)}'
        + (f"<mark>{html_text(other)}</mark>" if other else "")
        + "</pre></div>"
    )
