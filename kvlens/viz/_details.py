"""A page's data on every head, shown when the head is clicked, within size limits."""

import math
from typing import Any

import torch
from torch import Tensor

from kvlens.analyses import HeadDetails
from kvlens.viz._blocks import block_means, block_size, token_blocks
from kvlens.viz._quantized import quantized
from kvlens.viz._text import rounded

MAX_PROMPT_COLUMNS, MAX_TEXT_COLUMNS = 256, 128
MAX_NUMBERS, MAX_SHARES = 270_000, 70_000
"""The most numbers in a page for all heads together, and the most shares among them; each takes about three bytes.

A report page thus has about 3 MB, for prompts of any length.
"""


def details_json(details: HeadDetails) -> dict[str, Any]:
    """The data of the page, within its size limits, and ``notes`` that say what was left out."""
    n_layers, n_heads = details.pattern.shape[:2]
    n_prompt, n_text, n_queries = len(details.prompt), len(details.text), len(details.queries)
    n_columns = details.pattern.shape[-1] - n_text
    of_share = block_size(n_prompt, MAX_SHARES // (n_layers * n_heads))
    shares = block_means(details.prompt_shares, of_share)
    a_head = max(32, (MAX_NUMBERS - shares.numel()) // max(1, n_layers * n_heads * n_queries))
    of_text = block_size(n_text, min(MAX_TEXT_COLUMNS, 2 * a_head // 5))
    per_cell = block_size(n_columns, min(MAX_PROMPT_COLUMNS, a_head - math.ceil(n_text / of_text)))
    of_prompt = per_cell * details.block
    parts = details.pattern.split([n_columns, n_text], dim=-1)
    means = block_means(parts[0], per_cell, per_column=details.block, n=n_prompt), block_means(parts[1], of_text)
    cells = torch.cat(means, dim=-1)
    return {
        "n_prompt": n_prompt,
        "text": details.text,
        "queries": (details.queries - n_prompt).tolist(),
        "columns": {"prompt": token_blocks(details.prompt, of_prompt), "text": token_blocks(details.text, of_text)},
        "blocks": token_blocks(details.prompt, of_share),
        "heads": [
            [_head(details, layer, head, cells[layer, head], shares[layer, head]) for head in range(n_heads)]
            for layer in range(n_layers)
        ],
        "notes": _notes(details, n_queries, of_prompt, of_text, of_share),
    }


def _head(details: HeadDetails, layer: int, head: int, cells: Tensor, shares: Tensor) -> dict[str, Any]:
    whole = rounded(float(details.prompt_shares[layer, head].sum()))
    own = {"pattern": quantized(cells), "shares": quantized(shares), "whole": whole}
    return own if details.bias_shares is None else {**own, "bias": quantized(details.bias_shares[layer, head])}


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
