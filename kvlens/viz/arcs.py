"""Induction over prompt and text: an arc from each text token to the prompt token that follows its earlier occurrence."""

import functools
from collections.abc import Sequence
from typing import Any

import pandas as pd

from kvlens.checks import checked
from kvlens.errors import KVLensError
from kvlens.viz._color import NEGATIVE, POSITIVE
from kvlens.viz._text import data_script, html_text, label, printable, rounded
from kvlens.viz.piece import Piece

MAX_ARCS, MAX_TOKENS = 4000, 1024
MAX_TOUCHED = 256
"""The number of tokens shown of more than ``MAX_TOKENS``: those at the strongest arcs of each head."""


@checked
def induction_arcs(
    tokens: Sequence[str],
    n_prompt: int,
    arcs: pd.DataFrame,
    scores: pd.DataFrame,
    *,
    title: str = "induction arcs",
    ax: Any = None,
) -> Piece | Any:
    """Arcs of all heads, filtered by a strip of induction scores; dashed if the head matches by its key shift.

    Args:
        tokens: tokens of prompt and text, in order.
        n_prompt: number of tokens of the prompt.
        arcs: the table of ``prompt_copies``, one row per head and pair of tokens: ``layer``, ``head``, ``position`` (in the
            text), ``prompt_position``, ``attention`` (from the one to the other: the width of the arc), ``shifted`` (True if
            the head matches by its key shift).
        scores: one row per head: ``layer``, ``head``, ``score``, shown in the strip that filters the arcs.
        title: title above the picture.
        ax: draw the static picture into these matplotlib axes instead, and return them.

    Returns:
        A `Piece`; ``ax`` where it was given.

    Raises:
        KVLensError: positions outside the tokens.
    """
    for column, n in (("position", len(tokens) - n_prompt), ("prompt_position", n_prompt)):
        if len(arcs) and not 0 <= arcs[column].min() <= arcs[column].max() < n:
            raise KVLensError(f"induction_arcs: {column} must lie in 0..{n - 1}")
    arcs = arcs.assign(query=arcs["position"] + n_prompt)
    strongest, positions = _shown(arcs, len(tokens))
    at = {position: i for i, position in enumerate(positions)}
    data = {
        "tokens": [str(tokens[i]) for i in positions],
        "places": [i if i < n_prompt else i - n_prompt for i in positions],
        "n_prompt": sum(i < n_prompt for i in positions),
        "scores": [[int(r.layer), int(r.head), rounded(float(r.score))] for r in scores.itertuples()],
        "arcs": [
            [int(r.layer), int(r.head), at[r.query], at[r.prompt_position], rounded(float(r.attention)), int(bool(r.shifted))]
            for r in strongest.itertuples()
        ],
    }
    if ax is not None:
        return _draw(ax, data, title)
    left_out = ""
    if len(strongest) < len(arcs):
        left_out += f" {len(strongest):,} of {len(arcs):,} arcs are shown, each head's strongest."
    if len(positions) < len(tokens):
        left_out += f" Of {len(tokens):,} tokens the {len(positions):,} under them are shown; ⋯ marks where some are left out."
    note = (
        "From a text token to the token after its earlier occurrence; as wide as the head's share of attention. Dashed: "
        f"the head reaches it by its key shift. Choose heads in the strip.{left_out}"
    )
    if not len(arcs):
        note = "No token of the text occurs earlier, so there is nothing for induction to copy."
    body = (
        f'<figure class="piece" data-kvlens="arcs"><figcaption>{html_text(title)}</figcaption>'
        f'<p class="note">{html_text(note)}</p><div class="arcs"></div>'
        f"{data_script(data)}</figure>"
    )
    return Piece(title, body, figure=functools.partial(_figure, data, title))


def _shown(arcs: pd.DataFrame, n_tokens: int) -> tuple[pd.DataFrame, list[int]]:
    """The arcs that are drawn, each head's strongest first, and the positions of the tokens under them."""
    size = arcs["attention"].abs()
    rank = size.groupby([arcs["layer"], arcs["head"]]).rank(method="first", ascending=False)
    best = arcs.loc[rank.sort_values(kind="stable").index[:MAX_ARCS]]
    if n_tokens <= MAX_TOKENS:
        return best, list(range(n_tokens))
    positions: set[int] = set()
    n_drawn = 0
    for query, key in zip(best["query"].tolist(), best["prompt_position"].tolist(), strict=True):
        touched = positions | {query, key, max(0, key - 1)}  # the repeated token precedes the key
        if len(touched) > MAX_TOUCHED:
            break
        positions, n_drawn = touched, n_drawn + 1
    return best.iloc[:n_drawn], sorted(positions)


def _figure(data: dict[str, Any], title: str) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(5, 0.17 * len(data["tokens"])), 3.2))
    _draw(figure.add_axes((0.02, 0.02, 0.96, 0.9)), data, title)
    return figure


def _draw(ax: Any, data: dict[str, Any], title: str) -> Any:
    from matplotlib.patches import Arc

    n = len(data["tokens"])
    for _, _, query, key, share, shifted in data["arcs"]:
        width, style = 0.3 + 3 * abs(share or 0.0), "--" if shifted else "-"
        color = NEGATIVE if (share or 0.0) < 0 else POSITIVE
        middle, span = (query + key) / 2, query - key
        ax.add_patch(Arc((middle, 0), span, span, theta1=0, theta2=180, linewidth=width, linestyle=style, color=color))
    for i, token in enumerate(data["tokens"]):
        gray = "black" if i >= data["n_prompt"] else "dimgrey"
        look: dict[str, Any] = dict(rotation=90, ha="center", va="top", fontsize=6, color=gray, parse_math=False)
        ax.text(i, -0.6, printable(label(token))[:14], **look)
    sizes: list[tuple[str, dict[str, Any]]] = [(f"{share:g}", dict(linewidth=0.3 + 3 * share)) for share in (0.1, 0.5, 1.0)]
    if any(shifted for *_, shifted in data["arcs"]):
        sizes.append(("by the key shift", dict(linewidth=1.0, linestyle="--")))
    for words, look in sizes:
        ax.plot([], [], color=POSITIVE, label=words, **look)
    ax.legend(title="share of attention", frameon=False, fontsize=6, title_fontsize=6, loc="upper left")  # no arc is there
    ax.set(xlim=(-1, n), ylim=(-n / 5, n / 2), title=printable(title))
    ax.axis("off")
    return ax
