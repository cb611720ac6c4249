"""An explanation in words, each sentence written from statements, and in the terminal with the tables behind it."""

import textwrap
from typing import Any

import pandas as pd
from rich.table import Table

from kvlens.analyses.attribution.explain import SHIFT_STATE
from kvlens.analyses.attribution.verdicts import CHANGED, GAINED, KEPT, LOST
from kvlens.analyses.bias.parts import Part
from kvlens.analyses.texts import stripped
from kvlens.report.console import WIDTH, make_console
from kvlens.terminal import visible
from kvlens.viz._text import percent

MOST_ROWS = 12
MOST_NAMED = 4
"""Units that lose the answer by themselves, of which so many are named."""
_READ = {"heads": ("reads", "read"), "positions": ("holds what it holds in", "hold what they hold in")}
"""What one part does, and what several do."""
LONGEST_UNIT, LONGEST_IN_TABLE = 160, 29
"""Characters of a unit's text in a sentence, and in the table."""


def paragraphs(found: Any, by: str) -> list[list[str]]:
    """Sentences: on units, then heads, then positions, then what was not searched; each from rows of ``found.statements``."""
    every = (_of_units(found, by), _of_parts(found, by, "heads"), _of_parts(found, by, "positions"), _not_searched(found))
    return [each for each in every if each]


def in_a_paragraph(found: Any, by: str) -> str:
    """The same as one text."""
    return " ".join(sentence for each in paragraphs(found, by) for sentence in each)


def _of_units(found: Any, by: str) -> list[str]:
    rows = found.statements[(found.statements["about"] == "units") & (found.statements["positions"] == "kept")]
    each = rows[rows["role"] == "each"].reset_index(drop=True)
    breaking = _each(rows, "breaking")
    nothing = rows[rows["role"] == "none"].iloc[0]
    before, answer = percent(nothing["p_before"]), repr(found.answer)
    said = []
    if found.reference is not None:
        numbers = f"{before} and {percent(nothing['p_reference_before'])}"
        said.append(f"The answer {answer} is compared with {found.reference!r}: with the prompt they have {numbers}.")
    if not breaking:
        said += _none_breaks(found, by, each, nothing)
    else:
        first, *more = breaking
        said.append(
            f"Without {_units(found, first['parts'])}{_together(first)} the answer {answer} is lost: it falls from {before} to "
            f"{percent(first['p_after'])}{_instead(first)}{_bound(first)}."
        )
        if "+" in first["parts"]:
            alone = [each.iloc[int(unit)] for unit in first["parts"].split("+")]
            without = [f"without {_units(found, row['parts'])} {row['verdict']} ({percent(row['p_after'])})" for row in alone]
            said.append(f"Where only one of these {by}s is missing, it is not lost: {_listed(without, 'and')}.")
        elif more:
            listed = [_with_numbers(found, row) for row in more]
            rest = len(listed) - MOST_NAMED + 1
            listed = listed if rest <= 1 else [*listed[: MOST_NAMED - 1], f"{rest} more {by}s, each by itself"]
            said.append(f"It is also lost without {_listed(listed, 'and, separately,' if len(listed) == 2 else 'or')}.")
            more = []
        said += [
            f"It is also lost without {_units(found, row['parts'])}{_together(row)} ({percent(row['p_after'])}): there are at "
            "least two ways."
            for row in more
        ]
        said += _closed(found, breaking)
        said += [
            f"Without {_units(found, row['parts'])} at once it is kept again ({percent(row['p_after'])})."
            for row in _each(rows, "again")[:1]
        ]
    said += _raised(found, each)
    if nothing["verdict"] == KEPT:
        all_of_them = f"all {len(each)} {by}s" if len(each) > 1 else f"that {by}"
        said.append(f"Without {all_of_them} it is kept too ({percent(nothing['p_after'])}){_bound(nothing)}.")
    elif len(each) > 1:
        said += _kept_alone(found, by, rows)
    if found.unrelated is not None:
        count, of = found.unrelated
        said.append(f"Put in the place of the {by} with the largest effect, {count} of {of} unrelated texts did as much.")
    return said


def _none_breaks(found: Any, by: str, each: pd.DataFrame, nothing: pd.Series) -> list[str]:
    """No set of units that loses the answer was found."""
    at = int(found.units["total_effect"].abs().idxmax())
    largest, before = each.loc[at], percent(nothing["p_before"])
    moved = "rises" if largest["p_after"] > largest["p_before"] else "falls"
    changed = each[(each["verdict"] == CHANGED) & (each.index != at)].sort_values("p_after").head(MOST_NAMED)
    listed = [_with_numbers(found, row) for _, row in changed.iterrows()]
    return [
        f"The answer {found.answer!r} ({before}) is not lost without any single {by}. The largest effect is that of "
        f"{_units(found, largest['parts'])}: without it the answer {moved} from {before} to {percent(largest['p_after'])} and "
        f"is {largest['verdict']}{_instead(largest)}{_bound(largest)}.",
        *([f"It is changed without {_listed(listed, 'or')}."] if listed else []),
    ]


