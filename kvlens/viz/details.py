"""What a click on a head shows: whom the text's queries attend to, which prompt tokens count, and how much the bias carries."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from analyses.bias.positions import bias_positions
from kvlens.conversion import convert_prompt
from kvlens.errors import KVLensError
from kvlens.kv_bias import KVBias
from kvlens.model import HookedKVTransformer
from kvlens.viz._blocks import block_size, block_sums
from kvlens.viz._text import rounded
from kvlens.viz.patterns import attention_rows

MAX_QUERIES, MAX_PROMPT_QUERIES = 128, 64
MAX_PROMPT_COLUMNS, MAX_TEXT_COLUMNS = 256, 128
MAX_CELLS, MAX_SHARES = 600_000, 300_000
"""Numbers in a page for all heads together; each takes about three bytes."""


@dataclass(frozen=True)
class HeadDetails:
    """Every head's attention on one prompt and text.

    Attributes:
        prompt, text: their tokens as text.
        queries: positions in prompt + text, ascending: the rows of ``pattern``. The text's are there (128 of a longer one),
            and of the prompt the positions that these attend to most.
        pattern: of the unconverted model, over prompt and text: [layer, head, query, prompt + text].
        prompt_shares: [layer, head, prompt] of each prompt token in the head's output, over the whole text; with the shares of
            the shift boundary and of the text itself they sum to 1.
        bias_shares: [layer, head, text] how much of the head's output comes from the prompt, 0..1; None where it is unknown.
    """

    prompt: list[str]
    text: list[str]
    queries: Int[Tensor, " query"]
    pattern: Float[Tensor, "layer head query pos"]
    prompt_shares: Float[Tensor, "layer head prompt_pos"]
    bias_shares: Float[Tensor, "layer head text_pos"] | None = None

    def to_json(self) -> dict[str, Any]:
        """The data of the page, within its limits of size, and ``notes`` that say what was left out."""
        n_layers, n_heads = self.pattern.shape[:2]
        n_prompt, n_text = len(self.prompt), len(self.text)
        of_query = self.queries >= n_prompt
        n_queries = int(of_query.sum())
        a_head = max(32, MAX_CELLS // max(1, n_layers * n_heads * n_queries))
        of_prompt = block_size(n_prompt, min(MAX_PROMPT_COLUMNS, 2 * a_head // 3))
        of_text = block_size(n_text, min(MAX_TEXT_COLUMNS, a_head // 3))
        parts = self.pattern[:, :, of_query].split([n_prompt, n_text], dim=-1)
        cells = torch.cat([block_sums(parts[0], of_prompt), block_sums(parts[1], of_text)], dim=-1)
        of_share = block_size(n_prompt, MAX_SHARES // (n_layers * n_heads))
        shares = block_sums(self.prompt_shares, of_share)
        return {
            "prompt": self.prompt,
            "text": self.text,
            "queries": (self.queries[of_query] - n_prompt).tolist(),
            "block": {"prompt": of_prompt, "text": of_text, "share": of_share},
            "heads": [
                [self._head(layer, head, cells[layer, head], shares[layer, head]) for head in range(n_heads)]
                for layer in range(n_layers)
            ],
            "notes": self._notes(n_queries, of_prompt, of_text, of_share),
        }

    def _head(self, layer: int, head: int, cells: Tensor, shares: Tensor) -> dict[str, Any]:
        own = {"pattern": _quantised(cells), "shares": _quantised(shares)}
        return own if self.bias_shares is None else {**own, "bias": _quantised(self.bias_shares[layer, head])}

    def _notes(self, n_queries: int, of_prompt: int, of_text: int, of_share: int) -> list[str]:
        notes = []
        if n_queries < len(self.text):
            notes.append(f"{n_queries} of the text's {len(self.text):,} queries are shown, evenly spaced.")
        if of_prompt > 1:
            notes.append(f"One column sums {of_prompt} neighbouring tokens of the prompt's {len(self.prompt):,}.")
        if of_text > 1:
            notes.append(f"One column sums {of_text} neighbouring tokens of the text's {len(self.text):,}.")
        if of_share > 1:
            notes.append(f"Shares are those of {of_share} neighbouring prompt tokens together.")
        return notes


@torch.no_grad()
def head_details(
    model: HookedKVTransformer,
    prompt_tokens: Int[Tensor, " prompt_pos"],
    text_tokens: Int[Tensor, " text_pos"],
    *,
    bias: KVBias | None = None,
) -> HeadDetails:
    """Run the unconverted model on prompt and text, and the converted one on the text.

    Args:
        model: with linear attention and nothing attached.
        prompt_tokens, text_tokens: at least one each.
        bias: the converted prompt, if it is at hand; None converts it here.

    Raises:
        KVLensError: softmax attention, an attached bias, an empty prompt or text, heads that do not write to the residual
            stream directly.
    """
    if not len(prompt_tokens) or not len(text_tokens):
        raise KVLensError(f"head_details: {len(prompt_tokens)} prompt and {len(text_tokens)} text tokens; give some of both")
    if model.attached_kv_bias is not None:
        raise KVLensError("head_details: a bias is attached to this model; detach it first (model.detach_kv_bias())")
    bias = convert_prompt(model, prompt_tokens) if bias is None else bias
    n_prompt, n_text = len(prompt_tokens), len(text_tokens)
    everything = torch.cat([prompt_tokens, text_tokens])
    queries = n_prompt + torch.linspace(0, n_text - 1, min(n_text, MAX_QUERIES)).round().long()
    pattern = attention_rows(model, everything, queries)
    attended = pattern[..., :n_prompt].abs().sum(dim=(0, 1, 2))
    in_prompt = attended.topk(min(n_prompt, MAX_PROMPT_QUERIES)).indices.sort().values
    return HeadDetails(
        prompt=_texts(model, prompt_tokens),
        text=_texts(model, text_tokens),
        queries=torch.cat([in_prompt, queries]),
        pattern=torch.cat([attention_rows(model, everything, in_prompt), pattern], dim=2),
        prompt_shares=prompt_shares(model, prompt_tokens, text_tokens),
        bias_shares=_bias_shares(model, text_tokens, bias),
    )


def prompt_shares(
    model: HookedKVTransformer, prompt_tokens: Int[Tensor, " prompt_pos"], text_tokens: Int[Tensor, " text_pos"]
) -> Float[Tensor, "layer head prompt_pos"]:
    """The share of each prompt token in each head's output on the text (:func:`analyses.bias.positions.bias_positions`)."""
    frame = bias_positions(model, prompt_tokens, text_tokens)
    of_prompt = frame.loc[frame["part"] == "prompt", "output_share"]  # by layer, head, position
    shares = torch.tensor(of_prompt.to_numpy(), dtype=torch.float32)
    return shares.view(model.cfg.n_layers, model.cfg.n_heads, len(prompt_tokens))


