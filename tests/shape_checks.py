"""Cheaper looks at shapes for a test run: most tensors are those that an annotation asks for, and are seen to be in one look.

``isinstance(x, Float[Tensor, "batch pos"])`` is jaxtyping's, which copies its books before each look and spells the dtype. Here
a tensor whose dtype it has accepted before, and whose sizes are those in the book, is accepted; any other is its to judge.
"""

import re
from typing import Any, NamedTuple

import torch
from jaxtyping import AbstractArray
from jaxtyping._storage import get_shape_memo

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
        dtypes: that jaxtyping has accepted so far.
    """

    first: list[tuple[str | int, bool]]
    several: str | None
    last: list[tuple[str | int, bool]]
    dtypes: set[torch.dtype]


READ: dict[Any, Axes | None] = {}
"""By annotation; None for one that is left to jaxtyping."""


def is_instance(annotation: Any, x: Any) -> bool:
    """In the place of jaxtyping's ``isinstance(x, annotation)``."""
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
    return Axes(one[:at], words[at][1:] if several else None, one[at:], set())


def fits(axes: Axes, shape: torch.Size) -> bool:
    """Whether the sizes are those in the book, which then holds the new ones; it stays as it was where they are not."""
    n_several = len(shape) - len(axes.first) - len(axes.last)
    if n_several if axes.several is None else n_several < 0:
        return False
    one, more, *_ = get_shape_memo()
    seen = one.copy()
    sizes = shape if axes.several is None else (*shape[: len(axes.first)], *shape[len(axes.first) + n_several :])
    for (word, is_any_if_1), size in zip((*axes.first, *axes.last), sizes, strict=True):
        if is_any_if_1 and size == 1:
            continue
        if size != (word if isinstance(word, int) else seen.setdefault(word, size)):
            return False
    if axes.several is not None:
        new = (False, shape[len(axes.first) : len(axes.first) + n_several])
        if more.setdefault(axes.several, new) != new:
            return False
    one.update(seen)
    return True
