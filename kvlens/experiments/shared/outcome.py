"""The results of an experiment: tables, a figure, and our numbers next to the paper's, in one folder.

An `experiment` is a function of its settings that returns an `Outcome`. `write_outcome` writes a folder with one Parquet file
per table and ``summary.json`` with the comparisons: what was measured, the paper's number (null if it prints none), our number,
the paper's claim, and whether it held here. ``figure.png`` and ``figure.svg`` come last, so that a figure that cannot be drawn
costs no table.
"""

import json
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from kvlens.checks import checked
from kvlens.errors import KVLensError
from kvlens.experiments.shared.significance import SIGNIFICANCE, Values, interval_of_mean
from kvlens.files import FolderKind, listed_in, plain, write_folder
from kvlens.files.tables import table_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT = "kvlens.experiment"
SUMMARY = "summary.json"
MARGIN = 0.1
"""Inches around a figure, and below the line over it that says how it was made."""
SCALES = ("tiny", "small", "paper")
Settings = Mapping[str, Any]
Tell = Callable[[str], None]
"""Reports progress in a sentence."""
OUTCOME_FOLDER = FolderKind("an experiment", listed_in(SUMMARY, FORMAT, "files"))


class Sample(NamedTuple):
    """The values that a claim was tested on: one for each seed, prompt or context.

    Attributes:
        n: how many.
        mean, low, high: their mean and its 95 % interval (None for fewer than two values, or one that is not finite).
        bound: what the mean is compared with.
        detectable: where the test is inconclusive, the smallest distance from ``bound`` that it finds in 80 % of cases, for
            values that scatter like these; None elsewhere, and where it finds none (fewer than 6 values).
    """

    n: int
    mean: float
    low: float | None
    high: float | None
    bound: float
    detectable: float | None


Number = float | int | str | None


@dataclass(frozen=True)
class Comparison:
    """One number of the paper next to ours.

    Attributes:
        what: what is measured, with its unit.
        claim: what the paper says, in words.
        ours: what we measured.
        holds: whether our numbers support that claim, by :mod:`kvlens.experiments.shared.significance`; None where they are
            inconclusive.
        paper: the paper's number; None if it shows a curve or states a fact without one.
        tested: False for numbers that are only shown side by side, because no claim can be tested with them or their noise is
            unknown, and for claims about something that did not happen here. ``holds`` is None then.
        untrained: why the models have not learned enough for a test (:mod:`kvlens.experiments.shared.learned`); ``holds`` is
            None then. None if they have, or if nothing is trained.
        sample: the values that the claim was tested on; None if it was tested in another way.
    """

    what: str
    claim: str
    ours: Number
    holds: bool | None
    paper: Number = None
    tested: bool = True
    untrained: str | None = None
    sample: Sample | None = None

    @property
    def verdict(self) -> str:
        """The verdict in words."""
        if not self.tested:
            return "not tested"
        if self.untrained is not None:
            return "not trained far enough"
        return {True: "holds", False: "does not hold", None: "inconclusive"}[self.holds]

    def unless(self, untrained: str | None) -> "Comparison":
        """The same comparison, without its verdict if ``untrained`` gives a reason why the models have not learned enough."""
        return self if untrained is None or not self.tested else replace(self, holds=None, untrained=untrained)

    def as_json(self) -> dict[str, Any]:
        """The entry in ``summary.json``, where ``tested`` is called ``judged``."""
        entry = {"judged" if name == "tested" else name: value for name, value in vars(self).items()}
        return entry | {"sample": self.sample and self.sample._asdict(), "verdict": self.verdict}

    @classmethod
    def tested_on(
        cls,
        what: str,
        claim: str,
        values: Values,
        bound: float | int = 0.0,
        *,
        below: bool = False,
        ours: Number = None,
        paper: Number = None,
    ) -> "Comparison":
        """A claim that the values lie above ``bound`` (``below``: below it), by the significance test; ``ours``: their mean."""
        above, mean = SIGNIFICANCE.above(values, bound), float(np.mean(values)) if len(values) else math.nan
        low, high = interval_of_mean(values) or (None, None)
        detectable = SIGNIFICANCE.detectable(values) if above is None else None
        sample = Sample(len(values), mean, low, high, float(bound), detectable)
        holds = None if above is None else above is not below
        return cls(what, claim, mean if ours is None else ours, holds, paper, sample=sample)

    @classmethod
    def of_share(
        cls, what: str, claim: str, is_right: Sequence[bool] | pd.Series, bound: float, *, below: bool = False
    ) -> "Comparison":
        """A claim that the share of True lies above ``bound`` (``below``: below it), by the binomial test."""
        right, of = int(np.count_nonzero(is_right)), len(is_right)
        above = SIGNIFICANCE.share_above(right, of, bound)
        return cls(what, claim, right / of, None if above is None else above is not below)

    @classmethod
    def at_most(cls, what: str, claim: str, ours: float, bound: float, *, paper: Number = None) -> "Comparison":
        """A claim about a number without noise: that it is at most ``bound``."""
        return cls(what, claim, ours, ours <= bound, paper)

    @classmethod
    def stated(cls, what: str, claim: str, ours: Number, *, paper: Number = None) -> "Comparison":
        """Numbers side by side, without a verdict."""
        return cls(what, claim, ours, None, paper, tested=False)


