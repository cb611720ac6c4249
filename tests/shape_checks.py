"""Cheaper looks at shapes for a test run: most tensors are those that an annotation asks for, and are seen to be in one look.

``isinstance(x, Float[Tensor, "batch pos"])`` is jaxtyping's, which copies its books before each look and spells the dtype. Here
a tensor whose dtype it has accepted before, and whose sizes are those in the book, is accepted; any other is its to judge.
"""

import re
from typing import Any, NamedTuple

import torch
from jaxtyping import AbstractArray
from jaxtyping._storage import _shape_storage as BOOKS

ARRAYS = type(AbstractArray)
ORIGINAL = ARRAYS.__instancecheck__
TENSORS = (torch.Tensor, torch.nn.Parameter)
AXIS = re.compile(r"#?[a-zA-Z]\w*|\d+")
AXES = re.compile(r"\*[a-zA-Z]\w*")


class Axes(NamedTuple):
    """An annotation's words.

    Attributes:
        first, last: names or sizes of single axes, and whether an axis of 1 may stand for any size; ``last`` are those
            behind the word that stands for several.
        several: that word; None where there is none.
        names: the single axes, where each is a name and has one size; else None.
        n_single: how many single axes.
        dtypes: that jaxtyping has accepted so far.
    """

    first: list[tuple[str | int, bool]]
    several: str | None
    last: list[tuple[str | int, bool]]
    names: tuple[str, ...] | None
    n_single: int
    dtypes: set[torch.dtype]


READ: dict[Any, Axes | None] = {}
"""By annotation; None for one that is left to jaxtyping."""


def is_instance(annotation: Any, x: Any) -> bool:
    """In the place of jaxtyping's ``isinstance(x, annotation)``."""
    if x is None and getattr(annotation, "array_type", None) is torch.Tensor:  # an argument that may be left out, and is
        return False
    try:
        axes = READ[annotation]
    except KeyError:
        axes = READ[annotation] = read(annotation)
    if axes is None or type(x) not in TENSORS:
        return ORIGINAL(annotation, x)
    if x.dtype in axes.dtypes and fits(axes, x.shape):
        return True
    accepted = ORIGINAL(annotation, x)
    if accepted:
        axes.dtypes.add(x.dtype)
    return accepted


def read(annotation: Any) -> Axes | None:
    """Its words, where they are names and sizes."""
    words = getattr(annotation, "dim_str", "?").split()
    several = [i for i, word in enumerate(words) if AXES.fullmatch(word)]
    at = several[0] if several else len(words)
    single = [*words[:at], *words[at + 1 :]]
    if len(several) > 1 or not all(AXIS.fullmatch(word) for word in single):
        return None
    one = [(int(word) if word.isdigit() else word.removeprefix("#"), word.startswith("#")) for word in single]
    names = None if any(word[0] == "#" or word.isdigit() for word in single) else tuple(single)
    return Axes(one[:at], words[at][1:] if several else None, one[at:], names, len(single), set())


def fits(axes: Axes, shape: torch.Size) -> bool:
    """Whether the sizes are those in the innermost book, which then holds the new ones, or else stays as it was."""
    stack = getattr(BOOKS, "memo_stack", None)
    one, more = stack[-1][:2] if stack else ({}, {})  # of single axes, and of several
    n_several = len(shape) - axes.n_single
    sizes: Any = shape
    if axes.several is not None and n_several >= 0:
        n_first = len(axes.first)
        new = (False, shape[n_first : n_first + n_several])
        if more.get(axes.several, new) != new:
            return False
        sizes = shape[:n_first] + shape[n_first + n_several :]
    elif n_several:
        return False
    n_seen = len(one)
    if axes.names is None:
        fitting = all(fits_one(one, axis, size) for axis, size in zip((*axes.first, *axes.last), sizes, strict=True))
    else:
        fitting = True
        for name, size in zip(axes.names, sizes):  # noqa: B905 - as many as these are, and the word strict costs a fifth of the look
            if one.setdefault(name, size) != size:
                fitting = False
                break
    if fitting:
        if axes.several is not None:
            more[axes.several] = new
        return True
    while len(one) > n_seen:
        one.popitem()
    return False


def fits_one(one: dict[str, int], axis: tuple[str | int, bool], size: int) -> bool:
    """Whether a single axis has the size that it has in the book, which then holds it."""
    word, is_any_if_1 = axis
    return (is_any_if_1 and size == 1) or size == (word if isinstance(word, int) else one.setdefault(word, size))
