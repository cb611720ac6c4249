"""A page's data on every head: what a click on one of them shows, within limits of size."""

import math
from typing import Any

import torch
from torch import Tensor

from analyses import HeadDetails
from kvlens.viz._blocks import block_means, block_size
from kvlens.viz._quantised import quantised
from kvlens.viz._text import rounded

MAX_PROMPT_COLUMNS, MAX_TEXT_COLUMNS = 256, 128
MAX_CELLS, MAX_SHARES = 270_000, 300_000
"""Numbers in a page for all heads together; each takes about three bytes. A page on a prompt of 512 tokens stays below 3 MB."""


def details_json(details: HeadDetails) -> dict[str, Any]:
    """The data of the page, within its limits of size, and ``notes`` that say what was left out."""
    n_layers, n_heads = details.pattern.shape[:2]
    n_prompt, n_text = len(details.prompt), len(details.text)
    of_query = details.queries >= n_prompt
    n_queries = int(of_query.sum())
    a_head = max(32, MAX_CELLS // max(1, n_layers * n_heads * n_queries))
    of_text = block_size(n_text, min(MAX_TEXT_COLUMNS, 2 * a_head // 5))
    of_prompt = block_size(n_prompt, min(MAX_PROMPT_COLUMNS, a_head - math.ceil(n_text / of_text)))
    parts = details.pattern[:, :, of_query].split([n_prompt, n_text], dim=-1)
    cells = torch.cat([block_means(parts[0], of_prompt), block_means(parts[1], of_text)], dim=-1)
    of_share = block_size(n_prompt, MAX_SHARES // (n_layers * n_heads))
    shares = block_means(details.prompt_shares, of_share)
    return {
        "prompt": details.prompt,
        "text": details.text,
        "queries": (details.queries[of_query] - n_prompt).tolist(),
        "block": {"prompt": of_prompt, "text": of_text, "share": of_share},
        "heads": [
            [_head(details, layer, head, cells[layer, head], shares[layer, head]) for head in range(n_heads)]
            for layer in range(n_layers)
        ],
        "notes": _notes(details, n_queries, of_prompt, of_text, of_share),
    }


def _head(details: HeadDetails, layer: int, head: int, cells: Tensor, shares: Tensor) -> dict[str, Any]:
    whole = rounded(float(details.prompt_shares[layer, head].sum()))
    own = {"pattern": quantised(cells), "shares": quantised(shares), "whole": whole}
    return own if details.bias_shares is None else {**own, "bias": quantised(details.bias_shares[layer, head])}


def _notes(details: HeadDetails, n_queries: int, of_prompt: int, of_text: int, of_share: int) -> list[str]:
    notes = []
    if n_queries < len(details.text):
        notes.append(f"{n_queries} of the text's {len(details.text):,} queries are shown, evenly spaced.")
    if of_prompt > 1:
        notes.append(f"One column is the mean of {of_prompt} neighbouring tokens of the prompt's {len(details.prompt):,}.")
    if of_text > 1:
        notes.append(f"One column is the mean of {of_text} neighbouring tokens of the text's {len(details.text):,}.")
    if of_share > 1:
        notes.append(f"Shares are means over {of_share} neighbouring prompt tokens.")
    return notes
