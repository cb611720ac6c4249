"""The figure of `results.md`: `python docs/results_figure.py` draws docs/static/results.svg from the pages of measurements."""

import re
from pathlib import Path

import matplotlib

ROOT = Path(__file__).resolve().parents[1]


def numbers(root: Path = ROOT) -> dict[str, dict[str, float]]:
    """What is drawn, by panel, as the pages of measurements have it."""
    exactness, explanations, reading = (
        (root / f"tests/benchmarks/results/{page}.md").read_text(encoding="utf-8")
        for page in ("exactness", "explanations", "reading")
    )
    sizes = re.findall(r"^\| ([\d.]+ [KMB]) \| (\S+) \| (\S+) \|", exactness, re.M)
    scores = {
        name: float(re.search(rf"^\| {row} \| \**([\d.]+)", explanations, re.M)[1])
        for name, row in {
            "InteractionFit, 32 passes": r"kvlens, `InteractionFit\(32\)`",
            "ContextCite, 32": "ContextCite 0.0.4, 32",
            "leave one out": "kvlens, `LeaveOneOut`, gap closed",
            "FlashTrace": "FlashTrace 0.1.1",
        }.items()
    }
    kinds = "by exchange lose", "by retrieval score", "by induction score", "by attention", "at random"
    lost = re.search(r"\D*?(?:of 47)?\D*?".join(rf"{kind} (\d+)" for kind in kinds), " ".join(reading.split()))
    return {
        "error of a converted prompt,\ntimes that of a forward pass": {
            f"{size} weights": round(float(converted) / float(forward), 1) for size, converted, forward in sizes
        },
        "predicting removals of sentences\n(rank correlation)": scores,
        "answers lost without ten heads\n(of 47), chosen by": dict(
            zip(("exchange", "retrieval", "induction", "attention", "random"), map(float, lost.groups()), strict=True)
        ),
    }  # fmt: skip


def draw(path: Path) -> None:
    """Three panels of bars, ours first."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style = {"svg.fonttype": "none", "svg.hashsalt": "kvlens", "font.size": 9, "font.family": "sans-serif"}
    with plt.rc_context(style):
        figure, axes = plt.subplots(1, 3, figsize=(9.5, 2.3), layout="constrained")
        for ax, (title, bars) in zip(axes, numbers().items(), strict=True):
            ours = len(bars) if "error" in title else 1
            ax.barh([*bars], [*bars.values()], color=["#1f6f8b"] * ours + ["#b8bec5"] * (len(bars) - ours))
            ax.bar_label(ax.containers[0], fmt="%g", padding=3)
            ax.set_title(title, fontsize=9, loc="left")
            ax.set_xlim(0, 1.2 * max(bars.values()))
            ax.invert_yaxis()
            ax.xaxis.set_visible(False)
            ax.spines[["top", "right", "bottom"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    draw(Path(__file__).parent / "static" / "results.svg")
