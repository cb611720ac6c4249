"""The bound with negative samples is kvlens' own: what it says, beside the paper's, is measured."""

import pytest
import torch

from kvlens import HookedKVTransformer
from kvlens.dual import DualModel
from kvlens.ops.dual_layers import log_effective_trace

STORY = "The drum stands in the cellar. Pavel has a parrot. At night Kaya feeds a donkey."
QUESTION = " Which animal does Pavel keep? Pavel keeps a"


@pytest.fixture(scope="module")
def dual():
    model = HookedKVTransformer.from_zoo("facts-linear", dtype=torch.float64)
    return DualModel.from_head(model, model.to_tokens(STORY + QUESTION)[0], 1, 0).step()


def test_without_negatives_their_weight_changes_nothing(dual):
    for ours, plain in zip(dual.bound(n_negative=0, beta=0.5), dual.bound(), strict=True):
        assert torch.equal(ours, plain)


def test_the_first_negative_raises_the_bound_and_more_lower_it(dual):
    """The numbers of the op's docstring; the paper's bound falls from the first on."""
    found = {n: float(dual.bound(n_negative=n, beta=0.5).log_bound) for n in (0, 1, 2, 4, 8, 16)}
    rounded = {n: f"{found[n]:.2f}" for n in (0, 1, 16)}
    assert all(x in log_effective_trace.__doc__ for x in rounded.values())
    assert found[1] > found[0] and sorted(list(found.values())[1:], reverse=True) == list(found.values())[1:]
    assert found[16] > found[0]
