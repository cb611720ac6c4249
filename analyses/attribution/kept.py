"""Scores that were read from a model, kept in a file as they come, so that an interrupted explanation resumes where it stopped.

An explanation reads the same passes in the same order whenever model, texts and options are the same. So the file is a list:
the n-th reading's log-probabilities, one JSON line each, behind a line that says what they belong to. Texts that the model
writes and prompts that it converts are not kept; they are a small part.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

import kvlens
from kvlens import KVLensError, KVModel
from kvlens.files import check_regular, checksum, checksum_of_json, parsed_json, reason

FORMAT = "kvlens-scores"
Reading = tuple[Float[Tensor, "row answer"], int]
"""Log-probabilities, and how many tokens went through the model for them."""
_kept: ContextVar["Kept | None"] = ContextVar("kept scores", default=None)


@dataclass
class Account:
    """How much was read, in units of one pass over prompt and text."""

    n_tokens_per_pass: int
    n_tokens: int = 0
    on_tokens: Callable[[int], None] | None = None

    def count(self, n_tokens: int) -> None:
        """Add tokens that went through the model, and tell ``on_tokens`` how many there are by now."""
        self.n_tokens += n_tokens
        if self.on_tokens is not None:
            self.on_tokens(self.n_tokens)

    @property
    def n_passes(self) -> float:
        """So many passes over prompt and text would have read as many tokens."""
        return self.n_tokens / self.n_tokens_per_pass


class Kept:
    """The readings in a file, in order; new ones are appended.

    Args:
        path: where it is, or will be.
        of: what the readings belong to, as JSON's types. A file that belongs to something else is begun anew.

    Raises:
        KVLensError: the file is damaged, or no such file.
    """

    def __init__(self, path: Path, of: Mapping[str, Any]):
        self.path = path
        self.head = {"format": FORMAT, "of": checksum_of_json(of)}
        self.readings = _read(path, self.head)
        self.n_recalled = 0

    def recall(self, take: Callable[[], Float[Tensor, "row answer"]], account: Account) -> Float[Tensor, "row answer"]:
        """The next reading: from the file, or taken now and appended. Its tokens are counted either way."""
        if self.n_recalled < len(self.readings):
            found, n_tokens = self.readings[self.n_recalled]
            account.count(n_tokens)
        else:
            before = account.n_tokens
            found = take()
            self._append(found, account.n_tokens - before)
        self.n_recalled += 1
        return found

    def _append(self, found: Float[Tensor, "row answer"], n_tokens: int) -> None:
        line = _line(found, n_tokens)
        lines = [line] if self.readings else [json.dumps(self.head), line]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a" if self.readings else "w", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))
        except OSError as error:
            raise KVLensError(f"scores cannot be kept in {self.path}: {reason(error)}") from error
        self.readings.append((found, n_tokens))


def _line(found: Float[Tensor, "row answer"], n_tokens: int) -> str:
    numbers = json.dumps([n_tokens, list(found.shape), found.flatten().tolist()])
    return json.dumps({"numbers": numbers, "checksum": checksum(numbers)})


def _read(path: Path, head: Mapping[str, Any]) -> list[Reading]:
    """The readings in the file; a last line that was cut off while it was written does not count."""
    if not path.exists():
        return []
    check_regular("kept scores", path)
    first, *lines = path.read_bytes().split(b"\n")
    ours = json.dumps(head).encode()
    if not lines and ours.startswith(first):
        return []
    if not lines or not first.startswith(ours[: ours.index(b",")]):
        raise KVLensError(f"kept scores: {path} is no file of scores; it stays as it is. Name another one, or move it away")
    if first != ours:
        return []
    found = []
    for number, line in enumerate(lines[:-1], start=2):
        read = parsed_json("kept scores", path, line.decode(errors="replace"))
        numbers = read.get("numbers") if isinstance(read, dict) else None
        if not isinstance(numbers, str) or read.get("checksum") != checksum(numbers):
            raise KVLensError(f"kept scores: line {number} of {path} is damaged; delete the file to begin anew")
        n_tokens, shape, values = json.loads(numbers)
        found.append((torch.tensor(values, dtype=torch.float64).reshape(shape), n_tokens))
    if lines and lines[-1]:
        _cut(path, len(lines[-1]))
    return found


def _cut(path: Path, n_bytes: int) -> None:
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size - n_bytes)


@contextmanager
def keeping(path: Path | None, model: KVModel, **of: Any) -> Iterator[Kept | None]:
    """Inside, every reading of an answer's probability is kept in the file, or comes from it; with None nothing is.

    Args:
        path: of the file. It stays when the block ends, for its caller to delete.
        model: that is asked, with nothing attached.
        of: everything else that readings depend on: tensors, dataclasses, sequences, and objects with a ``repr`` that says all.

    Raises:
        KVLensError: the file is damaged or another one, or something is attached to the model.
    """
    if path is None:
        yield _kept.get()
        return
    if model.attached_kv_bias is not None:
        raise KVLensError("kept scores: the model has a bias attached; detach it first (model.detach_kv_bias())")
    versions = {"kvlens": kvlens.__version__, "torch": torch.__version__}
    computed = {"dtype": str(model.W_E.dtype), "device": model.W_E.device.type, "model": model.fingerprint().to_json()}
    kept = Kept(path, {**{name: _in_full(value) for name, value in of.items()}, **versions, **computed})
    token = _kept.set(kept)
    try:
        yield kept
    finally:
        _kept.reset(token)


def _in_full(value: Any) -> Any:
    """As JSON's types; a tensor's ``repr`` would leave numbers out."""
    if isinstance(value, Tensor):
        return value.tolist()
    if is_dataclass(value):
        return {field.name: _in_full(getattr(value, field.name)) for field in fields(value)}
    return [_in_full(item) for item in value] if isinstance(value, list | tuple) else repr(value)


def recalled(take: Callable[[], Float[Tensor, "row answer"]], account: Account) -> Float[Tensor, "row answer"]:
    """What ``take`` reads and ``account`` counts; from the file where it is there."""
    kept = _kept.get()
    return take() if kept is None else kept.recall(take, account)
