"""What an argument has to be - a whole number, a path, a device - asked in one place and answered in one sentence."""

import itertools
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlens.errors import KVLensError, nearest

if TYPE_CHECKING:
    from torch import Tensor


Span = tuple[int, int]
"""A range of a prompt's tokens: first, and past the last."""
DEEPEST = 200
"""Folders inside each other that a path may have: Python makes and clears them by recursion, which ends below a thousand."""
MOST = 2**63 - 1
"""The largest whole number that torch takes."""


def check_whole(what: str, value: Any, least: int = 0, most: int | None = None) -> None:
    """Raise KVLensError unless ``value`` is a whole number of at least ``least`` and at most ``most``; a bool is none."""
    limits = f"at least {least}" if most is None or (isinstance(value, int) and value < least) else f"{least} to {most}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise KVLensError(f"{what} must be a whole number of {limits}, got {value!r}")
    if not least <= value <= (MOST if most is None else most):
        raise KVLensError(f"{what} must be {limits}, got {value if value <= MOST else 'a number of more than 63 bits'}")


def check_number(what: str, value: Any) -> None:
    """Raise KVLensError unless ``value`` is a finite number; a bool is none."""
    if not is_number(value):
        raise KVLensError(f"{what} must be a finite number, got {brief(value)}")


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite number, one that a float can hold; a bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def check_choice(what: str, value: Any, options: Collection[str]) -> None:
    """Raise KVLensError unless ``value`` is one of the names; the nearest is proposed."""
    if not isinstance(value, str) or value not in options:
        raise KVLensError(f"{what} must be one of {', '.join(options)}, got {brief(value)}{nearest(value, options)}")


def check_flag(what: str, value: Any) -> None:
    """Raise KVLensError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise KVLensError(f"{what} must be True or False, got {value!r}")


def check_seed(what: str, value: Any) -> None:
    """Raise KVLensError unless torch's generators take ``value``."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise KVLensError(f"{what} must be a whole number from 0 to 2**63 - 1, got {value!r}")


def check_function(what: str, value: Callable[..., Any] | None) -> None:
    """Raise KVLensError unless ``value`` can be called; None is fine."""
    if value is not None and not callable(value):
        raise KVLensError(f"{what} must be a function or None, got {value!r}")


def check_characters(what: str, text: str) -> None:
    """Raise KVLensError if ``text`` holds half a character (a lone surrogate): no tokenizer reads it, no text file holds it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise KVLensError(
            f"{what}: character {error.start} is {text[error.start]!r}, half of a character (a lone surrogate), which no "
            'tokenizer reads; leave it out, or read the text again with errors="replace"'
        ) from None


def path_of(what: str, value: str | Path) -> Path:
    """``value`` as a path, with ``~`` as the home folder.

    Raises:
        KVLensError: neither a string nor a path, an empty one, or one that no file system takes.
    """
    if not isinstance(value, str | os.PathLike) or not os.fspath(value) or "\0" in str(value):
        raise KVLensError(f"{what}: expected a path, got {value!r}; give it as a string or a pathlib.Path")
    try:
        os.fsencode(value)
    except UnicodeEncodeError as error:
        raise KVLensError(f"{what}: {value!r} can be no path: it holds half a character; give whole ones") from error
    path = Path(os.path.expanduser(value))
    if len(path.parts) > DEEPEST:
        raise KVLensError(f"{what}: {len(path.parts):,} folders inside each other; give a path of at most {DEEPEST}")
    try:
        path.exists()
    except OSError as error:  # a name too long for the file system
        raise KVLensError(f"{what}: {str(path)!r} can be no path: {error.strerror or error}; choose another") from error
    return path


def numbers_of(what: str, values: Any) -> "Tensor":
    """``values``, a tensor, an array or nested lists, as float64 on the CPU, without gradients. Imports torch.

    Raises:
        KVLensError: they hold something else than real numbers, or rows of different lengths.
    """
    import torch  # kept out of the command line's start

    values = list(values) if isinstance(values, Iterator) else values.to_numpy() if hasattr(values, "to_numpy") else values
    try:
        found = torch.as_tensor(values).detach().cpu()
    except (TypeError, ValueError, RuntimeError, NotImplementedError, OverflowError) as error:
        raise KVLensError(f"{what}: expected numbers as a tensor, an array or lists, got {brief(values)}") from error
    if found.is_complex():
        raise KVLensError(f"{what}: expected real numbers, got {found.dtype}; take their size or one of their parts")
    return found.double()


def checked_spans(what: str, spans: Any, n_tokens: int) -> list[Span]:
    """Spans in order.

    Raises:
        KVLensError: something else than pairs of whole numbers, outside the prompt, empty, or overlapping.
    """
    if not isinstance(spans, Sequence) or isinstance(spans, str):
        raise KVLensError(f"{what}: expected token ranges such as [(3, 8)], got {brief(spans)}")
    for span in spans:
        is_pair = isinstance(span, tuple | list) and len(span) == 2 and all(type(end) is int for end in span)
        if not is_pair or not 0 <= span[0] < span[1] <= n_tokens:
            raise KVLensError(
                f"{what}: expected token ranges (start, stop) with 0 <= start < stop <= {n_tokens}, the prompt's length, "
                f"got {span!r}"
            )
    ordered = sorted((int(start), int(stop)) for start, stop in spans)
    for (_, stop), (start, after) in itertools.pairwise(ordered):
        if start < stop:
            raise KVLensError(f"{what}: the token ranges overlap at {start} to {min(stop, after)}; give each token once")
    return ordered


def brief(value: Any) -> str:
    """A value in a few words, for a message."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:
        return f"{type(value).__name__} of shape {list(shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({type(value).__name__})"


def check_device(what: str, device: Any) -> None:
    """Raise KVLensError unless tensors can be computed on ``device``; None is always fine. Imports torch."""
    if device is None:
        return
    import torch  # kept out of the command line's start

    try:
        torch.ones(1, device=device).sum().item()  # "meta" makes tensors, and holds no numbers
    except (RuntimeError, AssertionError, NotImplementedError, TypeError, ValueError) as error:
        raise KVLensError(f"{what}: {device!r} cannot be used here ({first_line(error)}); cpu always can") from error


def first_line(error: Exception) -> str:
    """What an error of another library says first."""
    return (str(error).splitlines() or [type(error).__name__])[0]
