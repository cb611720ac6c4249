"""Softmax attention, the fused form: torch's own kernel, which stores no query x key tensor.

``torch.nn.functional.scaled_dot_product_attention`` does not return its normalizer. The kernel behind it on a CPU does, but
without a gradient, so a log-normalizer with a gradient is refused here. On other devices the log-normalizer is computed
separately, over blocks of queries.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens.ops.softmax_attention.types import SoftmaxAttentionOutput
from kvlens.ops.softmax_attention.visible import visible_keys

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
    """One call of torch's kernel (arguments in :mod:`kvlens.ops.softmax_attention.types`).

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
