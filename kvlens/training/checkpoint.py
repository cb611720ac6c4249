"""A run on disk: one safetensors file with the complete state, replaced atomically, so that a kill at any moment loses little.

    checkpoint.safetensors    weights, best weights, optimizer state, metrics so far, watched parameters; header: identity
    metrics.parquet           the metrics as a table, rewritten from the checkpoint's rows with every checkpoint
    seconds.json              the time spent: the only file in which two runs of equal settings differ

The checkpoint is authoritative; the table is derived from it. A run is identified by task, model and settings; a folder that
holds another run is refused, with the first difference in the message.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
from torch import Tensor

from kvlens.arguments import path_of
from kvlens.checks import Within, ensure
from kvlens.errors import KVLensError
from kvlens.files import (
    FolderKind,
    check_folder,
    check_regular,
    clear_leftovers_in,
    is_temporary,
    lock,
    parsed_json,
    read_json,
    reason,
    write_atomically,
)
from kvlens.files.parquet import table_bytes
from kvlens.files.tensors import checked_tensor_bytes, read_checked_tensors
from kvlens.model.fingerprint import is_weight
from kvlens.tasks import SPLITS
from kvlens.training.run import Progress, Row, Run

FORMAT, FORMAT_VERSION = "kvlens.training", 2
CHECKPOINT, METRICS, SECONDS, RUN_LOCK = "checkpoint.safetensors", "metrics.parquet", "seconds.json", ".lock"
ARITHMETIC = 1
"""Raised by one when equal model, task and settings train to other numbers than before, rounding aside; runs kept under an
earlier number are then not found (`run_name`)."""
RUN_FOLDER = FolderKind(
    "a run with a checkpoint",
    lambda folder: {CHECKPOINT} if (folder / CHECKPOINT).is_file() else None,
    operation="train",
    allow=None,
    ignored=lambda path: path.name == RUN_LOCK or is_temporary(path.name),
)
JSON_TYPES = (bool, int, float, str, tuple, type(None))


class CheckpointFolder:
    """The folder of one run.

    Args:
        folder: created if missing.
        run: the run to save and restore.
        restart: start from scratch even if there is a checkpoint of a kvlens run; the first checkpoint of this run replaces it.

    Raises:
        KVLensError: the folder holds other things, or cannot be written.
    """

    def __init__(self, folder: str | Path, run: Run, *, restart: bool = False):
        self.path, self.run, self._restart = path_of("train: folder", folder), run, restart
        self.identity = json.loads(json.dumps(identity(run)))  # as read back from JSON: tuples become lists
        check_run_folder(self.path)

    @property
    def _file(self) -> Path:
        return self.path / CHECKPOINT

    def save(self) -> None:
        """Write the current state. Raises KVLensError if the disk is full; the previous checkpoint stays."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise KVLensError(f"train: cannot make {self.path}: {reason(error)}") from error
        header = {"format": FORMAT, "format_version": str(FORMAT_VERSION), "identity": json.dumps(self.identity)}
        progress = {name: value for name, value in asdict(self.run.progress).items() if name not in ("rows", "seconds")}
        header["progress"] = json.dumps(progress)
        header["watched_steps"] = json.dumps([step for step, _ in self.run.watched])
        write_atomically(self.path / SECONDS, f"{self.run.seconds}\n")
        write_atomically(self._file, checked_tensor_bytes(tensors_of_run(self.run), header))
        write_atomically(self.path / METRICS, table_bytes(metrics_frame(self.run.progress.rows)))

    def resume(self) -> bool:
        """Restore the run from its checkpoint, unless it starts from scratch; return whether there was one.

        Raises:
            KVLensError: the file is damaged, of another kind, or of another run; it is left unchanged.
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
        restore(self.run, {**progress, "seconds": self._seconds()}, steps, tensors)
        return True

    def _seconds(self) -> float:
        """The time spent on the run so far; 0 if the file is missing."""
        path = self.path / SECONDS
        return float(ensure(f"train: {path}", Annotated[float, Within(0)], read_json("train", path))) if path.exists() else 0.0

    def _parsed(self, header: Mapping[str, str]) -> tuple[dict[str, dict[str, object]], dict[str, object], list[int]]:
        """Identity, progress and the watched steps, from the header."""
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
                    continue  # a setting added later, at its default, which keeps the old behavior
                if was != now:
                    raise KVLensError(
                        f"train: {self.path} holds another run: {part} {name} was {was!r} there and is {now!r} now; give the "
                        "same settings to resume it, choose another folder, or ask for a restart to start from scratch"
                    )


def check_run_folder(folder: Path) -> None:
    """Raise KVLensError unless a run may be written to, or resumed from, ``folder``; leave the folder unchanged."""
    check_folder(folder, RUN_FOLDER)


@contextmanager
def only_run_in(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of ``folder``, created if missing; remove temporary files of runs that died.

    Args:
        folder: of the run.
        wait: wait while another process holds the lock.

    Raises:
        KVLensError: another process holds the lock, or the folder cannot be written.
    """
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock(folder / RUN_LOCK, patience=-1 if wait else 0))
        except TimeoutError as error:
            raise KVLensError(f"train: another process is training in {folder}; wait for it, or use another folder") from error
        except OSError as error:
            raise KVLensError(f"train: cannot write to {folder}: {reason(error)}; choose another folder") from error
        clear_leftovers_in(folder)
        yield


def run_name(run: Run) -> str:
    """A folder name that equal runs share and different ones do not: of task, data, model, settings and `ARITHMETIC`."""
    known = json.dumps([identity(run), ARITHMETIC], sort_keys=True)
    return f"{run.task.name}-{hashlib.sha256(known.encode()).hexdigest()[:24]}"


def identity(run: Run) -> dict[str, dict[str, object]]:
    """The task, model and settings that identify a run."""
    cfg = {k: v for k, v in run.model.cfg.to_json().items() if k != "device"}
    task = {"name": run.task.name, **run.task.settings(), "data": run.task.data_hash()}
    loss = run.loss.identity()
    known = {"task": task, "model": {"kind": type(run.model).__name__, **cfg}, "setting": asdict(run.settings)}
    return known if loss is None else {**known, "loss": loss}


def usual_values(run: Run) -> dict[str, dict[str, object]]:
    """The defaults of the fields of `identity`, as JSON values."""
    kinds: dict[str, Any] = {"task": run.task, "model": run.model.cfg, "setting": run.settings}
    return {
        part: {f.name: json.loads(json.dumps(f.default)) for f in fields(kind) if isinstance(f.default, JSON_TYPES)}
        for part, kind in kinds.items()
    }


def tensors_of_run(run: Run) -> dict[str, Tensor]:
    """Every tensor of a run, on the CPU, by a descriptive name."""
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
    """Undo `tensors_of_run`."""
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
    best = math.inf if progress["best_loss"] is None else float(progress["best_loss"])
    run.progress = Progress(**{**progress, "best_loss": best}, rows=rows)


def metrics_frame(rows: list[Row]) -> pd.DataFrame:
    """The metrics as a tidy table; see :class:`kvlens.training.TrainResult`."""
    return pd.DataFrame(rows, columns=list(Row._fields)).astype({"step": "int64", "tokens": "int64", "split": "str"})
