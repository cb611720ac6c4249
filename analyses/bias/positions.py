"""The contribution of each position of a converted prompt to each head's output and to a logit.

The parts of a head's output, and the two views of a shifted value, are those of :mod:`kvlens.analyses.bias.reads`. Here they
are reduced to numbers that add up: each is linear in the part, a product with one probe vector per text position.

Sums over the text's positions are taken before those over features: sum_i A_ij (v'_j . w_i) = phi~(k'_j)^T (sum_i q_i w_i^T)
v'_j. A text x prompt x head tensor is built only if single positions of the text are requested.

:func:`linked_shares` has the share of each prompt token, head and text token in the attention's output as one quantity,

    w[l, h, i, j] = <c, o> / (|o| sum over all heads of |o|)       c = A_ij v_j W_O,  o = z_i W_O of head (l, h)

A_ij is the attention of the unconverted model from text position i to prompt position j, v_j the value read there (with the
shift, if there is one), o what the head writes at i. <c, o> / |o|^2 is position j's share of what the head writes, exact and
signed; |o| over the sum over all heads is the weight of the head. At each text token the w of all heads and positions,
including those of the text, sum to 1. This holds for linear and softmax attention, since a conversion changes neither pattern
nor values. In a recurrent layer A is the exact effective attention, and W_O stands for the frozen norm and gate after z,
followed by the output projection; in a layer that gates its heads, c includes the gate.
"""

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import HookedKVTransformer, KVBias, KVLensError, KVModel
from kvlens.checks import checked, ensure, one_of
from kvlens.memory import BLOCK_NUMBERS
from kvlens.model import heads_per_layer, output_weights
from kvlens.texts import next_token_texts, token_texts

from ..attribution.answers import Answer, Rival
from ..declaration import Columns, Option, analysis
from ..logit_attribution import (
    LogitTarget,
    check_heads_write_directly,
    logit_targets,
)
from ..predictions import OUTPUT_SHARE
from ..readings import Readings, read_text
from ..segments import OnProgress, PromptColumns, part_of, progress, zeros_by_head
from ..sequences import PromptTokens, TextTokens, one_sequence, prompt_sequence, prompt_text_bias
from .decomposition import share_probes
from .exchange import HEAD
from .reads import VIEWS, LayerwiseReading, OnePassReading, Stretch, TextReads, View

NONE = -1
"""No position: all positions of the text together, or a part that is not a prompt position."""

AT = ("together", "last", "each")
COLUMNS = Columns(
    layer=("int64", "from 0"),
    head=("int64", HEAD),
    position=("int64", "in the text; -1 for all positions together"),
    part=("str", "``inherited``, ``prompt``, ``shift_state`` or ``text``"),
    prompt_position=("int64", "from 0; -1 except for ``prompt``"),
    token=("str", "the prompt's token, missing except for ``prompt``"),
    attention=(
        "float64",
        "A_ij, for ``source`` including the shift's coefficients; for all positions together its mean. NaN except for "
        "``prompt``",
    ),
    output_share=("float64", f"{OUTPUT_SHARE}; all parts sum to 1 (to 0 for no output)"),
    logit=(
        "float64",
        "direct logit attribution, final norm frozen, to the centered logit or the difference; for all positions together the "
        "mean over the target's; NaN at a position without target and in a text that has none",
    ),
)


