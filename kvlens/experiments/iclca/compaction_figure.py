"""The picture of ``compaction``: error against stored numbers, a panel for each length of the prompt."""

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvlens.experiments.iclca.compaction_ways import DISTILLED, METHODS, TOKENS

COLORS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#D55E00", "#0072B2", "#8B5A2B", "#777777")
"""Okabe and Ito's, and two more."""
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
    styles = _styles([*METHODS, *methods])
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


def _styles(methods: list[str]) -> dict[str, dict[str, Any]]:
    families = list(dict.fromkeys(map(family, methods)))
    seen: dict[str, int] = {}
    styles = {}
    for method in dict.fromkeys(methods):
        group = family(method)
        nth = seen[group] = seen.get(group, -1) + 1
        line = "none" if group in (DISTILLED, family("thought")) else ("-", "--", "-.", ":")[nth % 4]
        styles[method] = dict(color=COLORS[families.index(group) % len(COLORS)], marker="osD^"[nth % 4], linestyle=line)
    return styles
