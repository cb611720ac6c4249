"""The figure of ``coefficients``: heads in the four quadrants of KVSA table 4, and their course over training."""

from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvlens.experiments.shared.curves import MARKERS, PALETTE, finish

COEFFICIENT_COLORS = {"alpha_1": "#0072B2", "alpha_2": "#56B4E9", "beta_1": "#D55E00", "beta_2": "#E69F00"}
SHARE_COLORS = PALETTE[:5]


def draw(heads: pd.DataFrame, counts: pd.DataFrame, course: pd.DataFrame, shares: pd.DataFrame) -> Figure:
    """One plane per model; then, for the first model whose training was watched, its coefficients and shares against step.

    Args:
        heads: one row per head, with its coefficients as columns.
        counts: rows of table 4 per model.
        course: one row per coefficient and step; may be empty.
        shares: one row per step; may be empty.
    """
    names = heads["model"].unique().tolist()
    watched = course["model"].unique().tolist()[:1]
    n_panels = len(names) + 2 * len(watched)
    n_columns = min(n_panels, 3) if n_panels != 4 else 2
    n_rows = -(-n_panels // n_columns)
    figure = Figure(figsize=(5.4 * n_columns, 4.9 * n_rows), layout="constrained")
    panels = figure.subplots(n_rows, n_columns, squeeze=False).flatten().tolist()
    for axes, name in zip(panels, names, strict=False):
        _draw_plane(axes, heads[heads["model"] == name], counts[counts["model"] == name], name)
    for name in watched:
        _draw_course(panels[len(names)], course[course["model"] == name], name)
        _draw_shares(panels[len(names) + 1], shares[shares["model"] == name], name)
    for unused in panels[n_panels:]:
        unused.set_axis_off()
    return figure


def _draw_plane(axes: Axes, heads: pd.DataFrame, counts: pd.DataFrame, name: str) -> None:
    across, up = heads["alpha_1"] - heads["alpha_2"], heads["beta_1"] - heads["beta_2"]
    layers = sorted(heads["layer"].unique())
    for i, layer in enumerate(layers):
        chosen = heads["layer"] == layer
        color, marker = matplotlib.colormaps["viridis"](i / len(layers)), MARKERS[i % len(MARKERS)]
        axes.plot(across[chosen], up[chosen], marker, color=color, alpha=0.8, markersize=7, label=f"layer {layer}")
    axes.axhline(0, color="#9ca3af", linewidth=1)
    axes.axvline(0, color="#9ca3af", linewidth=1)
    for _, kind in counts.iterrows():
        x, y = (0.98 if ">" in kind["keys"] else 0.02), (0.98 if ">" in kind["values"] else 0.02)
        text = f"{kind['count']} ({kind['share']:.0%})\npaper {kind['paper']} ({kind['paper_share']:.0%})"
        look: dict[str, Any] = dict(ha="right" if x > 0.5 else "left", va="top" if y > 0.5 else "bottom", color="#374151")
        axes.text(x, y, text, transform=axes.transAxes, fontsize=9, **look)
    reach = 1.45 * max(across.abs().max(), up.abs().max())  # room for the counts in the corners
    axes.set(xlim=(-reach, reach), ylim=(-reach, reach))
    axes.set(xlabel="$\\alpha_1 - \\alpha_2$   (keys: right, the current token)", ylabel="$\\beta_1 - \\beta_2$   (values)")
    axes.set_title(f"{name}: a dot per head", loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=6, handletextpad=0.1)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_course(axes: Axes, course: pd.DataFrame, name: str) -> None:
    axes.axhspan(0, 1, color="#f1f5f9", zorder=0)
    for coefficient, rows in course.groupby("coefficient"):
        lines = rows.pivot_table(index="step", columns=["layer", "head"], values="value")
        color = COEFFICIENT_COLORS.get(str(coefficient), "#9ca3af")
        drawn = axes.plot(lines.index, lines, color=color, linewidth=0.9, alpha=0.75)
        letter, number = str(coefficient).split("_")
        drawn[0].set_label(f"$\\{letter}_{number}$")
    _against_step(axes, "coefficient (gray: from 0 to 1)", f"{name}: every head's coefficients in training")


def _draw_shares(axes: Axes, shares: pd.DataFrame, name: str) -> None:
    for column, color in zip([c for c in shares.columns if c not in ("model", "step")], SHARE_COLORS, strict=True):
        outside = column.startswith("outside")
        label = "coefficients outside [0, 1]" if outside else _as_mathtext(column)
        axes.plot(shares["step"], shares[column], color=color, linewidth=1.8, linestyle="--" if outside else "-", label=label)
    axes.set_ylim(-0.02, 1.02)
    _against_step(axes, "share", f"{name}: heads of each kind, in training")


def _as_mathtext(kind: str) -> str:
    formula = kind.replace("alpha", "\\alpha").replace("beta", "\\beta").replace("<=", "\\leq").replace(", ", ",\\ ")
    return f"${formula}$"


def _against_step(axes: Axes, y_label: str, title: str) -> None:
    axes.set(xlabel="step", ylabel=y_label)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    finish(axes, title, ncols=5, fontsize=8)
