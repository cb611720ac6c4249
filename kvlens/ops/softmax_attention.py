"""Softmax attention with its normalizer, and a KV bias merged into it in log space (ICLCA sec. 5).

    s_ij = q_i.k_j / scale + score_bias_ij         n_i = sum over the visible j of exp(s_ij)
    z_i  = sum over the visible j of exp(s_ij) v_j / n_i

In this order: the naive form (a loop over queries, the reference) and the fused one (torch's kernel, which stores no query x
key tensor); then a bias joined to attention's output, naive first; then its virtual keys as further keys of the same softmax.
Arguments of both forms, in this order:

- ``q`` [batch, query, head, d_head], ``k`` and ``v`` [batch, key, kv_head, d_head]; ``head`` is a multiple of ``kv_head``
  (GQA: query head h reads key-value head h // (head / kv_head)). If there are fewer queries than keys, the queries are the
  last positions, and the earlier keys come from a decode cache;
- ``scale``: divides the scores (TransformerLens' ``attn_scale``);
- ``causal``: a query sees no later key. False for bidirectional attention;
- ``padding`` [batch, key]: True at real tokens, None where all are. No query sees a padded key;
- ``window``: a query sees itself and the ``window - 1`` keys before it; None for all of them;
- ``score_bias`` [batch or 1, head or 1, query, key]: added to the scores (ALiBi), or None;
- ``log_normalizer``: whether to return log n_i too.

A query that sees no key gets z = 0 and log n = -inf.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens.checks import doors
from kvlens.errors import KVLensError


class SoftmaxAttentionOutput(NamedTuple):
    """z, and log n if it was requested (in float32 or better)."""

    z: Float[Tensor, "batch query head d_head"]
    log_normalizer: Float[Tensor, "batch query head"] | None


class ScaledFeatures(NamedTuple):
    """phi(q) = features * exp(log_scale): a query's features in a form that does not overflow.

    The largest of ``features`` is about 1, so that sums over them are safe; scores of real models reach 100 and more.
    """

    features: Float[Tensor, "batch query head d_phi"]
    log_scale: Float[Tensor, "batch query head"]


class ScaledMass(NamedTuple):
    """A sum of exponentials, mass * exp(log_scale): at a score of 1,000, float32 holds the sum's logarithm only to 6e-5."""

    mass: Float[Tensor, "batch query head"]
    log_scale: Float[Tensor, "batch query head"]

    @classmethod
    def of_log(cls, log_sum: Float[Tensor, "batch query head"]) -> "ScaledMass":
        """The sum with this logarithm."""
        return cls(torch.ones_like(log_sum), log_sum)

    @classmethod
    def of_scores(
        cls, scores: Float[Tensor, "batch head query key"], sinks: Float[Tensor, " head"] | None = None
    ) -> "ScaledMass":
        """The sum over a query's keys, and over its head's attention sink, relative to its largest term."""
        top = scores.detach().amax(dim=-1)
        if sinks is not None:
            top = torch.maximum(top, sinks.detach()[:, None].to(top))
        shift = top.masked_fill(top == -torch.inf, 0.0)  # inf - inf would be NaN
        # a term below e^-80 of the largest changes no digit; left at a mask's size it would take exp ten times as long
        mass = (scores - shift[..., None]).clamp(min=-80).exp().sum(dim=-1)
        if sinks is not None:
            mass = mass + (sinks[:, None].to(mass) - shift).exp()
        return cls(mass.transpose(1, 2), top.transpose(1, 2))


class JoinedBias(NamedTuple):
    """The two summands of z, and log n including the bias."""

    z_context: Float[Tensor, "batch query head d_head"]
    z_bias: Float[Tensor, "batch query head d_head"]
    log_normalizer: Float[Tensor, "batch query head"]

    def below_zero(self) -> Bool[Tensor, "batch query head"]:
        """Find where weights of both signs made the normalizer negative: it has no logarithm, and the summands are finite."""
        return self.log_normalizer.isnan() & ~self.z_bias[..., 0].isnan()


