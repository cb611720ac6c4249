"""The picture of ``compaction``: error against stored numbers, a panel for each length of the prompt."""

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvlens.experiments.iclca.compaction_ways import DISTILLED, METHODS, TOKENS
from kvlens.experiments.shared.curves import PALETTE

FEW_KEYS, WEIGHTS = "osD^vPX", "ovsD^<>pd"
"""Markers: of methods that keep few keys, one for each color; of changes of the weights, which are hollow and black."""
LINES = ("-", "--", "-.", ":")
ERRORS = {"relative_error": "relative error of the logits", "kl": "divergence of the next token, nats"}
DROPPED, EXACT = "prompt left out", "every key kept"


def family(method: str) -> str:
    """Methods that share a color: those of one paper."""
    return "thought patches" if method.startswith("thought") else method.partition(",")[0]


def draw(table: pd.DataFrame, model: str, n_contexts: int) -> Figure:
    """Error of the logits and divergence against stored numbers, all logarithmic, with 95 % intervals over contexts.

    What is exact up to rounding (every key kept, token patches) is drawn at the lower edge.
    """
    lengths = sorted(table["prompt_tokens"].unique())
    figure = Figure(figsize=(3.9 * len(lengths) + 3.2, 7.6), layout="constrained")
    panels = figure.subplots(2, len(lengths), sharex=True, sharey="row", squeeze=False)
    methods = [method for method in dict.fromkeys(table["method"]) if method not in (DROPPED, EXACT, TOKENS)]
    styles = styles_of([*METHODS, *methods])
    for (column, words), row in zip(ERRORS.items(), panels, strict=True):
        floor = table.loc[table["method"].isin(methods), column].min() / 1.8
        for axes, length in zip(row, lengths, strict=True):
            here = table[table["prompt_tokens"] == length]
            dropped = float(here.loc[here["method"] == DROPPED, column].iloc[0])
            axes.axhline(dropped, color="#555555", linestyle=":", linewidth=1.4, label=DROPPED)
            for method in methods:
                rows = here[here["method"] == method].sort_values("stored_numbers")
                interval = rows[f"{column}_interval"].clip(upper=0.95 * rows[column])
                axes.errorbar(rows["stored_numbers"], rows[column], interval, capsize=2, label=method, **styles[method])
            for method, marker in ((EXACT, "*"), (TOKENS, "v")):
                rows, name = here[here["method"] == method], f"{method} (exact)"
                axes.plot(rows["stored_numbers"], [floor] * len(rows), marker, color="#111111", label=name, clip_on=False)
            axes.set(xscale="log", yscale="log", ylim=(floor, None))
            axes.grid(color="#dddddd", linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel(words)
    for axes, length in zip(panels[0], lengths, strict=True):
        axes.set_title(f"prompts of {length} tokens", loc="left", fontsize=10)
    for axes in panels[1]:
        axes.set_xlabel("stored numbers")
    contexts = "1 context" if n_contexts == 1 else f"mean and 95 % interval over {n_contexts} contexts"
    figure.suptitle(f"What replaces a prompt of {model}: {contexts}", x=0.01, ha="left", fontsize=11)
    panels[0, -1].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def styles_of(methods: list[str]) -> dict[str, dict[str, Any]]:
    """No two alike: a color and a marker for each family of methods that keep few keys, a kind of line for each of its members;
    a hollow marker for each change of the weights, which has one size.
    """
    methods = list(dict.fromkeys(methods))
    weights = [method for method in methods if family(method) in (DISTILLED, family("thought"))]
    families = list(dict.fromkeys(family(method) for method in methods if method not in weights))
    styles: dict[str, dict[str, Any]] = {}
    for color, marker, group in zip(PALETTE, FEW_KEYS, families, strict=False):
        members = [method for method in methods if family(method) == group]
        for line, method in zip(LINES, members, strict=False):
            styles[method] = dict(color=color, marker=marker, linestyle=line, markersize=5)
    for marker, method in zip(WEIGHTS, weights, strict=False):
        styles[method] = dict(color="#222222", marker=marker, linestyle="none", markerfacecolor="none", markersize=6)
    return styles