@analysis(
    COLUMNS,
    "what each prompt position gives to each head's output and to a logit",
    cost="the prompt and the text once; twice in segments, where keys and values do not fit in memory",
    options={
        "by": Option("whose position counts where values are shifted", VIEWS),
        "at": Option("which positions of the text to distinguish", AT),
    },
)
@checked
@torch.no_grad()
def bias_positions(
    model: KVModel,
    prompt: PromptTokens,
    text: TextTokens,
    *,
    initial: KVBias | None = None,
    by: View = "attended",
    at: str | Sequence[int] = "together",
    answer: Answer = None,
    rival: Rival = None,
    segment_length: int | None = None,
) -> pd.DataFrame:
    """Measure what each prompt position contributes to each head's output on the text, and to a logit.

    With linear attention a long prompt is read in segments, and twice if its keys and values take more than 128 MiB, so that
    memory beyond that and the table does not grow with its length. Softmax attention is computed whole, with its pattern.

    Args:
        model: linear or softmax.
        prompt: a string, or tokens [pos] as converted, with BOS if the model uses one.
        text: a string, or tokens [pos] without BOS.
        initial: the bias that the prompt continues; None continues the one that is attached, as ``convert_prompt`` does.
        by: ``attended`` or ``source``, see :mod:`kvlens.analyses.bias.reads`; the same if values are not shifted.
        at: positions of the text to report separately, ``last`` or ``each``; ``together`` takes all of them together.
        answer, rival: the logit, as in :func:`kvlens.analyses.bias.decomposition.bias_decomposition`; with ``at`` that of the
            answer's token at each position.
        segment_length: tokens per segment, for linear attention; None chooses a length, and the whole text if the model has
            hooks.

    Returns:
        By layer, head and position of the text, then the parts of the head's output in order: one row "inherited" if the prompt
        continued a bias, one per prompt position, one "shift_state" if values are shifted, "text":

        {columns}

    Raises:
        KVLensError: an unknown view, positions outside the text, invalid tokens.
    """
    check_heads_write_directly(model, "bias_positions")
    prompt = prompt_sequence(model, "prompt", prompt, initial)
    text = one_sequence(model, "text", text)
    targets = logit_targets(model, text, answer, rival)
    where = _positions(at, len(text))
    attached = contextlib.nullcontext() if initial is None else model.kv_bias(initial)
    with attached, progress("bias_positions") as tell:
        numbers: list[Float[Tensor, "_ position part number"]] = []
        for i, target in enumerate(targets):
            told = part_of(tell, i, len(targets))
            reading = reading_of(model, prompt, target.text, by=by, segment_length=segment_length, on_progress=told)
            read, parts = _read(reading, target, where)
            numbers = [_with_logit(*both) for both in zip(numbers, read, strict=True)] if numbers else read
    return _frame(model, prompt, numbers, parts, where)


def _with_logit(
    own: Float[Tensor, "_ position part number"], other: Float[Tensor, "_ position part number"]
) -> Float[Tensor, "_ position part number"]:
    """The numbers of a layer, with the logit of another target added to theirs."""
    return torch.cat([own[..., :-1], own[..., -1:] + other[..., -1:]], dim=-1)


def reading_of(
    model: KVModel,
    prompt: Int[Tensor, " prompt_pos"],
    text: Int[Tensor, " text_pos"],
    *,
    by: View = "attended",
    segment_length: int | None = None,
    on_progress: OnProgress | None = None,
    with_logits: bool = True,
) -> LayerwiseReading | OnePassReading:
    """The prompt and the text, read layer by layer."""
    if isinstance(model, HookedKVTransformer):  # long linear texts in segments, and values behind a shift
        return LayerwiseReading(model, prompt, text, by=by, segment_length=segment_length, on_progress=on_progress)
    return OnePassReading(model, prompt, text, with_logits)


@torch.no_grad()
def output_shares(
    model: KVModel,
    prompt: Int[Tensor, " prompt_pos"],
    text: Int[Tensor, " text_pos"],
    *,
    on_progress: OnProgress | None = None,
) -> Float[Tensor, "layer head prompt_pos"]:
    """``output_share`` of :func:`bias_positions` for every prompt position, all positions of the text together.

    NaN for heads that a layer of a hybrid model does not have.
    """
    reading = reading_of(model, prompt, text, on_progress=on_progress, with_logits=False)
    layers, _ = reading.text()
    probes = [_gated(share_probes(reads.z, pooled=True)[..., None], reads) for reads in layers]
    shares = zeros_by_head(model, len(prompt), dtype=torch.float64)

    def add(layer: int, stretch: Stretch) -> None:
        numbers = _numbers(layers[layer].queries, stretch, probes[layer], pooled=True)
        shares[layer, : len(numbers), stretch.first : stretch.first + len(stretch.keys)] = numbers[:, 0, :, 1].cpu()

    reading.visit_prompt(add)
    return shares


def _positions(at: str | Sequence[int], n_text: int) -> Sequence[int] | None:
    """The positions that are named; None for all of them together."""
    if isinstance(at, str):
        ensure("at", one_of(AT), at)
        return {"together": None, "last": [n_text - 1], "each": range(n_text)}[at]
    outside = [i for i in at if not 0 <= i < n_text]
    if outside:
        raise KVLensError(f"bias_positions: at={outside[0]} lies outside the text, whose {n_text} positions count from 0")
    return at


