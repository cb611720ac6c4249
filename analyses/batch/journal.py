"""The rows of a batch on disk: the journal while it runs, which survives a kill at any moment, and the table at its end.

A Parquet file can be read only after its last byte is written, so rows are first appended to a journal next to the output
(``OUT.partial``), a line for each prompt: its checksum, then JSON. The first line has the settings of the batch, so that rows
computed with different settings never mix. What a killed process was writing is a last line without its newline, and is left
out; any other line that does not match its checksum is an error. Of two lines on one prompt the later counts.

A prompt's rows are passed as the bytes of an Arrow stream, which are copied from worker to journal to table without parsing.
The table has one schema for all prompts, and one row group per prompt.
"""

import json
import os
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from kvlens import KVLensError
from kvlens.checks import checked
from kvlens.files import checksum, lock, reason, write_file
from kvlens.files.parquet import TableWriter, checked_bytes

METADATA = b"kvlens.batch"
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
        rows: its table, from :func:`to_bytes`; None if it failed.
        kind: :data:`REFUSED`, :data:`FAILED` or :data:`DIED` if it failed, else None.
        error: the error, in one line.
        where: file and line of the code that raised it, and of the call in the analysis' module.
        warnings: given while the prompt was run.
    """

    model: int
    prompt: int
    prompt_id: str
    n_rows: int = 0
    rows: bytes | None = None
    kind: str | None = None
    error: str | None = None
    where: str | None = None
    warnings: tuple[str, ...] = ()


# --- the journal ---


class JournalCounts(NamedTuple):
    """Counts of a journal: runs of a prompt on a model that are done, how many of them failed, and rows."""

    n_done: int
    n_failed: int
    n_rows: int


class Line(NamedTuple):
    """A line of a journal: where it begins, the number of rows that it holds, and why it holds none."""

    start: int
    n_rows: int
    kind: str | None


class Journal:
    """The record of one batch; open it in a ``with`` statement, outside of which other runs can write it.

    Args:
        path: the file, created if missing, and resumed if it was started with equal settings.
        settings: everything that the rows depend on, as JSON values.
        restart: discard its content and settings.
        retry_failed: disregard every prompt that failed. Prompts that failed for a reason other than the prompt itself, such as
            memory, are always disregarded and tried again.
        known: results that it begins with where it is created.

    Raises:
        KVLensError: it was started with other settings (the message names them), another run is writing it, it is not a
            journal or damaged, or it cannot be written.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        *,
        restart: bool = False,
        retry_failed: bool = False,
        known: Iterable[PromptResult] = (),
    ):
        self.path, self._end, self._done = path, 0, dict[tuple[int, int], Line]()
        with ExitStack() as stack:
            try:
                stack.enter_context(lock(path.with_name(f".{path.name}.work.kvlens-lock"), patience=0))
                if restart and path.exists():
                    next(self._lines())  # only a journal is replaced
                if restart or not path.exists():
                    lines = chain([_line({"settings": settings})], map(_line_of, known))
                    write_file(path, lambda file: file.writelines(lines))
                self._read(json.loads(json.dumps(settings)), retry_failed)
            except TimeoutError as error:
                raise KVLensError(f"another run is writing {path}; wait for it, or choose another output") from error
            except OSError as error:
                raise KVLensError(f"cannot write {path}: {reason(error)}") from error
            self._close = stack.pop_all().close

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def _read(self, settings: Mapping[str, Any], retry_failed: bool) -> None:
        for start, record in self._lines():
            if start == 0:
                check_same(self.path, record["settings"], settings)
                continue
            kind = record["kind"]
            self._done.pop(key := (record["model"], record["prompt"]), None)
            if kind is None or (kind == REFUSED and not retry_failed):
                self._done[key] = Line(start, record["n_rows"], kind)

    def _lines(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield where every line begins, and its record."""
        self._end = 0
        with open(self.path, "rb") as file:
            for line in file:
                if line.endswith(b"\n") or not self._end:
                    yield self._end, self._parsed(line)
                    self._end += len(line)
        if not self._end:
            raise KVLensError(self._damaged())

    def _parsed(self, line: bytes) -> dict[str, Any]:
        written, _, text = line[:-1].partition(b" ")
        if checksum(text).encode() != written:
            raise KVLensError(self._damaged())
        return json.loads(text)

    def _damaged(self) -> str:
        return f"{self.path} is not the journal of a batch, or is damaged: move it away to start from scratch"

    def add(self, results: Iterable[PromptResult]) -> None:
        """Record ``results``.

        Raises:
            KVLensError: the disk is full, or the file has gone.
        """
        try:
            with open(self.path, "r+b") as file:
                file.truncate(self._end)  # what a full disk left of a line
                start, added = file.seek(self._end), {}
                for result in results:
                    added[result.model, result.prompt] = Line(start, result.n_rows, result.kind)
                    start += file.write(_line_of(result))
                file.flush()
                os.fsync(file.fileno())
            self._end = start
            self._done |= added
        except OSError as error:
            raise KVLensError(f"cannot write {self.path}: {reason(error)}; earlier results are kept") from error

    def holds(self, model: int, prompt: int) -> bool:
        """Whether this prompt is done on this model, successfully or not."""
        return (model, prompt) in self._done

    def progress(self) -> JournalCounts:
        """How far the batch has come."""
        lines = self._done.values()
        return JournalCounts(len(lines), sum(line.kind is not None for line in lines), sum(line.n_rows for line in lines))

    def tables(self) -> Iterator[bytes]:
        """The rows of every prompt that has any, by model, then in the order of the input, one at a time."""
        return (b64decode(record["rows"]) for record in self._records(failed=False))

    def failures(self) -> Iterator[PromptResult]:
        """Every prompt that failed, in the same order."""
        return (PromptResult(**record) for record in self._records(failed=True))

    def _records(self, *, failed: bool) -> Iterator[dict[str, Any]]:
        with open(self.path, "rb") as file:
            for _, line in sorted(self._done.items()):
                if (line.kind is not None) == failed:
                    file.seek(line.start)
                    yield self._parsed(file.readline())

    def delete(self) -> None:
        """Close the journal and remove it, once the table is complete."""
        self._close()
        self.path.unlink(missing_ok=True)


def _line(record: Mapping[str, Any]) -> bytes:
    text = json.dumps(record)
    return f"{checksum(text)} {text}\n".encode()


def _line_of(result: PromptResult) -> bytes:
    rows = None if result.rows is None else b64encode(result.rows).decode()
    return _line({name: value for name, value in vars(result).items() if name != "warnings"} | {"rows": rows})


def check_same(path: Path, started: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise KVLensError, naming the differences, if a file was started with other settings."""
    differing = differences(started, now)
    if differing:
        raise KVLensError(
            f"{path} was started with other settings: {'; '.join(differing[:4])}. Give the settings that it was started "
            "with to resume it, another output, or --overwrite to start from scratch"
        )


def differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
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


def to_bytes(frame: pd.DataFrame, schema: pa.Schema) -> bytes:
    """A prompt's rows, in the schema's columns, as a compressed Arrow stream.

    Raises:
        pyarrow.ArrowException: a value does not fit its column without loss.
    """
    return stream(pa.Table.from_pandas(frame, schema=schema, preserve_index=False), schema)


def stream(table: pa.Table, schema: pa.Schema) -> bytes:
    """A table as a compressed Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def write_parquet(path: Path, schema: pa.Schema, prompts: Iterable[bytes], facts: Mapping[str, Any]) -> None:
    """Write one row group per prompt; ``path`` is replaced when the file is complete.

    Args:
        path: the file.
        schema: from :func:`schema_of`.
        prompts: rows of each prompt from :func:`to_bytes`, in order; a prompt without rows has no row group.
        facts: kept as JSON in the file's metadata, for :func:`read_facts`.

    Raises:
        KVLensError: not writable, or the disk is full.
    """

    def fill(file: IO[bytes]) -> None:
        with TableWriter(file, schema) as writer:
            for rows in prompts:
                table = pa.ipc.open_stream(rows).read_all()
                if table.num_rows:
                    writer.write_table(table, row_group_size=table.num_rows)
            writer.seal({METADATA: json.dumps(facts)})

    write_file(path, fill)


def read_parquet(path: Path, schema: pa.Schema) -> Iterator[tuple[str, str, int, bytes]]:
    """(model, prompt_id, number of rows, rows as :func:`to_bytes` makes them) of every row group of a batch's table.

    Raises:
        KVLensError: it cannot be read, or has other columns.
    """
    try:
        file = pq.ParquetFile(pa.BufferReader(checked_bytes(path)))
        for group in range(file.num_row_groups):
            table = file.read_row_group(group).cast(schema)
            yield table["model"][0].as_py(), table["prompt_id"][0].as_py(), table.num_rows, stream(table, schema)
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise KVLensError(
            f"{path} cannot be read as the table of a batch: {error}; pass --overwrite to start from scratch"
        ) from error


def read_facts(path: Path) -> dict[str, Any] | None:
    """The facts that :func:`write_parquet` put into a file; None for any other file."""
    try:
        return json.loads(pq.read_metadata(path).metadata[METADATA])
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
        return None
