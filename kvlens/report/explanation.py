"""An explanation in the terminal: one sentence, then the tables behind it."""

import textwrap
from typing import Any

import pandas as pd
from rich.table import Table

from kvlens.analyses.bias.parts import part_name
from kvlens.report.console import WIDTH, make_console
from kvlens.terminal import visible
from kvlens.viz._text import percent

MOST_ROWS = 12
LONGEST_UNIT = 160
"""Characters of a unit's text in the sentence."""


def in_a_sentence(found: Any, by: str) -> str:
    """The result in one or two sentences."""
    if found.unit is None and not found.testable:
        largest = found.units.loc[found.units["total_effect"].abs().idxmax()]
        return (
            f"The prompt has {len(found.units):,} {by}s, too many for any of them to be significant against this number of "
            f"unrelated texts; the largest effect on the answer {found.answer!r} is that of "
            f"{_short(largest['unit_text'].strip())!r}, {largest['total_effect']:.3g} nats, which was not tested."
        )
    if found.unit is None:
        return (
            f"No {by} of the prompt changes the probability of {found.answer!r} more than {by}s of unrelated texts do "
            f"(it is {percent(found.p_answer[0])} with the prompt, {percent(found.p_answer[2])} without the prompt)."
        )
    removed, effect = _short(found.units["unit_text"][found.unit].strip()), float(found.units["total_effect"][found.unit])
    verb = "falls" if effect > 0 else "rises"
    said = (
        f"Without {removed!r} the answer {found.answer!r} {verb} from {percent(found.p_answer[0])} to "
        f"{percent(found.p_answer[1])}, {found.rival!r} goes from {percent(found.p_rival[0])} to {percent(found.p_rival[1])}."
    )
    needed, sufficient = found.needed(), found.sufficient()
    if needed:
        return f"{said} Carried by {_listed(needed, 'and')}.{_stability(found, by)}"
    if sufficient:
        if len(sufficient) == 1:
            return f"{said} Carried by {sufficient[0]}, which suffices alone, but is not necessary."
        each, none = ("either", "neither") if len(sufficient) == 2 else ("each", "none")
        return f"{said} Carried by {_listed(sufficient, 'and')}: {each} suffices alone, {none} is necessary."
    return f"{said} No head carries it alone."


def continuation_in_a_sentence(figures: list[dict[str, Any]]) -> str:
    """What the model continues with, from `kvlens.report.summary.continuation_figures`, where nothing is explained."""
    first, *other = figures
    p, p_without = percent(first["p_with_prompt"]), percent(first["p_without_prompt"])
    if not other:
        return f"After the text the model continues with {first['token']!r}: {p} with the prompt, {p_without} without it."
    return (
        f"After the text the model continues with {first['token']!r} ({p}; {p_without} without the prompt); without the prompt "
        f"it would continue with {other[0]['token']!r} ({percent(other[0]['p_without_prompt'])})."
    )


def _short(text: str) -> str:
    """The beginning and the end of a long unit."""
    half = LONGEST_UNIT // 2
    return text if len(text) <= LONGEST_UNIT else f"{text[:half]} … {text[-half:]}"


def _stability(found: Any, by: str) -> str:
    unstable = found.unstable_lead()
    if unstable is None:
        return ""
    head, share = unstable
    return (
        f" {head} does not always rank first: with unrelated texts in the {by}'s place it has the largest effect in "
        f"{percent(share)} of cases."
    )


def _listed(names: list[str], word: str) -> str:
    return f" {word} ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def print_explanation(found: Any, by: str) -> None:
    """Print the sentence, the units, and the heads and positions for the unit with the largest effect."""
    console = make_console()
    console.print(textwrap.fill(visible(in_a_sentence(found, by)), WIDTH))
    units = found.units.assign(p=found.units["p_adjusted"].map("{:.3f}".format))
    shown = units.sort_values("total_effect", key=abs, ascending=False).head(MOST_ROWS).sort_values("start")
    console.print("effect on the log-probability of the answer, nats", style="bold")
    console.print(
        _table(
            shown,
            {"unit_text": by, "total_effect": "total", "knockout_effect": "attention knockout", "p": "p, adjusted"},
        )
    )
    if len(units) > len(shown):
        console.print(f"(the {len(shown)} largest of {len(units)} effects)")
    if found.unit is None:
        return
    heads = found.heads.assign(name=[part_name(a, b) for a, b in zip(found.heads["layer"], found.heads["head"], strict=True)])
    heads = heads.sort_values("swap", key=abs, ascending=False).head(5)
    heads = heads.assign(
        p=heads["p_value"].map("{:.3f}".format, na_action="ignore").fillna("not tested"),
        alone=heads["p_value_alone"].map("{:.3f}".format, na_action="ignore").fillna("not tested"),
        leads=heads["leads"].map(percent, na_action="ignore").fillna("not tested"),
    )
    console.print(f"heads: nats lost when they read the prompt without that {by}", style="bold")
    console.print(
        _table(
            heads,
            {
                "name": "head",
                "swap": "this head's",
                "converse": "all others'",
                "p": "p",
                "alone": "p alone",
                "leads": "ranks first",
            },
        )
    )
    matters = found.positions["swap"].abs().combine((found.positions["whole"] - found.positions["converse"]).abs(), max)
    positions = found.positions.loc[matters.nlargest(5).index]
    positions = positions.assign(token=positions["token"].fillna("shift state"), where=_where(positions))
    console.print(f"positions: nats lost with their keys and values from the prompt without that {by}", style="bold")
    console.print(
        _table(
            positions,
            {
                "prompt_position": "position",
                "token": "token",
                "where": "",
                "swap": "this position's",
                "converse": "all others'",
            },
        )
    )


def _where(positions: pd.DataFrame) -> list[str]:
    return [
        "in the unit" if own else "reached by the shift" if shifted else ""
        for own, shifted in zip(positions["in_unit"], positions["in_shift_window"], strict=True)
    ]


def _table(rows: pd.DataFrame, columns: dict[str, str]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name, head in columns.items():
        numeric = pd.api.types.is_numeric_dtype(rows[name])
        table.add_column(head, justify="right" if numeric else "left", overflow="ellipsis", no_wrap=True)
    for row in rows[list(columns)].itertuples(index=False):
        table.add_row(*(f"{x:.3f}" if isinstance(x, float) else visible(str(x).strip()) for x in row))
    return table
