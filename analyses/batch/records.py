"""Reading the prompts of a batch: a JSONL file, a text file with one prompt per line, or a folder with one prompt per file.

Invalid lines are reported by number, and the others are read. Files are read twice and never kept in memory: once to count, to
hash and to find duplicate ids, and once to run. Only the ids stay in memory.

A field of a record that the analysis does not read becomes a column of the table, of the dtype of its values: ``int64``,
``float64``, ``bool`` or ``str``. Where a record lacks it, or has null, the value is missing (and the dtype ``Int64`` or
``boolean``). Lists and objects become their JSON, and so do numbers among strings.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvlens import Chat, KVLensError
from kvlens.errors import nearest_name
from kvlens.files import each_once, reading_file

from ..declaration import Record
from .work import check_prompts

JSONL = (".jsonl", ".ndjson")
OWN_DTYPES = {
    frozenset({"bool"}): ("bool", "boolean"),
    frozenset({"int"}): ("int64", "Int64"),
    frozenset({"long"}): ("int64", "Int64"),
    frozenset({"int", "long"}): ("int64", "Int64"),
    frozenset({"float"}): ("float64", "float64"),
    frozenset({"int", "float"}): ("float64", "float64"),
}
"""Kinds of a field's values -> the dtype of its column, and that where some are missing. Of any other kinds: str."""


@dataclass(frozen=True)
class BadLine:
    """A line, or a file of a folder, without a valid prompt.

    Attributes:
        where: ``prompts.jsonl:7``, or the file's name.
        problem: what is wrong with it.
    """

    where: str
    problem: str


@dataclass(frozen=True)
class Survey:
    """The result of a first reading of the input.

    Attributes:
        n_prompts: number of records.
        bad: the invalid lines.
        sha256: hash of all records and bad lines, in order; equal inputs give equal tables.
        own_fields: fields of the records that the analysis does not read -> dtype of the column that each becomes.
    """

    n_prompts: int
    bad: tuple[BadLine, ...]
    sha256: str
    own_fields: Mapping[str, str] = field(default_factory=dict)


def read_records(path: Path, text: str | None = None) -> Iterator[Record | BadLine]:
    """Yield every prompt of ``path``, and every invalid line, in order.

    Args:
        path: a folder (the content of every file in it, at any depth, is one prompt; hidden files are skipped), a ``.jsonl``
            or ``.ndjson`` file (one object per line: ``prompt``, or the ``messages`` of a chat, or a ``question`` with
            ``documents`` and ``system``, as :meth:`kvlens.Chat.ask` takes them, and optionally ``text``, ``id``, and fields of
            the analysis), a ``.json`` file (the messages of one chat), or any other file (one prompt per line).
        text: the text for records without one.

    Raises:
        KVLensError: there is no such file, it cannot be read, or it is one JSON document of anything but messages.
    """
    path = check_prompts(path)
    with reading_file("prompts", path):
        for entry in _folder(path) if path.is_dir() else _lines(path):
            if isinstance(entry, Record) and entry.text is None and text is not None:
                entry = replace(entry, text=text)
            yield entry


def survey(path: Path, text: str | None = None, fields: Collection[str] = ()) -> Survey:
    """Read the whole input once.

    Args:
        path, text: as in :func:`read_records`.
        fields: what the analysis reads of a record.

    Raises:
        KVLensError: as :func:`read_records`; two records with the same id; a record with a misspelled field; no record at all.
    """
    hasher, bad, seen, own = hashlib.sha256(), [], dict[str, int](), dict[str, Counter[str]]()
    for number, entry in enumerate(read_records(path, text), start=1):
        if isinstance(entry, BadLine):
            bad.append(entry)
            parts: tuple[object, ...] = (entry.where, entry.problem)
        else:
            if entry.id in seen:
                what = "files" if path.is_dir() else "lines"
                raise KVLensError(f"prompts: the id {entry.id!r} is on {what} {seen[entry.id]} and {number} of {path}; ids "
                                  "must differ")  # fmt: skip
            seen[entry.id] = number
            _check_spelling(entry, fields, f"{path}, {'file' if path.is_dir() else 'line'} {number}")
            for name in (name for name in entry.fields if name not in fields):
                own.setdefault(name, Counter()).update(_kind(entry.fields[name]))
            prompt = entry.prompt if isinstance(entry.prompt, str) else repr(entry.prompt)  # with its documents and question
            parts = (entry.id, prompt, entry.text, entry.fields)
        hasher.update(json.dumps(parts, sort_keys=True).encode() + b"\n")
    if not seen:
        first = f": {bad[0].where}: {bad[0].problem}" if bad else "; it is empty"
        raise KVLensError(f"prompts: {path} holds no prompt{first}")
    return Survey(len(seen), tuple(bad), hasher.hexdigest(), {name: _dtype(own[name], len(seen)) for name in own})