def naive_softmax_attention(
    q: Float[Tensor, "batch query head d_head"],
    k: Float[Tensor, "batch key kv_head d_head"],
    v: Float[Tensor, "batch key kv_head d_head"],
    scale: float,
    causal: bool = True,
    padding: Bool[Tensor, "batch key"] | None = None,
    window: int | None = None,
    score_bias: Float[Tensor, "#batch #head query key"] | None = None,
    log_normalizer: bool = False,
) -> SoftmaxAttentionOutput:
    """Score, mask, normalize, read (arguments at the top)."""
    n_queries, n_keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    rows, logs = [], []
    for i in range(n_queries):
        place = n_keys - n_queries + i
        score = torch.einsum("bhd,bjhd->bhj", q[:, i], k.repeat_interleave(group, dim=2)) / scale
        if score_bias is not None:
            score = score + score_bias[:, :, i]
        for j in range(n_keys):
            if (causal and j > place) or (window is not None and j <= place - window):
                score[:, :, j] = -torch.inf
        if padding is not None:
            score = score.masked_fill(~padding[:, None, :], -torch.inf)
        log_n = score.logsumexp(dim=-1)
        weight = torch.where(log_n[..., None] == -torch.inf, 0.0, (score - log_n[..., None]).exp())
        rows.append(torch.einsum("bhj,bjhd->bhd", weight, v.repeat_interleave(group, dim=2)))
        logs.append(log_n)
    return SoftmaxAttentionOutput(torch.stack(rows, dim=1), torch.stack(logs, dim=1) if log_normalizer else None)


def visible_keys(
    n_queries: int,
    n_keys: int,
    causal: bool = True,
    padding: Bool[Tensor, "batch key"] | None = None,
    window: int | None = None,
    device: torch.device | None = None,
) -> Bool[Tensor, "batch_or_1 1 query key"] | None:
    """True where a query sees a key, with an axis for the heads; None where every query sees every key.

    The queries are the last ``n_queries`` of ``n_keys`` positions. The other arguments are those at the
    top.

    Raises:
        KVLensError: more queries than keys where positions matter.
    """
    if (causal or window is not None) and n_queries > n_keys:
        raise KVLensError(f"softmax attention: expected at most as many queries as keys ({n_keys}), got {n_queries}")
    visible = None
    if (causal and n_queries > 1) or (window is not None and window < n_keys):
        key = torch.arange(n_keys, device=device)
        query = key[n_keys - n_queries :, None]
        visible = (key <= query) if causal else torch.ones_like(key <= query)
        if window is not None:
            visible = visible & (key > query - window)
        visible = visible[None, None]
    if padding is not None:
        seen = padding[:, None, None, :].expand(-1, 1, n_queries, -1)
        visible = seen if visible is None else visible & seen
    return visible


# The fused form: torch's own kernel. ``scaled_dot_product_attention`` does not return its normalizer. The kernel behind it on a
# CPU does, but without a gradient, so a log-normalizer with a gradient is refused here. On other devices the log-normalizer is
# computed separately, over blocks of queries.

QUERY_BLOCK = 256
"""Queries whose scores are held at once where the kernel does not return its normalizer."""


