"""The share of each prompt token, head and text token in the attention's output, as one quantity.

    w[l, h, i, j] = <c, o> / (|o| sum over all heads of |o|)       c = A_ij v_j W_O,  o = z_i W_O of head (l, h)

A_ij is the attention of the unconverted model from text position i to prompt position j, v_j the value read there (with the
shift, if there is one), o what the head writes at i. <c, o> / |o|^2 is position j's share of what the head writes, exact and
signed; |o| over the sum over all heads is the weight of the head. At each text token the w of all heads and positions,
including those of the text, sum to 1. This holds for linear and softmax attention, since a conversion changes neither pattern
nor values. In a recurrent layer A is the exact effective attention, and W_O stands for the frozen norm and gate after z,
followed by the output projection; in a layer that gates its heads, c includes the gate.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import KVBias, KVLensError, KVModel
from kvlens.checks import checked
from kvlens.errors import brief
from kvlens.memory import BLOCK_NUMBERS
from kvlens.model import heads_per_layer, output_weights
from kvlens.texts import next_token_texts, token_texts

from ..bias.positions import reading_of
from ..bias.reads import Stretch, TextReads
from ..segments import Progress, PromptColumns, bar_unless, zeros_by_head
from ..sequences import PromptTokens, TextTokens, prompt_text_bias
from .readings import CONDITIONS, Readings, check_readings, read_text

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

    def __post_init__(self):
        n_layers, n_heads, _ = self.by_prompt.shape
        for name, numbers in self.colorings.items():
            if not isinstance(numbers, Tensor) or tuple(numbers.shape) != (n_layers, n_heads):
                raise KVLensError(f"LinkedShares: coloring {name!r} must be [{n_layers}, {n_heads}], got {brief(numbers)}")


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
    on_progress: Progress | None = None,
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
        on_progress: called with the fraction done; None shows a progress bar on a terminal if it takes long.

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

    with bar_unless(on_progress, "linked_shares") as tell:
        visit_shares(model, prompt, text, add, on_progress=tell)
    readings = read_text(model, prompt, text, bias=bias) if readings is None else readings
    check_readings(readings, CONDITIONS, len(text))
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
    on_progress: Progress | None = None,
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
