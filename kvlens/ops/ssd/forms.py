"""The three forms of the recurrence: token by token, in chunks, and one step at a time."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens.ops.delta_rule.types import starting_state
from kvlens.ops.ssd.carried import by_head, carried_keys, carried_queries, effective_attention

CHUNK_SIZE = 64


class SSDOutput(NamedTuple):
    """z per token, and the state after the last real token where it was asked for."""

    output: Float[Tensor, "batch pos head d_v"]
    final_state: Float[Tensor, "batch head d_k d_v"] | None


def naive_ssd(
    q: Float[Tensor, "batch pos key_head d_k"],
    k: Float[Tensor, "batch pos key_head d_k"],
    v: Float[Tensor, "batch pos head d_v"],
    log_decay: Float[Tensor, "batch pos head"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
    initial_state: Float[Tensor, "#batch head d_k d_v"] | None = None,
    output_final_state: bool = False,
) -> SSDOutput:
    """One token after the other, one line an equation: the reference.

    Args:
        q, k: C and B, each of a group of heads.
        v: x.
        log_decay: log a_t = dt_t A, at most 0.
        write_strength: b_t = dt_t.
        mask: True at real tokens; padded positions neither write nor decay, and read 0.
        initial_state: what came before; zeros if None.
        output_final_state: whether the state after the last real token is returned.
    """
    batch, pos, n_heads, _ = v.shape
    q, k = by_head(q, n_heads), by_head(k, n_heads)
    state = starting_state(initial_state, v, k.shape[3])
    outputs = []
    for t in range(pos):
        write = write_strength[:, t, :, None, None] * k[:, t, :, :, None] * v[:, t, :, None, :]
        after = log_decay[:, t].exp()[..., None, None] * state + write
        real = torch.ones(batch, 1, 1, 1, dtype=torch.bool) if mask is None else mask[:, t, None, None, None]
        state = torch.where(real.to(after.device), after, state)
        outputs.append((state.mT @ q[:, t, :, :, None])[..., 0] * real.to(state)[..., 0])
    z = torch.stack(outputs, dim=1) if outputs else v
    return SSDOutput(z, state if output_final_state else None)


def chunked_ssd(
    q: Float[Tensor, "batch pos key_head d_k"],
    k: Float[Tensor, "batch pos key_head d_k"],
    v: Float[Tensor, "batch pos head d_v"],
    log_decay: Float[Tensor, "batch pos head"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
    initial_state: Float[Tensor, "#batch head d_k d_v"] | None = None,
    output_final_state: bool = False,
) -> SSDOutput:
    """Matrix products within chunks, one state from chunk to chunk (arguments as in :func:`naive_ssd`)."""
    pos = v.shape[1]
    state = starting_state(initial_state, v, k.shape[3])
    outputs = []
    for first in range(0, pos, CHUNK_SIZE):
        some = slice(first, first + CHUNK_SIZE)
        here = None if mask is None else mask[:, some]
        decay, write = log_decay[:, some], write_strength[:, some]
        values = v[:, some] if here is None else v[:, some].masked_fill(~here[..., None, None], 0.0)
        pattern = effective_attention(q[:, some], k[:, some], decay, write, here)
        before = carried_queries(q[:, some], decay, here).transpose(1, 2) @ state
        outputs.append((pattern @ values.transpose(1, 2) + before).transpose(1, 2))
        kept = (decay if here is None else decay.masked_fill(~here[..., None], 0.0)).sum(dim=1).exp()
        written = torch.einsum("bjhk,bjhv->bhkv", carried_keys(k[:, some], decay, write, here), values)
        state = kept[..., None, None].to(state) * state + written
    return SSDOutput(torch.cat(outputs, dim=1) if outputs else v, state if output_final_state else None)


def recurrent_ssd(
    q: Float[Tensor, "batch pos key_head d_k"],
    k: Float[Tensor, "batch pos key_head d_k"],
    v: Float[Tensor, "batch pos head d_v"],
    log_decay: Float[Tensor, "batch pos head"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
    initial_state: Float[Tensor, "#batch head d_k d_v"] | None = None,
    output_final_state: bool = False,
) -> SSDOutput:
    """One update and one read per token, for decoding (arguments as in :func:`naive_ssd`)."""
    return naive_ssd(q, k, v, log_decay, write_strength, mask, initial_state, output_final_state)
