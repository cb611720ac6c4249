"""Layer by layer: the effect of a prompt on each next token after each layer (logit lens)."""

import functools
from typing import Any

import numpy as np
import pandas as pd

from kvlens.checks import checked
from kvlens.errors import KVLensError
from kvlens.viz._color import beyond, diverging_map, strongest
from kvlens.viz._text import data_script, html_text, label, number, printable, rounded
from kvlens.viz.piece import Piece

MAX_POSITIONS = 512
"""The most text tokens on a map; if there are more, a note says so."""


@checked
def depth_map(table: pd.DataFrame, *, title: str = "layer by layer", axes: Any = None) -> Piece | Any:
    """Depths down, text tokens across; blue where the prompt lowers the loss on the next token, red where it raises it.

    Args:
        table: one row per depth and text token, as :func:`kvlens.analyses.prompt_by_depth` returns it: ``layer`` (n_layers for
            the whole model), ``position``, ``token``, ``loss_change`` (without minus with the prompt, nats), ``guess_with`` and
            ``guess_without`` (the most probable next token at that depth).
        title: title above the map.
        axes: draw the static picture into these two matplotlib axes instead, the map and the curve of its means, and return
            them.

    Returns:
        A `Piece`; ``axes`` where they were given.

    Raises:
        KVLensError: a position that has two rows at one depth.
    """
    if table.duplicated(["layer", "position"]).any():
        raise KVLensError("depth_map: one layer and position has two rows; give the rows of one prompt and text")
    positions = np.sort(table["position"].unique())
    shown = table[table["position"].isin(positions[:MAX_POSITIONS])].sort_values(["layer", "position"])
    changes = _grid(shown, "loss_change")
    top = strongest(changes.to_numpy().flat, 0.98)
    means = table.groupby("layer")["loss_change"].mean()
    data = {
        "layers": [int(layer) for layer in changes.index],
        "tokens": [str(token) for token in shown[shown["layer"] == changes.index[0]]["token"]],
        "positions": [int(position) for position in changes.columns],
        "change": [[rounded(float(x)) for x in row] for row in changes.to_numpy()],
        "with": _grid(shown, "guess_with").to_numpy().tolist(),
        "without": _grid(shown, "guess_without").to_numpy().tolist(),
        "means": [rounded(float(x)) for x in means],
        "top": rounded(top),
    }
    if axes is not None:
        ax, curve = np.ravel(axes)[:2]
        _draw(ax, curve, data, title)
        return axes
    n_tokens = len(positions)
    left_out = "" if n_tokens <= MAX_POSITIONS else f" The first {MAX_POSITIONS} of {n_tokens:,} text tokens are shown."
    note = (
        "The loss on the next token, read from the residual stream at each depth (logit lens), without minus with the "
        f"prompt, in nats: blue where the prompt helps, red where it hurts. Mean at the end: {number(float(means.iloc[-1]))}."
        f"{left_out}"
    )
    body = (
        f'<figure class="piece" data-kvlens="depth"><figcaption>{html_text(title)}</figcaption>'
        f'<p class="note">{html_text(note)}</p><div class="depth"></div>'
        f"{data_script(data)}</figure>"
    )
    return Piece(title, body, figure=functools.partial(_figure, data, title))


def _grid(table: pd.DataFrame, column: str) -> pd.DataFrame:
    return table.pivot(index="layer", columns="position", values=column)  # noqa: PD010, one row per layer and position was checked


def _figure(data: dict[str, Any], title: str) -> Any:
    from matplotlib.figure import Figure

    n_rows, n_columns = len(data["layers"]), len(data["positions"])
    figure = Figure(figsize=(2.5 + 0.16 * min(n_columns, 120), 1.4 + 0.3 * n_rows))
    ax, curve = figure.subplots(1, 2, width_ratios=(max(3, n_columns / 6), 1), sharey=True)
    _draw(ax, curve, data, title)
    return figure


def _draw(ax: Any, curve: Any, data: dict[str, Any], title: str) -> None:
    values = np.array([[np.nan if x is None else x for x in row] for row in data["change"]], dtype=float)
    n_rows, n_columns = values.shape
    top = data["top"] or 1.0
    image = ax.imshow(values, cmap=diverging_map(), vmin=-top, vmax=top, aspect="auto", origin="lower")
    ax.set(ylabel="depth (layers read)", title=printable(title))
    ax.set_yticks(range(n_rows), [str(layer) for layer in data["layers"]])
    ax.xaxis.tick_top()
    ax.set_xticks(range(n_columns), [printable(label(token))[:12] for token in data["tokens"]], rotation=90, fontsize=6)
    for tick in ax.get_xticklabels():
        tick.set_parse_math(False)
    curve.plot([np.nan if x is None else x for x in data["means"]], range(n_rows), color="black", marker=".")
    curve.axvline(0, color="gray", linewidth=0.8)
    curve.set(xlabel="mean, nats")
    curve.figure.colorbar(image, ax=curve, label="loss without - with, nats", extend=beyond(values.flat, -top, top))
