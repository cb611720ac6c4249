"""The engine of interventions: what different exchanges of the same parts give, and what keeping is."""

import pytest
import torch
from kvlens.analyses.attribution.terms import PositionExchange, Terms
from kvlens.analyses.bias.exchange import HeadExchange, LayerExchange
from kvlens.analyses.bias.parts import in_one_space
from precision import LAW, float64, relative_error
from tiny_text_model import PROMPT, TEXT, tiny_text_model

from kvlens import convert_prompt, counterfactuals


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_a_layer_is_all_of_its_heads_and_all_of_its_positions_and_keeping_it_is_exchanging_the_others(attention):
    with float64(), torch.no_grad():
        model = tiny_text_model(attention=attention, n_heads=6, d_model=24, n_key_value_heads=2, dtype=torch.float64)
        prompt, text = model.to_tokens(PROMPT)[0], model.to_tokens(TEXT, prepend_bos=False)[0]
        other = counterfactuals(model, prompt, [[(1, 4)]])
        own, donor = convert_prompt(model, prompt), convert_prompt(model, other).select_prompt(0)
        layers, heads = LayerExchange(own, donor), HeadExchange(*in_one_space(own, donor))
        positions = PositionExchange(Terms.of_prompt(model, prompt), other).in_layer(1)
        first, second = layers.rows([[0]]), heads.rows([heads.of(1)])
        every = torch.ones(1, len(positions.parts), dtype=torch.bool)
        read = []
        for biases in (
            layers.biases(~first),
            layers.biases(first, keep=True),
            heads.biases(second),
            heads.biases(~second, keep=True),
            positions.biases(every),
            own.repeat(1),
        ):
            with model.kv_bias(biases):
                read.append(model(text[None]))
    assert all(relative_error(read[0], same) < LAW for same in read[1:-1])
    assert relative_error(read[0], read[-1]) > 1e-3
