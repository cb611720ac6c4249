"""The cheaper looks at shapes accept what jaxtyping accepts, and leave its book as it would."""

from typing import Any

import jaxtyping
import pytest
import torch
import type_checks
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Bool, Float, Int, Shaped
from jaxtyping._storage import get_shape_memo
from shape_checks import ORIGINAL, READ, is_instance, read
from torch import Tensor

DIMS = (
    "",
    "a",
    "a b",
    "b a",
    "a a",
    "#a b",
    "a #a",
    "3 a",
    "*c a",
    "a *c",
    "a *c b",
    "*c",
    "*#c a",
    "... a",
    "_ a",
    "_x b",
    "a+1 b",
    "#2 a",
)
DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool)
KINDS = (Float, Int, Bool, Shaped)

arrays = st.builds(
    lambda shape, dtype: torch.zeros(shape, dtype=dtype), st.lists(st.integers(1, 3), max_size=3), st.sampled_from(DTYPES)
)
looks = st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(DIMS), arrays), min_size=1, max_size=6)


def in_turn(look, annotations_and_arrays):
    """What ``look`` says of one after the other, and its book after each."""
    said = []
    with type_checks.ORIGINAL("context"):
        for annotation, x in annotations_and_arrays:
            try:
                said.append(look(annotation, x))
            except jaxtyping.AnnotationError as error:  # a sum of sizes that nobody has named yet
                said.append(str(error))
            one, several, *_ = get_shape_memo()
            said += [dict(one), dict(several)]
    return said


@given(looks)
def test_every_look_and_the_book_after_it_are_jaxtypings(drawn):
    pairs = [(kind[Tensor, dims], x) for kind, dims, x in drawn]
    assert in_turn(is_instance, pairs) == in_turn(ORIGINAL, pairs)


def test_most_words_are_read_here_and_the_others_left():
    left = {dims for dims in DIMS if read(Float[Tensor, dims]) is None}
    assert left == {"*#c a", "... a", "_ a", "_x b", "a+1 b", "#2 a"}


@pytest.mark.parametrize("x", [[1.0], None, torch.zeros(2).numpy(), torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3)])
def test_what_is_no_such_tensor_is_refused(x):
    annotation = Float[Tensor, "a"]
    assert is_instance(annotation, torch.nn.Parameter(torch.zeros(2))) and torch.float32 in READ[annotation].dtypes
    assert not is_instance(annotation, x)


def test_none_is_an_array_only_where_anything_is():
    for annotation in (Float[Tensor, "a"], Float[Tensor, "*#a"], Float[torch.nn.Parameter, ""], Shaped[Any, ""]):
        assert is_instance(annotation, None) == ORIGINAL(annotation, None) == isinstance(None, annotation)
    assert isinstance(None, Float[Tensor, "a"] | None)


def test_it_is_in_use():
    assert type(Float[Tensor, "a"]).__instancecheck__ is is_instance
