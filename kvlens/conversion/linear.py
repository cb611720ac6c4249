"""Exact conversion of a prompt of a model with linear attention (ICLCA alg. 1, eq. 13 and 19, in kvlens' notation).

For each layer, with that layer's own input from the prompt of M tokens:

    b'_KV = gamma^M R_{-M} b_KV + sum_j gamma^{M-1-j} R_{j-M} phi(k'_j) v'_j^T        b'_D = b_D + sum_j phi(k'_j)
    shift state' = the last w rows of [old shift state; the prompt's raw keys, values, queries]

which is the state that one forward pass over the prompt leaves, a segment at a time, expressed from position M. That
pass reads the *old* bias and shift state (ICLCA alg. 1 step (d) has the new one, which is off by 16-60 %).

If RoPE follows the feature map, R_{-M} rotates the stored keys so that the text after the prompt starts at position 0.
Otherwise (learned, sinusoidal or no positions, RoPE before the feature map) R drops out and the text starts at
``position_offset'`` = old offset + M.


:func:`carry_bias` moves a bias past tokens that write nothing: the same without the new terms.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, cast

import torch
from jaxtyping import Int
from torch import Tensor

from kvlens.checks import Within, checked, ensure
from kvlens.components import KVAttention, LinearCacheEntry, hidden_tokens_keep_positions
from kvlens.conversion.prompt import PromptBatch
from kvlens.conversion.prompt_pass import moved_away
from kvlens.errors import KVLensError, brief
from kvlens.kv_bias import LAST_POSITION, Fingerprint, KVBias, Layer, State
from kvlens.kv_bias.fields import COUNTS
from kvlens.kv_bias.fit import since
from kvlens.model import HookedKVTransformer, streaming
from kvlens.model.protocol import Hooks, KVModel
from kvlens.ops.linear_attention import LinearAttentionState, carry_state


def convert_linear_prompt(
    model: HookedKVTransformer,
    prompt: PromptBatch,
    old: KVBias | None,
    fingerprint: Fingerprint,
    fwd_hooks: Hooks,
    segment_length: int | None,
    on_progress: Callable[[float], None] | None,
) -> KVBias:
    """See :func:`kvlens.convert_prompt`, which checks the prompt and the bias that it continues."""
    cfg, tokens, lengths, n_positions = model.cfg, prompt.tokens, prompt.lengths(), prompt.n_positions()
    mask, states = None if prompt.mask is None else prompt.mask.long(), [LinearCacheEntry() for _ in model.blocks]
    with model.hooks(fwd_hooks=list(fwd_hooks)), hidden_tokens_keep_positions(prompt.keeps_positions), model.one_pass():
        n = tokens.shape[1]
        model.check_length(n, mask)
        length = segment_length or streaming.default_segment_length(model, len(tokens))
        if segment_length is None and length < n and (streaming.has_hooks(model) or streaming.wants_gradients(model)):
            length = n
        options: dict[str, Any] = dict(segment_length=length, on_progress=on_progress)
        for _ in streaming.segments(model, tokens, mask, states, stop_at_layer=cfg.n_layers, **options):
            pass
    layers = [_layer(block.attn, state, n_positions, tokens.device) for block, state in zip(model.blocks, states, strict=True)]
    before = (0, 0) if old is None else (old.to(tokens.device).n_prompt_tokens, old.to(tokens.device).position_offset)
    offset = 0 if cfg.rotates_after else n_positions + before[1]
    single = not prompt.has_batch and (old is None or old.single)
    return KVBias(tuple(layers), lengths + before[0], offset, fingerprint, record=None, single=single)


def _layer(attn: KVAttention, left: LinearCacheEntry, n_positions: int | Tensor, device: torch.device) -> Layer:
    """What the prompt leaves in one layer, as read from its end."""
    assert left.state is not None
    group = attn.cfg.n_heads // left.state.kv.shape[1]  # a bias has the state of every query head
    k_sum = None if left.state.k_sum is None else left.state.k_sum.repeat_interleave(group, dim=1)
    written = LinearAttentionState(left.state.kv.repeat_interleave(group, dim=1), k_sum)
    old = None if left.bias is None else LinearAttentionState(*left.bias)
    kv, k_sum = carry_layer_state(attn, old, n_positions, written)
    kv, k_sum = kv.to(device), None if k_sum is None else k_sum.to(device)
    heads = dict(k=attn.cfg.n_kv_heads, v=attn.cfg.n_kv_heads, q=attn.cfg.n_heads)
    empty = {x: kv.new_zeros(len(kv), 0, n, kv.shape[-1]) for x, n in heads.items()}
    last = {x: left.shift_state.get(x, empty[x]).to(kv) for x in heads}
    return Layer((State(kv, kv.new_zeros(kv.shape[:3]) if k_sum is None else k_sum),), last)


@checked
def carry_bias(model: KVModel, bias: KVBias, n_tokens: int | Int[Tensor, " batch"]) -> KVBias:
    """``bias`` after ``n_tokens`` tokens that wrote nothing: its contribution to the bias of a prompt that continues it.

        carried(b_KV) = gamma^M R_{-M} b_KV        carried(b_D) = b_D        (M tokens; ICLCA eq. 19 without the new terms)

    so that ``convert_prompt(model, tokens, initial=bias)`` minus this is what those tokens wrote. A softmax model's keys do not
    decay or rotate; they are just M positions further away.

    Args:
        model: the model with which ``bias`` was made.
        bias: the bias of one prompt or of a batch.
        n_tokens: M, not negative; one number, or one for each prompt of a batch.

    Returns:
        The bias, with the position offset and number of tokens after the M tokens. The shift state is unchanged.

    Raises:
        KVLensError: a bias of another model, or a negative number of tokens.
    """
    if isinstance(n_tokens, Tensor):
        if n_tokens.shape != (bias.batch_size,) or int(n_tokens.min()) < 0 or int(n_tokens.max()) > LAST_POSITION:
            raise KVLensError(
                f"carry_bias: n_tokens must be a number for each of {bias.batch_size} prompts, got {brief(n_tokens)}"
            )
        n_tokens = n_tokens.to(bias.device)
    else:
        ensure("carry_bias: n_tokens", Annotated[int, Within(0, LAST_POSITION)], n_tokens)
    bias.fingerprint.check(model.fingerprint(), "carry_bias")
    counts = {name: getattr(bias, name) + n_tokens for name in COUNTS}
    if bias.kind is None:
        parts = [
            _carried(block.attn, part, n_tokens) for block, part in zip(cast(Any, model).blocks, bias.attention, strict=True)
        ]
        counts |= {"position_offset": 0} if model.cfg.rotates_after else {}
        return replace(bias.with_attention(parts), record=None, **counts)
    moved = moved_away(bias, n_tokens) if bias.kind == "virtual_keys" else bias
    return replace(moved, record=since(bias.fit, f"carried over {n_tokens} tokens") if n_tokens else bias.fit, **counts)


def _carried(attn: KVAttention, part: State, n_tokens: int | Tensor) -> State:
    return replace(part, b_kv=carry_layer_state(attn, LinearAttentionState(part.b_kv, part.b_d), n_tokens).kv)


def carry_layer_state(
    attn: KVAttention,
    before: LinearAttentionState | None,
    n_tokens: int | Int[Tensor, " batch"],
    written: LinearAttentionState | None = None,
) -> LinearAttentionState:
    """:func:`carry_state` for one layer, with its decay and, if RoPE follows the feature map, its rotation."""
    like = (before or written).kv  # type: ignore[union-attr]
    rotation = None
    if attn.cfg.rotates_after:
        positions = torch.as_tensor(n_tokens, device=like.device).reshape(-1)
        rotation = attn.rotary_table.at(positions, like.dtype)
    return carry_state(before, n_tokens, written, attn.decay, rotation, attn.cfg.rotary_adjacent_pairs)