def _logit_probes(
    probes: Float[Tensor, "text head d_head"], target: LogitTarget, reads: TextReads, at: Sequence[int] | None
) -> Float[Tensor, "text head d_head"]:
    """The target's probes of a layer, whose sum is the mean over its positions; NaN at single positions that have no target."""
    probes = probes if reads.factor is None else probes * reads.factor.to(probes)
    if at is None:
        return probes * target.weight
    has_target = torch.zeros(len(probes), dtype=torch.bool, device=probes.device)
    has_target[target.positions] = True
    probes = probes * (1.0 if target.weight > 0 else -1.0)  # at a single position of a mean, its own logit
    return probes.where(has_target[:, None, None], float("nan"))


def _read(
    reading: LayerwiseReading | OnePassReading, target: LogitTarget, at: Sequence[int] | None
) -> tuple[list[Float[Tensor, "_ position part number"]], list[str]]:
    """Attention and one number per probe of each layer, for each part in the order of the frame; and the parts that are not the
    prompt's."""
    model, n_prompt = reading.model, reading.n_prompt
    text, scale = reading.text()
    outside = [part for part in ("inherited", "shift_state") if getattr(text[0], part) is not None] + ["text"]
    probes = [
        torch.stack([share_probes(reads.z, at is None), _logit_probes(of_layer, target, reads, at)], dim=-1)
        for of_layer, reads in zip(target.probes(model, scale), text, strict=True)
    ]
    if at is not None:
        text, probes = [reads.at(list(at)) for reads in text], [p[list(at)] for p in probes]
    of_prompt = [_gated(p, reads) for p, reads in zip(probes, text, strict=True)]
    first = int(outside[0] == "inherited")  # of the prompt's parts
    n_positions, n_parts = 1 if at is None else len(at), n_prompt + len(outside)
    numbers = [torch.full((z.shape[1], n_positions, n_parts, 3), torch.nan, dtype=torch.float64) for _, z, *_ in text]

    def add(layer: int, stretch: Stretch) -> None:
        here = slice(first + stretch.first, first + stretch.first + len(stretch.keys))
        numbers[layer][:, :, here] = _numbers(text[layer].queries, stretch, of_prompt[layer], pooled=at is None).cpu()

    reading.visit_prompt(add)
    behind = first + n_prompt
    for layer, reads in enumerate(text):
        of_layer = numbers[layer][..., 1:]
        outputs = (reads.z, reads.inherited, reads.shift_state)
        whole, inherited, shift_state = (_numbers_of(z, probes[layer], at is None) for z in outputs)
        of_layer[:, :, :first], of_layer[:, :, behind:-1] = inherited, shift_state
        of_layer[:, :, -1:] = whole - of_layer[:, :, :-1].sum(dim=2, keepdim=True)  # what is left is the text's own
    return numbers, outside


def _gated(probes: Float[Tensor, "text head d_head probe"], reads: TextReads) -> Float[Tensor, "text head d_head probe"]:
    """The probes of what a prompt position gives, before the gate that makes it a part of the output."""
    return probes if reads.gate is None else probes * reads.gate[..., None].to(probes)


def _numbers(
    queries: Float[Tensor, "text head d_phi"],
    stretch: Stretch,
    probes: Float[Tensor, "text head d_head probe"],
    pooled: bool,
) -> Float[Tensor, "head position pos number"]:
    """Attention to each position of a stretch, and its numbers."""
    if pooled:
        attention = torch.einsum("hf,phf->hp", queries.mean(dim=0), stretch.keys)[:, None]
        read = torch.einsum("thf,thdn->hfdn", queries, probes)
        numbers = torch.einsum("phf,hfdn,phd->hpn", stretch.keys, read, stretch.values)[:, None]
    else:
        attention = torch.einsum("thf,phf->htp", queries, stretch.keys)
        numbers = attention[..., None] * torch.einsum("phd,thdn->htpn", stretch.values, probes)
    return torch.cat([attention[..., None], numbers], dim=-1)


