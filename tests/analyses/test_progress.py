"""Analyses that take long on a real model tell how far they are."""

import pytest
import torch
from kvlens.analyses.attribution.by_edge import attribution_by_edge
from kvlens.analyses.attribution.by_part import attribution_by_head, attribution_by_position
from kvlens.analyses.attribution.prompt import prompt_attribution
from kvlens.analyses.bias import decomposition, effects, patching
from kvlens.analyses.heads.induction import induction_heads

import kvlens

PROMPT, TEXT = torch.arange(3, 14), torch.tensor([5, 2, 7])
UNITS = dict(by=[(0, 5), (5, 11)])
LONG = {
    "attribution_by_edge": lambda model, **tell: attribution_by_edge(model, PROMPT, TEXT, **UNITS, **tell),
    "attribution_by_head": lambda model, **tell: attribution_by_head(model, PROMPT, TEXT, **UNITS, **tell),
    "attribution_by_position": lambda model, **tell: attribution_by_position(model, PROMPT, TEXT, **UNITS, **tell),
    "prompt_attribution": lambda model, **tell: prompt_attribution(model, PROMPT, TEXT, **UNITS, **tell),
    "bias_by_head": lambda model, **tell: decomposition.bias_by_head(model, PROMPT, TEXT, batch_size=4, **tell),
    "bias_by_layer": lambda model, **tell: decomposition.bias_by_layer(model, PROMPT, TEXT, batch_size=2, **tell),
    "bias_effects": lambda model, **tell: effects.bias_effects(model, PROMPT, TEXT, batch_size=4, **tell),
    "bias_ablation": lambda model, **tell: effects.bias_ablation(
        model, PROMPT, TEXT, [[(0, 0)], [(1, 0)]], batch_size=1, **tell
    ),
    "activation_patching": lambda model, **tell: patching.activation_patching(
        model, PROMPT, PROMPT.flip(0), TEXT, batch_size=4, **tell
    ),
    "induction_heads": lambda model, **tell: induction_heads(model, ablations=True, n_sequences=2, batch_size=4, **tell),
}


@pytest.fixture(scope="module")
def model():
    return kvlens.HookedKVTransformer.from_zoo("facts-gpt2")


@pytest.mark.parametrize("name", LONG)
def test_it_tells_how_far_it_is(model, name):
    told: list[float] = []
    LONG[name](model, on_progress=told.append)
    assert len(told) > 1 and told == sorted(told) and 0.9 < told[-1] <= 1.0 and told[0] < 0.9
