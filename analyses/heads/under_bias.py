"""Attention under a bias: the whole rows of a pattern, which ``hook_pattern`` under a bias are not.

    A_ir = phi_r(q_i) b_D[r] / n_i        A_ij = exp(s_ij) / n_i        n_i = sum_j exp(s_ij) + phi(q_i)^T b_D

The second is ``hook_pattern`` under the bias, whose rows may sum to 0.002 after a long prompt; the first is what they lack.
Both come from passes over the text alone: a bias of a few fitted keys shows what is read of it, not of its prompt.

Source: ICLCA sec. 5.
"""

from typing import Annotated, Any, NamedTuple, cast

import torch
from einops import rearrange, repeat
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import KVBias, KVLensError, KVModel
from kvlens.checks import Within, checked
from kvlens.model import HeadsRead, visit_heads
from kvlens.texts import token_texts

from ..sequences import PromptTokens, TextTokens, bias_of, one_bias, prompt_sequence
from ..sequences import one_sequence as read_text


class AttentionUnderBias(NamedTuple):
    """The attention of one layer's heads under a bias.

    Attributes:
        tokens: what each column stands for: the tokens of the prompt, or ``key 0``, ``key 1``, ... of a bias that was given
            without its prompt; then the text's tokens.
        pattern: the last rows are the text's. Those before are the prompt's, of its own pass, where its tokens were given. All
            sum to 1, but for an attention sink.
        n_prompt: how many columns are the bias's.
    """

    tokens: list[str]
    pattern: Float[Tensor, "head row column"]
    n_prompt: int


@checked
@torch.no_grad()
def attention_under_bias(
    model: KVModel,
    prompt: PromptTokens | KVBias,
    text: TextTokens,
    layer: Annotated[int, Within(0)],
    *,
    bias: KVBias | None = None,
) -> AttentionUnderBias:
    """What a text's tokens attend to in one layer under a bias: the prompt's tokens, and each other.

    :func:`kvlens.viz.attention_under_bias` draws it. Under an exact bias it is ``hook_pattern`` of a pass over prompt and text.

    Args:
        model: with softmax attention in this layer, and nothing attached.
        prompt: a string, a chat, or tokens [pos] with BOS if the model uses one; or its bias, whose columns are then keys.
        text: a string, or tokens [pos] without BOS.
        layer: the layer.
        bias: the converted prompt, also one of fewer keys: each is counted at the token that it was taken from. None converts
            the prompt exactly.

    Raises:
        KVLensError: a bias without keys, which has no columns, as with linear attention; one that is not of this prompt.
    """
    if model.attached_kv_bias is not None:
        raise KVLensError("attention_under_bias: a bias is attached to this model; detach it first (model.detach_kv_bias())")
    text = read_text(model, "text", text)
    tokens = None if isinstance(prompt, KVBias) else prompt_sequence(model, "prompt", prompt)
    bias = one_bias("prompt", prompt) if tokens is None else bias_of(model, tokens, bias)  # type: ignore[arg-type]
    of_bias, of_text, distance = _rows_of_text(model, bias, text, layer)
    if tokens is None:
        names = [f"key {i}" for i in range(of_bias.shape[-1])]
        return AttentionUnderBias([*names, *token_texts(model, text)], torch.cat([of_bias, of_text], dim=-1), len(names))
    n_prompt, names = len(tokens), token_texts(model, torch.cat([tokens, text]))
    of_bias = _by_position(of_bias, bias, distance, n_prompt)
    pattern = of_bias.new_zeros(len(of_bias), len(names), len(names))
    pattern[:, :n_prompt, :n_prompt] = _pattern(model, tokens, layer)[: len(of_bias)]
    pattern[:, n_prompt:] = torch.cat([of_bias, of_text], dim=-1)
    return AttentionUnderBias(names, pattern, n_prompt)


def _rows_of_text(
    model: KVModel, bias: KVBias, text: Int[Tensor, " text"], layer: int
) -> tuple[Float[Tensor, "head text key"], Float[Tensor, "head text text"], Int[Tensor, "kv_head key"]]:
    """What the text attends to: the keys of the bias, and itself; and how far each key is from the text."""
    features, b_d, log_scale, row = _weights(bias, layer)
    with model.kv_bias(bias):
        of_text = _pattern(model, text, layer)
        read = cast(Any, model).read_queries(text[None], range(row, row + 1))[0]
    rule = cast(Any, model.layers()[layer].parts[0]).score_rule()
    positions = torch.arange(len(text), device=text.device)[None]
    phi = features.read(read.q, rule, positions, log_scale, b_d[..., None], b_d)
    n_heads = read.q.shape[2]
    share = phi.features * (phi.log_scale - read.log_n).exp()[..., None]
    share = share * repeat(b_d.to(share), "1 g key -> 1 1 (g s) key", s=n_heads // b_d.shape[1])
    return rearrange(share, "1 text head key -> head text key"), of_text[:n_heads].to(share), features.distance[0]


def _pattern(model: KVModel, tokens: Int[Tensor, " pos"], layer: int) -> Float[Tensor, "head pos pos"]:
    found: dict[int, Tensor] = {}

    def keep(number: int, read: HeadsRead) -> None:
        if number == layer:
            found[layer] = read.pattern[0]

    visit_heads(model, tokens[None], keep, ("pattern",))
    return found[layer]


def _weights(bias: KVBias, layer: int) -> tuple[Any, Float[Tensor, "1 head key"], Float[Tensor, "1 kv_head"], int]:
    """The keys of a layer, b_D, its logarithmic scale, and which of the layers with attention it is."""
    if layer not in bias.attention_layers or getattr(bias.features, "kind", None) != "virtual_keys":
        has = "a recurrent state" if layer not in bias.attention_layers else "sums of features"
        if layer >= bias.n_layers:
            raise KVLensError(f"attention_under_bias: layer {layer}: this model has layers 0 to {bias.n_layers - 1}")
        raise KVLensError(
            f"attention_under_bias: layer {layer}: the bias holds {has} there and no keys, so its tokens have no columns; "
            "head_details(model, prompt, text).pattern has the attention of a pass over prompt and text"
        )
    row = bias.attention_layers.index(layer)
    of, i = (bias.of_layer(row), 0) if bias.fingerprint.layers_differ else (bias, row)
    assert of.features is not None
    assert of.log_scale is not None
    return of.features.of_layer(i), of.b_D[i][None], of.log_scale[i][None], row


def _by_position(
    share: Float[Tensor, "head text key"], bias: KVBias, distance: Int[Tensor, "kv_head key"], n_prompt: int
) -> Float[Tensor, "head text prompt"]:
    """Sum the keys' shares at the positions of the prompt that they were taken from."""
    if bias.position_offset != n_prompt or int(distance.max()) > n_prompt:
        raise KVLensError(
            f"attention_under_bias: the text begins at position {bias.position_offset} under this bias, and the prompt has "
            f"{n_prompt} tokens: give the whole prompt of the bias, or the bias in place of the prompt, for a column per key"
        )
    n_text, group = share.shape[1], len(share) // len(distance)
    place = repeat(n_prompt - distance, "g key -> (g s) text key", s=group, text=n_text).to(share.device)
    return share.new_zeros(*share.shape[:2], n_prompt).scatter_add(-1, place, share)
