"""Virtual keys as additional keys of one softmax.

    z_i = (sum_j exp(s_ij) v_j + sum_r exp(s_ir) w_r u_r) / (sum_j exp(s_ij) + sum_r exp(s_ir) w_r)
        = softmax over [keys of the text; virtual keys] of [s_ij; s_ir + log w_r], times [v_j; u_r]

If weights are positive and the two summands are not needed separately, a single softmax suffices, and it is numerically
stable. There are three forms. ``attend_with_extra_keys`` has gradients (a polishing step on stories260K takes 0.8 of the time
that it takes to join the two parts afterwards, :mod:`kvlens.ops.softmax_attention.bias`). ``merge_extra_keys`` has none, and
calls the kernel a second time, for the virtual keys. ``last_with_extra_keys`` is for one query that sees the whole text: it
calls the kernel once, with virtual keys that were copied in front of the text's.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.ops.softmax_attention.fused import fused_softmax_attention


class ExtraKeys(NamedTuple):
    """Virtual keys with positive weights.

    Attributes:
        keys, values: one set per key-value head; the ops of this file ask for keys and values of one size.
        log_weights: minus infinity where a head has fewer than r keys.
        by_distance: what the distance between query and key adds to the score (ALiBi, windows); None for nothing.
    """

    keys: Float[Tensor, "#batch kv_head r d_head"]
    log_weights: Float[Tensor, "#batch kv_head r"]
    values: Float[Tensor, "#batch kv_head r d_head"]
    by_distance: Float[Tensor, "#batch head query r"] | None = None

    @classmethod
    def of(
        cls,
        keys: Float[Tensor, "#batch kv_head r d_key"],
        b_kv: Float[Tensor, "#batch kv_head r d_head"],
        b_d: Float[Tensor, "#batch kv_head r"],
        log_scale: Float[Tensor, "#batch kv_head"],
    ) -> "ExtraKeys | None":
        """From a bias; None if a weight is negative or a value has weight 0, which a softmax cannot express."""
        log_scale = log_scale.to(b_d)
        if not b_d.requires_grad and bool((b_d == 1).all()):  # a prompt's own keys
            return cls._expanded(keys, log_scale[..., None].expand(*log_scale.shape, b_d.shape[-1]), b_kv)
        used = b_d > 0
        if not bool((used | ((b_d == 0) & (b_kv == 0).all(dim=-1))).all()):
            return None
        weights = torch.where(used, b_d, 1.0)  # log 0 has no gradient, even if it is masked
        log_weights = (weights.log() + log_scale[..., None]).masked_fill(~used, -torch.inf)
        return cls._expanded(keys, log_weights, b_kv / weights[..., None])

    @classmethod
    def _expanded(cls, *tensors: Tensor) -> "ExtraKeys":
        n = max(map(len, tensors))  # a hook may have made one of the three differ from row to row
        return cls(*(x.expand(n, *x.shape[1:]) for x in tensors))

    def added(self, n_heads: int) -> Float[Tensor, "#batch head #query r"]:
        """What is added to the scores of ``n_heads`` query heads: log w_r and the distance term."""
        log_weights = self.log_weights.repeat_interleave(n_heads // self.keys.shape[1], dim=1)[:, :, None]
        return log_weights if self.by_distance is None else log_weights + self.by_distance.to(log_weights)


class SomeHeads(NamedTuple):
    """Some key-value heads of a layer, as an index of their axis, and how many they are."""

    where: slice | Int[Tensor, " of_heads"]
    n: int

    @classmethod
    def of(cls, heads: Sequence[int], device: torch.device) -> "SomeHeads":
        """Heads that follow each other are a slice, which copies nothing."""
        first, last = heads[0], heads[-1] + 1
        where = slice(first, last) if last - first == len(heads) else torch.tensor(heads, device=device)
        return cls(where, len(heads))

    def among(self, x: Float[Tensor, "batch pos head *d"], n_kv_heads: int) -> Float[Tensor, "batch pos some_head *d"]:
        """The rows of these key-value heads, or of the query heads that read them."""
        return x.unflatten(2, (n_kv_heads, -1))[:, :, self.where].flatten(2, 3)


def read_by_groups(
    read: Callable[..., Tensor], groups: Sequence[tuple[SomeHeads | None, ExtraKeys]], n_kv_heads: int, *tensors: Tensor
) -> Float[Tensor, "batch query head d_head"]:
    """z of all heads from ``read(*tensors, extra=extra)`` of each group, whose tensors are those of its heads."""
    (heads, extra), *others = groups
    if heads is None or not others:
        return read(*tensors, extra=extra)
    z = None
    for heads, extra in groups:
        assert heads is not None
        own = read(*(heads.among(x, n_kv_heads) for x in tensors), extra=extra).unflatten(2, (heads.n, -1))
        z = own.new_empty(*own.shape[:2], n_kv_heads, *own.shape[3:]) if z is None else z
        z[:, :, heads.where] = own
    assert z is not None
    return z.flatten(2, 3)


def attend_with_extra_keys(
    q: Float[Tensor, "batch query head d_head"],
    k: Float[Tensor, "batch key kv_head d_head"],
    v: Float[Tensor, "batch key kv_head d_head"],
    extra: ExtraKeys,
    scale: float,
    visible: Bool[Tensor, "1 1 query key"] | None,
) -> Float[Tensor, "batch query head d_head"]:
    """z of the whole (arguments in :mod:`kvlens.ops.softmax_attention.types`); ``visible`` as ``visible_keys`` gives it.

    It is computed and returned in the dtype of the weights, because half precision is too coarse for scores.
    """
    q, k, v = (x.to(extra.log_weights) for x in (q, k, v))
    batch, n_queries, n_heads, d = q.shape
    kv_heads = k.shape[2]
    # log w_r becomes an extra key dimension at which every query is 1, so that its gradient is part of a matrix product
    rows = F.pad(q / scale, (0, 1), value=1.0).unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    log_weights = extra.log_weights.clamp(min=_log_of_nothing(q.dtype))
    virtual = torch.cat([extra.keys.to(q), log_weights[..., None]], dim=-1).expand(batch, -1, -1, -1)
    keys = torch.cat([virtual, F.pad(k.transpose(1, 2), (0, 1))], dim=2)
    values = torch.cat([extra.values.expand(batch, -1, -1, -1), v.transpose(1, 2)], dim=2)
    scores = (rows @ keys.mT).unflatten(2, (-1, n_queries))  # [batch, kv_head, group, query, r + key]
    if visible is not None:
        mask = torch.where(visible[:, :, None], 0.0, -torch.inf).to(scores)
        scores += F.pad(mask, (extra.keys.shape[2], 0))
    if extra.by_distance is not None:
        by_distance = extra.by_distance.unflatten(1, (kv_heads, -1)).to(scores)
        scores += F.pad(by_distance, (0, k.shape[1]))
    z = scores.softmax(dim=-1).flatten(2, 3) @ values
    return z.view(batch, kv_heads, n_heads // kv_heads, n_queries, d).permute(0, 3, 1, 2, 4).flatten(2, 3)


def last_with_extra_keys(
    q: Float[Tensor, "batch 1 head d_head"],
    k: Float[Tensor, "batch key kv_head d_head"],
    v: Float[Tensor, "batch key kv_head d_head"],
    groups: Sequence[tuple[SomeHeads | None, ExtraKeys]],
    scale: float,
) -> Float[Tensor, "batch 1 head d_head"]:
    """z of the text's last query, which sees every key of the text; for keys without a distance term, by groups of heads."""
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    rows = q.reshape(len(q), k.shape[1], -1, q.shape[-1])  # the query heads of a key-value head are as several queries of one
    z = torch.empty_like(rows)
    for heads, extra in groups:
        where = slice(None) if heads is None else heads.where
        keys, values = (
            torch.cat([x.expand(len(q), -1, -1, -1), y[:, where]], dim=2) for x, y in ((extra.keys, k), (extra.values, v))
        )
        added = None
        if bool(extra.log_weights.any()):
            added = F.pad(extra.log_weights[:, :, None], (0, k.shape[2])).to(q)
        z[:, where] = F.scaled_dot_product_attention(rows[:, where], keys, values, added, scale=1 / scale)
    return z.reshape(q.shape)


