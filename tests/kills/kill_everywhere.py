"""``python kill_everywhere.py FOLDER KIND...``: write over what is there, killed before every step on the file system.

Python announces (``sys.addaudithook``) every look or change below FOLDER. A fork writes once and copies the folder before each:
SIGKILL at that moment would leave just that, as all that a dead process takes along is its locks. One step in five is also
killed in earnest, and must leave what its picture shows. From every one of them that differs from the one before, the old
content or the new one must be read, whole; after one more run, nothing else may lie there. Prints each kind and how often it
was killed. A kind that ends in
``-`` is written as where no folders can be swapped.
"""

import gc
import json
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from kvlens.files import atomic

KILLED_IN_EARNEST = 5
"""One in this many steps; the others are snapshots."""
STEPS = ("os.", "open", "shutil.", "tempfile.", "ctypes.dlsym")


class Case(NamedTuple):
    """One kind of thing that is written.

    Attributes:
        write: writes it (again) below a folder, over whatever stands there.
        read: its content; raises where it is not whole.
        names: what lies in the folder when all is done.
    """

    write: Callable[[Path], object]
    read: Callable[[Path], object]
    names: set[str]


def bias(place: Path) -> Case:
    from tiny_text_model import PROMPT, TEXT, tiny_text_model

    from kvlens import KVBias, convert_prompt

    model, turn = tiny_text_model(), Turn()
    biases = [convert_prompt(model, words) for words in (PROMPT, TEXT)]
    return Case(
        lambda folder: biases[turn()].save(folder / "b.safetensors"),
        lambda folder: KVBias.load(folder / "b.safetensors").stacked("b_kv").sum().item(),
        {"b.safetensors"},
    )


def model(place: Path) -> Case:
    from tiny_text_model import tiny_text_model

    from kvlens import HookedKVTransformer

    models, turn = [tiny_text_model(n_layers=1, seed=seed) for seed in (1, 2)], Turn()
    return Case(
        lambda folder: models[turn()].save(folder / "m", overwrite=True),
        lambda folder: HookedKVTransformer.load(folder / "m").fingerprint().weights,
        {"m"},
    )


def outcome(place: Path) -> Case:
    import pandas as pd
    from matplotlib.figure import Figure

    from kvlens.files import check_folder
    from kvlens.papers import find_experiment
    from kvlens.papers.harness.run import EXPERIMENT_FOLDER, Reproduction, write_experiment

    turn = Turn()

    def write(folder: Path) -> None:
        found = Reproduction({"t": pd.DataFrame({"a": [turn()]})}, lambda: Figure(figsize=(0.1, 0.1)), [])
        write_experiment(found, find_experiment("hops"), "tiny", 1.0, folder / "o", overwrite=True)

    def read(folder: Path) -> object:
        check_folder(folder / "o", EXPERIMENT_FOLDER, overwrite=True)
        return pd.read_parquet(folder / "o" / "t.parquet")["a"].item()

    return Case(write, read, {"o"})


def run(place: Path) -> Case:
    from tiny_runs import run as train_tiny
    from tiny_runs import tiny_model

    from kvlens.files.tensors import read_checked_tensors
    from kvlens.training.checkpoint import FORMAT, FORMAT_VERSION

    turn, trained = Turn(), tiny_model()

    def read(folder: Path) -> object:
        _, header = read_checked_tensors(folder / "r" / "checkpoint.safetensors", "test", FORMAT, FORMAT_VERSION)
        return json.loads(header["identity"])["setting"]["steps"]

    often = dict(batch_size=1, eval_sequences=1, eval_every=1, checkpoint_every=1, restart=True)
    return Case(lambda folder: train_tiny(trained, folder=folder / "r", steps=(1, 2)[turn()], **often), read, {"r"})


def trained(place: Path) -> Case:
    from kvlens import HookedKVTransformer
    from kvlens.training import find_recipe, ship

    ship.MEASURED_SEQUENCES = 4
    sizes, task = dict(n_layers=1, d_model=12, d_head=6, attn_only=True, kv_shift={}), dict(vocab_size=13, length=9)
    training = dict(steps=2, batch_size=3, eval_every=2, eval_sequences=3, watch="shift_coef")
    turn = Turn()

    def write(folder: Path) -> None:
        recipe = replace(find_recipe("induction"), task_settings=task, model={**sizes, "seed": turn()}, training=training)
        ship.train_recipe(recipe, folder / "r", device="cpu", restart=True, progress=False)

    return Case(write, lambda folder: HookedKVTransformer.load(folder / "r" / "model").cfg.seed, {"r"})


