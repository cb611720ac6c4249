"""Mamba-2's recurrence: its forms agree, and its state has the properties of a KV bias."""

import torch
from ops_cases import normal, random_mask

from kvlens.ops.ssd import (
    chunked_ssd,
    naive_ssd,
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
