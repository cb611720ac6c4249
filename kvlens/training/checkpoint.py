"""A run on disk: one safetensors file that holds all of it, replaced as a whole, so that a kill at any moment loses little.

    checkpoint.safetensors    weights, best weights, optimizer state, metrics so far, what was watched; header: which run it is
    metrics.parquet           the metrics as a table, rewritten from the checkpoint's rows whenever it is

The checkpoint is the truth: the table can be made from it. A run is known by its identity (task, model, settings); a folder
that holds another run is refused and the first difference named.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from kvlens.arguments import path_of
from kvlens.errors import KVLensError
from kvlens.files import (
    FolderKind,
    check_folder,
    check_regular,
    clear_leftovers_in,
    is_temporary,
    lock,
    parsed_json,
    reason,
    write_atomically,
)
from kvlens.files.tensors import checked_tensor_bytes, read_checked_tensors
from kvlens.model.fingerprint import is_weight
from kvlens.training.run import Progress, Row, Run

FORMAT, FORMAT_VERSION = "kvlens.training", 2
CHECKPOINT, METRICS, LOCK = "checkpoint.safetensors", "metrics.parquet", ".lock"
SPLITS = ("train", "heldout")
RUN_FOLDER = FolderKind(
    "a run with a checkpoint",
    lambda folder: {CHECKPOINT} if (folder / CHECKPOINT).is_file() else None,
    operation="train",
    allow=None,
    ignored=lambda path: path.name == LOCK or is_temporary(path.name),
)
JSON_TYPES = (bool, int, float, str, tuple, type(None))


class CheckpointFolder:
    """The folder of one run.

    Args:
        folder: made where it is missing.
        run: what is saved there and restored from there.
        restart: start from scratch where there is a checkpoint of any kvlens run; the first one of this run replaces it.

    Raises:
        KVLensError: the folder holds other things, or cannot be written.
    """

    def __init__(self, folder: str | Path, run: Run, *, restart: bool = False):
        self.path, self.run, self._restart = path_of("train: folder", folder), run, restart
        self.identity = json.loads(json.dumps(identity(run)))  # as it comes back: tuples are lists
        check_run_folder(self.path)
        run.workers.wait()

    @property
    def _file(self) -> Path:
        return self.path / CHECKPOINT

    def save(self) -> None:
        """Write the run as it stands. Raises KVLensError where the disk is full; the checkpoint before it stays."""
        if not self.run.workers.is_first:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise KVLensError(f"train: cannot make {self.path}: {reason(error)}") from error
        header = {"format": FORMAT, "format_version": str(FORMAT_VERSION), "identity": json.dumps(self.identity)}
        progress = {**asdict(self.run.progress), "seconds": self.run.seconds}
        progress.pop("rows")
        header["progress"] = json.dumps(progress)
        header["watched_steps"] = json.dumps([step for step, _ in self.run.watched])
        write_atomically(self._file, checked_tensor_bytes(tensors_of(self.run), header))
        write_atomically(self.path / METRICS, metrics_frame(self.run.progress.rows).to_parquet(index=False))

    def resume(self) -> bool:
        """Bring the run to where its checkpoint is, unless it starts from scratch; returns whether there was one.

        Raises:
            KVLensError: the file is damaged, of another kind, or of another run; it is left as it is.
        """
        check_regular("train: the checkpoint", self._file)
        if self._restart or not self._file.is_file():
            return False
        try:
            tensors, header = read_checked_tensors(self._file, "train: the checkpoint", FORMAT, FORMAT_VERSION)
            identity, progress, steps = self._parsed(header)
        except KVLensError as error:
            raise KVLensError(f"{error}; or delete it, or ask for a restart, to start from scratch") from error
        self._check_identity(identity)
        restore(self.run, progress, steps, tensors)
        return True

    def _parsed(self, header: Mapping[str, str]) -> tuple[dict[str, dict[str, Any]], dict[str, Any], list[int]]:
        """Identity, progress and the steps that were watched, as the header has them."""
        what, names = "train: the checkpoint", ("identity", "progress", "watched_steps")
        identity, progress, steps = (parsed_json(what, self._file, header.get(name, "")) for name in names)
        kinds = [isinstance(part, dict) for part in (identity, *(identity.values() if isinstance(identity, dict) else ()))]
        if not all(kinds) or not isinstance(progress, dict) or not isinstance(steps, list):
            raise KVLensError(f"{what}: {self._file} is damaged: its header does not say which run it is")
        return identity, progress, steps

    def _check_identity(self, theirs: Mapping[str, Any]) -> None:
        for part in sorted({*self.identity, *theirs}):
            ours, those = self.identity.get(part, {}), theirs.get(part, {})
            usual = usual_values(self.run).get(part, {})
            for name in sorted({*ours, *those}):
                was, now = those.get(name), ours.get(name)
                if name not in those and name in usual and usual[name] == now:
                    continue  # a setting that came later, at the value that does what was done before
                if was != now:
                    raise KVLensError(
                        f"train: {self.path} holds another run: {part} {name} was {was!r} there and is {now!r} now; give the "
                        "same settings to resume it, choose another folder, or ask for a restart to start from scratch"
                    )


def check_run_folder(folder: Path) -> None:
    """Raise KVLensError unless a run may be written to, or resumed from, ``folder``; nothing stays changed."""
    check_folder(folder, RUN_FOLDER)


@contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder``, which is made where it is missing; clear what dead runs left.

    Raises:
        KVLensError: another run holds it, or it cannot be written.
    """
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock(folder / LOCK, patience=0))
        except TimeoutError as error:
            raise KVLensError(f"train: another run is at work in {folder}; wait for it, or choose another folder") from error
        except OSError as error:
            raise KVLensError(f"train: cannot write to {folder}: {reason(error)}; choose another folder") from error
        clear_leftovers_in(folder)
        yield


