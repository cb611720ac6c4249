"""The results of a batch on disk: a part for each finished prompt while it runs, and the table that they are joined into.

The parts are Parquet files in the folder ``OUT.partial``. Each is written under another name and then renamed, so that a kill
at any moment leaves it whole or not at all. Its metadata name its prompt, its model and the settings that it was computed with,
and say why it has no rows if the prompt failed. ``settings.json`` beside the parts has these settings, so that rows of
different settings never mix. Like the table, a part holds a checksum of the whole file: the rows of a damaged one are not used,
and its prompt is run again.

The table has one schema for all prompts, and one row group per prompt.
"""

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from kvlens import KVLensError
from kvlens.checks import checked
from kvlens.files import FolderKind, checksum_of_json, clear_leftovers_in, is_temporary, read_json, write_file, write_folder
from kvlens.files.parquet import TableWriter, checked_bytes

METADATA, PART_METADATA = "kvlens.batch", "kvlens.batch.part"
SETTINGS = "settings.json"
REFUSED, FAILED, DIED = "refused", "failed", "died"
"""Why a prompt has no rows: the analysis refused it; it raised any other error; its worker died."""


@dataclass(frozen=True)
class PromptResult:
    """The result of one prompt on one model.

    Attributes:
        model: index into the work's models.
        prompt: number of the prompt in the input.
        prompt_id: id of the prompt.
        n_rows: number of rows of its table.
        kind: :data:`REFUSED`, :data:`FAILED` or :data:`DIED` if it failed, else None.
        error: the error, in one line.
        where: file and line of the code that raised it, and of the call in the analysis' module.
        rows: its table; None if it failed, or was not read.
        warnings: given while the prompt was run.
    """

    model: int
    prompt: int
    prompt_id: str
    n_rows: int = 0
    kind: str | None = None
    error: str | None = None
    where: str | None = None
    rows: pa.Table | None = None
    warnings: tuple[str, ...] = ()

    @property
    def facts(self) -> dict[str, object]:
        """What its part says in the metadata."""
        return {name: value for name, value in vars(self).items() if name not in ("rows", "warnings")}


# --- parts ---


def _own_files(folder: Path) -> set[str] | None:
    names = {path.name for path in folder.iterdir()}
    own = {name for name in names if name == SETTINGS or re.fullmatch(r"\d+-\d+\.parquet", name) or is_temporary(name)}
    return own if own == names else None


PARTS = FolderKind("the parts of a batch", _own_files, "out", allow=None)


def folder_of_parts(out: Path) -> Path:
    """The folder of the parts of a table."""
    return out.with_name(f"{out.name}.partial")


def is_started(folder: Path) -> bool:
    """Whether the folder has the parts of an unfinished batch. Removes what a kill left of a finished one's.

    The settings appear together with the folder, and are deleted first.
    """
    if (folder / SETTINGS).exists():
        return True
    if folder.is_dir() and _own_files(folder) is not None:
        shutil.rmtree(folder, ignore_errors=True)
    return False


