"""A drawn flow: from a unit of the prompt through the positions where it is read and the heads that read it to the answer.

Every line is one row of :func:`kvlens.analyses.attribution.flow.answer_flow`, an intervention that was measured. What the model
says with parts switched off was measured too; of combinations that were not, the figure says so.
"""

import functools
import math
from typing import Any

import pandas as pd

from kvlens.analyses.attribution.flow import SHIFT_STATE
from kvlens.analyses.bias.parts import part_name
from kvlens.checks import checked
from kvlens.viz import _flow_figure
from kvlens.viz._frames import check_columns
from kvlens.viz._text import html_text, number, percent, rounded, script_json
from kvlens.viz.piece import Piece
from kvlens.viz.tables import table_html

MEASURES = {"alone": "effect kept by one part alone", "swap": "effect lost with one part"}
DIGITS = 4
"""Of numbers in the page: probabilities near 1 keep one more than others need."""


@checked
def flow_view(
    flow: pd.DataFrame, found: Any, *, by: str = "sentence", redundant: bool = False, title: str = "", ax: Any = None
) -> Piece | Any:
    """Draw the flow of an explained answer, with a switch for each unit, position and head.

    Works with the keyboard: arrow keys move among the parts, Enter pins one, Space switches it off, Escape switches all on.

    Args:
        flow: the table of :func:`kvlens.analyses.attribution.flow.answer_flow`, with at least one significant unit.
        found: the :class:`kvlens.analyses.attribution.explain.Explained` that it was made from.
        by: what a unit is called.
        redundant: begin with what each part keeps alone, where none is necessary.
        title: title above the picture.
        ax: draw the static picture, of the unit with the largest effect, into these matplotlib axes instead, and return them.

    Returns:
        A `Piece`; ``ax`` where it was given.

    Raises:
        KVLensError: a missing column (the nearest is proposed).
    """
    check_columns("flow_view", flow, ("removed", "unit", "position", "heads"))
    title = title or f"from the {by} to the answer"
    chosen, data = [*MEASURES] if redundant else [*reversed(MEASURES)], _json(flow, found, by)
    if ax is not None:
        return _flow_figure.draw(ax, data, chosen[0], title)
    options = "".join(f'<option value="{name}">{html_text(MEASURES[name])}, nats</option>' for name in chosen)
    about = {
        "alone": f"A number is how much of the {by}'s effect remains, in nats of log-probability of “{found.answer}”, when "
        f"this part alone reads the prompt with the {by} and everything else reads it without.",
        "swap": f"A number is how much the log-probability of “{found.answer}” falls, in nats, when this part alone reads the "
        f"prompt without the {by}.",
    }
    notes = "".join(f'<p class="note" data-measure="{name}">{html_text(about[name])}</p>' for name in chosen)
    said = (
        "Every number was measured by itself; they do not add up, because parts can stand in for each other. Click a part to "
        f"pin it. Switch a part off, and it reads the prompt without the {by} while all others read the whole prompt; the box "
        "on the right shows what the model then answers."
    )
    if (flow["position"] == SHIFT_STATE).any():
        said += " “shift state” is what the model's KV shift carries from the prompt's last tokens to the first of the text."
    body = (
        f'<figure class="piece" data-kvlens="flow"><figcaption>{html_text(title)} '
        f'<select aria-label="what the lines show">{options}</select></figcaption>{notes}<p class="note">{html_text(said)}</p>'
        f'<div class="flow"></div><div class="numbers">{table_html(_numbers(flow, found, by))}</div>'
        f'<script type="application/json">{script_json(data)}</script></figure>'
    )
    return Piece(title, body, figure=functools.partial(_flow_figure.figure, data, chosen[0], title))


