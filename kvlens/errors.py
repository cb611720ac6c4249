"""The one family of errors that kvlens raises on bad input, and the helper that proposes the nearest valid name."""

import difflib
from collections.abc import Iterable


class KVLensError(ValueError):
    """Bad input to kvlens: the message says what was expected, what came, and what to do."""


def nearest(name: object, options: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the option closest to ``name``, or ``""`` when none is close."""
    matches = difflib.get_close_matches(str(name), list(options), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""
