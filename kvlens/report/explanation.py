"""An explanation in words, each sentence written from statements, and in the terminal with the tables behind it."""

import textwrap
from dataclasses import replace
from typing import Any

import pandas as pd
from rich.table import Table

from kvlens.analyses.attribution.explain import SHIFT_STATE
from kvlens.analyses.attribution.verdicts import CHANGED, GAINED, KEPT, LOST
from kvlens.analyses.bias.parts import Part
from kvlens.report.console import WIDTH, make_console
from kvlens.terminal import visible
from kvlens.texts import stripped
from kvlens.viz._text import percent

MOST_ROWS = 12
MOST_NAMED = 4
"""Units that lose the answer by themselves, of which so many are named."""
LONGEST_UNIT, LONGEST_IN_TABLE = 160, 29
"""Characters of a unit's text in a sentence, and in the table."""
_EXCHANGED = {
    "heads": (
        "{parts} {reads} the prompt {those}, and everything else reads the whole prompt",
        "only {parts} {reads} the whole prompt, and everything else reads it {those}",
        "only {parts} {reads} the whole prompt",
    ),
    "positions": (
        "the text reads {parts} as in the prompt {those}, and everything else as in the whole prompt",
        "the text reads only {parts} as in the whole prompt, and everything else as in the prompt {those}",
        "it reads only {parts} as in the whole prompt",
    ),
}
"""A set exchanged; everything but a set; the same once more, in short."""


def definitions(found: Any, by: str) -> list[tuple[str, str]]:
    """What the words of an explanation mean, and the sign of an effect: (word, meaning), for the page and the terminal."""
    row, several = found.statements.iloc[0], len(found.answer_tokens) > 1
    p, value = "p", "the probability of the answer" + ", the product of those of its tokens" * several
    other, first, behind = "another token", "first at each of its tokens" if several else "the most probable token", False
    if found.reference is not None:
        other = repr(found.reference)
        p, value, first = "q", f"the answer's share p(answer) / (p(answer) + p({other}))", f"more probable than {other}"
        behind = row["p_before"] <= row["p_reference_before"]
    half, odds = "half of its value with the whole prompt", "by at least ln 4 (a factor of 4)"
    lost = f"{p}, {value}, is below {half}"
    gained = f"{p} is above twice its value with the whole prompt, or the answer overtakes {other} and its log-odds rise {odds}"
    overtaken = f"{other} overtakes the answer, whose log-odds against it fall {odds}"
    verdicts = [
        ("lost", lost if behind else f"{lost}, or {overtaken}"),
        ("gained", gained) if behind else ("kept", f"the answer is still {first}, and {p} is at least {half}"),
        ("kept" if behind else "changed", "neither"),
    ]
    those = _those(found, by)
    exchanged = [
        (
            "exchanged",
            f"a head reads the prompt without {those}: its keys and values of the prompt are replaced by those of a run "
            f"without {those}, and the text is run again. For a position, the same in all layers and heads; removed tokens "
            "have no keys and values",
        ),
        ("L0H1", "head 1 of layer 0, both counted from 0; KV1: key-value head 1"),
        *((kind.replace("_", " "), _OF_NO_HEAD[kind]) for kind in _OF_NO_HEAD if kind in set(found.heads.get("part", ()))),
        (
            "breaking set, keeping set",
            "exchanging a breaking set loses the answer; exchanging everything but a keeping set keeps it. Sets of "
            f"{by}s are removed, not exchanged, and a keeping set of them keeps the answer with any one other added, too",
        ),
    ]
    return [
        *verdicts,
        ("at the bound", "within 0.001 nats of where another of these words holds"),
        ("without, removed", "these tokens are deleted, all others keep their positions, and prompt and text are run again"),
        (
            "knocked out",
            f"the prompt is run whole, but the text does not read the {by}'s keys and values (with linear attention and in "
            "recurrent layers: their terms of the state); with a KV shift, nor those of the next positions, which are mixed "
            "with them",
        ),
        *(exchanged if found.cause else []),
        (
            "effect",
            f"{found.score} with the whole prompt, minus the same with a part removed, knocked out or exchanged, in nats. "
            "Positive: the part raises it. Negative: the part lowers it",
        ),
    ]


