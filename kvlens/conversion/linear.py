"""Exact conversion of a prompt of a model with linear attention (ICLCA alg. 1, eq. 13 and 19, in kvlens' notation).

For each layer, with that layer's own input from the prompt of M tokens:

    b'_KV = gamma^M R_{-M} b_KV + sum_j gamma^{M-1-j} R_{j-M} phi(k'_j) v'_j^T        b'_D = b_D + sum_j phi(k'_j)
    shift state' = the last w rows of [old shift state; the prompt's raw keys, values, queries]

which is the state that one forward pass over the prompt leaves in a decoding cache, expressed from position M. The prompt's own
pass reads the *old* bias and shift state (ICLCA alg. 1 step (d) has the new one, which is off by 16-60 %).

If RoPE follows the feature map, R_{-M} rotates the stored keys so that the text after the prompt starts at position 0.
Otherwise (learned, sinusoidal or no positions, RoPE before the feature map) R drops out and the text starts at
``position_offset'`` = old offset + M.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from kvlens.components import KVAttention, LinearCacheEntry, hidden_tokens_keep_positions
from kvlens.conversion.carry import carry_layer_state, per_query_head
from kvlens.conversion.prompt import PromptTokens
from kvlens.kv_bias import Fingerprint, KVBias
from kvlens.kv_bias.ragged import padded
from kvlens.model import HookedKVTransformer
from kvlens.model.streaming import has_hooks, segments, wants_gradients
from kvlens.ops.linear_attention import LinearAttentionState


def convert_linear_prompt(
    model: HookedKVTransformer,
    prompt: PromptTokens,
    old: KVBias | None,
    fingerprint: Fingerprint,
    fwd_hooks: Sequence[Any],
    segment_length: int | None,
    on_progress: Callable[[float], None] | None,
) -> KVBias:
    """See :func:`kvlens.convert_prompt`, which checks the prompt and the bias that it continues."""
    cfg, device, lengths, n_positions = model.cfg, prompt.tokens.device, prompt.lengths(), prompt.n_positions()
    entries = _states_after(model, prompt, fwd_hooks, segment_length, on_progress)
    layers = [_layer_tensors(block.attn, entry, n_positions) for block, entry in zip(model.blocks, entries, strict=True)]
    b_kv, b_d, last_k, last_v, last_q = (padded([x.to(device) for x in of_layers]) for of_layers in zip(*layers, strict=True))
    before = (0, 0) if old is None else (old.to(device).n_prompt_tokens, old.to(device).position_offset)
    return KVBias(
        b_KV=b_kv,
        b_D=b_d,
        last_k=last_k,
        last_v=last_v,
        last_q=last_q,
        n_prompt_tokens=lengths + before[0],
        position_offset=0 if cfg.rotates_after else n_positions + before[1],
        fingerprint=fingerprint,
    )


def _states_after(
    model: HookedKVTransformer,
    prompt: PromptTokens,
    fwd_hooks: Sequence[Any],
    segment_length: int | None,
    on_progress: Callable[[float], None] | None,
) -> list[LinearCacheEntry]:
    """Run the prompt's own forward pass without the unembedding, and return the states left in a decoding cache."""
    tokens, mask = prompt.tokens, None if prompt.mask is None else prompt.mask.long()
    cache = model.empty_cache(len(tokens))
    with model.hooks(fwd_hooks=list(fwd_hooks)), hidden_tokens_keep_positions(prompt.keeps_positions):
        model.check_length(tokens.shape[1], mask)
        if segment_length is None and (has_hooks(model) or wants_gradients(model)):
            segment_length = tokens.shape[1]
        options: dict[str, Any] = dict(segment_length=segment_length, on_progress=on_progress)
        for _ in segments(model, tokens, mask, cache, stop_at_layer=model.cfg.n_layers, **options):
            pass
    return cache.entries  # type: ignore[return-value]


def _layer_tensors(attn: KVAttention, entry: LinearCacheEntry, n_positions: int | Tensor) -> tuple[Tensor, ...]:
    """(b_KV, b_D, last_k, last_v, last_q) of one layer, each with a batch axis."""
    assert entry.state is not None
    written = per_query_head(entry.state, attn.cfg.n_heads)
    old = None if entry.bias is None else LinearAttentionState(*entry.bias)
    kv, k_sum = carry_layer_state(attn, old, n_positions, written)
    heads = dict(k=attn.cfg.n_kv_heads, v=attn.cfg.n_kv_heads, q=attn.cfg.n_heads)
    empty = {x: kv.new_zeros(len(kv), 0, n, kv.shape[-1]) for x, n in heads.items()}
    last = (entry.shift_state.get(x, empty[x]).to(kv) for x in heads)
    return kv, kv.new_zeros(kv.shape[:3]) if k_sum is None else k_sum, *last
