"""Centering W_U and b_U changes no prediction, and so no table of direct contributions."""

import numpy as np
import pytest
import torch
from analysis_models import random_model, tokens

from kvlens.analyses import (
    activation_patching,
    bias_decomposition,
    bias_effects,
    bias_positions,
    induction_verdicts,
    layer_contributions,
)

PROMPT, OTHER, TEXT = tokens(7), tokens(7, seed=4), tokens(5, seed=1)
RANDOM_DIRECTION = torch.randn(30, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TABLES = {
    "layer_contributions": lambda model: layer_contributions(model, PROMPT, TEXT, tokens=[3, 11], per_head=True)["logit"],
    "bias_decomposition": lambda model: bias_decomposition(model, PROMPT, TEXT)["logit"],
    "bias_decomposition of an answer": lambda model: bias_decomposition(model, PROMPT, TEXT, answer=3)["logit"],
    "bias_decomposition against a rival": lambda model: bias_decomposition(model, PROMPT, TEXT, answer=3, rival=11)["logit"],
    "bias_positions": lambda model: bias_positions(model, PROMPT, TEXT)["logit"],
    "bias_effects": lambda model: bias_effects(model, PROMPT, TEXT, answer=3)["logit_change"],
    "activation_patching": lambda model: activation_patching(model, PROMPT, OTHER, TEXT, answer=3, points="b_kv")["metric"],
    "induction_verdicts": lambda model: induction_verdicts(model, prompt=TEXT, ablations=True)[
        ["logit_attribution", "ablation_logit_change"]
    ],
}


def off_center():
    """A model whose logits have a large mean that depends on the position."""
    model = random_model(normalization_type="LN")
    model.W_U.add_(RANDOM_DIRECTION)
    model.b_U.add_(2.5)
    return model


@pytest.mark.parametrize("table", TABLES)
def test_tables_before_and_after_centering(table):
    raw, centered = off_center(), off_center()
    centered.W_U.sub_(centered.W_U.mean(dim=-1, keepdim=True))
    centered.b_U.sub_(centered.b_U.mean())
    logits = raw(TEXT[None]), centered(TEXT[None])
    assert float((logits[0] - logits[1]).abs().min()) > 0.1
    torch.testing.assert_close(*(each.log_softmax(dim=-1) for each in logits), rtol=1e-11, atol=1e-11)
    before, after = (TABLES[table](model).to_numpy() for model in (raw, centered))
    assert np.nanmax(np.abs(before)) > 1e-3
    np.testing.assert_allclose(after, before, rtol=1e-9, atol=1e-11)  # logits near 10, sums of some hundred products
