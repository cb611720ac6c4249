"""Everything about chunks of tokens that does not depend on the state before them, for all chunks at once."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from kvlens.checks import Count, ensure
from kvlens.ops.delta_rule.types import LOWEST_LOG_DECAY, masked

BLOCK = 16
"""Block size with a decay per channel: within a block products are formed pair by pair, between blocks as matrix products."""


class Chunks(NamedTuple):
    """The matrices of :mod:`kvlens.ops.delta_rule.chunked`, [batch, head, chunk, ...].

    Attributes:
        pos: number of tokens before the last chunk was padded.
        d_written: columns of ``written``; 0 if it is None.
        q_decayed: Q e^G [size, d_k]; ``scores``: QK [size, size]; both None without queries.
        k_to_end: Kd = K e^{G_C - G} [size, d_k].
        write: b [size, 1].
        system: tril(diag(b) KK) [size, size]; its diagonal is taken to be 1.
        removed: W [size, d_k].
        written: U [size, d_v]; None without values.
        end_decay: e^{G_C} [d_k or 1, 1].
    """

    pos: int
    d_written: int
    q_decayed: Tensor | None
    scores: Tensor | None
    k_to_end: Tensor
    write: Tensor
    system: Tensor
    removed: Tensor
    written: Tensor | None
    end_decay: Tensor

    def maps(self) -> Float[Tensor, "batch head chunk d_k d_k"]:
        """P of each chunk."""
        d_k = self.k_to_end.shape[-1]
        decay = self.end_decay * torch.eye(d_k, dtype=self.write.dtype, device=self.write.device)
        return decay - self.k_to_end.transpose(-1, -2) @ self.removed

    def local_carried_keys(self, times_write_strength: bool) -> Float[Tensor, "batch head chunk size d_k"]:
        """diag(b) (I + L)^{-T} Kd: each key as it contributes to the state at the end of its chunk."""
        keys = torch.linalg.solve_triangular(self.system.transpose(-1, -2), self.k_to_end, upper=True, unitriangular=True)
        return keys * self.write if times_write_strength else keys

    def joined(self, x: Tensor) -> Tensor:
        """[batch, head, chunk, size, d] as [batch, pos, head, d], without what fills the last chunk."""
        return x.flatten(2, 3)[:, :, : self.pos].transpose(1, 2)


def chunks_of(
    q: Tensor | None,
    k: Tensor,
    log_decay: Tensor,
    write_strength: Tensor,
    mask: Tensor | None,
    chunk_size: int,
    v: Tensor | None = None,
) -> Chunks:
    """Cut the tokens into chunks; the last one is padded with tokens that change nothing."""
    ensure("delta rule: chunk_size", Count, chunk_size)
    reads = [x for x in (v, q) if x is not None]
    k, log_decay, write_strength, reads = masked(mask, k, log_decay, write_strength, *reads)
    pos, n_heads = write_strength.shape[1:]
    key_heads, size = k.shape[2], max(1, min(chunk_size, pos))
    by_channel = log_decay.dim() == 4

    def cut(x: Tensor) -> Tensor:
        """[batch, pos, head, d] as [batch, head, chunk, size, d]."""
        missing = -pos % size if pos else 1
        x = pad(x, (0, 0, 0, 0, 0, missing)) if missing else x
        return x.transpose(1, 2).unflatten(2, (-1, size))

    def per_key_head(x: Tensor) -> Tensor:
        """[batch, head, ...] as [batch, key_head, head / key_head, ...]."""
        return x.unflatten(1, (key_heads, n_heads // key_heads))

    # differences of long sums lose digits, so the sums are in float64 whatever the dtype of the rest
    steps = (log_decay if by_channel else log_decay[..., None]).clamp(min=LOWEST_LOG_DECAY)
    cumulated = per_key_head(cut(steps).double().cumsum(-2))
    b = per_key_head(cut(write_strength[..., None]))
    from_start, to_end = cumulated.to(k).exp(), (cumulated[..., -1:, :] - cumulated).to(k).exp()

    keys = cut(k).unsqueeze(2)
    queries = None if q is None else cut(reads[-1]).unsqueeze(2)
    products = decayed_products([keys] if queries is None else [keys, queries], keys, cumulated)
    system = b * products[0]
    right = [b * keys * from_start]
    if v is not None:
        right.append(b * per_key_head(cut(reads[0])))
    solved = torch.linalg.solve_triangular(system, torch.cat(right, dim=-1), upper=False, unitriangular=True).flatten(1, 2)
    d_k = k.shape[-1]
    return Chunks(
        pos,
        0 if v is None else v.shape[-1],
        None if queries is None else (queries * from_start).flatten(1, 2),
        None if queries is None else products[1].flatten(1, 2),
        (keys * to_end).flatten(1, 2),
        b.flatten(1, 2),
        system.flatten(1, 2),
        solved[..., :d_k],
        None if v is None else solved[..., d_k:],
        from_start[..., -1, :, None].flatten(1, 2),
    )


def decayed_products(rows: list[Tensor], keys: Tensor, cumulated: Tensor) -> list[Tensor]:
    """sum_c x_ic k_jc e^{G_ic - G_jc} for j <= i, else 0 [..., size, size], for each x in ``rows``.

    Args:
        rows, keys: [..., size, d_k].
        cumulated: G [..., size, 1] or, with a decay per channel, [..., size, d_k], in float64.
    """
    size = keys.shape[-2]
    later = torch.ones(size, size, dtype=torch.bool, device=keys.device).triu(1)
    if cumulated.shape[-1] == 1:
        gaps = (cumulated - cumulated.transpose(-1, -2)).to(keys).masked_fill(later, -torch.inf)
        weight = gaps.exp()
        return [(x @ keys.transpose(-1, -2)) * weight for x in rows]
    blocks = [_block_of_rows(rows, keys, cumulated, start) for start in range(0, size, BLOCK)]
    return [torch.cat(parts, dim=-2) for parts in zip(*blocks, strict=True)]


def _block_of_rows(rows: list[Tensor], keys: Tensor, cumulated: Tensor, start: int) -> list[Tensor]:
    """Rows ``start`` to ``start + BLOCK`` of :func:`decayed_products`, for a decay per channel.

    Between the block's tokens and all earlier ones, the decay splits at the start of the block into two factors of at most 1.
    """
    size, here = keys.shape[-2], slice(start, start + BLOCK)
    before = cumulated[..., start - 1 : start, :] if start else torch.zeros_like(cumulated[..., :1, :])
    within = (cumulated[..., here, :] - before).to(keys)
    n_rows = within.shape[-2]
    later = torch.ones(n_rows, n_rows, dtype=torch.bool, device=keys.device).triu(1)[..., None]
    gaps = (within.unsqueeze(-2) - within.unsqueeze(-3)).masked_fill(later, -torch.inf)
    near_keys = gaps.exp() * keys[..., None, here, :]
    far_keys = keys[..., :start, :] * (before - cumulated[..., :start, :]).to(keys).exp()
    blocks = []
    for x in rows:
        near = (near_keys @ x[..., here, :, None]).squeeze(-1)
        far = (x[..., here, :] * within.exp()) @ far_keys.transpose(-1, -2)
        blocks.append(pad(torch.cat([far, near], dim=-1), (0, size - start - n_rows)))
    return blocks
