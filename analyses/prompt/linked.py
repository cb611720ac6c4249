"""Prompt token, head and text token in one quantity: whose share in the attention's output is whose.

    w[l, h, i, j] = <c, o> / (|o| sum over all heads of |o|)       c = A_ij v_j W_O,  o = z_i W_O of head (l, h)

A_ij is what the unconverted model pays from text place i to prompt position j, v_j the value it reads there (shifted, where
values are shifted), o what the head writes at i. <c, o> / |o|^2 is position j's share of what its head writes, exact and
signed; |o| over the sum of all heads' weighs the heads. At each text token the w of all heads and positions, the text's own
included, sum to 1. It holds for linear and for softmax attention: a conversion changes neither pattern nor values.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from analyses.heads.rows import attention_rows
from analyses.prompt.readings import CONDITIONS, Readings, check_readings, read_text
from analyses.sequences import PromptTokens, TextTokens, prompt_text_bias, token_texts
from kvlens import HookedKVTransformer, KVBias, KVLensError
from kvlens.arguments import brief
from kvlens.signature import checked

N_GUESSES = 5
SHOWN = {"with prompt": "with_prompt", "converted": "converted", "without prompt": "without_prompt"}
"""What the view calls each condition, in its order."""


@dataclass(frozen=True)
class LinkedShares:
    """What :func:`kvlens.viz.linked_view` draws.

    Attributes:
        prompt, text: their tokens as text.
        by_prompt: w summed over nothing but the text, as a mean over its tokens: [layer, head, prompt].
        by_text: w summed over the prompt: [layer, head, text].
        between: w summed over layers and heads: [text, prompt].
        next_tokens: by condition ("with prompt", ...), for each text token the likeliest next tokens and their probabilities.
        colourings: other numbers of each head, [layer, head], by name: losses, ablations, scores.
        without_zero: names of colourings whose 0 means nothing, such as logarithms: coloured from lowest to highest.
    """

    prompt: Sequence[str]
    text: Sequence[str]
    by_prompt: Float[Tensor, "layer head prompt_pos"]
    by_text: Float[Tensor, "layer head text_pos"]
    between: Float[Tensor, "text_pos prompt_pos"]
    next_tokens: Mapping[str, Sequence[Sequence[tuple[str, float]]]]
    colourings: Mapping[str, Float[Tensor, "layer head"]] = field(default_factory=dict)
    without_zero: Collection[str] = ()

    def __post_init__(self):
        n_layers, n_heads, n_prompt = self.by_prompt.shape
        n_text = len(self.text)
        expected: dict[str, tuple[int, ...]] = {"by_prompt": (n_layers, n_heads, len(self.prompt))}
        expected |= {"by_text": (n_layers, n_heads, n_text), "between": (n_text, n_prompt)}
        for name, shape in expected.items():
            if tuple(getattr(self, name).shape) != shape:
                raise KVLensError(f"LinkedShares: {name} must be {list(shape)}, got {list(getattr(self, name).shape)}")
        for name, guesses in self.next_tokens.items():
            if len(guesses) != n_text:
                raise KVLensError(f"LinkedShares: next_tokens[{name!r}] has {len(guesses)} rows for {n_text} text tokens")
        for name, numbers in self.colourings.items():
            if not isinstance(numbers, Tensor) or tuple(numbers.shape) != (n_layers, n_heads):
                raise KVLensError(f"LinkedShares: colouring {name!r} must be [{n_layers}, {n_heads}], got {brief(numbers)}")


@checked
@torch.no_grad()
def linked_shares(
    model: HookedKVTransformer,
    prompt_tokens: PromptTokens,
    text_tokens: TextTokens,
    *,
    bias: KVBias | None = None,
    colourings: Mapping[str, Float[Tensor, "layer head"]] | None = None,
    without_zero: Collection[str] = (),
    readings: Readings | None = None,
) -> LinkedShares:
    """What :func:`kvlens.viz.linked_view` draws.

    Args:
        model: with nothing attached.
        prompt_tokens: a string, or tokens [pos] as converted, with BOS where the model wants one.
        text_tokens: a string, or tokens [pos] without BOS.
        bias: the converted prompt, if it is at hand; None converts it here.
        colourings: other numbers of each head that the reader may look at, by name.
        without_zero: names of those whose 0 means nothing, such as logarithms.
        readings: of this text in the three conditions, where they are at hand; None reads it here.

    Raises:
        KVLensError: tokens that do not fit.
    """
    prompt, text, bias = prompt_text_bias(model, prompt_tokens, text_tokens, bias)
    shares = attention_output_shares(model, prompt, text)
    readings = read_text(model, prompt, text, bias=bias) if readings is None else readings
    check_readings(readings, CONDITIONS, len(text))
    return LinkedShares(
        prompt=token_texts(model, prompt),
        text=token_texts(model, text),
        by_prompt=torch.stack([w.mean(dim=1) for w in shares]),
        by_text=torch.stack([w.sum(dim=2) for w in shares]),
        between=torch.stack([w.sum(dim=0) for w in shares]).sum(dim=0),
        next_tokens={name: likeliest(model, readings[condition].logits) for name, condition in SHOWN.items()},
        colourings=dict(colourings or {}),
        without_zero=tuple(without_zero),
    )


def attention_output_shares(
    model: HookedKVTransformer, prompt: Int[Tensor, " prompt_pos"], text: Int[Tensor, " text_pos"]
) -> list[Float[Tensor, "head text_pos prompt_pos"]]:
    """w of every layer, in float64 on the CPU."""
    n_prompt, everything = len(prompt), torch.cat([prompt, text])
    places = torch.arange(n_prompt, len(everything))
    patterns = attention_rows(model, everything, places)[..., :n_prompt].double()
    value = "hook_v_shifted" if model.cfg.kv_shift is not None and model.cfg.kv_shift.values else "hook_v"
    names = [f"blocks.{layer}.attn.{name}" for layer in range(model.cfg.n_layers) for name in (value, "hook_z")]
    mask = torch.ones_like(everything[None])
    _, cache = model.run_with_cache(everything[None], attention_mask=mask, names_filter=names, stop_at_layer=model.cfg.n_layers)
    projections, sizes = [], []
    for layer, pattern in enumerate(patterns):
        v, z = (cache[f"blocks.{layer}.attn.{name}"][0].double().cpu() for name in (value, "hook_z"))
        w_o = model.blocks[layer].attn.W_O.double().cpu()
        written = torch.einsum("thd,hdm->thm", z[n_prompt:], w_o)
        back = torch.einsum("thm,hdm->thd", written, w_o)  # <v W_O, o> = <v, o W_O^T>
        v = v[:n_prompt].repeat_interleave(z.shape[1] // v.shape[1], dim=1)
        projections.append(pattern * torch.einsum("phd,thd->htp", v, back))
        sizes.append(written.norm(dim=-1).T)
    whole = torch.stack(sizes).sum(dim=(0, 1))  # of all heads, at each text token
    weights = [size * whole for size in sizes]
    return [
        projection / weight.where(weight > 0, 1.0)[..., None] for projection, weight in zip(projections, weights, strict=True)
    ]


def likeliest(model: HookedKVTransformer, logits: Float[Tensor, "pos d_vocab"]) -> list[list[tuple[str, float]]]:
    """The five likeliest next tokens at each place, with their probabilities."""
    best = logits.double().softmax(dim=-1).topk(min(N_GUESSES, logits.shape[-1]))
    texts = [token_texts(model, row) for row in best.indices]
    return [list(zip(names, row.tolist(), strict=True)) for names, row in zip(texts, best.values, strict=True)]
