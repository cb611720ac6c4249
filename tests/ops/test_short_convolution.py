"""The short convolution against its loop, cut anywhere, padded anywhere."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_cases import laws, normal, random_mask

from kvlens.ops.short_convolution import naive_short_convolution, short_convolution

CLOSE = {"rtol": 0, "atol": 1e-13}  # a sum of at most five products of size ten, in two orders


@given(st.integers(0, 12), st.integers(1, 4), st.booleans(), st.booleans(), st.integers(0, 99))
@laws
def test_equals_the_loop(pos, kernel, padded, biased, seed):
    x, weight = normal(2, pos, 5, seed=seed), normal(5, kernel, seed=seed + 1)
    bias = normal(5, seed=seed + 2) if biased else None
    mask = random_mask(2, pos, seed) if padded else None
    for state in (None, normal(1, kernel - 1, 5, seed=3), normal(2, kernel - 1, 5, seed=4)):
        arguments = (x, weight, bias, mask, state, True)
        torch.testing.assert_close(tuple(short_convolution(*arguments)), tuple(naive_short_convolution(*arguments)), **CLOSE)


@pytest.mark.parametrize("padded", [False, True])
def test_cut_anywhere_and_carried_equals_the_whole(padded):
    x, weight = normal(2, 9, 5, seed=0), normal(5, 4, seed=1)
    mask = random_mask(2, 9, 2) if padded else None
    whole, end = short_convolution(x, weight, None, mask, None, True)
    for cut in range(1, 9):
        first_mask, second_mask = (None, None) if mask is None else (mask[:, :cut], mask[:, cut:])
        first, between = short_convolution(x[:, :cut], weight, None, first_mask, None, True)
        second, last = short_convolution(x[:, cut:], weight, None, second_mask, between, True)
        torch.testing.assert_close(torch.cat([first, second], dim=1), whole, **CLOSE)
        torch.testing.assert_close(last, end, **CLOSE)


@pytest.mark.parametrize("padded", [False, True])
def test_gradcheck(padded):
    inputs = [normal(*shape, seed=i).requires_grad_() for i, shape in enumerate([(2, 6, 3), (3, 4), (3,), (2, 3, 3)])]
    mask = random_mask(2, 6, 2) if padded else None

    def op(x, weight, bias, state):
        return tuple(short_convolution(x, weight, bias, mask, state, True))

    assert torch.autograd.gradcheck(op, inputs, fast_mode=True)
