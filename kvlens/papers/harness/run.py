"""What an experiment is: a function of its settings, declared by `experiment`, whose `Reproduction` becomes a folder.

The folder has one Parquet file per table and ``summary.json`` with the comparisons: what was measured, the paper's number
(null if it prints none), our number, the paper's claim, and whether it held here. ``figure.png`` and ``figure.svg`` come last,
so that a figure that cannot be drawn costs no table.
"""

import json
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from kvlens import load
from kvlens.checks import checked
from kvlens.errors import KVLensError, brief, check_known
from kvlens.files import FolderKind, listed_in, plain, write_folder
from kvlens.files.parquet import table_bytes
from kvlens.model import HookedKVTransformer
from kvlens.papers.harness.significance import Comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT = "kvlens.experiment"
SUMMARY = "summary.json"
EXPERIMENT_FOLDER = FolderKind("an experiment", listed_in(SUMMARY, FORMAT, "files"))
SCALES = ("tiny", "small", "paper")
Settings = Mapping[str, Any]
Tell = Callable[[str], None]
"""Reports progress in a sentence."""


@dataclass(frozen=True)
class Reproduction:
    """What an experiment found.

    Attributes:
        tables: tidy frames by name; each becomes ``NAME.parquet``.
        figure: draws a matplotlib figure, without pyplot, so without windows or global state.
        comparisons: the paper's numbers next to ours.
        differences: sentences that say how scale or setup differ from the paper's.
    """

    tables: Mapping[str, pd.DataFrame]
    figure: Callable[[], "Figure"]
    comparisons: list[Comparison]
    differences: Sequence[str] = ()


@dataclass(frozen=True)
class Experiment:
    """An experiment by name.

    Attributes:
        name: as in ``kvlens reproduce NAME``.
        source: paper and figure, table or theorem.
        question: the question that it answers, in one sentence.
        run: ``run(settings, tell)``; ``tell(text)`` reports progress, ``settings`` is one of ``scales``.
        scales: "tiny" (seconds, for tests), "small" (at most two hours on one core) and, of an experiment that was run at it,
            "paper", each the settings as keyword -> value.
        cost: scale -> what a run costs, in words ("6 minutes on two cores").
    """

    name: str
    source: str
    question: str
    run: Callable[[Settings, Tell], Reproduction]
    scales: Mapping[str, Settings]
    cost: Mapping[str, str]


def experiment(
    source: str, question: str, *, cost: tuple[str, ...], **settings: object
) -> Callable[[Callable[[Settings, Tell], Reproduction]], Experiment]:
    """Decorator that declares a function of settings and ``tell`` as the experiment of its name.

    Args:
        source, question: as in `Experiment`.
        cost: at the scales tiny and small, and paper if there is that.
        settings: by name, one value for all scales or a tuple of the values at each, in dictionaries too; ``...`` where a
            scale does not have the setting.
    """

    def declare(run: Callable[[Settings, Tell], Reproduction]) -> Experiment:
        costs = dict(zip(SCALES, cost, strict=False))
        scales = {scale: _at(scale, list(costs), settings) for scale in costs}
        return Experiment(run.__name__.replace("_", "-"), source, question, run, scales, costs)

    return declare


def _at(scale: str, scales: list[str], value: object) -> Any:
    """The value at one of the scales."""
    if isinstance(value, tuple):
        return dict(zip(scales, value, strict=True))[scale]
    if not isinstance(value, dict):
        return value
    return {name: own for name, entry in value.items() if (own := _at(scale, scales, entry)) is not ...}


COLLECTIONS = ("classes", "d_x", "models", "sizes", "steps", "tasks")
"""Dictionaries of like things by name, such as models by size: a given one replaces that of the scale. All others describe one
thing (a task, a model, its training): a given one changes only the fields that it names."""


def with_settings(experiment: Experiment, scale: str, changes: Mapping[str, object]) -> Experiment:
    """``experiment`` with some settings of one scale changed.

    A value must be of the same kind as the scale's; what else it must be is checked where it is used.

    Raises:
        KVLensError: an unknown setting (the nearest is named), or a value of another kind.
    """
    settings = dict(experiment.scales[scale])
    check_known(f"{experiment.name}: no setting", changes, settings)
    for name, value in changes.items():
        settings[name] = _changed(f"{experiment.name}: the setting {name}", name, settings[name], value)
    return replace(experiment, scales={**experiment.scales, scale: settings})


def _changed(what: str, name: str, own: Any, value: Any) -> object:
    """``value`` in place of ``own``; of a dictionary that describes one thing, with the fields that it does not name."""
    if own is None or own == []:
        return value
    if kind := _another_kind(name, own, value):
        raise KVLensError(f"{what} must be {kind}, such as {brief(own)}, got {brief(value)}")
    if isinstance(own, list):
        for place, one in enumerate(value, 1):
            _changed(f"{what}, entry {place},", name, own[0], one)
    if not isinstance(own, dict):
        return value
    example = next(iter(own.values())) if name in COLLECTIONS else None
    given = {key: _changed(f"{what}, {key},", key, own.get(key, example), one) for key, one in value.items()}
    return value if name in COLLECTIONS else {**own, **given}