def fused_softmax_attention(
    q: Float[Tensor, "batch query head d_head"],
    k: Float[Tensor, "batch key kv_head d_head"],
    v: Float[Tensor, "batch key kv_head d_head"],
    scale: float,
    causal: bool = True,
    padding: Bool[Tensor, "batch key"] | None = None,
    window: int | None = None,
    score_bias: Float[Tensor, "#batch #head #query key"] | None = None,
    log_normalizer: bool = False,
) -> SoftmaxAttentionOutput:
    """One call of torch's kernel (arguments at the top).

    Raises:
        ValueError: ``log_normalizer`` is set and gradients are required, which the kernel does not provide.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    n_queries, n_keys = q.shape[2], k.shape[2]
    window = None if window is None or window >= n_keys else window
    triangle = causal and n_queries == n_keys and padding is None and window is None and score_bias is None
    visible = None if triangle else visible_keys(n_queries, n_keys, causal, padding, window, q.device)
    mask = _additive(visible, score_bias, q)
    if not log_normalizer:
        grouped = q.shape[1] != k.shape[1]
        z = F.scaled_dot_product_attention(q, k, v, mask, is_causal=triangle, scale=1 / scale, enable_gqa=grouped)
        return SoftmaxAttentionOutput(_where_seen(z, visible).transpose(1, 2), None)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise ValueError("fused_softmax_attention: the kernel's log-normalizer has no gradient; use torch.no_grad()")
    z, log_n = _with_log_normalizer(q, k, v, scale, mask, triangle)
    if visible is not None:
        log_n = log_n.masked_fill(~visible.any(dim=-1), -torch.inf)
    return SoftmaxAttentionOutput(_where_seen(z, visible).transpose(1, 2), log_n.transpose(1, 2))


def _additive(visible: Tensor | None, score_bias: Tensor | None, like: Tensor) -> Tensor | None:
    """Mask and score bias as one tensor to add to the scores, -inf at keys that are not visible."""
    if visible is None:
        return None if score_bias is None else score_bias.to(like.dtype)
    base = like.new_zeros(()) if score_bias is None else score_bias.to(like.dtype)
    return torch.where(visible, base, -torch.inf)


def _where_seen(z: Tensor, visible: Tensor | None) -> Tensor:
    """z, with zeros for queries that see no key, whatever the kernel returns for them."""
    return z if visible is None else torch.where(visible.any(dim=-1, keepdim=True), z, 0.0)


def _with_log_normalizer(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, triangle: bool
) -> tuple[Tensor, Tensor]:
    """z [batch, head, query, d_head] and log n [batch, head, query]."""
    if q.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))  # it reads others wrongly
        return kernel(q, k, v, 0.0, triangle, attn_mask=mask, scale=1 / scale)
    grouped = q.shape[1] != k.shape[1]
    z = F.scaled_dot_product_attention(q, k, v, mask, is_causal=triangle, scale=1 / scale, enable_gqa=grouped)
    return z, _log_normalizer_in_blocks(q, k, scale, mask, triangle)


def _log_normalizer_in_blocks(q: Tensor, k: Tensor, scale: float, mask: Tensor | None, triangle: bool) -> Tensor:
    """log n from the scores, a block of queries at a time: [batch, head, query]."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).to(torch.promote_types(q.dtype, torch.float32))
    logs = []
    for first in range(0, q.shape[2], QUERY_BLOCK):
        block = q[:, :, first : first + QUERY_BLOCK].to(k.dtype)
        scores = block @ k.transpose(-1, -2) / scale
        if triangle:
            unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(first + 1)
            scores = scores.masked_fill(unseen, -torch.inf)
        elif mask is not None:
            scores = scores + (mask[:, :, first : first + QUERY_BLOCK] if mask.shape[2] > 1 else mask)
        logs.append(scores.logsumexp(dim=-1))
    return torch.cat(logs, dim=-1)


def by_kv_head(
    x: Float[Tensor, "batch query head d"], held: Float[Tensor, "#batch kv_head d n"]
) -> Float[Tensor, "batch kv_head row n"]:
    """``x @ held`` for each key-value head. Its rows are the queries of a group's heads, query by query.

    If the whole batch shares ``held``, its rows are flattened into one matrix product instead of one product per batch row.
    """
    kv_heads = held.shape[1]
    if len(held) == 1:
        rows = rearrange(x, "b p (g s) d -> g (b p s) d", g=kv_heads)
        return rearrange(rows @ held[0], "g (b i) n -> b g i n", b=len(x))
    return rearrange(x, "b p (g s) d -> b g (p s) d", g=kv_heads) @ held


# A KV bias joined to softmax attention in log space (ICLCA sec. 5, ICLAA).
#
#     z_i = (sum_j exp(s_ij) v_j + phi(q_i)^T b_KV) / n_i        n_i = sum_j exp(s_ij) + phi(q_i)^T b_D
#
# Each side comes with its own logarithmic scale, and both are brought to the larger one before they are added, so that scores
# above 100 neither overflow nor wipe out the other side. Scales are first subtracted from each other, which is exact between
# numbers of similar size; adding a small logarithm to a scale of 1,000 directly would be off by 6e-5 in float32.


