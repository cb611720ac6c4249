"""The one family of errors that kvlens raises on bad input, what it warns of, and the nearest valid name."""

import difflib
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent.as_posix()
BETWEEN = (HERE, "/transformer_lens/", "/torch/nn/")
"""Parts of the names of files that stand between a caller and what is found deep inside."""


class KVLensError(ValueError):
    """Bad input to kvlens: the message says what was expected, what came, and what to do."""


class WrongArguments(KVLensError, TypeError):
    """A call with an argument that the function does not have, with one too many, or without one that it needs."""


def nearest(name: object, options: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the option closest to ``name``, or ``""`` when none is close."""
    match = nearest_name(name, options)
    return "" if match is None else f"; did you mean {match!r}?"


def nearest_name(name: object, options: Iterable[str], likeness: float = 0.5) -> str | None:
    """The option closest to ``name``; None when none is as close as ``likeness``: 1 is equal, 0.8 a slip of the hand."""
    return next(iter(difflib.get_close_matches(str(name), list(options), n=1, cutoff=likeness)), None)


def warn(message: str) -> None:
    """Warn, and point at the line that called this package (or TransformerLens), however deep inside the cause was found."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and any(part in Path(frame.f_code.co_filename).as_posix() for part in BETWEEN):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
