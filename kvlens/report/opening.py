"""The opening of a report's page: what was found in words, and one picture of what the prompt does to one answer.

All of it comes from the statements and tables of :func:`kvlens.analyses.attribution.explain.explain`.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import pandas as pd

from kvlens.analyses.attribution.verdicts import KEPT
from kvlens.report.explanation import continuation_in_a_sentence, definitions, paragraphs
from kvlens.texts import NEWLINE, joined
from kvlens.viz._color import strongest, style
from kvlens.viz._text import html_text, number, percent, running
from kvlens.viz.piece import Piece

MOST_NUMBERED = 24
"""Up to so many units show behind them what became of the answer."""
CONVERTED = "The prompt's conversion into a KV bias (numbers in each attention head that take the prompt's place) is"


def opening(explained: Any, by: str, text: str, tokens: pd.DataFrame | None = None, word: str | None = None) -> Piece:
    """What was found in words; the prompt with each unit colored by its effect; the text; the answer against its rival.

    Args:
        explained: a :class:`kvlens.analyses.attribution.explain.Explained`.
        by: what a unit is called, such as "sentence".
        text: what follows the prompt.
        tokens: the same effects of each token, as :func:`kvlens.analyses.attribution.prompt.prompt_attribution` returns them.
        word: what the model writes of which the answer is the beginning, if that is more than the answer.
    """
    (first, *more), *others = paragraphs(explained, by)
    words = [" ".join(more), *(" ".join(each) for each in others)]
    claim = _claim(first) + "".join(f'<p class="found">{_unbroken(each)}</p>' for each in words if each)
    views = [
        ("removed", f"effect of removing a {by}, nats", explained.units, "total_effect"),
        ("knockout", f"effect of knocking a {by} out, nats", explained.units, "knockout_effect"),
        *([] if tokens is None else [("tokens", "effect of removing a token, nats", tokens, "total_effect")]),
    ]
    each = explained.statements[(explained.statements["about"] == "units") & (explained.statements["role"] == "each")]
    together = {unit for found in explained.sets("units", "breaking") if len(found) > 1 for unit in map(int, found)}
    became = [
        (
            row.verdict,
            f"{'' if row.verdict == KEPT else row.verdict} {percent(row.p_after)}{', together lost' * (unit in together)}",
        )
        for unit, row in enumerate(each.itertuples())
    ]
    options = "".join(f'<option value="{name}">{html_text(words)}</option>' for name, words, _, _ in views)
    prompts = "".join(
        f'<div data-column="{view[0]}"{" hidden" if i else ""}>{_colored_units(*view, explained.score, became)}</div>'
        for i, view in enumerate(views)
    )
    said = (
        f"Color is the effect on {explained.score}: blue, a part raises it; red, it lowers it. Gray: without the part the "
        f"answer is kept. After a {by}: the probability of the answer without it."
    )
    body = (
        f"{claim}{_odds_explained(explained, by)}{_begun(explained.answer, word)}{_what_words_mean(explained, by)}"
        f'<figure class="piece" data-kvlens="opening"><figcaption>The prompt '
        f'<select aria-label="which effect is shown">{options}</select></figcaption><p class="note">{html_text(said)}</p>'
        f'{prompts}<h3>The text that follows</h3><div class="tokens asked" tabindex="0" role="region" '
        f'aria-label="the text that follows">{_shown(text)}</div></figure>'
    )
    return Piece("what the prompt does", body)


def continuation(figures: list[dict[str, Any]]) -> Piece:
    """The opening where nothing is explained: what the model continues with, with the prompt and without it.

    Args:
        figures: from :func:`kvlens.report.summary.continuation_figures`.
    """
    whats = ("most probable with the prompt", "most probable without the prompt")
    named = [
        (row["token"], what, (row["p_with_prompt"], row["p_without_prompt"])) for row, what in zip(figures, whats, strict=False)
    ]
    table = _odds(["with the prompt", "without the prompt"], named)
    return Piece("what the prompt does", _claim(continuation_in_a_sentence(figures)) + table)


def _what_words_mean(explained: Any, by: str) -> str:
    rows = "".join(f"<dt>{html_text(word)}</dt><dd>{html_text(meaning)}.</dd>" for word, meaning in definitions(explained, by))
    return f'<details class="words" open><summary>What the words mean</summary><dl>{rows}</dl></details>'


def _claim(sentence: str) -> str:
    return f'<p class="claim">{_unbroken(sentence)}</p>'


def _unbroken(text: str) -> str:
    return html_text(text).replace(" %", "&nbsp;%").replace("&lt; ", "&lt;&nbsp;").replace("&gt; ", "&gt;&nbsp;")


def word_begun(answer: str, written: list[str]) -> str | None:
    """The word of which ``answer`` is the beginning in the tokens that the model wrote; None where it is a whole word there."""
    if not written or written[0].strip() != answer or not answer.isalpha():
        return None
    text = joined(written).lstrip()
    word = "".join(itertools.takewhile(str.isalpha, text))
    return word if len(answer) < len(word) < len(text) else None  # a word that goes on to the end may not be whole


def _colored_units(name: str, words: str, units: pd.DataFrame, column: str, score: str, became: list[tuple[str, str]]) -> str:
    said = became if name == "removed" else [(None, "")] * len(units)
    colored = [verdict != KEPT for verdict, _ in said]
    top = strongest(units.loc[colored, column])
    numbered = [len(units) <= MOST_NUMBERED or (own and sum(colored) <= MOST_NUMBERED) for own in colored]
    spans = "".join(
        _unit(row["unit_text"], row[column], score, top, verdict, badge * shows, place)
        for (_, row), (verdict, badge), shows, place in zip(units.iterrows(), said, numbered, _places(units, name), strict=True)
    )
    return f'<div class="tokens units" tabindex="0" role="region" aria-label="prompt, {html_text(words)}">{spans}</div>'


def _places(units: pd.DataFrame, name: str) -> list[str]:
    """What clicking each unit selects: the unit, and its positions; where tokens are shown as well, the position."""
    if name == "tokens":
        return [f'data-prompt="{start}"' for start in units["start"]]
    return [f'data-unit="{row.unit}" data-start="{row.start}" data-stop="{row.stop}"' for row in units.itertuples()]


def _unit(text: str, effect: float, score: str, top: float, verdict: str | None, badge: str, place: str) -> str:
    """One unit without the blanks around it, which stay uncolored; behind it what becomes of the answer without it."""
    said = f"{'raises' if effect > 0 else 'lowers'} {score} by {number(abs(effect))} nats"
    said += "" if verdict is None else f"; without it the answer is {verdict}"
    own = text.strip()
    before, after = text[: text.index(own)], text[text.index(own) + len(own) :]
    shown_badge = f'<b class="effect">{_unbroken(badge.strip())}</b>' if badge else ""
    look = 'class="unsure"' if verdict == KEPT else style(effect, top)
    shown = f'<span title="{html_text(said)}" {look} {place}>{_shown(own)}{shown_badge}</span>' if own else ""
    return f"{_blank(before)}{shown}{_blank(after)}"


def _blank(text: str) -> str:
    return f'<i class="unsure">{_shown(text)}</i>' if text else ""


def _shown(text: str) -> str:
    return html_text(running(text)).replace("\n", f"{NEWLINE}\n")


def _odds_explained(explained: Any, by: str) -> str:
    """Two answers, and the most probable token without the prompt, with the prompt, without the unit, without the prompt."""
    without = explained.p_answer[1] is not None
    those = f"that {by}" if len(explained.cause) == 1 else f"those {by}s"
    removed = [f"without {those}"] if without else []
    named = [(explained.answer, "the answer", explained.p_answer), (explained.rival, "rival", explained.p_rival)]
    if explained.unprompted is not None:
        named.append((explained.unprompted, "most probable without the prompt", explained.p_unprompted))
    return _odds(["with the prompt", *removed, "without the prompt"], named)


def _odds(conditions: list[str], named: Sequence[tuple[str, str, tuple[float | None, ...]]]) -> str:
    """A table of probabilities with bars: continuations down, each with what it is, conditions across."""
    rows = "".join(
        f'<tr><th scope="row"><bdi>{html_text(name)}</bdi> <span class="unit">{what}</span></th>'
        + "".join(_odd(p) for p in each if p is not None)
        + "</tr>"
        for name, what, each in named
    )
    head = "".join(f'<th scope="col">{html_text(words)}</th>' for words in ("the model continues with", *conditions))
    return f'<table class="odds"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _begun(answer: str, word: str | None) -> str:
    """What is said of an answer that is a part of a word."""
    if word is None:
        return ""
    return f'<p class="note">“{html_text(answer)}” is the beginning of “{html_text(word)}”, which the model writes.</p>'


def _odd(p: float) -> str:
    bar = f'<div class="track"><div class="bar positive" style="left:0;width:{100 * p:.2f}%"></div></div>'
    return f"<td><div>{percent(p)}</div>{bar}</td>"


def exactness(figures: dict[str, Any], n_text: int) -> str:
    """One line on how exact the conversion is, from the summary's ``conversion``."""
    agreeing = f"the same most probable next token at {round(figures['argmax_agreement'] * n_text)} of {n_text} positions"
    error = f"relative error of the logits {number(figures['relative_error'])}"
    if figures["approximation"] is not None:
        return f"{CONVERTED} approximate ({figures['approximation']}): {error}; {agreeing}."
    if figures["exact_to_rounding"]:
        return f"{CONVERTED} exact to rounding: {error}; {agreeing}."
    return f"{CONVERTED} NOT EXACT: {error}, rounding alone gives {number(figures['rounding_error'])}; {agreeing}."
