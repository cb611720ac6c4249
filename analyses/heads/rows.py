"""Attention patterns at chosen queries: rows of ``hook_pattern``, without the rest of it.

TransformerLens' pattern is N x N a head: 1.6 GB for 24 heads and 4,096 tokens, of which a picture needs a few rows. Linear
attention gives single rows from its features,

    pattern[i, j] = phi~(q_i).phi~(k_j) gamma^{i-j} / n_i     for j <= i       (n_i = attn_scale under normaliser "none")

(ICLCA eq. 12-13, divided out). Softmax attention computes all of them, and the rows are cut out layer by layer.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from analyses.sequences import one_sequence
from kvlens import HookedKVTransformer, KVLensError
from kvlens.signature import checked


@checked
@torch.no_grad()
def attention_rows(
    model: HookedKVTransformer, tokens: str | Int[Tensor, "*one pos"], queries: Int[Tensor, " query"]
) -> Float[Tensor, "layer head query pos"]:
    """The pattern that the model has at ``queries``, float32 on the CPU.

    Args:
        model: with whatever is attached to it; a bias takes its part of the normaliser, and has no column.
        tokens: the whole sequence: a string, or tokens [pos].
        queries: positions in it.

    Raises:
        KVLensError: tokens that are no sequence, or a query outside it.
    """
    tokens = one_sequence(model, "attention_rows", tokens, prepend_bos=bool(model.cfg.default_prepend_bos))
    if queries.dim() != 1 or queries.is_floating_point() or queries.is_complex() or queries.dtype == torch.bool:
        raise KVLensError(f"attention_rows: queries: expected whole numbers [query], got {queries.dtype} {list(queries.shape)}")
    if len(queries) and not 0 <= int(queries.min()) <= int(queries.max()) < len(tokens):
        raise KVLensError(
            f"attention_rows: queries {int(queries.min())}..{int(queries.max())} do not lie in 0..{len(tokens) - 1}"
        )
    of_layer = _linear_rows if model.cfg.attention == "linear" else _softmax_rows
    return torch.stack(of_layer(model, tokens, queries.to(model.W_E.device)))


def _linear_rows(model: HookedKVTransformer, tokens: Tensor, queries: Tensor) -> list[Tensor]:
    features = "rot" if model.cfg.positional_embedding_type == "rotary" and model.cfg.rotates_after else "phi"
    names = [f"{features}_q", f"{features}_k"] + (["normalizer"] if model.cfg.normalizer == "kernel" else [])
    wanted = [f"blocks.{layer}.attn.hook_{name}" for layer in range(model.cfg.n_layers) for name in names]
    cache = _run(model, tokens, names_filter=wanted)
    rows = []
    for layer in range(model.cfg.n_layers):
        attn = model.blocks[layer].attn
        q, k, *n = (cache[f"blocks.{layer}.attn.hook_{name}"][0] for name in names)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = torch.einsum("qhf,khf->hqk", q[queries], k)
        distance = queries[:, None] - torch.arange(len(tokens), device=queries.device)
        if attn.decay is not None:
            scores = scores * attn.decay.to(scores)[:, None, None] ** distance.clamp(min=0)
        scale = n[0][queries].T[..., None] if n else attn.attn_scale
        rows.append((scores / scale).masked_fill(distance < 0, 0.0).float().cpu())
    return rows


def _softmax_rows(model: HookedKVTransformer, tokens: Tensor, queries: Tensor) -> list[Tensor]:
    rows: list[Tensor] = []

    def keep(pattern: Tensor, hook: Any) -> None:
        rows.append(pattern[0, :, queries].float().cpu())

    hooks = [(f"blocks.{layer}.attn.hook_pattern", keep) for layer in range(model.cfg.n_layers)]
    _run(model, tokens, fwd_hooks=hooks)
    return rows


def _run(model: HookedKVTransformer, tokens: Tensor, *, fwd_hooks: list | None = None, **options: Any) -> Any:
    """One forward pass without unembedding; its cache where nothing else is hooked."""
    rows = tokens[None].to(model.W_E.device)
    mask = torch.ones_like(rows)  # a pad token that was typed is a token, not padding
    if fwd_hooks is not None:
        return model.run_with_hooks(rows, attention_mask=mask, fwd_hooks=fwd_hooks, stop_at_layer=model.cfg.n_layers)
    return model.run_with_cache(rows, attention_mask=mask, stop_at_layer=model.cfg.n_layers, **options)[1]
