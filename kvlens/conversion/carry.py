"""How a bias changes as tokens are read: :func:`carry_state` with the decay and the rotation of a model."""

from dataclasses import replace
from typing import Annotated

import torch
from jaxtyping import Int
from torch import Tensor

from kvlens.checks import Within, checked, ensure
from kvlens.components.attention import KVAttention
from kvlens.errors import KVLensError, brief
from kvlens.kv_bias import LAST_POSITION, KVBias, VirtualKeys
from kvlens.kv_bias.fit import since
from kvlens.kv_bias.ragged import padded
from kvlens.model import HookedKVTransformer
from kvlens.ops.linear_attention import LinearAttentionState, carry_state


@checked
def carry_bias(model: HookedKVTransformer, bias: KVBias, n_tokens: int | Int[Tensor, " batch"]) -> KVBias:
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
        n_tokens = n_tokens.to(bias.b_KV.device)
    else:
        ensure("carry_bias: n_tokens", Annotated[int, Within(0, LAST_POSITION)], n_tokens)
    bias.fingerprint.check(model.fingerprint(), "carry_bias")
    if bias.features is not None:
        features = bias.features.further(n_tokens) if isinstance(bias.features, VirtualKeys) else bias.features
        after = {name: getattr(bias, name) + n_tokens for name in ("n_prompt_tokens", "position_offset")}
        return bias._made(
            since(bias.fit, f"carried over {n_tokens} tokens") if n_tokens else bias.fit, features=features, **after
        )
    has_batch = bias.batch_size is not None
    layers = []
    for layer, block in enumerate(model.blocks):
        one = bias.of_layer(layer)
        kv, k_sum = one.b_KV[0], one.b_D[0]
        state = LinearAttentionState(kv if has_batch else kv[None], k_sum if has_batch else k_sum[None])
        layers.append(carry_layer_state(block.attn, state, n_tokens))
    b_kv = padded([state.kv if has_batch else state.kv[0] for state in layers])
    offset = 0 if model.cfg.rotates_after else bias.position_offset + n_tokens
    return replace(bias, b_KV=b_kv, position_offset=offset, n_prompt_tokens=bias.n_prompt_tokens + n_tokens)


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


def per_query_head(state: LinearAttentionState, n_heads: int) -> LinearAttentionState:
    """A context's state, one per key-value head, in the layout of a bias: one per query head."""
    group = n_heads // state.kv.shape[1]
    k_sum = None if state.k_sum is None else state.k_sum.repeat_interleave(group, dim=1)
    return LinearAttentionState(state.kv.repeat_interleave(group, dim=1), k_sum)
