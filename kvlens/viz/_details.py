"""A page's data on every head, shown when the head is clicked, within size limits."""

import math
from typing import Any

import torch
from torch import Tensor

from kvlens.analyses import HeadDetails
from kvlens.viz._blocks import block_means, block_size, token_blocks
from kvlens.viz._color import FULL, strongest
from kvlens.viz._quantized import quantized
from kvlens.viz._text import rounded

MAX_PROMPT_COLUMNS, MAX_TEXT_COLUMNS = 256, 128
MAX_NUMBERS, MAX_SHARES = 270_000, 70_000
"""The most numbers in a page for all heads together, and the most shares among them."""
MIN_COLUMNS = 32
"""A pattern has these, even if it makes more numbers; what is more than `MAX_NUMBERS` is rounded to `LEVELS`."""
LEVELS = 63
"""Of the colors from none to full: more than are seen. Fewer numbers keep three digits."""


def details_json(details: HeadDetails) -> dict[str, Any]:
    """The data of the page, within its size limits, and ``notes`` that say what was left out."""
    n_layers, n_heads = details.pattern.shape[:2]
    n_prompt, n_text, n_queries = len(details.prompt), len(details.text), len(details.queries)
    n_columns = details.pattern.shape[-1] - n_text
    of_share = block_size(n_prompt, MAX_SHARES // (n_layers * n_heads))
    shares = block_means(details.prompt_shares, of_share)
    a_head = max(MIN_COLUMNS, (MAX_NUMBERS - shares.numel()) // max(1, n_layers * n_heads * n_queries))
    of_text = block_size(n_text, min(MAX_TEXT_COLUMNS, 2 * a_head // 5))
    per_cell = block_size(n_columns, min(MAX_PROMPT_COLUMNS, a_head - math.ceil(n_text / of_text)))
    of_prompt = per_cell * details.block
    parts = details.pattern.split([n_columns, n_text], dim=-1)
    means = block_means(parts[0], per_cell, per_column=details.block, n=n_prompt), block_means(parts[1], of_text)
    cells = torch.cat(means, dim=-1)
    coarse = cells.numel() + shares.numel() > MAX_NUMBERS
    bias = details.bias_shares
    return {
        "n_prompt": n_prompt,
        "text": details.text,
        "queries": (details.queries - n_prompt).tolist(),
        "columns": {"prompt": token_blocks(details.prompt, of_prompt), "text": token_blocks(details.text, of_text)},
        "blocks": token_blocks(details.prompt, of_share),
        "pattern": _by_head(cells, coarse),
        "shares": _by_head(shares, coarse),
        "bias": None if bias is None else _by_head(bias, coarse),
        "whole": [[rounded(x) for x in heads] for heads in details.prompt_shares.sum(dim=-1).tolist()],
        "notes": [
            *_notes(details, n_queries, of_prompt, of_text, of_share),
            *([f"Values are rounded to 1/{LEVELS} of full color."] if coarse else []),
        ],
    }


def _by_head(values: Tensor, coarse: bool) -> list[list[dict[str, Any]]]:
    """[layer][head]: the numbers of a head, to three digits of its largest or, if ``coarse``, what their common colors show."""
    precision: dict[str, Any] = {"full": strongest(values.flatten().tolist(), FULL), "levels": LEVELS} if coarse else {}
    return [[quantized(head, **precision) for head in layer] for layer in values]


def _notes(details: HeadDetails, n_queries: int, of_prompt: int, of_text: int, of_share: int) -> list[str]:
    notes = []
    if n_queries < len(details.text):
        notes.append(f"{n_queries} of the text's {len(details.text):,} queries are shown, evenly spaced.")
    if of_prompt > 1:
        notes.append(f"One column is the mean of {of_prompt} neighboring tokens of the prompt's {len(details.prompt):,}.")
    if of_text > 1:
        notes.append(f"One column is the mean of {of_text} neighboring tokens of the text's {len(details.text):,}.")
    if of_share > 1:
        notes.append(f"Shares are means over {of_share} neighboring prompt tokens; the text of long blocks is shortened.")
    return notes
