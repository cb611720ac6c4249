"""The errors that kvlens raises on bad input, its warnings, and suggestions of the nearest valid name."""

import difflib
import sys
import warnings
from collections.abc import Iterable

BETWEEN = ("kvlens.", "transformer_lens.", "torch.", "contextlib.", "tqdm.", "jaxtyping.", "beartype.")
"""The packages that stand between a caller and what is found deep inside."""


MOST_SAID = 500
"""Characters of another library's message that are passed on: some quote whole files."""
MOST_LISTED = 64
"""Names that a message lists, of those that there are."""


class KVLensError(ValueError):
    """Bad input to kvlens: the message says what was expected, what was given, and what to do."""


class IndirectHeads(KVLensError):
    """Direct logit attribution was asked of a model whose heads do not write to the residual stream directly."""


def nearest(name: object, options: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the option closest to ``name``, or ``""`` when none is close."""
    match = nearest_name(name, options)
    return "" if match is None else f"; did you mean {match!r}?"


def nearest_name(name: object, options: Iterable[str], likeness: float = 0.5) -> str | None:
    """The option closest to ``name``; None if none is as close as ``likeness``: 1 is equal, 0.8 is a typing error."""
    return next(iter(difflib.get_close_matches(str(name), list(options), n=1, cutoff=likeness)), None)


def check_known(what: str, given: str | Iterable[str], names: Iterable[str]) -> None:
    """Raise KVLensError for the first name of ``given`` that is none of ``names``; ``what`` is such as "train: no setting"."""
    names = list(names)
    for name in [given] if isinstance(given, str) else given:
        if name not in names:
            listed = f"; there are {', '.join(names) or 'none'}" if len(names) <= MOST_LISTED else ""
            raise KVLensError(f"{what} is called {name!r}{nearest(name, names)}{listed}")


def warn(message: str) -> None:
    """Warn, pointing at the line that called this package (or TransformerLens), however deep the cause is."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(BETWEEN):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def brief(value: object) -> str:
    """A short description of a value, for a message."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:
        return f"{type(value).__name__} of shape {list(shape)}"
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({type(value).__name__})"


def first_line(error: BaseException) -> str:
    """The first line of the message of another library's error, or the beginning of a long one."""
    return (str(error).splitlines() or [type(error).__name__])[0][:MOST_SAID]
