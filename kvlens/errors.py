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


def nearest(name: object, options: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the option closest to ``name``, or ``""`` when none is close."""
    matches = difflib.get_close_matches(str(name), list(options), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def warn(message: str) -> None:
    """Warn, and point at the line that called this package (or TransformerLens), however deep inside the cause was found."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and any(part in Path(frame.f_code.co_filename).as_posix() for part in BETWEEN):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