def _bias_shares(
    model: HookedKVTransformer, text: Int[Tensor, " text_pos"], bias: KVBias
) -> Float[Tensor, "layer head text_pos"]:
    """||z_bias|| / (||z_bias|| + ||z_context||) of every head at every place of the text, 0 for 0 / 0."""
    names = [f"blocks.{layer}.attn.hook_z_{part}" for layer in range(model.cfg.n_layers) for part in ("bias", "context")]
    with model.kv_bias(bias):
        mask = torch.ones_like(text[None])
        _, cache = model.run_with_cache(text[None], attention_mask=mask, names_filter=names, stop_at_layer=model.cfg.n_layers)
    norms = torch.stack([cache[name][0].double().norm(dim=-1).T.cpu() for name in names]).unflatten(0, (-1, 2))
    total = norms.sum(dim=1)
    return torch.where(total > 0, norms[:, 0] / total.clamp(min=torch.finfo(total.dtype).tiny), 0.0).float()


def _texts(model: HookedKVTransformer, tokens: Tensor) -> list[str]:
    if model.tokenizer is None:
        return [str(token) for token in tokens.tolist()]
    return [model.tokenizer.decode([token]) for token in tokens.tolist()]


def _quantised(values: Float[Tensor, "..."]) -> dict[str, Any]:
    """Integers of at most three digits and their unit, one list in row order; None where a value is not finite."""
    finite = values.isfinite()
    largest = float(values[finite].abs().max()) if bool(finite.any()) else 0.0
    unit = rounded(largest / 999, digits=4) or 1.0
    whole = (values.nan_to_num(0.0, 0.0, 0.0) / unit).round().int()
    cells = whole.flatten().tolist()
    if not bool(finite.all()):
        cells = [cell if real else None for cell, real in zip(cells, finite.flatten().tolist(), strict=True)]
    return {"unit": unit, "cells": cells}
