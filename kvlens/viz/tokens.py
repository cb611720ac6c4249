"""Text with numbers at its tokens: tokens colored by one number each, and by layer (logit lens)."""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pandas as pd

from kvlens.arguments import numbers_of
from kvlens.checks import Within, checked
from kvlens.errors import KVLensError
from kvlens.texts import NEWLINE, joined
from kvlens.viz._figures import (
    FULL_COLOR,
    beyond,
    diverging_map,
    strongest,
    style,
)
from kvlens.viz._text import data_script, html_text, label, number, part_note, printable, rounded, running
from kvlens.viz.page import Piece

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_TOKENS = 4096
LINE = 92
"""Characters per line of the static picture."""
FONT, CHARACTER = 7.5, 7.5 * 0.602 / 72
"""Font size in points, and the width of a letter in inches: DejaVu Sans Mono is 0.602 of its size wide."""


@checked
def colored_tokens(
    tokens: Iterable[str],
    values: object,
    *,
    title: str = "tokens",
    unit: str = "value",
    top: Annotated[float, Within(0)] | None = None,
    ax: "Axes | None" = None,
) -> Piece | Any:
    """Draw tokens in reading order, blue where their value is positive and red where it is negative.

    >>> colored_tokens(["a", " widget"], [0.5, -1.0], unit="nats").save_html("tokens.html")

    Args:
        tokens: any strings, such as those that :func:`kvlens.analyses.token_texts` makes from a model's tokens. Its text for
            a token with part of a character, such as ``<0xC3>``, is shown as ``⋯``.
        values: one number per token; tokens whose value is not finite are not colored.
        title, unit: title, and the unit of the values.
        top: the magnitude that gets full color; None takes a high quantile.
        ax: draw the static picture into these matplotlib axes instead, and return them.

    More than 4,096 tokens are shown in blocks of neighbors, each with the mean of its values, which the title says.

    Returns:
        A `Piece`; ``ax`` where it was given.

    Raises:
        KVLensError: no tokens, or another number of values than of tokens.
    """
    shown, numbers = list(tokens), numbers_of(values).tolist()
    if not shown or len(shown) != len(numbers):
        raise KVLensError(f"colored_tokens: {len(shown)} tokens, {len(numbers)} values; give one value per token, at least one")
    if len(shown) > MAX_TOKENS:
        size = math.ceil(len(shown) / MAX_TOKENS)
        title += f" (blocks of {size} of the {len(shown):,} tokens, mean of each)"
        shown, numbers = _in_blocks(shown, numbers, size)
    full = strongest(numbers, FULL_COLOR) if top is None else top
    if ax is not None:
        return _draw(ax, _line_parts(shown, numbers), full, title, printable(unit))
    spans = "".join(_span(token, value, full, i, unit) for i, (token, value) in enumerate(zip(shown, numbers, strict=True)))
    note = f'<p class="note">{said}</p>' if (said := part_note(shown)) else ""
    body = (
        f'<figure class="piece"><figcaption>{html_text(title)} <span class="unit">{html_text(unit)}, full color at '
        f'{number(full)}</span></figcaption>{note}<div class="tokens" tabindex="0" role="region" '
        f'aria-label="{html_text(title)}">{spans}</div></figure>'
    )
    return Piece(title, body, figure=functools.partial(_figure, shown, numbers, full, title, printable(unit)))


def _span(token: str, value: float, top: float, position: int, unit: str) -> str:
    """One token; a newline is shown as a sign, followed by a line break."""
    text = html_text(running(token)).replace("\n", f"{NEWLINE}\n")
    return f'<span title="{html_text(f"{position} {label(token)}: {unit} {number(value)}")}" {style(value, top)}>{text}</span>'


def _in_blocks(tokens: list[str], values: list[float], size: int) -> tuple[list[str], list[float]]:
    starts = range(0, len(tokens), size)
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in starts]
    return [joined(tokens[i : i + size]) for i in starts], means