def table(place: Path) -> Case:
    import pandas as pd
    from kvlens.analyses.batch.runner import Input, run_batch
    from kvlens.analyses.batch.work import Work
    from tiny_text_model import PROMPT, TEXT, tiny_text_model

    place.mkdir()
    tiny_text_model().save(place / "model")
    (place / "p.jsonl").write_text("".join(json.dumps({"prompt": PROMPT + end, "text": TEXT}) + "\n" for end in "ab"))
    turn = Turn()

    def write(folder: Path) -> None:
        work = Work("conversion_error", (str(place / "model"),), dtype=("float32", "float64")[turn()])
        run_batch(work, Input(place / "p.jsonl"), folder / "t.parquet", overwrite=True, progress=False)

    return Case(write, lambda folder: pd.read_parquet(folder / "t.parquet")["relative_error"].sum(), {"t.parquet"})


class Turn:
    """0 until it is set to 1: which of two contents is written."""

    value = 0

    def __call__(self) -> int:
        return self.value


class Steps:
    """Counts what Python announces (``sys.addaudithook``): each look or change below ``folder``, just before it is done."""

    def __init__(self, folder: Path, before: Callable[[int], object]):
        self.folder, self.before, self.count, self.watching = str(folder), before, 0, True
        sys.addaudithook(self.hook)

    def hook(self, event: str, args: tuple[object, ...]) -> None:
        if not self.watching or not event.startswith(STEPS):
            return
        if event == "ctypes.dlsym" or any(self.folder in str(argument) for argument in args):
            self.count += 1
            self.watching = False  # not what ``before`` does itself
            self.before(self.count)
            self.watching = True


def in_a_fork(work: Callable[[], object]) -> int:
    """Do ``work`` in a fork; the signal that killed it, or 0."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def photograph(write: Callable[[Path], object], folder: Path, album: Path) -> None:
    """Write in ``folder``, and copy it to ``album / "1"``, ``"2"``, ... before each step: what a SIGKILL would leave there."""

    def photographed() -> None:
        steps = Steps(folder, lambda step: shutil.copytree(folder, album / str(step), symlinks=True))
        write(folder)
        steps.watching = False

    assert in_a_fork(photographed) == 0


def kill(write: Callable[[Path], object], folder: Path, at: int) -> None:
    """Write in ``folder``, killed before the step ``at``."""

    def killed() -> None:
        Steps(folder, lambda step: step == at and os.kill(os.getpid(), signal.SIGKILL))
        write(folder)

    assert in_a_fork(killed) == signal.SIGKILL


def tree(folder: Path) -> dict[str, bool]:
    """What lies below a folder, and whether each is a folder or empty."""
    return {str(path.relative_to(folder)): path.is_dir() or not path.stat().st_size for path in folder.rglob("*")}


def contents(folder: Path) -> dict[str, bytes | None]:
    """What lies below a folder, and what is in it."""
    return {str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes() for path in folder.rglob("*")}


def kill_everywhere(kind: str, place: Path) -> int:
    """Kill the writing of ``kind`` before every step; how many there were."""
    case = KINDS[kind.rstrip("-")](place)
    turn = next(cell.cell_contents for cell in case.write.__closure__ if isinstance(cell.cell_contents, Turn))
    old, at_work, album = place / "old", place / "work", place / "album"
    old.mkdir(parents=True)
    case.write(old)
    before, seen, turn.value = case.read(old), set(), 1
    gc.freeze()  # forks share these pages
    shutil.copytree(old, at_work, symlinks=True)
    photograph(case.write, at_work, album)
    kills = len(os.listdir(album))
    shown = None
    for step in range(1, kills + 1):
        last, shown = shown, contents(album / str(step))
        in_earnest = step % KILLED_IN_EARNEST == 1
        if shown == last and not in_earnest:
            continue  # nothing was changed since, and this was just tried
        shutil.rmtree(at_work)
        if in_earnest:
            shutil.copytree(old, at_work, symlinks=True)
            kill(case.write, at_work, step)
            assert tree(at_work) == tree(album / str(step)), step
        else:
            (album / str(step)).rename(at_work)
        seen.add(case.read(at_work))
        case.write(at_work)
        after = case.read(at_work)
        assert after != before and set(os.listdir(at_work)) == case.names, os.listdir(at_work)
        left = [path.name for path in at_work.rglob("*") if atomic.is_temporary(path.name) or path.name == ".lock"]
        assert not left, left
    assert seen == {before, after}, (seen, before, after)
    return kills


KINDS = {case.__name__: case for case in (bias, model, outcome, run, trained, table)}
if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    swapped = atomic._swapped
    for name in sys.argv[2:]:
        atomic._swapped = (lambda a, b: False) if name.endswith("-") else swapped
        print(name, kill_everywhere(name, Path(sys.argv[1]) / name))
