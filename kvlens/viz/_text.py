"""Text and numbers on their way into a page: nothing that a prompt holds may become markup or end a script.

Tokens are data of strangers. They reach a page in two ways, and each has its one function: as HTML through `html_text`, as JSON
inside a script element through `script_json`.
"""

import html
import json
import math
import re
import unicodedata
from collections.abc import Iterable
from typing import Any

NEWLINE, SPACE, UNREADABLE = "⏎", "·", "\N{REPLACEMENT CHARACTER}"
PART, BASE = "⋯", "◌"
"""A token that holds a part of a character, in running text; and what an accent stands on whose letter is another token's."""
_IN_SCRIPT = str.maketrans({sign: f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"})
_LONE_SURROGATES = re.compile("[\ud800-\udfff]")
"""Halves of a character, which no file of UTF-8 can hold and on which browsers stumble."""
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029\u202a-\u202e]")
"""Controls, halves of a character, line ends that are none of HTML's, and marks that turn the text behind them around."""

_BYTES = re.compile("(?:<0x[0-9A-F]{2}>)+")
"""As :mod:`kvlens.analyses.texts` writes the bytes of a character that is not complete."""

_TURNS = re.compile("[\u0590-\u08ff\u200f\u202a-\u202e\u2066-\u2069\ufb1d-\ufdff\ufe70-\ufeff]")
"""Text from right to left, which would turn around the numbers beside it; an isolate (U+2068, U+2069) keeps it to itself."""


def script_json(value: Any) -> str:
    """``value`` as JSON that may stand inside a script element: without the signs that HTML or JavaScript read there.

    Those signs stand in strings alone, where their escape means the same. U+2028 and U+2029 end a line in older JavaScript. A
    number that is not finite is a ValueError: `rounded` makes it None.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _LONE_SURROGATES.sub(UNREADABLE, text).translate(_IN_SCRIPT)


def html_text(text: str) -> str:
    """``text`` as HTML that shows it, in an attribute or between tags; controls and lone surrogates become visible."""
    return html.escape(_UNSEEN.sub(UNREADABLE, text))


def printable(text: str) -> str:
    """``text`` as a font can draw it: controls and lone surrogates become visible."""
    return _UNSEEN.sub(UNREADABLE, text).replace("\n", UNREADABLE).replace("\t", UNREADABLE)


def label(token: str) -> str:
    """``token`` on one line with all that it holds visible, for axes and tooltips: ``" the\\n"`` is ``·the⏎``."""
    shown = token.replace("\n", NEWLINE).replace(" ", SPACE).replace("\t", "⇥")
    shown = "".join(f"<U+{ord(sign):04X}>" for sign in shown) if _has_no_width(shown) else _on_a_base(shown)
    return f"\u2068{shown}\u2069" if _TURNS.search(shown) else shown


def running(token: str) -> str:
    """``token`` as a piece of running text: bytes of an unfinished character (``<0xC3>``) are one sign, ``⋯``."""
    return PART if _has_no_width(token) else _on_a_base(_BYTES.sub(PART, token))


def part_note(tokens: Iterable[str]) -> str:
    """An explanation of ``⋯`` if one of the tokens is shown as that; otherwise an empty string."""
    if any(running(token) != token and PART in running(token) for token in tokens):
        return f"{PART} is a token with part of a character; the character is shown at the token that completes it."
    return ""


def _has_no_width(token: str) -> bool:
    """Whether nothing of it is seen, such as of the joiner between the parts of an emoji."""
    return token != "" and all(unicodedata.category(sign) == "Cf" for sign in token)


def _on_a_base(token: str) -> str:
    """An accent, or another mark on a letter, gets a base of its own where a token begins with it."""
    return BASE + token if token and unicodedata.category(token[0])[0] == "M" else token


def rounded(value: float, digits: int = 3) -> float | None:
    """``value`` to three significant digits, which is all that a picture shows; None where it is not finite."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def number(value: float | int) -> str:
    """``value`` as a reader wants it: three significant digits, without an exponent in the common range, ``–`` for none."""
    if not math.isfinite(value):
        return "–"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        digits = 0 if value == 0 else max(0, 2 - math.floor(math.log10(abs(value))))
        return f"{value:,.{digits}f}".replace("-", "−")
    return f"{value:.1e}".replace("-", "−")


def percent(fraction: float | int, least: float = 0.001) -> str:
    """``fraction`` in per cent, to three significant digits: what is not 0 is not shown as 0, and what is not all as 100.

    Args:
        fraction: 1 is 100 %.
        least: what is smaller is ``< 0.1 %``. Errors, and shares of a whole that has thousands of parts, have 0 here: all their
            digits are shown.
    """
    if not math.isfinite(fraction):
        return "–"
    if 0 < abs(fraction) < least:
        return f"< {100 * least:g} %" if fraction > 0 else f"> −{100 * least:g} %"
    shown = float(f"{100 * fraction:.3g}")
    return "> 99.9 %" if fraction < 1 and shown == 100 else f"{shown:.10g} %".replace("-", "−")