def _another_kind(name: str, own: object, value: Any) -> str | None:
    """What ``value`` should be and is not; None if it is like ``own``. A seed that counts twice would pass for evidence."""
    if isinstance(own, bool):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(own, int):
        least = int(own > 0 and "seed" not in name and not name.endswith("_steps"))
        return None if type(value) is int and value >= least else f"a whole number, at least {least}"
    if isinstance(own, float):
        return None if type(value) in (int, float) and math.isfinite(value) else "a finite number"
    if isinstance(own, list):
        twice = isinstance(value, list) and isinstance(own[0], int | str) and len({repr(one) for one in value}) < len(value)
        return None if isinstance(value, list) and value and not twice else "a nonempty list without repeats"
    if isinstance(value, type(own)) and value:
        return None
    return "a nonempty dictionary" if isinstance(own, dict) else "a nonempty string"


def hooked_model(source: str, *, tokenizer: str | None = None, device: torch.device | str | None = None) -> HookedKVTransformer:
    """The model of ``source``, as :func:`kvlens.load` finds it, in evaluation mode and without gradients.

    Raises:
        KVLensError: there is none, or HookedKVTransformer cannot build it.
    """
    model = load(source, tokenizer=tokenizer, device=device)
    if not isinstance(model, HookedKVTransformer):
        raise KVLensError(f"this experiment needs a model that HookedKVTransformer can build; {source} is for the bridge alone")
    return model.eval().requires_grad_(False)


# --- the folder ---

MARGIN = 0.1
"""Inches around a figure, and below the line over it that says how it was made."""


@checked
def write_experiment(
    found: Reproduction,
    experiment: Experiment,
    scale: str,
    seconds: float,
    folder: str | Path,
    *,
    overwrite: bool = False,
    command: str | None = None,
) -> dict[str, object]:
    """Write tables and summary to ``folder``, completely or not at all, then the same with the figure; return the summary.

    Raises:
        KVLensError: the folder is in use or not writable, or the figure cannot be drawn; tables and summary are kept then.
    """
    summary: dict[str, Any] = {
        "format": FORMAT,
        "name": experiment.name,
        "source": experiment.source,
        "question": experiment.question,
        "command": command,
        "scale": scale,
        "settings": dict(experiment.scales[scale]),
        "differences": list(found.differences),
        "comparisons": [comparison.as_json() for comparison in found.comparisons],
        "seconds": round(seconds, 1),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in ("kvlens", "torch")}},
        "files": [f"{name}.parquet" for name in found.tables],
    }

    def fill(temporary: Path) -> None:
        for name, table in found.tables.items():
            (temporary / f"{name}.parquet").write_bytes(table_bytes(table))
        for name, content in images.items():
            (temporary / name).write_bytes(content)
        (temporary / SUMMARY).write_text(json.dumps(plain(summary), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    images: dict[str, bytes] = {}
    write_folder(folder, fill, EXPERIMENT_FOLDER, overwrite=overwrite)
    try:
        images = _drawn(found.figure(), _how_made(experiment, scale))
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise KVLensError(
            f"{experiment.name}: the figure cannot be drawn ({problem}); tables and {SUMMARY} are in {folder}"
        ) from error
    summary["files"] += images
    write_folder(folder, fill, EXPERIMENT_FOLDER, overwrite=True)
    return summary


def _how_made(experiment: Experiment, scale: str) -> str:
    """The line over a figure: the command that made it, its scale, and the number of seeds where it has several."""
    seeds = experiment.scales[scale].get("seeds")
    of_seeds = "" if seeds is None else f"; {len(seeds)} seed{'' if len(seeds) == 1 else 's'}"
    return f"kvlens reproduce {experiment.name} --scale {scale}{of_seeds}"


def _drawn(figure: "Figure", line: str) -> dict[str, bytes]:
    """The files of a figure, with a line over it that says how it was made."""
    from matplotlib import rc_context  # takes half a second, which the command line's first checks do not need

    figure.set_dpi(150)
    if engine := figure.get_layout_engine():
        engine.execute(figure)
        figure.set_layout_engine(None)  # so that both files have the same layout and margins, and each is drawn once
    drawn, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    x, y = drawn.x0 / width, (drawn.y1 + MARGIN) / height
    figure.text(x, y, line, fontsize=8, color="#555555", va="bottom", parse_math=False)
    inches, png, svg = figure.get_tightbbox().padded(MARGIN), BytesIO(), BytesIO()
    figure.savefig(png, format="png", dpi=figure.dpi, bbox_inches=inches)
    with rc_context({"svg.hashsalt": "kvlens"}):  # ids that do not differ from run to run
        figure.savefig(svg, format="svg", bbox_inches=inches, metadata={"Date": None})
    return {"figure.png": png.getvalue(), "figure.svg": svg.getvalue()}