_OF_NO_HEAD = {
    "shift_state": "the prompt's last keys and values (and queries, if the model shifts them) before the KV shift, "
    "which mixes them into those of the text's first tokens",
    "convolution": "the inputs of a recurrent layer at the prompt's last tokens, which its short convolution mixes into "
    "those of the text's first tokens",
}


def paragraphs(found: Any, by: str) -> list[list[str]]:
    """Sentences: on units, then heads, then positions, then what was not searched; each from rows of ``found.statements``."""
    found = _with_shares(found)
    every = (_of_units(found, by), _of_parts(found, by, "heads"), _of_parts(found, by, "positions"), _not_searched(found, by))
    return [each for each in every if each]


def _with_shares(found: Any) -> Any:
    """Against a reference, verdicts are on the answer's share of both, and so are the percentages; a reference that was ahead
    of the answer all along is not what the model says "instead"."""
    if found.reference is None:
        return found
    rows, named = found.statements, {}
    for when in ("before", "after"):
        p, reference = rows[f"p_{when}"], rows[f"p_reference_{when}"]
        named[f"p_{when}"] = p / (p + reference)
    behind = (rows["p_before"] <= rows["p_reference_before"]) & (rows["says"] == found.reference)
    return replace(found, statements=rows.assign(**named, p_answer=rows["p_before"], says=rows["says"].mask(behind)))


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
        which = "its rival" if found.rival_given else "which the model says"
        numbers = f"{percent(nothing['p_answer'])} and {percent(nothing['p_reference_before'])}"
        said.append(
            f"The answer {answer} is compared with {found.reference!r}, {which}: with the whole prompt their probabilities are "
            f"{numbers}. Below, the answer's percentages are its share of both ({before} with the whole prompt), which decides "
            "whether it is lost or kept."
        )
    if not breaking:
        said += _none_breaks(found, by, each, nothing)
    else:
        first, *more = breaking
        said.append(
            f"Without {_units(found, first['parts'])}{_together(first)} the answer {answer} is lost: its "
            f"{_measured(found)} falls {_from_to(first)}{_instead(first)}{_bound(first)}."
        )
        if "+" in first["parts"]:
            alone = [each.iloc[int(unit)] for unit in first["parts"].split("+")]
            without = [f"{row['verdict']} without {_units(found, row['parts'])} ({percent(row['p_after'])})" for row in alone]
            said.append(f"With only one of these {by}s removed it is not lost: {_listed(without, 'and')}.")
        elif more:
            listed = [_with_numbers(found, row) for row in more]
            rest = len(listed) - MOST_NAMED + 1
            listed = listed if rest <= 1 else [*listed[: MOST_NAMED - 1], f"{rest} more {by}s, each by itself"]
            said.append(f"It is also lost without {_listed(listed, 'and, separately,' if len(listed) == 2 else 'or')}.")
            more = []
        said += [
            f"It is also lost without {_units(found, row['parts'])}{_together(row)} ({percent(row['p_after'])})."
            for row in more
        ]
        said += _closed(found, breaking)
        said += [
            f"Yet without {_units(found, row['parts'])} together it is kept ({percent(row['p_after'])})."
            for row in _each(rows, "again")[:1]
        ]
    said += [
        f"Without {_units(found, row['parts'])} it is gained: its {_measured(found)} rises {_from_to(row)}{_bound(row)}."
        for _, row in each[each["verdict"] == GAINED].sort_values("p_after").tail(1).iterrows()
    ]
    if nothing["verdict"] == KEPT:
        all_of_them = {1: f"that {by}", 2: f"both {by}s"}.get(len(each), f"all {len(each)} {by}s")
        said.append(f"Even with {all_of_them} removed it is kept ({percent(nothing['p_after'])}){_bound(nothing)}.")
    elif len(each) > 1:
        said += _kept_alone(found, by, rows)
    if found.unrelated is not None:
        count, of = found.unrelated
        said.append(
            f"{count} of {of} unrelated texts, put in the place of the {by} with the largest effect, had an effect as large."
        )
    return said