def _numbers_of(
    z: Float[Tensor, "text head d_head"] | None, probes: Float[Tensor, "text head d_head probe"], pooled: bool
) -> Float[Tensor, "head position part number"]:
    """The numbers of a part of the outputs; an empty tensor where there is no such part."""
    if z is None:
        return torch.zeros(probes.shape[1], 1 if pooled else len(probes), 0, probes.shape[-1], dtype=torch.float64)
    numbers = torch.einsum("thd,thdn->htn", z, probes)
    return (numbers.sum(dim=1, keepdim=True) if pooled else numbers)[:, :, None].cpu()


def _frame(
    model: KVModel,
    prompt: Tensor,
    numbers: list[Float[Tensor, "_ position part number"]],
    outside: list[str],
    at: Sequence[int] | None,
) -> pd.DataFrame:
    heads = [(layer, head) for layer, of_layer in enumerate(numbers) for head in range(len(of_layer))]
    _, n_positions, n_parts, _ = numbers[0].shape
    first = int(outside[0] == "inherited")
    parts = np.array([*outside[:first], *["prompt"] * len(prompt), *outside[first:]], dtype=object)
    positions = np.full(n_parts, NONE)
    positions[first : first + len(prompt)] = np.arange(len(prompt))
    tokens = np.array([*[None] * first, *token_texts(model, prompt), *[None] * (len(outside) - first)], dtype=object)
    text_positions = np.array([NONE] if at is None else list(at))
    by_number = rearrange(torch.cat(numbers), "head position part number -> number (head position part)")
    attention, output_share, logit = by_number.numpy()
    n_blocks = len(heads) * n_positions
    layer, head = np.repeat(np.array(heads), n_positions * n_parts, axis=0).T
    return COLUMNS.frame(
        {
            "layer": layer,
            "head": head,
            "position": np.tile(np.repeat(text_positions, n_parts), len(heads)),
            "part": np.tile(parts, n_blocks),
            "prompt_position": np.tile(positions, n_blocks),
            "token": np.tile(tokens, n_blocks),
            "attention": attention,
            "output_share": output_share,
            "logit": logit,
        }
    )


N_GUESSES = 5
SHOWN = {"with the prompt": "with_prompt", "converted": "converted", "without the prompt": "without_prompt"}
"""The labels of the conditions in the view, in order."""


@dataclass(frozen=True)
class LinkedShares:
    """The data that :func:`kvlens.viz.linked_view` draws.

    Attributes:
        prompt, text: their tokens as text.
        by_prompt: w averaged over the text's tokens: [layer, head, prompt]; NaN for heads that a layer does not have.
        by_text: w summed over the prompt: [layer, head, text]; likewise.
        between: w summed over layers and heads: [text, column]. A column is the sum over ``block`` neighboring prompt tokens
            (the last one may have fewer).
        next_tokens: by condition ("with the prompt", ...), for each text token the most probable next tokens and their
            probabilities.
        colorings: other numbers of each head, [layer, head], by name: losses, ablations, scores.
        without_zero: names of colorings whose 0 is not meaningful, such as logarithms: colored from lowest to highest.
        block: tokens per column of ``between``: 1 for up to 4,096 prompt tokens.
    """

    prompt: Sequence[str]
    text: Sequence[str]
    by_prompt: Float[Tensor, "layer head prompt_pos"]
    by_text: Float[Tensor, "layer head text_pos"]
    between: Float[Tensor, "text_pos column"]
    next_tokens: Mapping[str, Sequence[Sequence[tuple[str, float]]]]
    colorings: Mapping[str, Float[Tensor, "layer head"]] = field(default_factory=dict)
    without_zero: Collection[str] = ()
    block: int = 1