def _figure(tokens: list[str], values: list[float], top: float, title: str, unit: str) -> "Figure":
    """Draw monospaced text with a colored box under each token."""
    from matplotlib.figure import Figure

    parts = _line_parts(tokens, values)
    figure = Figure(figsize=(LINE * CHARACTER, 0.2 * (parts[-1][1] + 5)))
    _draw(figure.add_axes((0, 0, 1, 1)), parts, top, title, unit)
    return figure


def _draw(ax: "Axes", parts: list[tuple[int, int, str, float]], top: float, title: str, unit: str) -> "Axes":
    from matplotlib.patches import Rectangle

    n_lines = parts[-1][1] + 1
    colors = diverging_map()
    for column, line, shown, value in parts:
        if math.isfinite(value) and top > 0:
            strength = max(-1.0, min(1.0, value / top))
            ax.add_patch(Rectangle((column, line - 0.5), len(shown), 1, color=colors(0.5 + 0.35 * strength), linewidth=0))
        ax.text(column, line, shown, va="center", family="monospace", fontsize=FONT, parse_math=False)
    ax.text(0, -1.5, printable(title)[:LINE], va="center", fontsize=9, parse_math=False)
    ax.set(xlim=(0, LINE), ylim=(n_lines + 2, -2))
    ax.axis("off")
    for i in range(41):  # the scale, as a strip under the text
        strength = i / 20 - 1
        ax.add_patch(Rectangle((8 + 0.5 * i, n_lines + 0.5), 0.5, 0.7, color=colors(0.5 + 0.35 * strength), linewidth=0))
    for x, end, side in ((7.5, number(-top, top), "right"), (29.0, f"{number(top, top)} {unit}", "left")):
        ax.text(x, n_lines + 0.85, end, va="center", ha=side, fontsize=FONT, parse_math=False)
    return ax


def _line_parts(tokens: list[str], values: list[float]) -> list[tuple[int, int, str, float]]:
    """Column, line, text and value of each token's parts, one for every line that it is on."""
    parts, column, line = [], 0, 0
    for token, value in zip(tokens, values, strict=True):
        for piece in running(token).expandtabs(4).splitlines(keepends=True):
            shown = printable(piece.rstrip("\r\n")) + (NEWLINE if piece.endswith("\n") else "")
            if column and column + len(shown) > LINE:
                column, line = 0, line + 1
            parts.append((column, line, shown, value))
            column, line = (0, line + 1) if piece.endswith("\n") else (column + len(shown), line)
    return parts or [(0, 0, "", math.nan)]


# Layer by layer: the effect of a prompt on each next token after each layer (logit lens).


MAX_POSITIONS = 512
"""The most text tokens on a map; if there are more, a note says so."""


@checked
def depth_map(
    table: pd.DataFrame, *, title: str = "layer by layer", axes: "Sequence[Axes] | np.ndarray | None" = None
) -> Piece | Any:
    """Draw depths down and text tokens across: blue where the prompt lowers the loss on the next token, red where it raises it.

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
        ax, curve = np.asarray(axes).ravel()[:2]
        _draw_depth(ax, curve, data, title)
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
    return Piece(title, body, figure=functools.partial(_depth_figure, data, title))


def _grid(table: pd.DataFrame, column: str) -> pd.DataFrame:
    return table.pivot(index="layer", columns="position", values=column)  # noqa: PD010, one row per layer and position was checked


def _depth_figure(data: dict[str, Any], title: str) -> "Figure":
    from matplotlib.figure import Figure

    n_rows, n_columns = len(data["layers"]), len(data["positions"])
    figure = Figure(figsize=(2.5 + 0.16 * min(n_columns, 120), 1.4 + 0.3 * n_rows))
    ax, curve = figure.subplots(1, 2, width_ratios=(max(3, n_columns / 6), 1), sharey=True)
    _draw_depth(ax, curve, data, title)
    return figure


def _draw_depth(ax: "Axes", curve: "Axes", data: dict[str, Any], title: str) -> None:
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
