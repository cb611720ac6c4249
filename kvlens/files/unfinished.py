"""What a long computation has found so far, in one file, from which the same computation resumes.

Each result is one line of JSON with its number and a checksum, appended as soon as it is there, behind a first line that says
what the results belong to. One process at a time works with a file, by its lock. A process may be killed at any moment: at most
its last line is then incomplete, and the next process cuts it off.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from kvlens.arguments import path_of
from kvlens.errors import KVLensError
from kvlens.files.atomic import LOCK, beside, lock, reason
from kvlens.files.folders import FolderKind, check_folder
from kvlens.files.manifest import checksum, checksum_of_json
from kvlens.files.reading import check_regular, parsed_json

FORMAT = "kvlens.unfinished"
START = json.dumps({"format": FORMAT})[:-1].encode()
"""How the first line of every such file begins."""


class Unfinished:
    """A file of results, from :func:`hold_unfinished` or :func:`work_on`.

    Args:
        path: of the file; it need not exist.
        overwrite: whether results of another computation may be replaced.

    Attributes:
        results: those in the file, in order; empty before :meth:`begin`.
        n_new: how many of them were added since.
    """

    def __init__(self, path: Path, *, overwrite: bool = False):
        self.path, self.overwrite = path, overwrite
        self.results: list[Any] = []
        self.n_new = 0
        self._head: bytes | None = None
        self._holds_head = False

    def begin(self, of: Mapping[str, Any]) -> None:
        """Read what this computation found before.

        Args:
            of: everything that its results depend on, as JSON's types, by name.

        Raises:
            KVLensError: the file is damaged, another kind of file, or has results of another computation; the message names
                what differs.
        """
        named = {name: checksum_of_json({name: of[name]}) for name in sorted(of)}
        self._head = json.dumps({"format": FORMAT, "of": named}).encode()
        first, *lines = self._lines() or [b""]
        self._holds_head, self.n_new = first == self._head, 0
        if lines and not self._holds_head and not self.overwrite:
            raise KVLensError(
                f"{self.path} holds what another computation found before it was interrupted{_difference(first, named)}. Run "
                "that one again to finish it, choose another output, or delete the file to start from scratch"
            )
        self.results = [self._result(i, line) for i, line in enumerate(lines, start=1)] if self._holds_head else []

    def append(self, result: Any) -> None:
        """Add a result, of JSON's types.

        Raises:
            KVLensError: the file cannot be written. Earlier results are kept.
        """
        assert self._head is not None
        text, number = json.dumps(result), len(self.results) + 1
        line = json.dumps({"number": number, "result": text, "checksum": self._checksum(number, text)}).encode()
        try:
            if not self._holds_head:
                self.path.unlink(missing_ok=True)
            with open(self.path, "ab" if self._holds_head else "xb") as file:
                file.write((b"" if self._holds_head else self._head + b"\n") + line + b"\n")
        except OSError as error:
            raise KVLensError(f"cannot write {self.path}: {reason(error)}; earlier results are kept") from error
        self._holds_head = True
        self.results.append(result)
        self.n_new += 1

    def delete(self) -> None:
        """Delete the file if it belongs to the computation that :meth:`begin` named; any other stays."""
        with suppress(KVLensError):
            if self._head is not None and self._lines()[:1] == [self._head]:
                self.path.unlink()

    def check(self) -> None:
        """Raise KVLensError if there is something else than a file of results, which would be refused later."""
        self._lines()

    def _lines(self) -> list[bytes]:
        """The complete lines; what a dead process wrote of another is cut off."""
        if self.path.is_symlink():
            raise self._foreign("is a link")
        check_regular("unfinished results", self.path)
        try:
            content = self.path.read_bytes() if self.path.exists() else b""
            *lines, rest = content.split(b"\n")
            first = [*lines, rest][0]
            if not (first.startswith(START) or (not lines and START.startswith(first))):
                raise self._foreign("is no file of unfinished results")
            if lines and rest:
                os.truncate(self.path, len(content) - len(rest))
        except OSError as error:
            raise KVLensError(f"{self.path} cannot be read: {reason(error)}; choose another output") from error
        return lines

    def _result(self, number: int, line: bytes) -> Any:
        """The result of a line, which must be the one of that number of this computation."""
        read = parsed_json("unfinished results", self.path, line.decode(errors="replace"))
        text = read.get("result") if isinstance(read, dict) else None
        if not isinstance(text, str) or [read.get("number"), read.get("checksum")] != [number, self._checksum(number, text)]:
            raise KVLensError(
                f"{self.path}: result {number} is damaged, or another process wrote it; delete the file to start from scratch"
            )
        return json.loads(text)

    def _checksum(self, number: int, text: str) -> str:
        assert self._head is not None
        return checksum(self._head, str(number), text)

    def _foreign(self, what: str) -> KVLensError:
        return KVLensError(f"{self.path} {what}, so it is left alone; move it away, or choose another output")


@contextmanager
def hold_unfinished(path: str | Path, *, overwrite: bool = False) -> Iterator[Unfinished]:
    """Inside the block, no other process works with this file; missing parent folders are created, and removed if left empty.

    Raises:
        KVLensError: another process does, or the folder cannot be written.
    """
    path = path_of("unfinished results", path).absolute()
    with ExitStack() as stack:
        try:
            stack.callback(_remove_empty, [folder for folder in path.parents if not folder.exists()])
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock(beside(path, LOCK), patience=0))
        except TimeoutError as error:
            raise KVLensError(f"another process is at work on {path}; wait for it, or choose another output") from error
        except OSError as error:
            raise KVLensError(f"cannot write {path}: {reason(error)}; choose another output") from error
        yield Unfinished(path, overwrite=overwrite)


@contextmanager
def work_on(folder: str | Path, kind: FolderKind, *, overwrite: bool = False) -> Iterator[Unfinished]:
    """Inside the block, no other command works on the output ``folder``; its unfinished results are in ``FOLDER.unfinished``.

    Raises:
        KVLensError: as :func:`check_folder`, or another process works on it.
    """
    path = check_folder(folder, kind, overwrite=overwrite)
    with hold_unfinished(path.with_name(f"{path.name}.unfinished"), overwrite=overwrite) as unfinished:
        check_folder(folder, kind, overwrite=overwrite)  # again: the process that held the lock may just have written it
        yield unfinished


def _difference(first: bytes, named: Mapping[str, str]) -> str:
    """Which of the things that results depend on are different, for the message."""
    try:
        other = json.loads(first)["of"]
        names = [name for name in sorted({*named, *other}) if named.get(name) != other.get(name)]
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""
    return f": {', '.join(names)} differ{'s' if len(names) == 1 else ''}"


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()
