"""Lightning attention: its forms agree, and its state has the properties of a KV bias."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_cases import laws, normal, random_mask

from kvlens.ops.lightning import (
    carried_keys,
    carried_queries,
    chunked_lightning,
    effective_attention,
    naive_lightning,
    recurrent_lightning,
    state_map,
)

BATCH, HEAD, D_K, D_V = 2, 3, 5, 7
CLOSE = {"rtol": 0, "atol": 1e-12}  # at most 40 * 5 products of size ten in two orders, powers of a counted in float64


def case(pos, mask, seed=0):
    q, k = (normal(BATCH, pos, HEAD, D_K, seed=seed + i) for i in range(2))
    decay = -torch.tensor([0.0, 0.3, 40.0], dtype=torch.float64)
    return q, k, normal(BATCH, pos, HEAD, D_V, seed=seed + 2), decay, random_mask(BATCH, pos, seed) if mask else None


@given(st.integers(0, 40), st.booleans(), st.booleans(), st.integers(0, 99))
@laws
def test_forms_and_what_is_carried(pos, mask, erased, seed):
    q, k, v, decay, mask = case(pos, mask, seed)
    if erased:
        decay[2] = -torch.inf
    S = normal(1, HEAD, D_K, D_V, seed=9)
    z, final = naive_lightning(q, k, v, decay, mask, S, True)
    for form in (chunked_lightning, recurrent_lightning):
        got, got_final = form(q, k, v, decay, mask, S, True)
        torch.testing.assert_close(got_final, final, **CLOSE)
        torch.testing.assert_close(got, z, **CLOSE)
    real = torch.ones(BATCH, pos, dtype=torch.bool) if mask is None else mask
    values = v * real[..., None, None]
    written = torch.einsum("bjhk,bjhd->bhkd", carried_keys(k, decay, mask), values)
    torch.testing.assert_close(state_map(k, decay, mask) @ S + written, final, **CLOSE)
    context = torch.einsum("bhij,bjhd->bihd", effective_attention(q, k, decay, mask), values)
    read = torch.einsum("bihk,bhkd->bihd", carried_queries(q, decay, mask), S.expand(BATCH, -1, -1, -1))
    torch.testing.assert_close((context + read)[real], z[real], **CLOSE)


@pytest.mark.parametrize("cut", [1, 5, 10])
def test_cut_anywhere_and_carried_equals_the_whole(cut):
    q, k, v, decay, _ = case(11, False)
    for form in (naive_lightning, chunked_lightning, recurrent_lightning):
        z, final = form(q, k, v, decay, output_final_state=True)
        first, between = form(q[:, :cut], k[:, :cut], v[:, :cut], decay, output_final_state=True)
        second, end = form(q[:, cut:], k[:, cut:], v[:, cut:], decay, initial_state=between, output_final_state=True)
        torch.testing.assert_close(torch.cat([first, second], dim=1), z, **CLOSE)
        torch.testing.assert_close(end, final, **CLOSE)