def _none_breaks(found: Any, by: str, each: pd.DataFrame, nothing: pd.Series) -> list[str]:
    """No set of units that loses the answer was found."""
    at = int(found.units["total_effect"].abs().idxmax())
    largest, before = each.loc[at], percent(nothing["p_before"])
    moved = "rises" if largest["p_after"] > largest["p_before"] else "falls"
    changed = each[(each["verdict"] == CHANGED) & (each.index != at)].sort_values("p_after").head(MOST_NAMED)
    listed = [_with_numbers(found, row) for _, row in changed.iterrows()]
    return [
        f"There is no single {by} without which the answer {found.answer!r} ({before}) is lost. The largest effect is that of "
        f"{_units(found, largest['parts'])}: without it the answer's {_measured(found)} {moved} {_from_to(largest)}, and the "
        f"answer is {largest['verdict']}{_instead(largest)}{_bound(largest)}.",
        *([f"It is changed without {_listed(listed, 'or')}."] if listed else []),
    ]


def _closed(found: Any, breaking: list[pd.Series]) -> list[str]:
    """Where it matters whether what follows a removed unit moves up."""
    named = {row["parts"]: row["verdict"] for row in breaking}
    return [
        f"When the tokens after {_units(found, row['parts'])} move up to close the gap, the answer is {row['verdict']} "
        f"instead ({percent(row['p_after'])})."
        for row in _each(found.statements[found.statements["positions"] == "closed"], "breaking")
        if row["verdict"] != named[row["parts"]]
    ]


def _kept_alone(found: Any, by: str, rows: pd.DataFrame) -> list[str]:
    said: list[str] = []
    cause = "+".join(map(str, found.cause))
    for row in _each(rows, "keeping", "alone"):
        which = _those(found, by) if row["parts"] == cause and not _several_named(found) else _units(found, row["parts"])
        alone = f"With only {which} in the prompt it is kept{' too' if said else ''}"
        alone = f"{alone} ({percent(row['p_after'])}){_bound(row)}"
        worse = rows[(rows["role"] == "together") & (rows["way"] == row["way"])]
        if row["role"] == "keeping":
            whole = len(row["parts"].split("+")) == len(found.units)
            none = f"It is kept with no set of fewer {by}s"
            none = none if row["smallest"] else f"No set of fewer {by}s that was tried keeps it, but not all were tried"
            said.append(f"{none}." if whole else f"{alone}, also when any one other {by} is added.")
        elif worse.empty:
            said.append(f"{alone}; with other {by}s added it was not run.")
        else:
            other = worse.iloc[0]
            said.append(
                f"{alone}, but when {_units(found, other['parts'].split('+')[-1])} is added it is {other['verdict']} "
                f"({percent(other['p_after'])}{_instead(other, short=True)})."
            )
    return said


def _of_parts(found: Any, by: str, about: str) -> list[str]:
    """Heads or positions that were exchanged for those of the prompt without the units."""
    rows = found.statements[found.statements["about"] == about]
    if rows.empty:
        return []
    said: list[str] = []
    named = _units(found, "+".join(map(str, found.cause))) if _several_named(found) else _those(found, by)

    def when(how: str, parts: list[str]) -> str:
        """``parts``: codes of one set, or several sets of one part each."""
        those = f"without {_those(found, by) if said else named}"
        one, names = "+" not in parts[0], _parts(found, about, "+".join(parts))
        names = names if not parts[1:] else f"{'any one' if parts[2:] else 'either'} of {names} alone"
        return how.format(parts=names, reads="reads" if one else "read", those=those)

    lose, keep, keep_too = _EXCHANGED[about]
    breaking = _each(rows, "breaking")
    single = [row for row in breaking if "+" not in row["parts"]]
    if len(single) > 1:
        each = [f"{percent(row['p_after'])} with {_parts(found, about, row['parts'])}{_bound(row)}" for row in single]
        said.append(
            f"When {when(lose, [row['parts'] for row in single])}, the answer is lost: its {_measured(found)} falls from "
            f"{percent(single[0]['p_before'])} to {_listed(each, 'and')}; {_tried_alone(found, about)}."
        )
        breaking = [row for row in breaking if "+" in row["parts"]]
    for row in breaking:
        smaller = _smaller(row, "loses it") or f"; {_tried_alone(found, about)}"
        numbers = f"{percent(row['p_after'])}{_instead(row, short=True)}{smaller * (not said)}"
        lost = "It is also lost when {}" if said else "When {}, the answer is lost"
        said.append(f"{lost.format(when(lose, [row['parts']]))} ({numbers}){_bound(row)}.")
    alone = _each(rows[rows["way"] == 0], "alone")
    shown = {row["parts"] for row in alone}
    kept: list[str] = []
    for row in [*alone, *(row for row in _each(rows, "keeping") if row["parts"] not in shown)]:
        smaller = _smaller(row, "keeps it") if (row["role"], row["way"]) == ("keeping", 0) else ""
        which = f"when {when(keep_too, [row['parts']])}, it" if kept else f"When {when(keep, [row['parts']])}, the answer"
        kept.append(f"{which} is {row['verdict']} ({percent(row['p_after'])}{smaller}){_bound(row)}")
    return [*said, *(["; ".join(kept) + "."] if kept else [])]


