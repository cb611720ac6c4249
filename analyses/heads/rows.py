"""Attention patterns at chosen queries: rows of ``hook_pattern``, without the rest of it.

TransformerLens' pattern is N x N per head: 1.6 GB for 24 heads and 4,096 tokens, of which a plot needs a few rows. For a
HookedKVTransformer with linear attention single rows can be computed from features,

    pattern[i, j] = phi~(q_i).phi~(k_j) gamma^{i-j} / n_i     for j <= i       (n_i = attn_scale under normalizer "none")

(from ICLCA eq. 12-13): the queries are read first, then the keys, for a long text one segment at a time
(:mod:`kvlens.analyses.segments`). For softmax attention, and for the exact effective attention of recurrent layers, all rows
are computed, and the chosen ones selected layer by layer.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import HookedKVTransformer, KVModel
from kvlens.model import HeadsRead, visit_heads

from ..segments import Found, Looks, Progress, rows_at, stack_layers

VisitRows = Callable[[int, int, Float[Tensor, "head query pos"]], None]
"""Called with a layer, the position of the first key, and the pattern from all queries to these keys, float32."""


@torch.no_grad()
def visit_rows(
    model: KVModel,
    tokens: Int[Tensor, " pos"],
    queries: Int[Tensor, " query"],
    visit: VisitRows,
    *,
    on_progress: Progress | None = None,
) -> None:
    """Call ``visit`` on the model's pattern at ``queries``, in parts for a long text, so that memory does not grow with it.

    Args:
        model: with whatever is attached to it; a bias is part of the normalizer, but has no column.
        tokens, queries: the whole sequence and positions in it.
        visit: called for each layer with consecutive parts of the keys.
        on_progress: called with the fraction done.
    """
    queries = queries.to(model.cfg.device)
    if model.cfg.attention != "linear":
        visit_patterns(model, tokens, lambda layer, pattern: visit(layer, 0, pattern[:, queries].float().cpu()), on_progress)
        return
    assert isinstance(model, HookedKVTransformer)  # linear attention is found in no other
    query, key = _features(model)
    looks = Looks(model, tokens, [query, key, "hook_normalizer"], again=[key], on_progress=on_progress)
    unique, order = queries.unique(return_inverse=True)
    of_queries = rows_at(looks, {query: unique, "hook_normalizer": unique})

    def multiply(layer: int, first: int, found: Found) -> None:
        keys = found[key]
        positions = torch.arange(first, first + len(keys), device=keys.device)
        rows = _pattern(model, layer, of_queries[layer], keys, unique, positions)
        visit(layer, first, rows[:, order.to(rows.device)].float().cpu())

    looks.look(multiply)


def visit_patterns(
    model: KVModel,
    tokens: Int[Tensor, " pos"],
    visit: Callable[[int, Float[Tensor, "head pos pos"]], None],
    on_progress: Progress | None,
) -> None:
    """Call ``visit(layer, pattern)`` on the whole pattern of each layer, in one pass."""

    def show(layer: int, read: HeadsRead) -> None:
        visit(layer, read.pattern[0])
        if on_progress is not None:
            on_progress((layer + 1) / model.cfg.n_layers)

    visit_heads(model, tokens[None], show)


@torch.no_grad()
def attention_among(
    model: KVModel,
    tokens: Int[Tensor, " pos"],
    positions: Int[Tensor, " position"],
    *,
    on_progress: Progress | None = None,
) -> Float[Tensor, "layer head position position"]:
    """The pattern among chosen positions of a text, float32 on the CPU; NaN for heads that a layer does not have.

    Args:
        model, tokens: as :func:`visit_rows`.
        positions: positions, ascending.
        on_progress: called with the fraction done.
    """
    positions = positions.to(model.cfg.device)
    found: list[Tensor] = []
    if model.cfg.attention != "linear":

        def cut(layer: int, pattern: Tensor) -> None:
            found.append(pattern[:, positions[:, None], positions].float().cpu())

        visit_patterns(model, tokens, cut, on_progress)
        return stack_layers(found, fill=torch.nan)
    assert isinstance(model, HookedKVTransformer)  # linear attention is found in no other
    names = [*_features(model), "hook_normalizer"]
    looks = Looks(model, tokens, names, n_looks=1, on_progress=on_progress)
    for layer, of in enumerate(rows_at(looks, dict.fromkeys(names, positions))[: model.cfg.n_layers]):
        found.append(_pattern(model, layer, of, of[names[1]], positions, positions).float().cpu())
    return stack_layers(found, fill=torch.nan)


def _features(model: HookedKVTransformer) -> tuple[str, str]:
    kind = "rot" if model.cfg.rotates_after else "phi"
    return f"hook_{kind}_q", f"hook_{kind}_k"


def _pattern(
    model: HookedKVTransformer,
    layer: int,
    of_queries: Found,
    keys: Float[Tensor, "pos kv_head d_phi"],
    queries: Int[Tensor, " query"],
    positions: Int[Tensor, " pos"],
) -> Float[Tensor, "head query pos"]:
    """Linear attention's pattern from ``queries``, whose features and normalizers are given, to keys at ``positions``."""
    q, n = of_queries[_features(model)[0]], of_queries.get("hook_normalizer")
    scores = torch.einsum("qhf,khf->hqk", q, keys.repeat_interleave(q.shape[1] // keys.shape[1], dim=1))
    attn = model.blocks[layer].attn
    distance = queries.to(keys.device)[:, None] - positions.to(keys.device)
    if attn.decay is not None:
        scores = scores * attn.decay.to(scores)[:, None, None] ** distance.clamp(min=0)
    scale = attn.attn_scale if n is None else n.T[..., None]
    return (scores / scale).masked_fill(distance < 0, 0.0)
