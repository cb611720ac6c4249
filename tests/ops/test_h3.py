"""H3: the recurrence is its attention, and a prompt is its initial states."""

import pytest
import torch
from ops_cases import normal
from precision import LAW, relative_error

from kvlens.ops.h3 import DiagonalSSM, H3State, carried_queries, effective_attention, h3_attention

BATCH, POS, HEAD, STATE, D_K, D_V, KERNEL = 2, 13, 3, 4, 5, 7, 4


def layer(seed=0):
    """q, k, v, the shift's filter and the diagonal SSM."""
    A = normal(HEAD, STATE, seed=seed + 4).sigmoid()
    ssm = DiagonalSSM(A, normal(HEAD, STATE, seed=seed + 5), normal(HEAD, STATE, seed=seed + 6), normal(HEAD, seed=seed + 7))
    q, k, v = (normal(BATCH, POS, HEAD, d, seed=seed + i) for i, d in enumerate((D_K, D_K, D_V)))
    return q, k, v, normal(HEAD, D_K, KERNEL, seed=seed + 3), ssm


def test_the_recurrence_is_its_attention():
    q, k, v, shift, ssm = layer()
    pattern = effective_attention(q, k, shift, ssm)
    assert relative_error(torch.einsum("bhij,bjhv->bihv", pattern, v), h3_attention(q, k, v, shift, ssm)[0]) < LAW
    assert not pattern.triu(1).any()


@pytest.mark.parametrize("cut", [1, 2, 6, POS - 1])
def test_a_prompt_is_its_initial_states(cut):
    """ICLCA sec. 7: the text after the states is the text after the prompt, and each of the two states matters."""
    q, k, v, shift, ssm = layer()
    whole, end = h3_attention(q, k, v, shift, ssm)
    _, prompt = h3_attention(q[:, :cut], k[:, :cut], v[:, :cut], shift, ssm)
    text = q[:, cut:], k[:, cut:], v[:, cut:], shift, ssm
    continued, after = h3_attention(*text, prompt)
    assert relative_error(continued, whole[:, cut:]) < LAW
    for ours, theirs in zip(after, end, strict=True):
        assert relative_error(ours, theirs) < LAW
    for without in (prompt._replace(last_k=0 * prompt.last_k), prompt._replace(states=0 * prompt.states)):
        assert relative_error(h3_attention(*text, without)[0], whole[:, cut:]) > 0.01
    context = torch.einsum("bhij,bjhv->bihv", effective_attention(*text[:2], shift, ssm, prompt.last_k), text[2])
    of_prompt = torch.einsum("bihmk,bhmkv->bihv", carried_queries(text[0], ssm), prompt.states)
    assert relative_error(context + of_prompt, continued) < LAW


def test_two_tokens_by_hand():
    """kbar = 2 k_t + 3 k_{t-1}; X = X/2 + kbar v; z = (5 X + 7 kbar v) q with k = 1, 10, v = 1, 1, q = 1, 2 and X_0 = 4."""
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k, q, v = torch.cat([one, 10 * one], 1), torch.cat([one, 2 * one], 1), torch.cat([one, one], 1)
    shift = torch.tensor([[[3.0, 2.0]]], dtype=torch.float64)
    ssm = DiagonalSSM(*(torch.full((1, 1), x, dtype=torch.float64) for x in (0.5, 1.0, 5.0)), torch.full((1,), 7.0).double())
    z, after = h3_attention(q, k, v, shift, ssm, H3State(0 * one, 4 * one[None]))
    assert z.flatten().tolist() == [5 * (2 + 2) + 7 * 2, 2 * (5 * (2 + 23) + 7 * 23)]  # kbar = 2, 23; X = 4, 25
    assert (after.last_k.item(), after.states.item()) == (10, 25)