def _tried_alone(found: Any, about: str) -> str:
    """That no other single part loses the answer, of so many as were exchanged alone."""
    parts = getattr(found, about)
    tried = int(parts["p_exchanged"].notna().sum())
    kinds = ["position"] if about == "positions" else [kind.replace("_", " ") for kind in parts["part"].unique()]
    if tried == len(parts):
        return f"no other {_listed(kinds, 'or')} loses it alone"
    return f"of the {tried} {_listed([f'{kind}s' for kind in kinds], 'and')} tried alone, no other loses it"


def _parts(found: Any, about: str, parts: str) -> str:
    codes = parts.split("+")
    if about == "heads":
        return _listed([Part.of_code(code).name for code in codes], "and")
    tokens = found.positions.set_index("code")["token"]
    named = {code: f"{stripped(tokens[code])!r} at position {code}" for code in codes if code != SHIFT_STATE}
    return _listed([named.get(code, "the shift state") for code in codes], "and")


def _not_searched(found: Any, by: str) -> list[str]:
    about = {"units": f"{by}s", **({"heads": "heads", "positions": "positions"} if found.cause else {})}
    left = [words for name, words in about.items() if name not in found.searched]
    return [f"The search for sets of {_listed(left, 'and')} ended at its limit of passes."] if left else []


def _units(found: Any, parts: str) -> str:
    return _listed([repr(_short(stripped(found.units["unit_text"][int(unit)]))) for unit in parts.split("+")], "and")


def _those(found: Any, by: str) -> str:
    return f"that {by}" if len(found.cause) == 1 else f"those {by}s"


def _measured(found: Any) -> str:
    return "probability" if found.reference is None else "share"


def _several_named(found: Any) -> bool:
    """Whether "that sentence" might be another than that of the cause."""
    rows = found.statements[found.statements["about"] == "units"]
    rows = rows[~rows["role"].isin(["each", "none"]) | (rows["verdict"] == GAINED)]
    return not {int(unit) for parts in rows["parts"] for unit in parts.split("+") if unit} <= {*found.cause}


def _each(rows: pd.DataFrame, *roles: str) -> list[pd.Series]:
    return [row for _, row in rows[rows["role"].isin(roles)].iterrows()]


def _with_numbers(found: Any, row: pd.Series) -> str:
    """Units, and what becomes of the answer without them."""
    return f"{_units(found, row['parts'])} ({percent(row['p_after'])}{_instead(row, short=True)})"


def _together(row: pd.Series) -> str:
    return " together" if "+" in row["parts"] else ""


def _from_to(row: pd.Series) -> str:
    """Two probabilities, with as many digits as tell them apart."""
    p = row["p_before"], row["p_after"]
    shown = [percent(x) for x in p]
    digits = 2
    while shown[0] == shown[1] and digits < 15:
        shown, digits = [f"{100 * x:.{digits}g} %" for x in p], digits + 1
    return f"from {shown[0]} to {shown[1]}"


def _instead(row: pd.Series, short: bool = False) -> str:
    if pd.isna(row["says"]):
        return ", although it stays first" if row["verdict"] == LOST and not short and "p_answer" not in row else ""
    if short:
        return f"; the model says {row['says']!r}"
    return f", {'although' if row['verdict'] == KEPT else 'and'} the model says {row['says']!r} ({percent(row['p_says'])})"


