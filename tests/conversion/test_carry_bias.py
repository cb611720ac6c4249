"""A bias that tokens pass by: against the conversion of a prompt whose values are silenced, and every refusal."""

from dataclasses import replace

import pytest
import torch
from small_models import linear_model, model_of, relative_error, small_model, tokens

from kvlens import KVLensError, convert_prompt
from kvlens.conversion import carry_bias


def silenced(model, prompt, bias):
    """The conversion of a prompt that writes nothing into A; it does write into D."""
    shifts_values = model.cfg.kv_shift is not None and model.cfg.kv_shift.values
    name = "hook_v_shifted" if shifts_values else "hook_v"
    hooks = [(f"blocks.{layer}.attn.{name}", lambda v, hook: torch.zeros_like(v)) for layer in range(model.cfg.n_layers)]
    return convert_prompt(model, prompt, initial=bias, fwd_hooks=hooks)


@pytest.mark.parametrize("batch", [None, 3])
@pytest.mark.parametrize("name", ["rope after", "rope before", "gqa decay", "learned", "no shift", "keys only"])
def test_equals_the_conversion_of_a_prompt_without_values(name, batch):
    model = model_of("linear", name)
    first, second = (tokens(batch or 1, n, seed=n) for n in (5, 7))
    if batch is None:
        first, second = first[0], second[0]
    bias = convert_prompt(model, first)
    got, expected = carry_bias(model, bias, 7), silenced(model, second, bias)
    assert relative_error(got.b_KV, expected.b_KV) < 1e-14
    assert torch.equal(got.b_D, bias.b_D)
    assert got.position_offset == expected.position_offset
    assert got.n_prompt_tokens == expected.n_prompt_tokens
    assert torch.equal(got.last_k, bias.last_k)
    if model.cfg.rotates_after or model.cfg.decay is not None:
        assert relative_error(got.b_KV, bias.b_KV) > 1e-3  # it does move


def test_no_tokens_change_nothing():
    model = linear_model().requires_grad_(False)
    bias = convert_prompt(model, tokens(1, 5)[0])
    assert torch.equal(carry_bias(model, bias, 0).b_KV, bias.b_KV)


def test_refusals():
    model = linear_model().requires_grad_(False)
    bias = convert_prompt(model, tokens(1, 5)[0])
    other = replace(bias, fingerprint=convert_prompt(linear_model(seed=4), tokens(1, 5)[0]).fingerprint)
    with pytest.raises(KVLensError, match="carry_bias"):
        carry_bias(model, other, 1)
    with pytest.raises(KVLensError, match="carry_bias: attention differs"):
        carry_bias(small_model(), bias, 1)


def test_a_softmax_prompt_moves_away():
    """With ALiBi keys are penalized by distance: three tokens that write nothing add three positions."""
    slopes = (0.5, 0.25, 0.125, 0.0625, 0.03125)
    model = small_model(dtype=torch.float64, positional_embedding_type="alibi", alibi_slopes=slopes).requires_grad_(False)
    bias = convert_prompt(model, tokens(2, 6))
    moved = carry_bias(model, bias, 3)
    assert moved.n_prompt_tokens == moved.position_offset == 9
    assert torch.equal(moved.features.distance, bias.features.distance + 3)
    whole = convert_prompt(model, tokens(2, 3, seed=4), initial=bias)
    assert torch.equal(whole.features.distance[..., :6], moved.features.distance)
    assert torch.equal(carry_bias(model, bias, 0).features.distance, bias.features.distance)