def _json(flow: pd.DataFrame, found: Any, by: str) -> dict[str, Any]:
    units = found.units
    shown = {
        int(unit): {
            "positions": [*dict.fromkeys(rows.loc[rows["position"] != "", "position"])],
            "heads": _leading(rows),
        }
        for unit, rows in flow[(flow["unit"] >= 0) & (flow["removed"] == "")].groupby("unit", sort=False)
    }
    positions = {position for each in shown.values() for position in each["positions"]} - {SHIFT_STATE}
    tokens = found.positions.drop_duplicates("prompt_position").set_index("prompt_position")["token"]
    single = flow[
        (flow["unit"] >= 0) & (flow["position"] == "") & (flow["heads"] != "") & ~flow["heads"].str.contains("+", regex=False)
    ]
    return {
        "by": by,
        "answer": found.answer,
        "rival": found.rival,
        "first": int(found.unit),
        "units": units["unit_text"].tolist(),
        "shown": shown,
        "heads": [*dict.fromkeys(single["heads"])],
        "tokens": {position: str(tokens[int(position)]) for position in sorted(positions, key=int)},
        "states": {
            f"{row.removed}|{row.unit}|{row.position}|{row.heads}|{int(row.others)}": [
                rounded(float(x), DIGITS) for x in (row.effect, row.p_answer, row.p_rival)
            ]
            for row in flow.itertuples()
        },
    }


def _leading(rows: pd.DataFrame) -> list[str]:
    """The heads of the pairs; where there is one head alone, that head."""
    pairs = rows.loc[rows["heads"].str.contains("+", regex=False), "heads"]
    return [*dict.fromkeys(head for pair in pairs for head in pair.split("+"))] or [
        *rows["heads"].loc[lambda x: x != ""].unique()
    ]


def _numbers(flow: pd.DataFrame, found: Any, by: str) -> pd.DataFrame:
    """The interventions as a table; of heads by themselves those that are drawn."""
    key = ["removed", "unit", "position", "heads"]
    rows = flow[~flow["others"]].merge(
        flow.loc[flow["others"], [*key, "effect", "p_answer"]], on=key, how="left", suffixes=("", "_alone"), validate="1:1"
    )
    drawn = {(unit, head) for unit, each in _json(flow, found, by)["shown"].items() for head in each["heads"]}
    kept = [
        not row.heads or "+" in row.heads or row.removed != "" or (row.unit, row.heads) in drawn for row in rows.itertuples()
    ]
    rows = rows[kept]
    whole = flow[flow["unit"] == -1].set_index("removed")["effect"]
    kept_alone = [whole[str(row.unit)] - row.effect_alone if row.unit >= 0 else math.nan for row in rows.itertuples()]
    return pd.DataFrame(
        {
            "switched off": [_switched_off(row, by) for row in rows.itertuples()],
            f"read without {by}": ["" if row.unit < 0 else str(row.unit + 1) for row in rows.itertuples()],
            "lost, nats": [_nats(x) for x in rows["effect"]],
            f"{found.answer}": [_percent(p) for p in rows["p_answer"]],
            f"{found.rival} (rival)": [_percent(p) for p in rows["p_rival"]],
            "kept by it alone, nats": [_nats(x) for x in kept_alone],
            f"{found.answer}, it alone on": [_percent(p) for p in rows["p_answer_alone"]],
        }
    )


def _switched_off(row: Any, by: str) -> str:
    """Which parts a row of the table is about."""
    units = [int(unit) + 1 for unit in row.removed.split("+") if unit]
    said = [f"{by}{'s' if units[1:] else ''} {' and '.join(map(str, units))}"] if units else []
    heads = " and ".join(part_name(*map(int, head.split("."))) for head in row.heads.split("+") if head)
    position = row.position.replace("_", " ") if row.position == SHIFT_STATE else f"position {row.position}"
    if row.position:
        said.append(f"{position} in {heads}" if heads else position)
    elif row.unit >= 0:
        said.append(heads or "all heads")
    return "; ".join(said) or "nothing"


def _nats(x: float) -> str:
    if not math.isfinite(x):
        return ""
    return number(x) if abs(x) >= 1e-3 or x == 0 else "< 0.001" if x > 0 else "> −0.001"


def _percent(p: float) -> str:
    return percent(p).replace(" ", "\u00a0") if math.isfinite(p) else ""
