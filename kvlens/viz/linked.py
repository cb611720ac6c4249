"""Prompt, heads and text side by side: choosing a token or a head in one panel recolors the other two.

All three panels show one quantity, the share of prompt token j, through head (l, h), in the attention output at text token i:

    w[l, h, i, j] = <c, o> / (|o| sum over all heads of |o|)       c = A_ij v_j W_O,  o = z_i W_O of that head

At one text token the shares of all heads and all positions, including those of the text, sum to 1. A panel only needs sums of w
over one or two axes, so a page contains just three matrices.
"""

import math
from typing import Any

from kvlens.analyses import LinkedShares
from kvlens.checks import checked
from kvlens.viz._blocks import block_means, block_size, token_blocks
from kvlens.viz._quantized import quantized
from kvlens.viz._text import data_script, html_text, part_note, percent, rounded
from kvlens.viz.piece import Piece

MAX_CELLS = 60_000
"""The most numbers in each of the three matrices; each takes about three bytes."""


@checked
def linked_view(data: LinkedShares, *, title: str = "prompt, heads and next token") -> Piece:
    """The three panels and, below them, the most probable next tokens after a chosen text token.

    Works with the keyboard: arrow keys move within a panel, Enter chooses, Escape clears the choice.
    """
    whole = float(data.by_text.nansum(dim=(0, 1)).mean())
    said = (
        f"Shares of the prompt in the attention output; in total {percent(whole)}, averaged over the text's tokens; the rest "
        "comes from the text itself. Blue adds to the output, red subtracts from it; a marked corner is beyond the scale."
        if math.isfinite(whole)
        else "Shares of the prompt in the attention output."
    )
    said = f"{said} {part_note([*data.prompt, *data.text])}".strip()
    body = (
        f'<figure class="piece" data-kvlens="linked"><figcaption>{html_text(title)}</figcaption>'
        f'<p class="note">{html_text(said)}</p><div class="linked"></div>'
        f"{data_script(_json(data))}</figure>"
    )
    return Piece(title, body)


def _json(data: LinkedShares) -> dict[str, Any]:
    """The data of the page. A long prompt is shown in blocks of neighbors, each with its mean per token."""
    n_layers, n_heads, n_prompt = data.by_prompt.shape
    n_text = min(len(data.text), max(16, MAX_CELLS // (n_layers * n_heads)))
    limit = min(MAX_CELLS // (n_layers * n_heads), MAX_CELLS // n_text)
    per_block = block_size(data.between.shape[1], limit)
    size = per_block * data.block
    return {
        "n_layers": n_layers,
        "n_heads": n_heads,
        "n_prompt": n_prompt,
        "block": size,
        "blocks": token_blocks(data.prompt, size),
        "text": list(data.text[:n_text]),
        "by_prompt": quantized(block_means(data.by_prompt, size)),
        "by_text": quantized(data.by_text[..., :n_text]),
        "between": quantized(block_means(data.between[:n_text], per_block, per_column=data.block, n=n_prompt)),
        "next": {
            name: [[[token, rounded(p)] for token, p in row] for row in rows[:n_text]]
            for name, rows in data.next_tokens.items()
        },
        "colorings": {
            name: {**quantized(numbers), "without_zero": name in data.without_zero} for name, numbers in data.colorings.items()
        },
        "note": f"{len(data.text):,} tokens." + (f" The first {n_text} are shown." if n_text < len(data.text) else ""),
    }