@dataclass(frozen=True)
class Outcome:
    """The results of an experiment.

    Attributes:
        tables: tidy frames by name; each becomes ``NAME.parquet``.
        figure: draws a matplotlib figure, without pyplot, so without windows or global state.
        comparisons: the paper's numbers next to ours.
        differences: sentences that say how scale or setup differ from the paper's.
    """

    tables: Mapping[str, pd.DataFrame]
    figure: Callable[[], "Figure"]
    comparisons: list[Comparison]
    differences: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Experiment:
    """An experiment by name.

    Attributes:
        name: as in ``kvlens reproduce NAME``.
        source: paper and figure, table or theorem.
        question: the question that it answers, in one sentence.
        run: ``run(settings, tell) -> Outcome``; ``tell(text)`` reports progress, ``settings`` is one of ``scales``.
        scales: "tiny" (seconds, for tests), "small" (at most two hours on one core) and, of an experiment that was run at it,
            "paper", each the settings as keyword -> value.
        cost: scale -> what a run costs, in words ("6 minutes on two cores").
    """

    name: str
    source: str
    question: str
    run: Callable[[Settings, Tell], Outcome]
    scales: Mapping[str, Settings]
    cost: Mapping[str, str]


def experiment(
    source: str, question: str, *, cost: tuple[str, ...], **settings: Any
) -> Callable[[Callable[[Settings, Tell], Outcome]], Experiment]:
    """Decorator that declares a function of settings and ``tell`` as the experiment of its name.

    Args:
        source, question: as in `Experiment`.
        cost: at the scales tiny and small, and paper if there is that.
        settings: by name, one value for all scales or a tuple of the values at each, in dictionaries too; ``...`` where a
            scale does not have the setting.
    """

    def declare(run: Callable[[Settings, Tell], Outcome]) -> Experiment:
        costs = dict(zip(SCALES, cost, strict=False))
        scales = {scale: _at(scale, list(costs), settings) for scale in costs}
        return Experiment(run.__name__.replace("_", "-"), source, question, run, scales, costs)

    return declare


def _at(scale: str, scales: list[str], value: Any) -> Any:
    """The value at one of the scales."""
    if isinstance(value, tuple):
        return dict(zip(scales, value, strict=True))[scale]
    if not isinstance(value, dict):
        return value
    return {name: own for name, entry in value.items() if (own := _at(scale, scales, entry)) is not ...}


def how_made(experiment: Experiment, scale: str) -> str:
    """The line over a figure: the command that made it, its scale, and the number of seeds where it has several."""
    seeds = experiment.scales[scale].get("seeds", experiment.scales[scale].get("n_seeds"))
    n_seeds = None if seeds is None else seeds if isinstance(seeds, int) else len(seeds)
    of_seeds = "" if n_seeds is None else f"; {n_seeds} seed{'' if n_seeds == 1 else 's'}"
    return f"kvlens reproduce {experiment.name} --scale {scale}{of_seeds}"


@checked
def write_outcome(
    outcome: Outcome, experiment: Experiment, scale: str, seconds: float, folder: str | Path, *, overwrite: bool = False
) -> dict[str, Any]:
    """Write tables and summary to ``folder``, completely or not at all, then the same with the figure; return the summary.

    Raises:
        KVLensError: the folder is in use or not writable, or the figure cannot be drawn; tables and summary are kept then.
    """
    summary: dict[str, Any] = {
        "format": FORMAT,
        "name": experiment.name,
        "source": experiment.source,
        "question": experiment.question,
        "scale": scale,
        "settings": dict(experiment.scales[scale]),
        "differences": list(outcome.differences),
        "comparisons": [comparison.as_json() for comparison in outcome.comparisons],
        "seconds": round(seconds, 1),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in ("kvlens", "torch")}},
        "files": [f"{name}.parquet" for name in outcome.tables],
    }

    def fill(temporary: Path) -> None:
        for name, table in outcome.tables.items():
            (temporary / f"{name}.parquet").write_bytes(table_bytes(table))
        for name, content in images.items():
            (temporary / name).write_bytes(content)
        (temporary / SUMMARY).write_text(json.dumps(plain(summary), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    images: dict[str, bytes] = {}
    write_folder(folder, fill, OUTCOME_FOLDER, overwrite=overwrite)
    try:
        images = _drawn(outcome.figure(), how_made(experiment, scale))
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise KVLensError(
            f"{experiment.name}: the figure cannot be drawn ({problem}); tables and {SUMMARY} are in {folder}"
        ) from error
    summary["files"] += images
    write_folder(folder, fill, OUTCOME_FOLDER, overwrite=True)
    return summary


def _drawn(figure: "Figure", line: str) -> dict[str, bytes]:
    """The files of a figure, with a line over it that says how it was made."""
    from matplotlib import rc_context  # takes half a second, which the command line's first checks do not need

    figure.set_dpi(150)
    if engine := figure.get_layout_engine():
        engine.execute(figure)
        figure.set_layout_engine(None)  # so that both files have the same layout and margins, and each is drawn once
    drawn, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    look: dict[str, Any] = dict(fontsize=8, color="#555555", va="bottom", parse_math=False)
    figure.text(drawn.x0 / width, (drawn.y1 + MARGIN) / height, line, **look)
    inches, png, svg = figure.get_tightbbox().padded(MARGIN), BytesIO(), BytesIO()
    figure.savefig(png, format="png", dpi=figure.dpi, bbox_inches=inches)
    with rc_context({"svg.hashsalt": "kvlens"}):  # ids that do not differ from run to run
        figure.savefig(svg, format="svg", bbox_inches=inches, metadata={"Date": None})
    return {"figure.png": png.getvalue(), "figure.svg": svg.getvalue()}