def merge_extra_keys(
    z: Float[Tensor, "batch query head d_head"],
    log_normalizer: Float[Tensor, "batch query head"],
    q: Float[Tensor, "batch query head d_head"],
    extra: ExtraKeys,
    scale: float,
) -> Float[Tensor, "batch query head d_head"]:
    """z over text and virtual keys from the text's own z and log n, weighting the two outputs by their normalizers.

    Raises:
        ValueError: gradients are required.
    """
    nothing = _log_of_nothing(log_normalizer.dtype)  # a head may have no keys, or a query none in its window
    added = extra.added(q.shape[2]).to(log_normalizer).clamp(min=nothing)
    keys, values = (x.to(log_normalizer).transpose(1, 2) for x in (extra.keys, extra.values))
    rows = q.to(keys)
    if extra.by_distance is None:
        rows = rows.reshape(len(keys), -1, *q.shape[2:])  # under one shared bias the batch is a single list of queries
    else:
        keys, values = (x.expand(len(q), -1, -1, -1) for x in (keys, values))
    read = fused_softmax_attention(rows, keys, values, scale, causal=False, score_bias=added, log_normalizer=True)
    assert read.log_normalizer is not None
    log_read = read.log_normalizer.reshape(log_normalizer.shape)
    share = (log_normalizer - log_read).sigmoid().masked_fill(log_read < nothing / 2, 1.0)
    return torch.lerp(read.z.reshape(q.shape), z.to(keys), share[..., None])


def _log_of_nothing(dtype: torch.dtype) -> float:
    """A finite stand-in for log 0, since 0 * -inf and inf - inf are NaN. It can be added to scores and to itself."""
    return torch.finfo(dtype).min / 4