def _smaller(row: pd.Series, what: str) -> str:
    """Of a set of several parts: whether all smaller ones were run."""
    said = f"; no smaller set {what}" if row["smallest"] else f"; no smaller set that was tried {what}, but not all were tried"
    return said if "+" in row["parts"] else ""


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
    """Print the sentences, the units, the heads and positions of the first breaking set, and what the words mean."""
    console = make_console()
    for sentences in paragraphs(found, by):
        console.print(_wrapped(" ".join(sentences)), end="\n\n")
    statements = _with_shares(found).statements
    each = statements[(statements["about"] == "units") & (statements["role"] == "each")]
    units = found.units.assign(p=[percent(p) for p in each["p_after"]], says=each["says"].fillna("").tolist())
    units = units.assign(verdict=each["verdict"].tolist())
    texts = [stripped(text) for text in units["unit_text"]]
    units["unit_text"] = [x if len(x) <= LONGEST_IN_TABLE else f"{x[: LONGEST_IN_TABLE - 1]}…" for x in texts]
    shown = units.sort_values("total_effect", ascending=False, key=abs).head(MOST_ROWS).sort_values("start")
    answer = visible(repr(found.answer))
    of = f"p({answer})" if found.reference is None else f"share of {answer} against {visible(repr(found.reference))}"
    console.print(f"{of} without each {by}; effects in nats", style="bold")
    columns = {"unit_text": by, "p": "without", "verdict": "answer", "says": "instead", "total_effect": "removed"}
    console.print(_table(shown, {**columns, "knockout_effect": "knocked out"}))
    if len(units) > len(shown):
        console.print(f"(the {len(shown)} largest of {len(units)} effects)")
    if found.cause:
        heads = found.heads.assign(name=[Part.of_code(code).name for code in found.heads["code"]])
        _print_parts(console, f"p({answer}) with heads exchanged (–: not run)", heads, {"name": "head"})
        positions = found.positions.assign(token=found.positions["token"].fillna("shift state"))
        positions["place"] = positions["prompt_position"].astype(str).replace("-1", "")
        positions["where"] = ["removed" if own else "" for own in positions["in_unit"]]
        _print_parts(
            console,
            f"p({answer}) with positions exchanged (–: not run)",
            positions,
            {"place": "position", "token": "token", "where": ""},
        )
    console.print("\nWhat the words mean", style="bold")
    for word, meaning in definitions(found, by):
        console.print(_wrapped(f"{word}: {meaning}.", indent="  "))


def _wrapped(text: str, indent: str = "") -> str:
    """Lines of the terminal's width; a number and its percent sign stay together."""
    together = visible(text).replace(" %", "\N{NO-BREAK SPACE}%")
    return textwrap.fill(together, WIDTH, subsequent_indent=indent, break_on_hyphens=False).replace("\N{NO-BREAK SPACE}%", " %")


def _print_parts(console: Any, title: str, rows: pd.DataFrame, columns: dict[str, str]) -> None:
    """Those of the sets first, then the strongest of those that were run by themselves."""
    rows = rows.assign(
        named=rows["breaking"] | rows["keeping"], least=rows["p_exchanged"].fillna(2) - rows["p_alone"].fillna(0)
    )
    rows = rows.sort_values(["named", "least"], ascending=[False, True], kind="stable")
    rows = rows[rows["p_exchanged"].notna() | rows["p_alone"].notna() | rows["named"]].head(5)
    rows = rows.assign(exchanged=[percent(p) for p in rows["p_exchanged"]], alone=[percent(p) for p in rows["p_alone"]])
    if len(rows):
        console.print(title, style="bold")
        console.print(_table(rows, {**columns, "exchanged": "only this one", "alone": "all but this one"}))


def _table(rows: pd.DataFrame, columns: dict[str, str]) -> Table:
    """Only the first column gives way where the terminal is narrow."""
    table = Table(box=None, pad_edge=False)
    cells = {
        name: [f"{round(x, 3) + 0.0:.3f}" if isinstance(x, float) else visible(stripped(str(x))) for x in rows[name]]
        for name in columns
    }
    for place, (name, head) in enumerate(columns.items()):
        numeric = pd.api.types.is_numeric_dtype(rows[name])
        widest = max(map(len, [head, *cells[name]])) if place else None
        table.add_column(head, justify="right" if numeric else "left", overflow="ellipsis", no_wrap=True, min_width=widest)
    for row in zip(*cells.values(), strict=True):
        table.add_row(*row)
    return table
