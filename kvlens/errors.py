"""The one family of errors that kvlens raises on bad input, what it warns of, and the nearest valid name."""

import difflib
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

HERE = str(Path(__file__).parent)


class KVLensError(ValueError):
    """Bad input to kvlens: the message says what was expected, what came, and what to do."""


def nearest(name: object, options: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the option closest to ``name``, or ``""`` when none is close."""
    matches = difflib.get_close_matches(str(name), list(options), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def warn(message: str) -> None:
    """Warn, and point at the line outside this package that called it, however deep inside the cause was found."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(HERE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
