"""Text and numbers for a page: no content of a prompt may become markup or end a script.

Tokens are untrusted data. They reach a page in two ways, each with one function: as HTML through `html_text`, and as data of a
figure, compressed, through `data_script`. Large tables of numbers are `quantized` first: one character each, and their unit.
"""

import base64
import gzip
import html
import json
import math
import re
import unicodedata
from collections.abc import Iterable

from jaxtyping import Float
from torch import Tensor

from kvlens.texts import with_white_space_shown

UNREADABLE = "\N{REPLACEMENT CHARACTER}"
PART, BASE = "⋯", "◌"
"""Shown for a token with part of a character in running text; and the base for an accent whose letter is in another token."""
_LONE_SURROGATES = re.compile("[\ud800-\udfff]")
"""Lone surrogates, which UTF-8 cannot encode and browsers do not handle."""
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029\u202a-\u202e]")
"""Control characters, lone surrogates, line ends other than those of HTML, and marks that change the direction of text."""

_BYTES = re.compile("(?:<0x[0-9A-F]{2}>)+")
"""The form in which :mod:`kvlens.texts` writes the bytes of an incomplete character."""

_TURNS = re.compile("[\u0590-\u08ff\u200f\u202a-\u202e\u2066-\u2069\ufb1d-\ufdff\ufe70-\ufeff]")
"""Right-to-left text, which would reorder the numbers next to it unless isolated (U+2068, U+2069)."""


def data_script(value: object) -> str:
    """The data of the figure around it, in a script element that holds nothing but letters, digits, ``+``, ``/`` and ``=``.

    A number that is not finite raises ValueError; `rounded` turns it into None.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f'<script type="text/plain" class="data">{packed(_LONE_SURROGATES.sub(UNREADABLE, text))}</script>'


def packed(text: str) -> str:
    """``text`` compressed with gzip, in base64, the same for the same text; a script of the page unpacks it."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def html_text(text: str) -> str:
    """``text`` escaped for HTML, in an attribute or between tags; control characters and lone surrogates become visible."""
    return html.escape(_UNSEEN.sub(UNREADABLE, text))


def printable(text: str) -> str:
    """``text`` in a form that a font can draw: control characters and lone surrogates become visible."""
    return _UNSEEN.sub(UNREADABLE, text).replace("\n", UNREADABLE).replace("\t", UNREADABLE)


def label(token: str) -> str:
    """``token`` on one line with white space visible, for axes and tooltips: ``" the\\n"`` is ``·the⏎``."""
    shown = with_white_space_shown(token)
    shown = "".join(f"<U+{ord(sign):04X}>" for sign in shown) if _has_no_width(shown) else _on_a_base(shown)
    return f"\u2068{shown}\u2069" if _TURNS.search(shown) else shown


def running(token: str) -> str:
    """``token`` as part of running text: bytes of an incomplete character (``<0xC3>``) become one sign, ``⋯``."""
    return PART if _has_no_width(token) else _on_a_base(_BYTES.sub(PART, token))


def part_note(tokens: Iterable[str]) -> str:
    """An explanation of ``⋯`` if one of the tokens is shown as that; otherwise an empty string."""
    if any(running(token) != token and PART in running(token) for token in tokens):
        return f"{PART} is a token with part of a character; the character is shown at the token that completes it."
    return ""


def _has_no_width(token: str) -> bool:
    """Whether it is invisible, such as the joiner between the parts of an emoji."""
    return token != "" and all(unicodedata.category(sign) == "Cf" for sign in token)


def _on_a_base(token: str) -> str:
    """Prepend a base character if a token begins with an accent, or another combining mark."""
    return BASE + token if token and unicodedata.category(token[0])[0] == "M" else token


def rounded(value: float, digits: int = 3) -> float | None:
    """``value`` to three significant digits, as many as a picture shows; None if it is not finite."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def number(value: float | int, top: float | None = None) -> str:
    """``value`` formatted to three significant digits, without an exponent in the common range; ``–`` for none.

    Args:
        value: the number.
        top: the largest of those that are shown beside it: all of them get its form and as many decimals.
    """
    if not math.isfinite(value):
        return "–"
    largest = abs(value) if top is None or not math.isfinite(top) else abs(top)
    if largest == 0 or 1e-3 <= largest < 1e5:
        digits = 0 if largest == 0 else max(0, 2 - math.floor(math.log10(largest)))
        shown = f"{value:,.{digits}f}"
        return (shown if float(shown.replace(",", "")) else shown.removeprefix("-")).replace("-", "−")
    return f"{value:.1e}".replace("-", "−")


def percent(fraction: float | int, least: float = 0.001) -> str:
    """``fraction`` in percent, to three significant digits; values other than 0 and 1 are never shown as 0 or 100 %.

    Args:
        fraction: 1 is 100 %.
        least: smaller values are shown as ``< 0.1 %``; 0 shows all digits, for errors, and for shares with thousands of parts.
    """
    if not math.isfinite(fraction):
        return "–"
    if 0 < abs(fraction) < least:
        return f"< {100 * least:g} %" if fraction > 0 else f"> −{100 * least:g} %"
    shown = float(f"{100 * fraction:.3g}")
    return "> 99.9 %" if fraction < 1 and shown == 100 else f"{shown:.10g} %".replace("-", "−")


NO_VALUE, ZERO = "!", ord("#")
"""The characters of a value that is not finite and of 0; neither these nor those after them are spaces or quotes."""
LARGEST = 20_000
"""The most units of a value, so that none of the characters is half of a surrogate pair."""


def quantized(values: Float[Tensor, "..."], *, full: float | None = None, levels: int = 999) -> dict[str, object]:
    """Values in row order as whole numbers q of a unit: q >= 0 is the character with the number `ZERO` + 2q, q < 0 that with
    `ZERO` - 2q - 1.

    Args:
        values: of any shape.
        full: the value of ``levels`` units; the largest magnitude if None.
        levels: how many units that is.
    """
    finite = values.isfinite()
    largest = float(values[finite].abs().max()) if bool(finite.any()) else 0.0
    unit = rounded(max((largest if full is None else full) / levels, largest / LARGEST), digits=4) or 1.0
    q = (values.nan_to_num(0.0, 0.0, 0.0) / unit).round().int()
    numbers = (2 * q.abs() - (q < 0).int() + ZERO).flatten().tolist()
    signs = (chr(number) if real else NO_VALUE for number, real in zip(numbers, finite.flatten().tolist(), strict=True))
    return {"unit": unit, "cells": "".join(signs)}