def _kind(value: object) -> list[str]:
    """The kind of a field's value; none of null."""
    if isinstance(value, int) and not isinstance(value, bool):
        return ["int" if abs(value) <= 2**53 else "long" if -(2**63) <= value < 2**63 else "json"]  # exact as float, or int64
    return [] if value is None else [type(value).__name__ if isinstance(value, bool | float | str) else "json"]


def _dtype(kinds: Counter[str], n_records: int) -> str:
    whole, with_missing = OWN_DTYPES.get(frozenset(kinds), ("str", "str"))
    return whole if kinds.total() == n_records else with_missing


def own_value(value: object, dtype: str) -> object:
    """The value of a record's own field in a column of that dtype; None where it is missing."""
    fits = dtype != "str" or value is None or isinstance(value, str)
    return value if fits else json.dumps(value, ensure_ascii=False)


def _check_spelling(record: Record, fields: Collection[str], where: str) -> None:
    """Refuse a field that looks like a misspelling of one that the record lacks.

    Other fields are left alone: one file serves several analyses, and may say more about its prompts.
    """
    held = {name for name in ("text", *record.fields) if name != "text" or record.text is not None}
    missing = [name for name in dict.fromkeys(("text", *fields)) if name not in {*held, "prompt"}]
    for name in record.fields:
        meant = None if name in fields else nearest_name(name, missing, likeness=0.7)
        if meant is not None:
            raise KVLensError(
                f"prompts: {where}: no field is called {name!r}; did you mean {meant!r}? Fields that are read: "
                f"{', '.join(dict.fromkeys(('id', 'prompt', 'text', *fields)))}"
            )


def _folder(folder: Path) -> Iterator[Record | BadLine]:
    names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    for name in names:
        if any(part.startswith(".") for part in name.split("/")):
            continue
        prompt = _decoded((folder / name).read_bytes())
        if prompt is None:
            yield BadLine(name, "not UTF-8 text; convert it first")
        elif not prompt.strip():
            yield BadLine(name, "the file is empty")
        else:
            yield Record(name, prompt)


def _lines(path: Path) -> Iterator[Record | BadLine]:
    if path.suffix == ".json":
        yield _one_chat(path)
        return
    is_jsonl = path.suffix in JSONL
    with open(path, "rb") as file:  # a line ends only at a newline byte, not at other Unicode separators
        for number, raw in enumerate(file, start=1):
            where = f"{path.name}:{number}"
            line = _decoded(raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw)
            if line is None:
                yield BadLine(where, "not UTF-8 text; convert the file first")
            elif not line.strip():
                yield BadLine(where, "the line is empty")
            elif is_jsonl:
                yield _from_json(where, line)
            else:
                yield Record(where, line.removesuffix("\n").removesuffix("\r"))


def _one_chat(path: Path) -> Record:
    """A JSON document is a list of messages: one prompt."""
    try:
        messages = json.loads(path.read_bytes(), object_pairs_hook=each_once)
    except (ValueError, RecursionError) as error:
        raise KVLensError(f"prompts: {path} is not JSON ({error})") from error
    if not isinstance(messages, list):
        raise KVLensError(
            f"prompts: {path} is one JSON document, and no list of messages; write an object per line and call it .jsonl"
        )
    return Record(path.name, Chat(messages))


def _from_json(where: str, line: str) -> Record | BadLine:
    try:
        values = json.loads(line, object_pairs_hook=each_once)
    except (ValueError, RecursionError) as error:  # not JSON, or a number or nesting too large for Python
        return BadLine(where, f"not JSON ({error})")
    if not isinstance(values, dict):
        return BadLine(where, f"expected an object with a prompt, got {type(values).__name__}")
    prompt, text, given = values.pop("prompt", None), values.pop("text", None), values.pop("id", where)
    if "messages" in values and prompt is not None:
        return BadLine(where, '"prompt" and "messages" are both given, and each is a whole prompt')
    try:
        if "messages" in values:
            prompt = Chat(values.pop("messages"))
        elif "question" in values and prompt is None:
            prompt = Chat.ask(*(values.pop(name, None) for name in ("question", "documents", "system")))
    except KVLensError as error:
        return BadLine(where, str(error))
    if not isinstance(prompt, Chat | str) or not prompt:
        return BadLine(where, '"prompt" is missing, empty, or not a string')
    if text is not None and (not isinstance(text, str) or not text):
        return BadLine(where, '"text" is empty or not a string')
    if isinstance(given, bool) or not isinstance(given, str | int) or given == "":
        return BadLine(where, '"id" is neither a string nor an integer')
    if _is_half_a_character(f"{prompt}{text}{given}{json.dumps(values, ensure_ascii=False)}"):
        return BadLine(where, "it contains half a character (a lone surrogate), which cannot be encoded as text")
    return Record(str(given), prompt, text, values)


def _is_half_a_character(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _decoded(raw: bytes) -> str | None:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return None
