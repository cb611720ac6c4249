"""A drawn flow: from units of the prompt through the positions where they are read and the heads that read them to the answer.

Every line and every combination of switches is one row of :func:`kvlens.analyses.attribution.flow.answer_flow`, an intervention
that was measured.
"""

import functools
import math
from typing import Any

import pandas as pd

from kvlens.analyses.attribution.explain import SHIFT_STATE
from kvlens.analyses.attribution.flow import parts_drawn
from kvlens.analyses.bias.parts import Part
from kvlens.checks import checked
from kvlens.viz import _flow_figure
from kvlens.viz._frames import check_columns
from kvlens.viz._text import html_text, number, percent, rounded, script_json
from kvlens.viz.piece import Piece
from kvlens.viz.tables import table_html

MEASURES = {"swap": "effect of exchanging one part", "alone": "effect of one part alone"}
DIGITS = 9
"""Of numbers in the page, so that its percentages are those of the sentences."""


@checked
def flow_view(flow: pd.DataFrame, found: Any, *, by: str = "sentence", title: str = "", ax: Any = None) -> Piece | Any:
    """Draw the flow of an explained answer, with a switch for the units, and for each position and head of the sets.

    Works with the keyboard: arrow keys move among the parts, Enter pins one, Space switches it off, Escape switches all on.

    Args:
        flow: the table of :func:`kvlens.analyses.attribution.flow.answer_flow`, of an answer that some units lose.
        found: the :class:`kvlens.analyses.attribution.explain.Explained` that it was made from.
        by: what a unit is called.
        title: title above the picture.
        ax: draw the static picture into these matplotlib axes instead, and return them.

    Returns:
        A `Piece`; ``ax`` where it was given.

    Raises:
        KVLensError: a missing column (the nearest is proposed).
    """
    check_columns("flow_view", flow, ("heads", "positions", "inside", "others", "verdict"))
    title = title or f"from the {by}{'s' * (len(found.cause) > 1)} to the answer"
    data, chosen = _json(flow, found, by), [*MEASURES]
    several = any(len(each) > 1 for about in ("heads", "positions") for each in found.sets(about, "breaking"))
    chosen = chosen[::-1] if several else chosen  # no part of theirs loses the answer by itself
    if ax is not None:
        return _flow_figure.draw(ax, data, chosen[0], title)
    options = "".join(f'<option value="{name}">{html_text(MEASURES[name])}, nats</option>' for name in chosen)
    those = f"that {by}" if len(found.cause) == 1 else f"those {by}s"
    about = {
        "swap": f"A number is how far {found.score} falls, in nats, when only this part reads the prompt without {those}.",
        "alone": f"A number is how far {found.score} rises, in nats, when this part alone reads the whole prompt and all "
        f"else reads it without {those}, compared with when all do.",
    }
    notes = "".join(
        f'<p class="note" data-measure="{name}">{html_text(about[name])} Positive: the part raises it.</p>' for name in chosen
    )
    said = (
        "The heads and positions named above are drawn. Each number was measured by itself; the numbers do not add "
        "up, because parts can stand in for each other. Click a part to pin it. Switch a part off, and it reads the "
        f"prompt without {those} while all others read the whole prompt; the box on the right shows the answer's "
        "probability then, and that of what the model says instead, or of the rival. Every combination of switches was run."
    )
    if any(SHIFT_STATE in each or "s" in heads for each, heads in zip(flow["positions"], flow["heads"], strict=True)):
        said += " A shift state is what the model's KV shift carries from the prompt's last tokens to the first of the text."
    in_sets = [each for about in ("heads", "positions") for role in ("breaking", "keeping") for each in found.sets(about, role)]
    n_left = len({code for each in in_sets for code in each} - {*data["heads"], *data["positions"]})
    if n_left:
        said += f" {n_left} more parts of the sets are not drawn."
    body = (
        f'<figure class="piece" data-kvlens="flow"><figcaption>{html_text(title)} '
        f'<select aria-label="what the lines show">{options}</select></figcaption>{notes}<p class="note">{html_text(said)}</p>'
        f'<div class="flow"></div><div class="numbers">{table_html(_numbers(flow, found, those))}</div>'
        f'<script type="application/json">{script_json(data)}</script></figure>'
    )
    return Piece(title, body, figure=functools.partial(_flow_figure.figure, data, chosen[0], title))


def _json(flow: pd.DataFrame, found: Any, by: str) -> dict[str, Any]:
    heads, positions = parts_drawn(found)
    tokens = found.positions.set_index("code")["token"]
    texts = [f"{by} {unit + 1}: {found.units['unit_text'][unit].strip()}" for unit in found.cause]
    return {
        "cause": "; ".join(texts),
        "causes": f"{by}{'s' if texts[1:] else ''} {' and '.join(str(unit + 1) for unit in found.cause)}",
        "columns": [f"the {by}{'s' if texts[1:] else ''}", "held at position", "read by head", "the model says"],
        "answer": found.answer,
        "rival": found.rival,
        "heads": {code: Part.of_code(code).name for code in heads},
        "positions": {code: None if code == SHIFT_STATE else str(tokens[code]) for code in positions},
        "states": {
            f"{row.heads}|{row.positions}|{int(row.inside)}|{int(row.others)}": [
                *(rounded(float(x), DIGITS) for x in (row.effect, row.p_answer, row.p_rival)),
                row.verdict,
                *([] if pd.isna(row.says) else [row.says, rounded(row.p_says, DIGITS)]),
            ]
            for row in flow.itertuples()
        },
    }


def _numbers(flow: pd.DataFrame, found: Any, those: str) -> pd.DataFrame:
    """The interventions as a table."""
    return pd.DataFrame(
        {
            f"read without {those}": [_read_without(row) for row in flow.itertuples()],
            "effect, nats": [_nats(x) for x in flow["effect"]],
            f"{found.answer}": [_percent(p) for p in flow["p_answer"]],
            f"{found.rival} (rival)": [_percent(p) for p in flow["p_rival"]],
            "the answer is": flow["verdict"],
            "the model says instead": [
                "" if pd.isna(says) else f"{says!r} ({_percent(p)})"
                for says, p in zip(flow["says"], flow["p_says"], strict=True)
            ],
        }
    )


def _read_without(row: Any) -> str:
    """Which parts a row of the table is about."""
    heads = [Part.of_code(code).name for code in row.heads.split("+") if code]
    positions = ["shift state" if code == SHIFT_STATE else f"position {code}" for code in row.positions.split("+") if code]
    said = " in ".join([*positions, *heads]) if row.inside else " and ".join([*positions, *heads])
    if row.others:
        return f"everything but {said}" if said else "everything"
    return said or "nothing"


def _nats(x: float) -> str:
    if not math.isfinite(x):
        return ""
    return number(x) if abs(x) >= 1e-3 or x == 0 else "< 0.001" if x > 0 else "> −0.001"


def _percent(p: float) -> str:
    return percent(p).replace(" ", "\u00a0") if math.isfinite(p) else ""
