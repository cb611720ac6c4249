"""Checks of arguments that annotations cannot express: paths, devices, texts, numbers in several forms."""

import itertools
import os
from collections.abc import Iterator, Sequence
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from kvlens.errors import KVLensError, brief, first_line

if TYPE_CHECKING:
    from torch import Tensor


Span = tuple[int, int]
"""A range (start, stop) of a prompt's tokens."""
Positions = Literal["kept", "closed"]
"""Whether what comes after tokens that are left out stays where it stood or moves up."""
UnitName = Literal["message", "document", "paragraph", "line", "sentence", "code", "word", "token"]
UNITS: tuple[str, ...] = get_args(UnitName)
"""What a prompt is cut into by name; ``code`` means statements."""
Depth = Literal["units", "ranges", "layers", "heads", "positions"]
HOW_FAR: tuple[str, ...] = get_args(Depth)
"""How far an explanation goes."""
SectionName = Literal["heads", "patterns", "shares", "effect", "depth", "logits", "dual", "copies", "exactness"]
SECTIONS: tuple[str, ...] = get_args(SectionName)
"""What the page of an explanation can show below the answer."""
USUAL_SECTIONS: tuple[SectionName, ...] = ("shares", "effect", "depth", "exactness")
"""What it shows unless told otherwise: a few passes in all, a fraction of what the explanation takes."""
MOST_ASKED = 2**24
"""Upper limit for features, steps and texts: a larger number is a typing error, or would take years."""


def check_tokenizer(what: str, model: Any) -> None:
    """Raise KVLensError for a model that reads token ids alone."""
    if model.tokenizer is None:
        raise KVLensError(f"{what}: this model has no tokenizer, so it cannot read text; give token ids")


def check_characters(what: str, text: str) -> None:
    """Raise KVLensError if ``text`` has a lone surrogate (half a character), which no tokenizer or text file accepts."""
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
        KVLensError: not a string or path, an empty one, or one that is not valid on any file system.
    """
    if not isinstance(value, str | os.PathLike) or not os.fspath(value) or "\0" in str(value):
        raise KVLensError(f"{what}: expected a path, got {value!r}; give it as a string or a pathlib.Path")
    path = Path(os.path.expanduser(value))
    try:
        os.fsencode(value)
        path.exists()
    except (OSError, UnicodeEncodeError) as error:  # a name too long for the file system, or with half a character
        reason = getattr(error, "strerror", None) or error
        raise KVLensError(f"{what}: {str(path)!r} cannot be a path: {reason}; choose another") from error
    return path


def numbers_of(values: object) -> "Tensor":
    """``values``, a tensor, an array or nested lists, as float64 on the CPU, without gradients. Imports torch."""
    import torch  # kept out of the command line's start

    values = list(values) if isinstance(values, Iterator) else values.to_numpy() if hasattr(values, "to_numpy") else values
    found = torch.as_tensor(values).detach().cpu()
    if found.is_complex():
        raise KVLensError(f"expected real numbers, got {found.dtype}; take their size or one of their parts")
    return found.double()


def checked_spans(what: str, spans: Any, n_tokens: int) -> list[Span]:
    """The spans in ascending order.

    Raises:
        KVLensError: spans that are not pairs of whole numbers, are outside the prompt, empty, or overlapping.
    """
    for span in spans if isinstance(spans, Sequence) and not isinstance(spans, str) else [spans]:
        is_pair = isinstance(span, tuple | list) and len(span) == 2 and all(map(_is_whole, span))
        if not is_pair or not 0 <= span[0] < span[1] <= n_tokens:
            raise KVLensError(
                f"{what}: expected token ranges (start, stop) with 0 <= start < stop <= {n_tokens}, the prompt's length, "
                f"got {brief(span)}"
            )
    ordered = sorted((int(start), int(stop)) for start, stop in spans)
    for (_, stop), (start, after) in itertools.pairwise(ordered):
        if start < stop:
            raise KVLensError(f"{what}: the token ranges overlap at {start} to {min(stop, after)}; give each token once")
    return ordered


def _is_whole(x: object) -> bool:
    """Whether a number is an integer, of Python or numpy (as cells of a table are)."""
    return isinstance(x, Integral) and not isinstance(x, bool)


def check_device(what: str, device: Any) -> None:
    """Raise KVLensError unless tensors can be computed on ``device``; None is always fine. Imports torch."""
    if device is None:
        return
    import torch  # kept out of the command line's start

    try:
        torch.ones(1, device=device).sum().item()  # fails on "meta", whose tensors hold no numbers
    except (RuntimeError, AssertionError, NotImplementedError, TypeError, ValueError) as error:
        raise KVLensError(f"{what}: {device!r} cannot be used here ({first_line(error)}); cpu always can") from error
