"""The figure of ``function-classes``: error curves in and out of distribution, longer prompts, and permutations."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvlens.experiments.shared.curves import draw_curves, finish

COLORS = {"transformer": "#D55E00", "least squares": "#0072B2", "ridge": "#56B4E9", "nearest neighbors": "#9a8c5a"}
SHIFT_TITLES = {
    "scaled_inputs": "points 3 times as far out",
    "skewed_inputs": "skewed covariance",
    "orthant": "examples in one orthant",
    "noisy": "noise of deviation 1",
}
KIND_LABELS = {
    ("bidirectional", "none"): "plain: no positions,\nno mask",
    ("causal", "none"): "no positions,\ncausal mask",
    ("bidirectional", "standard"): "learned positions,\nno mask",
    ("bidirectional", "sinusoidal"): "sinusoidal positions,\nno mask",
}
POSITION_STYLES = {"standard": ("learned positions", "#D55E00"), "sinusoidal": ("sinusoidal positions", "#CC79A7")}
BELOW: dict[str, Any] = dict(below=0.2, fontsize=8.5, ncols=2)
"""Where a panel's own legend stands: outside it, so that it covers nothing."""
LOWEST, HIGHEST = 3e-4, 3.0
"""The lower end of the logarithmic axis of relative errors; least squares on linear functions continues down to rounding."""


def draw(tables: Mapping[str, pd.DataFrame], settings: Mapping[str, Any]) -> Figure:
    """Plot, above, every class in distribution; below, linear functions out of distribution, longer prompts, permutations."""
    error, dimensions = tables["error"], settings["task"]["dimensions"]
    classes, shifts = list(settings["classes"]), list(SHIFT_TITLES)
    figure = Figure(figsize=(18, 8.2), layout="constrained")
    above, below = figure.subfigures(2, 1, squeeze=False)[:, 0]
    said = "In distribution: error on new functions of the class trained on; mean over seeds, band from least to largest"
    above.suptitle(said, x=0.005, ha="left", fontsize=12)
    trained, drawn = _seeds(error[error["functions"] == "linear"]), tables["equivariance"]["seed"].nunique()
    said = f"Linear functions out of distribution, {trained}; longer prompts, 1 seed; permutations, {drawn} draws of weights"
    below.suptitle(said, x=0.005, ha="left", fontsize=12)
    panels = above.subplots(1, len(classes), sharey=True, squeeze=False)[0]
    for axes, functions in zip(panels, classes, strict=True):
        rows = error[(error["functions"] == functions) & (error["shift"] == "none")]
        draw_errors(axes, rows, f"{functions.replace('_', ' ')}, {_seeds(rows)}", dimensions)
    panels[0].set_ylabel("squared error / that of always saying 0")

    panels = below.subplots(1, len(shifts) + 2, width_ratios=[1] * (len(shifts) + 1) + [1.25])
    for axes, shift in zip(panels, shifts, strict=False):
        draw_errors(axes, error[error["shift"] == shift], SHIFT_TITLES[shift], dimensions)
    panels[0].set_ylabel("squared error / that of always saying 0")
    draw_lengths(panels[-2], tables["length"])
    draw_orders(panels[-1], tables["equivariance"])
    handles, labels = above.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=10)
    return figure


def _seeds(rows: pd.DataFrame) -> str:
    n = rows.loc[rows["predictor"] == "transformer", "seed"].nunique()
    return f"{n} seed{'s' if n > 1 else ''}"


def draw_errors(axes: Axes, rows: pd.DataFrame, title: str, dimensions: int) -> None:
    """Plot relative error against the number of examples, one line per predictor; the dotted line is at n = d."""
    # The trained model is drawn last, on top; a logarithmic axis cannot show an error of exactly 0.
    visible = rows.assign(
        relative_error=rows["relative_error"].clip(lower=LOWEST / 10),
        rank=rows["predictor"].map({name: rank for rank, name in enumerate(reversed(COLORS))}),
    )
    shown = visible.sort_values(["rank", "seed", "n_examples"])
    draw_curves(axes, shown, "n_examples", "relative_error", by="predictor", colors=COLORS)
    axes.axvline(dimensions, color="#94a3b8", linewidth=1, linestyle=":")
    axes.axhline(1, color="#94a3b8", linewidth=0.8)
    axes.set(yscale="log", ylim=(LOWEST, HIGHEST), xlabel="examples in the prompt")
    axes.minorticks_off()
    axes.set_title(title, loc="left", fontsize=10.5)


def draw_lengths(axes: Axes, table: pd.DataFrame) -> None:
    """Plot the error of the models with learned and sinusoidal positions, at and beyond the training lengths."""
    for positions, (label, color) in POSITION_STYLES.items():
        rows = table[table["positions"] == positions]
        axes.plot(rows["n_examples"], rows["relative_error"], color=color, linewidth=1.8, label=label)
    inside = table[table["in_training"]]
    last = inside["n_examples"].max()
    axes.axvspan(last, table["n_examples"].max(), color="#f1f5f9", zorder=0)
    end = inside[inside["positions"] == "standard"].iloc[-1]
    axes.plot(last, end["relative_error"], marker="X", color=POSITION_STYLES["standard"][1], markersize=9, linestyle="none")
    place: dict[str, Any] = dict(xytext=(4, 7), textcoords="offset points", fontsize=8.5)
    axes.annotate("refused", (last, end["relative_error"]), color=POSITION_STYLES["standard"][1], **place)
    axes.set(yscale="log", ylim=(LOWEST, HIGHEST), xlabel="examples in the prompt")
    axes.minorticks_off()
    axes.set_title("prompts longer than in training", loc="left", fontsize=10.5)
    finish(axes, **BELOW)


def draw_orders(axes: Axes, table: pd.DataFrame) -> None:
    """Plot |T(pi X) - pi T(X)| / |T(X)| for every kind of model, one point per draw of weights."""
    for dtype, marker in (("float64", "o"), ("float32", "s")):
        for height, kind in enumerate(reversed(KIND_LABELS)):
            rows = table[(table["attention_dir"] == kind[0]) & (table["positions"] == kind[1]) & (table["dtype"] == dtype)]
            label = dtype if height == 0 else None
            at = [height + (0.12 if dtype == "float64" else -0.12)] * len(rows)
            axes.plot(rows["deviation"], at, marker, color="#334155" if dtype == "float64" else "#94a3b8", label=label)
    axes.set_yticks(range(len(KIND_LABELS)), list(reversed(KIND_LABELS.values())), fontsize=8.5)
    axes.set(xscale="log", xlim=(1e-17, 10), ylim=(-0.6, len(KIND_LABELS) - 0.4))
    axes.minorticks_off()
    axes.set_xlabel("$|T(\\pi X) - \\pi T(X)|\\,/\\,|T(X)|$")
    axes.set_title("effect of permuting the positions", loc="left", fontsize=10.5)
    finish(axes, **BELOW)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