def naive_join_bias(
    z_context: Float[Tensor, "batch query head d_head"],
    log_normalizer: Float[Tensor, "batch query head"],
    phi: ScaledFeatures,
    b_kv: Float[Tensor, "#batch kv_head d_phi d_head"],
    b_d: Float[Tensor, "#batch kv_head d_phi"],
) -> JoinedBias:
    """The equation as written, head by head; overflows where exp(s) does."""
    n_heads = z_context.shape[2]
    group = n_heads // b_kv.shape[1]
    contexts, reads, logs = [], [], []
    for h in range(n_heads):
        kv, d = b_kv[:, h // group], b_d[:, h // group]
        true_phi = phi.features[:, :, h] * phi.log_scale[:, :, h, None].exp()
        n_context = log_normalizer[:, :, h].exp()
        n = n_context + torch.einsum("bir,br->bi", true_phi, d.expand(len(true_phi), -1))
        contexts.append(n_context[..., None] * z_context[:, :, h] / n[..., None])
        reads.append(torch.einsum("bir,brd->bid", true_phi, kv.expand(len(true_phi), -1, -1)) / n[..., None])
        logs.append(n.log())
    return JoinedBias(torch.stack(contexts, 2), torch.stack(reads, 2), torch.stack(logs, 2))


def join_bias(
    z_context: Float[Tensor, "batch query head d_z"],
    normalizer: ScaledMass,
    phi: ScaledFeatures,
    b_kv: Float[Tensor, "#batch kv_head d_phi d_head"],
    b_d: Float[Tensor, "#batch kv_head d_phi"],
) -> JoinedBias:
    """The same, with both sides brought to the larger of their scales (including the size of b_KV and b_D).

    Args:
        z_context: attention over the context alone, already divided by its own normalizer.
        normalizer: the context's normalizer; its log_scale is -inf where a query sees no key.
        phi: the query's features.
        b_kv, b_d: the bias, one per key-value head.

    Returns:
        Both summands of z, divided by the whole normalizer, and the logarithm of that normalizer. Where nothing is visible
        (both sides are 0, as at a padded query without a bias), z is 0. Signed weights may make the normalizer negative; its
        logarithm is then NaN, which the caller has to report.
    """
    group = z_context.shape[2] // b_kv.shape[1]
    n_biases = max(len(b_kv), len(b_d))  # a hook may have expanded one of them to a batch
    stored = torch.cat([b_kv.expand(n_biases, -1, -1, -1), b_d[..., None].expand(n_biases, -1, -1, -1)], dim=-1)
    given = stored.detach()
    size = torch.maximum(given.amax(dim=(-1, -2)), -given.amin(dim=(-1, -2)))  # the maximum norm, which takes 20 times as long
    numerator, mass = _read(phi.features, stored / torch.where(size == 0, 1.0, size)[..., None, None], group)
    log_size = size.log().repeat_interleave(group, dim=1)[:, None]
    top = torch.maximum(normalizer.log_scale, phi.log_scale + log_size)
    top = torch.where(top == -torch.inf, 0.0, top)
    from_context = (normalizer.log_scale - top).exp() * normalizer.mass
    from_bias = (phi.log_scale - top + log_size).exp()
    n = from_context + from_bias * mass
    nothing = n.abs() < torch.finfo(n.dtype).tiny  # 1 / n would overflow
    share = 1 / torch.where(nothing, 1.0, n)
    return JoinedBias(
        (from_context * share)[..., None] * z_context,
        (from_bias * share)[..., None] * numerator,
        torch.where(nothing, -torch.inf, torch.where(nothing, 1.0, n).log() + top),
    )


def _read(features: Tensor, stored: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """phi^T b_KV and phi^T b_D in one product per key-value head: the queries of a group become rows of one matrix."""
    rows = by_kv_head(features, stored)
    read = rearrange(rows, "batch kv_head (query group) d -> batch query (kv_head group) d", group=group)
    return read[..., :-1], read[..., -1]


# Virtual keys as additional keys of one softmax.
#
#     z_i = (sum_j exp(s_ij) v_j + sum_r exp(s_ir) w_r u_r) / (sum_j exp(s_ij) + sum_r exp(s_ir) w_r)
#         = softmax over [keys of the text; virtual keys] of [s_ij; s_ir + log w_r], times [v_j; u_r]
#
# If weights are positive and the two summands are not needed separately, a single softmax suffices, and it is numerically
# stable. There are three forms. `attend_with_extra_keys` has gradients (a polishing step on stories260K takes 0.8 of the time
# that it takes to join the two parts afterwards, `join_bias`). `merge_extra_keys` has none, and calls the kernel a second time,
# for the virtual keys. `last_with_extra_keys` is for one query that sees the whole text: it calls the kernel once, with virtual
# keys that were copied in front of the text's.


class ExtraKeys(NamedTuple):
    """Virtual keys with positive weights.

    Attributes:
        keys, values: one set per key-value head; these ops ask for keys and values of one size.
        log_weights: minus infinity where a head has fewer than r keys.
        by_distance: what the distance between query and key adds to the score (ALiBi, windows); None for nothing.
        weighted: False where every weight is known to be 1, so that nothing need be added to a score.
    """

    keys: Float[Tensor, "#batch kv_head r d_head"]
    log_weights: Float[Tensor, "#batch kv_head r"]
    values: Float[Tensor, "#batch kv_head r d_head"]
    by_distance: Float[Tensor, "#batch head query r"] | None = None
    weighted: bool = True

    @classmethod
    def of(
        cls,
        keys: Float[Tensor, "#batch kv_head r d_key"],
        b_kv: Float[Tensor, "#batch kv_head r d_head"],
        b_d: Float[Tensor, "#batch kv_head r"],
        log_scale: Float[Tensor, "#batch kv_head"],
    ) -> "ExtraKeys | None":
        """Take them from a bias; None if a weight is negative or a value has weight 0, which a softmax cannot express."""
        log_scale, used = log_scale.to(b_d)[..., None], b_d > 0
        n = max(len(b_kv), len(b_d))
        unused = ~used.expand(n, *used.shape[1:])
        if not bool((b_d >= 0).all()) or bool((b_kv.expand(n, *b_kv.shape[1:])[unused] != 0).any()):
            return None
        weights = torch.where(used, b_d, 1.0)  # log 0 has no gradient, even if it is masked
        log_weights, values, weighted = log_scale.expand_as(b_d), b_kv, bool(log_scale.any()) or bool(unused.any())
        if b_d.requires_grad or not bool((weights == 1).all()):  # others than a prompt's own keys
            log_weights, values, weighted = weights.log() + log_scale, b_kv / weights[..., None], True
        return cls._expanded(keys, log_weights.masked_fill(~used, -torch.inf), values, weighted=weighted)

    @classmethod
    def _expanded(cls, *tensors: Tensor, weighted: bool = True) -> "ExtraKeys":
        n = max(map(len, tensors))  # a hook may have made one of the three differ from row to row
        keys, log_weights, values = (x.expand(n, *x.shape[1:]) for x in tensors)
        return cls(keys, log_weights, values, weighted=weighted)

    def added(self, n_heads: int) -> Float[Tensor, "#batch head #query r"]:
        """What is added to the scores of ``n_heads`` query heads: log w_r and the distance term."""
        log_weights = self.log_weights.repeat_interleave(n_heads // self.keys.shape[1], dim=1)[:, :, None]
        return log_weights if self.by_distance is None else log_weights + self.by_distance.to(log_weights)


def attend_with_extra_keys(
    q: Float[Tensor, "batch query head d_head"],
    k: Float[Tensor, "batch key kv_head d_head"],
    v: Float[Tensor, "batch key kv_head d_head"],
    extra: ExtraKeys,
    scale: float,
    visible: Bool[Tensor, "1 1 query key"] | None,
) -> Float[Tensor, "batch query head d_head"]:
    """z of the whole (arguments at the top); ``visible`` as ``visible_keys`` gives it.

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
    extra: ExtraKeys,
    scale: float,
) -> Float[Tensor, "batch 1 head d_head"]:
    """z of the text's last query, which sees every key of the text; for keys without a distance term."""
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    rows = q.reshape(len(q), k.shape[1], -1, q.shape[-1])  # the query heads of a key-value head are as several queries of one
    keys, values = (torch.cat([x.expand(len(q), -1, -1, -1), y], dim=2) for x, y in ((extra.keys, k), (extra.values, v)))
    added = F.pad(extra.log_weights[:, :, None], (0, k.shape[2])).to(q) if extra.weighted else None
    z = F.scaled_dot_product_attention(rows, keys, values, added, scale=1 / scale)
    return z.reshape(q.shape)


def merge_extra_keys(
    z: Float[Tensor, "batch query head d_head"],
    log_normalizer: Float[Tensor, "batch query head"],
    q: Float[Tensor, "batch query head d_head"],
    extra: ExtraKeys,
    scale: float,
) -> tuple[Float[Tensor, "batch query head d_head"], Float[Tensor, "batch query head"]]:
    """z and log n over text and virtual keys from the text's own, weighting the two outputs by their normalizers.

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
    unread = log_read < nothing / 2
    share = (log_normalizer - log_read).sigmoid().masked_fill(unread, 1.0)
    log_whole = log_normalizer.logaddexp(log_read.masked_fill(unread, -torch.inf))
    return torch.lerp(read.z.reshape(q.shape), z.to(keys), share[..., None]), log_whole


def _log_of_nothing(dtype: torch.dtype) -> float:
    """A finite stand-in for log 0, since 0 * -inf and inf - inf are NaN. It can be added to scores and to itself."""
    return torch.finfo(dtype).min / 4


doors(__name__)