def _raised(found: Any, each: pd.DataFrame) -> list[str]:
    """Units without which an answer that is not first is gained."""
    gained = each[each["verdict"] == GAINED].sort_values("p_after", ascending=False).head(1)
    return [
        f"Without {_units(found, row['parts'])} it rises from {percent(row['p_before'])} to {percent(row['p_after'])}"
        f"{_bound(row)}."
        for _, row in gained.iterrows()
    ]


def _closed(found: Any, breaking: list[pd.Series]) -> list[str]:
    """Where it matters whether what follows a deleted unit moves up."""
    named = {row["parts"]: row["verdict"] for row in breaking}
    return [
        f"With the tokens behind {_units(found, row['parts'])} moved up into its place, the answer is {row['verdict']} instead "
        f"({percent(row['p_after'])})."
        for row in _each(found.statements[found.statements["positions"] == "closed"], "breaking")
        if row["verdict"] != named[row["parts"]]
    ]


def _kept_alone(found: Any, by: str, rows: pd.DataFrame) -> list[str]:
    said: list[str] = []
    for row in _each(rows, "keeping", "alone"):
        alone = f"{_units(found, row['parts'])} alone {'keep' if '+' in row['parts'] else 'keeps'} it{' too' if said else ''}"
        alone = f"{alone} ({percent(row['p_after'])}){_bound(row)}"
        worse = rows[(rows["role"] == "together") & (rows["way"] == row["way"])]
        if row["role"] == "keeping":
            whole = len(row["parts"].split("+")) == len(found.units)
            none = (
                f"No set of fewer {by}s keeps it alone"
                if row["smallest"]
                else f"A set of fewer {by}s that keeps it was not found"
            )
            said.append(f"{none}." if whole else f"{alone}, also with any one other {by} added.")
        elif worse.empty:
            said.append(f"{alone}; with other {by}s added it was not run.")
        else:
            other = worse.iloc[0]
            said.append(
                f"{alone}; together with {_units(found, other['parts'].split('+')[-1])} it is {other['verdict']} "
                f"({percent(other['p_after'])}{_instead(other, short=True)})."
            )
    return said


def _of_parts(found: Any, by: str, about: str) -> list[str]:
    """Heads or positions that were exchanged for those of the prompt without the units."""
    rows = found.statements[found.statements["about"] == about]
    those, read = _those(found, by), _READ[about]
    if about == "heads":
        others = "and everything else reads all of it", f"and everything else reads it without {those}"
    else:
        others = "and all others what they hold in the whole prompt", f"and all others what they hold without {those}"
    alone, said = _each(rows[rows["way"] == 0], "alone"), []
    for row in _each(rows, "breaking"):
        what = f"{_parts(found, about, row['parts'])} {read['+' in row['parts']]} the prompt without {those}"
        if row["way"] == 0:
            numbers = f"{percent(row['p_after'])}{_instead(row, short=True)}{_smaller(row, 'loses it')}"
            said.append(f"When {what}, {others[0]}, the answer is lost ({numbers}){_bound(row)}.")
            said += _alone(found, about, alone, others[1])
        else:
            said.append(f"It is lost in another way too: when {what} ({percent(row['p_after'])}){_bound(row)}.")
    shown = {row["parts"] for row in alone}
    for row in (row for row in _each(rows, "keeping") if row["parts"] not in shown):
        what = f"only {_parts(found, about, row['parts'])} {read['+' in row['parts']]} the whole prompt"
        if row["way"] == 0:
            numbers = f"{percent(row['p_after'])}{_smaller(row, 'keeps it')}"
            said.append(f"When {what}, {others[1]}, the answer is kept ({numbers}){_bound(row)}.")
        else:
            said.append(f"It is kept in another way too: when {what} ({percent(row['p_after'])}){_bound(row)}.")
    return said


def _alone(found: Any, about: str, rows: list[pd.Series], others: str) -> list[str]:
    """Of the members of a breaking set, what becomes of the answer when each alone reads the whole prompt."""
    if not rows:
        return []
    each = [f"{row['verdict']} with {_parts(found, about, row['parts'])} ({percent(row['p_after'])})" for row in rows]
    what = f"When only one of these {_READ[about][0]} the whole prompt, {others}"
    return [f"{what}, the answer is {_listed(each, 'and')}."]


def _parts(found: Any, about: str, parts: str) -> str:
    codes = parts.split("+")
    if about == "heads":
        return _listed([Part.of_code(code).name for code in codes], "and")
    tokens = found.positions.set_index("code")["token"]
    return _listed(["the shift state" if c == SHIFT_STATE else f"{stripped(tokens[c])!r} at {c}" for c in codes], "and")


def _not_searched(found: Any) -> list[str]:
    about = ["units", *(["heads", "positions"] if found.cause else [])]
    left = [name for name in about if name not in found.searched]
    return [f"Sets of {_listed(left, 'and')} were not searched further."] if left else []