def identity(run: Run) -> dict[str, dict[str, Any]]:
    """What makes two runs the same one."""
    cfg = {k: v for k, v in run.model.cfg.to_json().items() if k != "device"}
    task = {"name": run.task.name, **run.task.settings(), "data": run.task.data_hash()}
    loss = run.loss.identity()
    known = {"task": task, "model": {"kind": type(run.model).__name__, **cfg}, "setting": asdict(run.settings)}
    return known if loss is None else {**known, "loss": loss}


def usual_values(run: Run) -> dict[str, dict[str, Any]]:
    """The defaults of what `identity` holds, of JSON's types."""
    kinds: dict[str, Any] = {"task": run.task, "model": run.model.cfg, "setting": run.settings}
    return {
        part: {f.name: json.loads(json.dumps(f.default)) for f in fields(kind) if isinstance(f.default, JSON_TYPES)}
        for part, kind in kinds.items()
    }


def tensors_of(run: Run) -> dict[str, Tensor]:
    """Every tensor of a run, on the CPU, under a name that says what it is."""
    tensors = {f"model/{name}": value for name, value in run.model.state_dict().items() if is_weight(name)}
    tensors |= {f"best/{name}": value for name, value in (run.best or {}).items()}
    for name, parameter in run.model.named_parameters():
        tensors |= {f"adam/{key}/{name}": value for key, value in run.optimizer.state.get(parameter, {}).items()}
    for name in run.watched[0][1] if run.watched else ():
        tensors[f"watched/{name}"] = torch.stack([values[name] for _, values in run.watched])
    rows = [[row.step, SPLITS.index(row.split), *row[2:]] for row in run.progress.rows]
    tensors["rows"] = torch.tensor(rows, dtype=torch.float64).reshape(-1, len(Row._fields))
    return {name: value.detach().to("cpu").contiguous().clone() for name, value in tensors.items()}


@torch.no_grad()
def restore(run: Run, progress: dict[str, Any], watched_steps: list[int], tensors: dict[str, Tensor]) -> None:
    """Undo `tensors_of`."""
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "best": {}, "adam": {}, "watched": {}}
    for name, value in tensors.items():
        kind, _, rest = name.partition("/")
        if kind in parts:
            parts[kind][rest] = value
    run.model.load_state_dict(parts["model"], strict=False)
    run.keep_weights()
    device = next(run.model.parameters()).device
    run.best = {name: value.to(device) for name, value in parts["best"].items()} or None
    for name, parameter in run.model.named_parameters():
        keys = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}/{name}" in parts["adam"]]
        if keys:
            run.optimizer.state[parameter] = {key: parts["adam"][f"{key}/{name}"].to(device) for key in keys}
    run.watched = [(step, {n: v[i] for n, v in parts["watched"].items()}) for i, step in enumerate(watched_steps)]
    rows = [Row(int(r[0]), SPLITS[int(r[1])], r[2], r[3], int(r[4]), r[5], r[6]) for r in tensors["rows"].tolist()]
    run.progress = Progress(**{**progress, "best_loss": float(progress["best_loss"] or math.inf)}, rows=rows)


def metrics_frame(rows: list[Row]) -> pd.DataFrame:
    """The metrics as a tidy table; see :class:`kvlens.training.TrainResult`."""
    return pd.DataFrame(rows, columns=list(Row._fields)).astype({"step": "int64", "tokens": "int64", "split": "str"})