@checked
@torch.no_grad()
def linked_shares(
    model: KVModel,
    prompt: PromptTokens,
    text: TextTokens,
    *,
    bias: KVBias | None = None,
    colorings: Mapping[str, Float[Tensor, "layer head"]] | None = None,
    without_zero: Collection[str] = (),
    readings: Readings | None = None,
) -> LinkedShares:
    """Compute the data that :func:`kvlens.viz.linked_view` draws.

    Args:
        model: a model with nothing attached.
        prompt: a string, or tokens [pos] as converted, with BOS if the model uses one.
        text: a string, or tokens [pos] without BOS.
        bias: the converted prompt, if it has been converted already; None converts it here.
        colorings: other numbers of each head that the view can show, by name.
        without_zero: names of those whose 0 is not meaningful, such as logarithms.
        readings: of this text in the three conditions, if they have been read already; None reads it here.

    Raises:
        KVLensError: invalid tokens.
    """
    prompt, text, bias = prompt_text_bias(model, prompt, text, bias)
    columns = PromptColumns.of(len(prompt))
    by_prompt, by_text = (zeros_by_head(model, len(tokens), dtype=torch.float64) for tokens in (prompt, text))
    between = torch.zeros(len(text), len(columns), dtype=torch.float64)

    def add(layer: int, first: int, shares: Tensor) -> None:
        by_prompt[layer, : len(shares), first : first + shares.shape[-1]] = shares.mean(dim=1)
        by_text[layer, : len(shares)] += shares.sum(dim=2)
        columns.add(between, shares.sum(dim=0), first)

    with progress("linked_shares") as tell:
        visit_shares(model, prompt, text, add, on_progress=tell)
    readings = read_text(model, prompt, text, bias=bias) if readings is None else readings
    return LinkedShares(
        prompt=token_texts(model, prompt),
        text=token_texts(model, text),
        by_prompt=by_prompt,
        by_text=by_text,
        between=between,
        next_tokens={name: likeliest(model, text, readings[condition].logits) for name, condition in SHOWN.items()},
        colorings=dict(colorings or {}),
        without_zero=tuple(without_zero),
        block=columns.block,
    )


@torch.no_grad()
def visit_shares(
    model: KVModel,
    prompt: Int[Tensor, " prompt_pos"],
    text: Int[Tensor, " text_pos"],
    visit: Callable[[int, int, Float[Tensor, "head text_pos pos"]], None],
    *,
    segment_length: int | None = None,
    on_progress: OnProgress | None = None,
) -> None:
    """Call ``visit(layer, first, w)`` with w, in float64 on the CPU, for each layer on consecutive parts of the prompt."""
    reading = reading_of(model, prompt, text, segment_length=segment_length, on_progress=on_progress, with_logits=False)
    layers, _ = reading.text()
    probes = _probes(model, layers)
    at_once = max(1, BLOCK_NUMBERS // (max(heads_per_layer(model)) * len(text)))

    def multiply(layer: int, stretch: Stretch) -> None:
        for start in range(0, len(stretch.keys), at_once):
            keys, values = (x[start : start + at_once] for x in (stretch.keys, stretch.values))
            attention = torch.einsum("thf,phf->htp", layers[layer].queries, keys)
            visit(layer, stretch.first + start, (attention * torch.einsum("phd,thd->htp", values, probes[layer])).cpu())

    reading.visit_prompt(multiply)


def _probes(model: KVModel, layers: Sequence[TextReads]) -> list[Float[Tensor, "text_pos head d_head"]]:
    """The vectors whose product with a value, times the attention, is w: o W_O^T / (|o| sum of all heads' |o|).

    A factor between z and W_O, and a gate before z, are part of the path from the value to what the head writes.
    """
    backs, sizes = [], []
    for layer, reads in enumerate(layers):
        w_o = output_weights(model, layer).to(reads.z)
        written = torch.einsum("thd,hdm->thm", reads.z if reads.factor is None else reads.z * reads.factor, w_o)
        back = torch.einsum("thm,hdm->thd", written, w_o)  # <v W_O, o> = <v, o W_O^T>
        for path in (reads.factor, reads.gate):
            back = back if path is None else back * path
        backs.append(back)
        sizes.append(written.norm(dim=-1))
    whole = torch.stack([size.sum(dim=1).cpu() for size in sizes]).sum(dim=0)  # of all heads, at each text token
    weights = [size * whole.to(size)[:, None] for size in sizes]
    return [back / weight.where(weight > 0, 1.0)[..., None] for back, weight in zip(backs, weights, strict=True)]


def likeliest(model: KVModel, text: Int[Tensor, " pos"], logits: Float[Tensor, "pos d_vocab"]) -> list[list[tuple[str, float]]]:
    """The five likeliest next tokens at each position of a text, with their probabilities."""
    best = logits.double().softmax(dim=-1).topk(min(N_GUESSES, logits.shape[-1]))
    texts = next_token_texts(model, text, best.indices)
    return [list(zip(names, row.tolist(), strict=True)) for names, row in zip(texts, best.values, strict=True)]