def _units(found: Any, parts: str) -> str:
    return _listed([repr(_short(stripped(found.units["unit_text"][int(unit)]))) for unit in parts.split("+")], "and")


def _those(found: Any, by: str) -> str:
    return f"that {by}" if len(found.cause) == 1 else f"those {by}s"


def _each(rows: pd.DataFrame, *roles: str) -> list[pd.Series]:
    return [row for _, row in rows[rows["role"].isin(roles)].iterrows()]


def _with_numbers(found: Any, row: pd.Series) -> str:
    """Units, and what becomes of the answer without them."""
    return f"{_units(found, row['parts'])} ({percent(row['p_after'])}{_instead(row, short=True)})"


def _together(row: pd.Series) -> str:
    return " together" if "+" in row["parts"] else ""


def _instead(row: pd.Series, short: bool = False) -> str:
    if pd.isna(row["says"]):
        return "" if short or row["verdict"] != LOST else ", although it stays first"
    return f", {row['says']!r}" if short else f", and the model says {row['says']!r} ({percent(row['p_says'])})"


def _smaller(row: pd.Series, what: str) -> str:
    """Of a set of several parts: whether all smaller ones were run."""
    if "+" not in row["parts"]:
        return ""
    return f"; no smaller set {what}" if row["smallest"] else f"; a smaller set that {what} was not found"


def _bound(row: pd.Series) -> str:
    return " (at the bound)" if row["at_bound"] else ""


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


def _listed(names: list[str], word: str) -> str:
    return f" {word} ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def print_explanation(found: Any, by: str) -> None:
    """Print the sentences, the units, and the heads and positions of the first breaking set."""
    console = make_console()
    for sentences in paragraphs(found, by):
        console.print(textwrap.fill(visible(" ".join(sentences)), WIDTH), end="\n\n")
    each = found.statements[(found.statements["about"] == "units") & (found.statements["role"] == "each")]
    units = found.units.assign(
        without=[percent(p) for p in each["p_after"]], says=each["says"].fillna("").tolist(), verdict=each["verdict"].tolist()
    )
    texts = [stripped(text) for text in units["unit_text"]]
    units["unit_text"] = [x if len(x) <= LONGEST_IN_TABLE else f"{x[: LONGEST_IN_TABLE - 1]}…" for x in texts]
    shown = units.sort_values("total_effect", ascending=False, key=abs).head(MOST_ROWS).sort_values("start")
    console.print(
        f"the answer {visible(repr(found.answer))} without each {by} in turn; effects of removing and hiding it, in nats",
        style="bold",
    )
    columns = {"unit_text": by, "without": "without", "verdict": "answer", "says": "instead", "total_effect": "removed"}
    console.print(_table(shown, {**columns, "knockout_effect": "hidden"}))
    if len(units) > len(shown):
        console.print(f"(the {len(shown)} largest of {len(units)} effects)")
    if not found.cause:
        return
    those = _those(found, by)
    heads = found.heads.assign(name=[Part.of_code(code).name for code in found.heads["code"]])
    _print_parts(console, f"heads: the answer when they read the prompt without {those}", heads, {"name": "head"})
    positions = found.positions.assign(token=found.positions["token"].fillna("shift state"))
    positions = positions.assign(where=["removed" if own else "" for own in positions["in_unit"]])
    columns = {"prompt_position": "position", "token": "token", "where": ""}
    _print_parts(
        console, f"positions: the answer with their keys and values from the prompt without {those}", positions, columns
    )


def _print_parts(console: Any, title: str, rows: pd.DataFrame, columns: dict[str, str]) -> None:
    """Those of the sets first, then the strongest of those that were run by themselves."""
    rows = rows.assign(
        named=rows["breaking"] | rows["keeping"], least=rows["p_exchanged"].fillna(2) - rows["p_alone"].fillna(0)
    )
    rows = rows.sort_values(["named", "least"], ascending=[False, True], kind="stable")
    rows = rows[rows["p_exchanged"].notna() | rows["p_alone"].notna() | rows["named"]].head(5)
    rows = rows.assign(exchanged=[percent(p) for p in rows["p_exchanged"]], alone=[percent(p) for p in rows["p_alone"]])
    if len(rows):
        console.print(f"{title} (–: not run)", style="bold")
        console.print(_table(rows, {**columns, "exchanged": "only this one", "alone": "all but this one"}))


def _table(rows: pd.DataFrame, columns: dict[str, str]) -> Table:
    """Only the first column gives way where the terminal is narrow."""
    table = Table(box=None, pad_edge=False)
    cells = {name: [f"{x:.3f}" if isinstance(x, float) else visible(stripped(str(x))) for x in rows[name]] for name in columns}
    for place, (name, head) in enumerate(columns.items()):
        numeric = pd.api.types.is_numeric_dtype(rows[name])
        widest = max(map(len, [head, *cells[name]])) if place else None
        table.add_column(head, justify="right" if numeric else "left", overflow="ellipsis", no_wrap=True, min_width=widest)
    for row in zip(*cells.values(), strict=True):
        table.add_row(*row)
    return table
