"""The progress of a batch, kept in one file that stays valid if the process is killed at any moment.

A Parquet file can be read only after its last byte is written, so rows are first collected in an SQLite database next to the
output (``OUT.partial``): the rows of a job are stored completely or not at all, no prompt is stored twice, and only one run can
write at a time. It also stores the settings of the batch, so that rows computed with different settings never mix.
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlens import KVLensError
from kvlens.files import checksum

from .worker import REFUSED, PromptResult

_TABLES = """
CREATE TABLE settings (value TEXT NOT NULL, checksum TEXT NOT NULL);
CREATE TABLE done (
    model INTEGER NOT NULL, prompt INTEGER NOT NULL, prompt_id TEXT NOT NULL,
    n_rows INTEGER NOT NULL, rows BLOB, kind TEXT, error TEXT, checksum TEXT NOT NULL,
    PRIMARY KEY (model, prompt)
);
"""


@dataclass(frozen=True)
class Progress:
    """Counts of a journal: runs of a prompt on a model that are done, how many of them failed, and rows."""

    n_done: int
    n_failed: int
    n_rows: int


class Journal:
    """The record of one batch; open it in a ``with`` statement, so that it is always closed.

    Args:
        path: the database, created if missing, and resumed if it was started with equal settings.
        settings: everything that the rows depend on, as JSON values.
        restart: discard its content and settings.
        retry_failed: discard every prompt that failed. Prompts that failed for a reason other than the prompt itself, such as
            memory, are always discarded and tried again.

    Raises:
        KVLensError: it was started with other settings (the message names them), another run is writing it, it is not a
            journal, or it cannot be written.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], *, restart: bool = False, retry_failed: bool = False):
        self.path = path
        try:
            self._db = sqlite3.connect(path, timeout=0, isolation_level=None)
        except sqlite3.Error as error:
            raise KVLensError(f"cannot write {path}: {error}") from error
        try:
            self._begin(json.dumps(settings), restart, retry_failed)
        except BaseException:
            self._db.close()
            raise

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *error: object) -> None:
        self._db.close()

    def _begin(self, settings: str, restart: bool, retry_failed: bool) -> None:
        try:
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")  # held until the file is closed, or the process dies
            self._db.execute("BEGIN EXCLUSIVE")
            if not self._db.execute("SELECT name FROM sqlite_master").fetchall():
                for statement in _TABLES.split(";"):
                    self._db.execute(statement)
                self._db.execute("INSERT INTO settings VALUES (?, ?)", (settings, checksum(settings)))
            if restart:
                self._db.execute("DELETE FROM done")
                self._db.execute("UPDATE settings SET value = ?, checksum = ?", (settings, checksum(settings)))
            self._check_settings(json.loads(settings))
            self._check_rows()
            self._db.execute("DELETE FROM done WHERE kind != ?", ("" if retry_failed else REFUSED,))
            self._db.execute("COMMIT")
        except KVLensError:
            raise
        except (sqlite3.Error, TypeError, ValueError) as error:
            raise KVLensError(_why_unusable(self.path, error)) from error

    def _check_settings(self, now: Mapping[str, Any]) -> None:
        """Raise KVLensError unless the database is intact, and was started with these settings."""
        whole = [row[0] for row in self._db.execute("PRAGMA integrity_check")] == ["ok"]
        settings = self._db.execute("SELECT value, checksum FROM settings").fetchall()
        if not whole or len(settings) != 1 or checksum(settings[0][0]) != settings[0][1]:
            raise KVLensError(self._damaged())
        check_same(self.path, json.loads(settings[0][0]), now)

    def _check_rows(self) -> None:
        """Raise KVLensError unless every row has the checksum with which it was written."""
        if any(_row_checksum(row) != written for *row, written in self._db.execute("SELECT * FROM done")):
            raise KVLensError(self._damaged())

    def _damaged(self) -> str:
        return f"{self.path}, the record of an unfinished batch, is damaged: move it away to start from scratch"

    def add(self, results: Iterable[PromptResult]) -> None:
        """Record all of ``results`` or none; only one at a time is in memory.

        Raises:
            KVLensError: the disk is full, or the file has gone.
        """
        rows = ((o.model, o.prompt, o.prompt_id, o.n_rows, o.rows, o.kind, _with_location(o.error, o.where)) for o in results)
        checked = ((*row, _row_checksum(row)) for row in rows)
        try:
            self._db.execute("BEGIN")
            self._db.executemany("INSERT INTO done VALUES (?, ?, ?, ?, ?, ?, ?, ?)", checked)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise KVLensError(f"cannot write {self.path}: {error}; earlier results are kept") from error

    def holds(self, model: int, prompt: int) -> bool:
        """Whether this prompt is done on this model, successfully or not."""
        found = self._db.execute("SELECT 1 FROM done WHERE model = ? AND prompt = ?", (model, prompt))
        return found.fetchone() is not None

    def progress(self) -> Progress:
        """How far the batch has come."""
        counts = self._db.execute("SELECT count(*), count(kind), coalesce(sum(n_rows), 0) FROM done").fetchone()
        return Progress(*counts)

    def tables(self) -> Iterator[bytes]:
        """The rows of every prompt that has any, by model, then in the order of the input, one at a time."""
        for (rows,) in self._db.execute("SELECT rows FROM done WHERE rows IS NOT NULL ORDER BY model, prompt"):
            yield rows

    def failures(self) -> Iterator[PromptResult]:
        """Every prompt that failed, in the same order."""
        for model, prompt, prompt_id, kind, text in self._db.execute(
            "SELECT model, prompt, prompt_id, kind, error FROM done WHERE kind IS NOT NULL ORDER BY model, prompt"
        ):
            error, _, where = text.partition("\n")
            yield PromptResult(model, prompt, prompt_id, kind=kind, error=error, where=where or None)

    def delete(self) -> None:
        """Close the journal and remove it, once the table is complete.

        SQLite's rollback file is removed first; it is empty by now, and nothing else would remove it.
        """
        self._db.close()
        self.path.with_name(f"{self.path.name}-journal").unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)


def _row_checksum(row: Sequence[Any]) -> str:
    """Checksum of a row: of table rows as bytes, and of the other values by their ``repr``."""
    model, prompt, prompt_id, n_rows, rows, kind, error = row
    return checksum(repr((model, prompt, prompt_id, n_rows, type(rows).__name__, kind, error)), rows or b"")


def _with_location(error: str | None, where: str | None) -> str | None:
    """The one-line error and, on a second line, where it was raised, for one column."""
    return error if where is None else f"{error}\n{where}"


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


def _why_unusable(path: Path, error: Exception) -> str:
    if "locked" in str(error):
        return f"another run is writing {path}; wait for it, or choose another output"
    if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
        return f"{path} is not the journal of a batch ({error}); move it away"
    return f"cannot use {path}: {error}"
