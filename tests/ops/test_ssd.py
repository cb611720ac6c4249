"""Mamba-2's recurrence: its forms agree, and its state has the properties of a KV bias."""

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_cases import laws, normal, random_mask

from kvlens.ops.ssd import (
    carried_keys,
    carried_queries,
    chunked_ssd,
    effective_attention,
    naive_ssd,
    recurrent_ssd,
    state_map,
)

BATCH, GROUPS, HEAD, D_K, D_V = 2, 2, 4, 5, 7
CLOSE = {"rtol": 0, "atol": 1e-12}  # at most 40 * 5 products of size ten in two orders, decays summed in float64


def case(pos, mask, seed=0):
    q, k = (normal(BATCH, pos, GROUPS, D_K, seed=seed + i) for i in range(2))
    log_decay = -3 * normal(BATCH, pos, HEAD, seed=seed + 3).square()
    write = normal(BATCH, pos, HEAD, seed=seed + 4).abs()
    v = normal(BATCH, pos, HEAD, D_V, seed=seed + 2)
    return q, k, v, log_decay, write, random_mask(BATCH, pos, seed) if mask else None


def test_one_token_by_hand():
    """S = e^{-1} S_0 + 2 k v^T, z = S^T q, with k = (1, 0), v = 3, q = (1, 10)."""
    q, k = torch.tensor([1.0, 10.0]).view(1, 1, 1, 2), torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    v, log_decay, write = torch.full((1, 1, 1, 1), 3.0), torch.full((1, 1, 1), -1.0), torch.full((1, 1, 1), 2.0)
    before = torch.tensor([1.0, 1.0]).view(1, 1, 2, 1)
    z, state = naive_ssd(q, k, v, log_decay, write, initial_state=before, output_final_state=True)
    kept = torch.tensor(-1.0).exp()
    torch.testing.assert_close(state.flatten(), torch.stack([kept + 6, kept]))
    torch.testing.assert_close(z.flatten(), (11 * kept + 6)[None])


@given(st.integers(0, 40), st.booleans(), st.booleans(), st.integers(0, 99))
@laws
def test_forms_and_what_is_carried(pos, mask, erased, seed):
    q, k, v, log_decay, write, mask = case(pos, mask, seed)
    if erased and pos:
        log_decay[:, pos // 2, 1:] = -torch.inf
    S = normal(1, HEAD, D_K, D_V, seed=9)
    z, final = naive_ssd(q, k, v, log_decay, write, mask, S, True)
    for form in (chunked_ssd, recurrent_ssd):
        got, got_final = form(q, k, v, log_decay, write, mask, S, True)
        torch.testing.assert_close(got_final, final, **CLOSE)
        torch.testing.assert_close(got, z, **CLOSE)
    real = torch.ones(BATCH, pos, dtype=torch.bool) if mask is None else mask
    values = v * real[..., None, None]
    written = torch.einsum("bjhk,bjhd->bhkd", carried_keys(k, log_decay, write, mask), values)
    torch.testing.assert_close(state_map(k, log_decay, mask) @ S + written, final, **CLOSE)
    context = torch.einsum("bhij,bjhd->bihd", effective_attention(q, k, log_decay, write, mask), values)
    read = torch.einsum("bihk,bhkd->bihd", carried_queries(q, log_decay, mask), S.expand(BATCH, -1, -1, -1))
    torch.testing.assert_close((context + read)[real], z[real], **CLOSE)


@pytest.mark.parametrize("cut", [1, 5, 10])
def test_cut_anywhere_and_carried_equals_the_whole(cut, monkeypatch):
    monkeypatch.setattr(sys.modules["kvlens.ops.ssd.forms"], "CHUNK_SIZE", 4)
    q, k, v, log_decay, write, _ = case(11, False)
    parts = [(x[:, :cut], x[:, cut:]) for x in (q, k, v, log_decay, write)]
    for form in (naive_ssd, chunked_ssd, recurrent_ssd):
        z, final = form(q, k, v, log_decay, write, output_final_state=True)
        first, between = form(*(x for x, _ in parts), output_final_state=True)
        second, end = form(*(x for _, x in parts), initial_state=between, output_final_state=True)
        torch.testing.assert_close(torch.cat([first, second], dim=1), z, **CLOSE)
        torch.testing.assert_close(end, final, **CLOSE)


def test_strong_decay_overflows_nothing():
    """e^{G_i - G_j} above the diagonal would be e^{4000}: neither the pattern nor its gradient may be touched by it."""
    q, k, v, _, write, _ = case(20, False)
    log_decay = torch.full((BATCH, 20, HEAD), -200.0, dtype=torch.float64, requires_grad=True)
    z, final = chunked_ssd(q, k, v, log_decay, write, output_final_state=True)
    (z.square().sum() + final.square().sum()).backward()
    assert bool(z.isfinite().all()) and bool(log_decay.grad.isfinite().all())


def test_gradients_are_those_of_the_recurrence():
    q, k, v, log_decay, write, _ = case(9, False)
    S = normal(BATCH, HEAD, D_K, D_V, seed=9)
    grads = []
    for form in (naive_ssd, chunked_ssd):
        inputs = [x.clone().requires_grad_() for x in (q, k, v, log_decay, write, S)]
        z, final = form(*inputs[:5], initial_state=inputs[5], output_final_state=True)
        (z.square().sum() + final.square().sum()).backward()
        grads.append([x.grad for x in inputs])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
