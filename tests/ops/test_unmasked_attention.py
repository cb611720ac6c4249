"""Linear attention without the causal mask (ICLCA def. 3.2, th. 4.1, assumption 4.2)."""

import pytest
import torch
from ops_cases import normal, random_mask
from precision import LAW, relative_error

from kvlens.ops.linear_attention import LinearAttentionState, unmasked_linear_attention

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


WEIGHTS = [[normal(5, 5, seed=10 * layer + i) / 5 for i in range(3)] for layer in range(2)]
PROMPT, TEXT, OTHER = (normal(1, n, 5, seed=n) for n in (6, 4, 3))


def with_prompt(text, n_layers, prompt_sees_text):
    """By the matrix of all products: what the text becomes behind the prompt, and each layer's state of the prompt's tokens."""
    tokens, n = torch.cat([PROMPT, text], dim=1), PROMPT.shape[1]
    visible = torch.ones(2 * [tokens.shape[1]], dtype=tokens.dtype)
    visible[:n, n:] = float(prompt_sees_text)
    states = []
    for W_Q, W_K, W_V in WEIGHTS[:n_layers]:
        q, k, v = (tokens @ W for W in (W_Q, W_K, W_V))
        states.append(LinearAttentionState((k[:, :n].mT @ v[:, :n])[:, None], None))
        tokens = tokens + (q @ k.mT * visible) @ v
    return tokens[:, n:], states


def with_bias(text, states):
    """What the text becomes without the prompt, where each layer has a bias."""
    for (W_Q, W_K, W_V), bias in zip(WEIGHTS, states, strict=False):
        q, k, v = ((text @ W)[:, :, None] for W in (W_Q, W_K, W_V))
        text = text + unmasked_linear_attention(q, k, v, initial_state=bias).numerator[:, :, 0]
    return text


@pytest.mark.parametrize(
    ("n_layers", "prompt_sees_text", "holds"), [(1, True, True), (2, True, False), (1, False, True), (2, False, True)]
)
def test_a_bias_replaces_the_prompt_in_one_layer_or_if_the_prompt_does_not_see_the_text(n_layers, prompt_sees_text, holds):
    """The bias of one text, for that text and for another; the first holds always, since it knows what the prompt became."""
    expected, states = with_prompt(TEXT, n_layers, prompt_sees_text)
    assert relative_error(with_bias(TEXT, states), expected) < LAW
    error = relative_error(with_bias(OTHER, states), with_prompt(OTHER, n_layers, prompt_sees_text)[0])
    assert error < LAW if holds else error > 0.01
