"""Heads as steps of learning: a map of their dual models' losses, and below it the demonstrations of a chosen head."""

import functools
from typing import Any

import numpy as np
import pandas as pd
import torch

from kvlens.checks import checked
from kvlens.errors import KVLensError
from kvlens.viz._figures import block_means, block_size, token_blocks
from kvlens.viz._text import data_script, html_text, quantized, rounded
from kvlens.viz.heads import column_choice, draw_heat_map, head_map, heat_figure, maps_data
from kvlens.viz.page import Piece

FIGURES = ("log_loss_drop", "step_share", "demonstration_weight", "cosine_before", "cosine_after")
LOGARITHMS = ("log_loss_drop",)
OF_TOKENS = ("weight", "output_share", "log_step_norm", "cosine_before", "cosine_after")
MOST = 5
"""The number of demonstrations listed for each head by their contribution to the output, and again by that to the step."""
MAX_CELLS = 100_000
"""The most numbers in each of the two matrices; each takes about three bytes."""


@checked
def dual_view(
    losses: pd.DataFrame,
    demonstrations: pd.DataFrame,
    *,
    query: str = "the query",
    title: str = "steps of the dual models",
    ax: Any = None,
) -> Piece | Any:
    """A map of the heads' steps; choosing a head shows the contribution of each demonstration to its step and its output.

    Args:
        losses: the table of ``dual_losses``, for one prompt; each head's numbers are means over its queries.
        demonstrations: the table of ``dual_demonstrations``, for one query.
        query: that query's token.
        title: title above the map.
        ax: draw the map of the heads into these matplotlib axes instead, and return them.

    Returns:
        A `Piece`; ``ax`` where it was given.

    Raises:
        KVLensError: a head with missing or duplicate demonstrations.
    """
    by_head = losses.groupby(["layer", "head"], as_index=False)[list(FIGURES)].mean()
    given = demonstrations.sort_values(["layer", "head", "prompt_position"], kind="stable")
    n = given["prompt_position"].nunique()
    if not (given.groupby(["layer", "head"]).size() == n).all() or len(given) != n * len(by_head):
        raise KVLensError(
            f"dual_view: expected one row for each of {len(by_head)} heads and {n} demonstrations, got {len(given)}; give the "
            "table of one query of the same prompt"
        )
    if ax is not None:
        return draw_heat_map(ax, by_head, FIGURES[0], title, without_zero=True)
    data = {"maps": maps_data(by_head, FIGURES, LOGARITHMS), **_json(given, by_head, n, query)}
    body = (
        f'<figure class="piece" data-kvlens="dual"><figcaption>{html_text(title)}{column_choice(FIGURES)}</figcaption>'
        f"{head_map(by_head, FIGURES[0], clickable=True, without_zero=FIGURES[0] in LOGARITHMS, title=title)}"
        f'<div class="detail"></div>{data_script(data)}</figure>'
    )
    return Piece(title, body, figure=functools.partial(heat_figure, by_head, FIGURES[0], title, without_zero=True))


def _json(given: pd.DataFrame, by_head: pd.DataFrame, n: int, query: str) -> dict[str, Any]:
    """The data of the page. Long prompts are colored in blocks of neighbors, each with its mean per token."""
    numbers = {name: given[name].to_numpy().reshape(len(by_head), n) for name in OF_TOKENS}
    numbers["step"] = _shares(numbers["log_step_norm"])
    positions, tokens = given["prompt_position"].tolist()[:n], [str(token) for token in given["token"].tolist()[:n]]
    size = block_size(n, MAX_CELLS // len(by_head))
    heads: dict[int, dict[int, Any]] = {}
    for i, row in enumerate(by_head.itertuples()):
        of_head = {name: values[i] for name, values in numbers.items()}
        heads.setdefault(int(row.layer), {})[int(row.head)] = {
            "step": quantized(block_means(torch.tensor(of_head["step"]), size)),
            "output": quantized(block_means(torch.tensor(of_head["output_share"]), size)),
            "whole": rounded(float(of_head["output_share"].sum())),
            "most": [_row(of_head, positions[j], tokens[j], j) for j in _most(of_head)],
        }
    return {"n": n, "query": query, "block": size, "blocks": token_blocks(tokens, size), "heads": heads}


def _shares(logs: np.ndarray) -> np.ndarray:
    """exp of each number, divided by the sum over its row."""
    largest = logs.max(axis=1, keepdims=True)
    sizes = np.exp(logs - np.where(np.isfinite(largest), largest, 0.0))
    total = sizes.sum(axis=1, keepdims=True)
    return sizes / np.where(total > 0, total, 1.0)


def _most(of_head: dict[str, np.ndarray]) -> list[int]:
    """The demonstrations that are listed: first those of the output, then those of the step."""
    strongest = [np.argsort(-np.abs(of_head[name]), kind="stable")[:MOST].tolist() for name in ("output_share", "step")]
    return list(dict.fromkeys([*strongest[0], *strongest[1]]))


def _row(of_head: dict[str, np.ndarray], position: int, token: str, j: int) -> list[Any]:
    names = ("step", "output_share", "weight", "cosine_before", "cosine_after")
    return [position, token, *(rounded(float(of_head[name][j])) for name in names)]
