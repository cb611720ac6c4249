"""Linear attention without the causal mask (ICLCA def. 3.2, th. 4.1, assumption 4.2)."""

import pytest
import torch
from ops_cases import normal, random_mask
from precision import LAW, relative_error

from kvlens.ops.linear_attention import LinearAttentionState, final_state, unmasked_linear_attention

BATCH, POS, HEAD, KV_HEAD, D_PHI, D_HEAD = 2, 11, 6, 3, 5, 7


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("normalized", [False, True])
def test_it_is_the_matrix_of_all_products(masked, normalized):
    sizes = (HEAD, D_PHI), (KV_HEAD, D_PHI), (KV_HEAD, D_HEAD)
    q, k, v = (normal(BATCH, POS, *size, seed=seed) for seed, size in enumerate(sizes))
    mask = random_mask(BATCH, POS, 4) if masked else None
    state = LinearAttentionState(normal(1, KV_HEAD, D_PHI, D_HEAD, seed=5), normal(1, KV_HEAD, D_PHI, seed=6))
    norms = (q.abs(), k.abs()) if normalized else (None, None)
    found = unmasked_linear_attention(q, k, v, *norms, mask, state)
    real = torch.ones(BATCH, POS, dtype=torch.bool) if mask is None else mask
    k, v, kv = (x.repeat_interleave(HEAD // KV_HEAD, dim=2) for x in (k, v, state.kv.transpose(1, 2)))
    scores = torch.einsum("bihf,bjhf->bhij", q, k) * real[:, None, None]
    expected = torch.einsum("bhij,bjhd->bihd", scores, v) + torch.einsum("bihf,bfhd->bihd", q, kv.expand(BATCH, -1, -1, -1))
    assert relative_error(found.numerator, expected) < LAW
    if normalized:
        sums = state.k_sum.repeat_interleave(HEAD // KV_HEAD, dim=1)
        weights = torch.einsum("bihf,bjhf->bihj", q.abs(), k.abs()) * real[:, None, None]
        before = torch.einsum("bihf,bhf->bih", q.abs(), sums.expand(BATCH, -1, -1))
        assert relative_error(found.normalizer, weights.sum(dim=-1) + before) < LAW
    else:
        assert found.normalizer is None


def layers(tokens, weights, biases):
    """Plain linear attention, layer by layer; the bias of each, and what it reads of its tokens."""
    states = []
    for (W_Q, W_K, W_V), bias in zip(weights, biases, strict=True):
        q, k, v = ((tokens @ W)[:, :, None] for W in (W_Q, W_K, W_V))
        states.append(final_state(k, v))
        tokens = tokens + unmasked_linear_attention(q, k, v, initial_state=bias).numerator[:, :, 0]
    return tokens, states


def test_a_bias_replaces_the_prompt_in_one_layer_and_not_in_two():
    prompt, text = normal(1, 6, 5, seed=1), normal(1, 4, 5, seed=2)
    weights = [[normal(5, 5, seed=10 * layer + i) / 5 for i in range(3)] for layer in range(2)]
    for n, holds in ((1, True), (2, False)):
        whole, _ = layers(torch.cat([prompt, text], dim=1), weights[:n], [None] * n)
        _, states = layers(prompt, weights[:n], [None] * n)
        converted, _ = layers(text, weights[:n], states)
        error = relative_error(converted, whole[:, 6:])
        assert error < LAW if holds else error > 0.01