class Parts:
    """The parts of one batch; only one process may have them, as `kvlens.files.work_on` ensures.

    Args:
        folder: of :func:`folder_of_parts`, created if missing, and resumed if it was started with equal settings.
        settings: everything that the rows depend on, as JSON values.
        schema: of the table.
        restart: discard its content and settings.
        retry_failed: disregard every prompt that failed. Prompts that failed for a reason other than the prompt itself, such as
            memory, are always disregarded and tried again.
        known: results that it begins with where it is created.

    Attributes:
        done: (model, prompt) -> its result, without its rows.
        damaged: the parts that were found damaged.

    Raises:
        KVLensError: it was started with other settings (the message names them), is damaged, or cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, object],
        schema: pa.Schema,
        *,
        restart: bool = False,
        retry_failed: bool = False,
        known: Iterable[PromptResult] = (),
    ):
        self.folder, self.schema = folder, schema
        self.done, self.damaged = dict[tuple[int, int], PromptResult](), list[Path]()
        self._checksum = checksum_of_json(settings)
        if restart or not is_started(folder):
            write_folder(folder, lambda new: self._begin(new, settings, known), PARTS)
        else:
            check_same(folder, self._started_with(), settings)
            clear_leftovers_in(folder)
        self._find(retry_failed)

    def _begin(self, folder: Path, settings: Mapping[str, object], known: Iterable[PromptResult]) -> None:
        (folder / SETTINGS).write_text(json.dumps(settings, indent=2))
        for result in known:
            with open(self._path(result, folder), "x+b") as file:
                self._write(file, result)

    def _started_with(self) -> dict[str, object]:
        """The settings of the parts, which need no checksum: where they are damaged, they differ from any others."""
        try:
            return dict(read_json("out", self.folder / SETTINGS))
        except (KVLensError, TypeError, ValueError) as error:
            raise KVLensError(f"{error}; pass --overwrite to start from scratch") from error

    def _find(self, retry_failed: bool) -> None:
        for path in self.folder.glob("*.parquet"):
            try:
                result = self._read(path)
            except KVLensError:
                self.damaged.append(path)
                continue
            if result.kind is None or (result.kind == REFUSED and not retry_failed):
                self.done[result.model, result.prompt] = replace(result, rows=None)

    def _path(self, result: PromptResult, folder: Path | None = None) -> Path:
        return (folder or self.folder) / f"{result.model}-{result.prompt}.parquet"

    def _read(self, path: Path) -> PromptResult:
        file = pq.ParquetFile(pa.BufferReader(checked_bytes(path)))
        facts = json.loads(file.metadata.metadata.get(PART_METADATA.encode(), b"{}"))
        if facts.pop("settings", None) != self._checksum or self._path(result := PromptResult(**facts)) != path:
            raise KVLensError(f"{path} is the part of another prompt or batch; delete it to have its prompt run again")
        return result if result.kind else replace(result, rows=file.read().cast(self.schema))

    def _write(self, file: IO[bytes], result: PromptResult) -> None:
        facts = json.dumps({"settings": self._checksum, **result.facts})
        _fill(file, self.schema, () if result.rows is None else (result.rows,), {PART_METADATA: facts})

    def add(self, result: PromptResult) -> None:
        """Write the part of a prompt.

        Raises:
            KVLensError: the disk is full, or the folder has gone.
        """
        write_file(self._path(result), lambda file: self._write(file, result))
        self.done[result.model, result.prompt] = replace(result, rows=None)

    @property
    def failures(self) -> list[PromptResult]:
        """Every prompt that failed, by model, then in the order of the input."""
        return [result for _, result in sorted(self.done.items()) if result.kind is not None]

    def tables(self) -> Iterator[pa.Table]:
        """The rows of every other prompt, in the same order, read one at a time."""
        for _, result in sorted(self.done.items()):
            if result.kind is None:
                yield self._read(self._path(result)).rows

    def delete(self) -> None:
        """Remove the parts, once the table is complete."""
        (self.folder / SETTINGS).unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def check_same(path: Path, started: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Raise KVLensError, naming the differences, if a file was started with other settings."""
    differing = differences(started, now)
    if differing:
        raise KVLensError(
            f"{path} was started with other settings: {'; '.join(differing[:4])}. Give the settings that it was started "
            "with to resume it, another output, or --overwrite to start from scratch"
        )


def differences(before: Mapping[str, object], now: Mapping[str, object], prefix: str = "") -> list[str]:
    """Describe every setting that differs, as ``options.seed was 4, now 8``; mappings are compared entry by entry."""
    found = []
    for name in [*before, *(name for name in now if name not in before)]:
        old, new = before.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += differences(old, new, f"{prefix}{name}.")
        elif old != new:
            found.append(f"{prefix}{name} was {json.dumps(old)}, now {json.dumps(new)}")
    return found


# --- the table ---


@checked
def schema_of(columns: Mapping[str, str]) -> pa.Schema:
    """The Arrow schema of a table with these columns (name -> dtype of pandas)."""
    empty = pd.DataFrame({name: pd.Series(dtype="str" if kind == "category" else kind) for name, kind in columns.items()})
    schema = pa.Schema.from_pandas(empty, preserve_index=False)
    for i, kind in enumerate(columns.values()):
        if kind == "category":  # an empty one has no type
            schema = schema.set(i, schema.field(i).with_type(pa.dictionary(pa.int32(), pa.string())))
    return schema


def _fill(file: IO[bytes], schema: pa.Schema, tables: Iterable[pa.Table], facts: Mapping[str, str]) -> None:
    """Write a row group for each table that has rows."""
    with TableWriter(file, schema) as writer:
        for table in tables:
            if table.num_rows:
                writer.write_table(table, row_group_size=table.num_rows)
        writer.seal(facts)


def write_table(path: Path, schema: pa.Schema, tables: Iterable[pa.Table], facts: Mapping[str, object]) -> None:
    """Write the table of a batch; ``path`` is replaced when the file is complete.

    Args:
        path: the file.
        schema: from :func:`schema_of`.
        tables: the rows of each prompt, in order; a prompt without rows has no row group.
        facts: kept as JSON in the file's metadata, for :func:`read_facts`.

    Raises:
        KVLensError: not writable, or the disk is full.
    """
    write_file(path, lambda file: _fill(file, schema, tables, {METADATA: json.dumps(facts)}))


def read_row_groups(path: Path, schema: pa.Schema) -> Iterator[pa.Table]:
    """Every row group of a batch's table, which is the rows of one prompt on one model.

    Raises:
        KVLensError: it cannot be read, or has other columns.
    """
    try:
        file = pq.ParquetFile(pa.BufferReader(checked_bytes(path)))
        for group in range(file.num_row_groups):
            yield file.read_row_group(group).cast(schema)
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise KVLensError(
            f"{path} cannot be read as the table of a batch: {error}; pass --overwrite to start from scratch"
        ) from error


def read_facts(path: Path) -> dict[str, object] | None:
    """The facts that :func:`write_table` put into a file; None for any other file."""
    try:
        return json.loads(pq.read_metadata(path).metadata[METADATA.encode()])
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
        return None
