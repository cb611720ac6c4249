"""Rows of attention patterns: at chosen queries, without the rest of the pattern; whole rows under a bias; details of heads.

TransformerLens' pattern is N x N per head: 1.6 GB for 24 heads and 4,096 tokens, of which a plot needs a few rows. For a
HookedKVTransformer with linear attention single rows can be computed from features,

    pattern[i, j] = phi~(q_i).phi~(k_j) gamma^{i-j} / n_i     for j <= i       (n_i = attn_scale under normalizer "none")

(from ICLCA eq. 12-13): the queries are read first, then the keys, for a long text one segment at a time
(:mod:`kvlens.analyses.segments`). For softmax attention, and for the exact effective attention of recurrent layers, all rows
are computed, and the chosen ones selected layer by layer.

Rows of ``hook_pattern`` under a bias are not whole:

    A_ir = phi_r(q_i) b_D[r] / n_i        A_ij = exp(s_ij) / n_i        n_i = sum_j exp(s_ij) + phi(q_i)^T b_D

The second is ``hook_pattern`` under the bias, whose rows may sum to 0.002 after a long prompt; the first is what they lack.
Both come from passes over the text alone: a bias of a few fitted keys shows what is read of it, not of its prompt.

Source: ICLCA sec. 5.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from einops import rearrange, repeat
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import HookedKVTransformer, KVBias, KVLensError, KVModel
from kvlens.checks import Within, checked
from kvlens.kv_bias import Keys, VirtualKeys
from kvlens.model import HeadsRead, attention_parts, visit_heads
from kvlens.texts import token_texts

from ..bias.decomposition import bias_outputs, share_by_size
from ..bias.positions import output_shares
from ..segments import Found, Looks, OnProgress, PromptColumns, progress, rows_at, stack_layers, zeros_by_head
from ..sequences import (
    PromptTokens,
    TextTokens,
    bias_of,
    check_detached,
    one_bias,
    one_sequence,
    prompt_sequence,
    prompt_text_bias,
)

VisitRows = Callable[[int, int, Float[Tensor, "head query pos"]], None]
"""Called with a layer, the position of the first key, and the pattern from all queries to these keys, float32."""


@torch.no_grad()
def visit_rows(
    model: KVModel,
    tokens: Int[Tensor, " pos"],
    queries: Int[Tensor, " query"],
    visit: VisitRows,
    *,
    on_progress: OnProgress | None = None,
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
    on_progress: OnProgress | None,
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
    on_progress: OnProgress | None = None,
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

    :func:`kvlens.viz.attention_view_under_bias` draws it. Under an exact bias it is ``hook_pattern`` over prompt and text.

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
    check_detached("attention_under_bias", model)
    text = one_sequence(model, "text", text)
    tokens = None if isinstance(prompt, KVBias) else prompt_sequence(model, "prompt", prompt)
    bias = one_bias("prompt", prompt) if tokens is None else bias_of(model, tokens, bias)  # type: ignore[arg-type]
    of_bias, of_text, distance = _rows_of_text(model, bias, text, layer)
    if tokens is None:
        names = [f"key {i}" for i in range(of_bias.shape[-1])]
        return AttentionUnderBias([*names, *token_texts(model, text)], torch.cat([of_bias, of_text], dim=-1), len(names))
    n_prompt, names = len(tokens), token_texts(model, torch.cat([tokens, text]))
    of_bias = _by_position(of_bias, bias, distance, n_prompt)
    pattern = of_bias.new_zeros(len(of_bias), len(names), len(names))
    pattern[:, :n_prompt, :n_prompt] = _pattern_under_bias(model, tokens, layer)[: len(of_bias)]
    pattern[:, n_prompt:] = torch.cat([of_bias, of_text], dim=-1)
    return AttentionUnderBias(names, pattern, n_prompt)


def _rows_of_text(
    model: KVModel, bias: KVBias, text: Int[Tensor, " text"], layer: int
) -> tuple[Float[Tensor, "head text key"], Float[Tensor, "head text text"], Int[Tensor, "kv_head key"]]:
    """What the text attends to: the keys of the bias, and itself; and how far each key is from the text."""
    features, b_d, log_scale, row = _weights(bias, layer)
    with model.kv_bias(bias):
        of_text = _pattern_under_bias(model, text, layer)
        read = model.read_queries(text[None], range(row, row + 1))[0]
    rule = attention_parts(model)[row].score_rule()
    positions = torch.arange(len(text), device=text.device)[None]
    phi = features.read(read.q, rule, positions, log_scale, b_d[..., None], b_d)
    n_heads = read.q.shape[2]
    share = phi.features * (phi.log_scale - read.log_n).exp()[..., None]
    share = share * repeat(b_d.to(share), "1 g key -> 1 1 (g s) key", s=n_heads // b_d.shape[1])
    return rearrange(share, "1 text head key -> head text key"), of_text[:n_heads].to(share), features.distance[0]


def _pattern_under_bias(model: KVModel, tokens: Int[Tensor, " pos"], layer: int) -> Float[Tensor, "head pos pos"]:
    found: dict[int, Tensor] = {}

    def keep(number: int, read: HeadsRead) -> None:
        if number == layer:
            found[layer] = read.pattern[0]

    visit_heads(model, tokens[None], keep, ("pattern",))
    return found[layer]


def _weights(bias: KVBias, layer: int) -> tuple[VirtualKeys, Float[Tensor, "1 head key"], Float[Tensor, "1 kv_head"], int]:
    """The keys of a layer, b_D, its logarithmic scale, and which of the layers with attention it is."""
    if layer >= bias.n_layers:
        raise KVLensError(f"attention_under_bias: layer {layer}: this model has layers 0 to {bias.n_layers - 1}")
    part = bias.layers[layer].attention
    if not isinstance(part, Keys):
        has = "a recurrent state" if part is None else "sums of features"
        raise KVLensError(
            f"attention_under_bias: layer {layer}: the bias holds {has} there and no keys, so its tokens have no columns; "
            "head_details(model, prompt, text).pattern has the attention of a pass over prompt and text"
        )
    return part.features, part.b_d, part.log_scale, bias.attention_layers.index(layer)


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


MAX_QUERIES, MAX_STRONGEST = 128, 64
"""The number of pattern rows that are computed, evenly spaced over the text; the number of prompt tokens in ``strongest``."""


@dataclass(frozen=True)
class HeadDetails:
    """Every head's attention on one prompt and text.

    The axis ``head`` is as long as the largest layer needs; heads that a layer of a hybrid model does not have are NaN.

    Attributes:
        prompt, text: their tokens as text.
        queries: positions in prompt + text of the rows of ``pattern``, ascending: those of the text, or 128 of a longer text.
        pattern: pattern of the unconverted model, [layer, head, query, column]; for recurrent layers the exact effective
            attention. The first columns are the prompt's, each the
            sum over ``block`` neighboring tokens (the last one may have fewer); then the text's, one per token.
        prompt_shares: [layer, head, prompt] share of each prompt token in the head's output, over the whole text; with the
            shares of the shift state and of the text itself they sum to 1.
        bias_shares: [layer, head, text] share of the head's output that comes from the prompt, in [0, 1]; None if unknown.
        block: tokens per column of the prompt: 1 for prompts of up to 4,096 tokens.
        strongest: positions in prompt + text, ascending: the 64 prompt positions that the text attends to most, and the last
            128 of the text.
        among: the pattern among these, [layer, head, position, position]; None if unknown, as is ``strongest``.
    """

    prompt: list[str]
    text: list[str]
    queries: Int[Tensor, " query"]
    pattern: Float[Tensor, "layer head query column"]
    prompt_shares: Float[Tensor, "layer head prompt_pos"]
    bias_shares: Float[Tensor, "layer head text_pos"] | None = None
    block: int = 1
    strongest: Int[Tensor, " position"] | None = None
    among: Float[Tensor, "layer head position position"] | None = None


@checked
@torch.no_grad()
def head_details(
    model: KVModel,
    prompt: PromptTokens,
    text: TextTokens,
    *,
    bias: KVBias | None = None,
) -> HeadDetails:
    """Run the unconverted model on prompt and text, and the converted one on the text.

    Args:
        model: a model with nothing attached.
        prompt: a string, or tokens [pos] with BOS if the model uses one.
        text: a string, or tokens [pos] without BOS.
        bias: the converted prompt, if it has been converted already; None converts it here.

    Raises:
        KVLensError: an attached bias, an empty prompt or text.
    """
    check_detached("head_details", model)
    prompt, text, bias = prompt_text_bias(model, prompt, text, bias)
    n_prompt, n_text = len(prompt), len(text)
    everything = torch.cat([prompt, text])
    queries = n_prompt + torch.linspace(0, n_text - 1, min(n_text, MAX_QUERIES)).round().long()
    with progress("head_details") as tell:
        pattern, attended = _rows(model, everything, queries, n_prompt, lambda x: tell(0.4 * x))
        in_prompt = attended.topk(min(n_prompt, MAX_STRONGEST)).indices.sort().values
        strongest = torch.cat([in_prompt, torch.arange(max(n_prompt, len(everything) - MAX_QUERIES), len(everything))])
        among = attention_among(model, everything, strongest, on_progress=lambda x: tell(0.4 + 0.2 * x))
        shares = output_shares(model, prompt, text, on_progress=lambda x: tell(0.6 + 0.4 * x)).float()
    return HeadDetails(
        prompt=token_texts(model, prompt),
        text=token_texts(model, text),
        queries=queries,
        pattern=pattern,
        prompt_shares=shares,
        bias_shares=_bias_shares(model, text, bias),
        block=PromptColumns.of(n_prompt).block,
        strongest=strongest,
        among=among,
    )


def _rows(
    model: KVModel, everything: Tensor, queries: Tensor, n_prompt: int, tell: OnProgress
) -> tuple[Float[Tensor, "layer head query column"], Float[Tensor, " prompt_pos"]]:
    """The pattern at ``queries`` in columns, and the attention to each prompt token, summed over queries and heads."""
    columns = PromptColumns.of(n_prompt)
    n_text = len(everything) - n_prompt
    pattern = zeros_by_head(model, len(queries), len(columns) + n_text)
    attended = torch.zeros(n_prompt)

    def add(layer: int, first: int, rows: Tensor) -> None:
        n_here = min(max(0, n_prompt - first), rows.shape[-1])
        of_prompt, of_text = rows[..., :n_here], rows[..., n_here:]
        columns.add(pattern[layer, : len(rows), :, : len(columns)], of_prompt, first)
        attended[first : first + n_here] += of_prompt.abs().sum(dim=(0, 1))
        behind = len(columns) + max(0, first - n_prompt)
        pattern[layer, : len(rows), :, behind : behind + of_text.shape[-1]] = of_text

    visit_rows(model, everything, queries, add, on_progress=tell)
    return pattern, attended


def _bias_shares(model: KVModel, text: Int[Tensor, " text_pos"], bias: KVBias) -> Float[Tensor, "layer head text_pos"]:
    """The bias's share of every head's output at every position of the text."""
    outputs = bias_outputs(model, bias, text)
    of_bias, of_context = (stack_layers([z.norm(dim=-1) for z in part], fill=torch.nan) for part in outputs)
    return share_by_size(of_bias, of_context).transpose(1, 2).float().cpu()
