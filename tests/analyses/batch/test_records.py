"""What counts as a prompt, and that what does not is named by its line."""

import json
import os

import pytest
from kvlens.analyses.batch.records import BadLine, read_records, survey
from kvlens.analyses.declaration import Record

from kvlens import Chat, KVLensError


def write(path, *lines: bytes | str):
    path.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines) + b"\n")
    return path


@pytest.mark.parametrize("read", [survey, lambda path: list(read_records(path))])
def test_a_pipe_is_refused_and_not_opened(read, tmp_path):
    os.mkfifo(tmp_path / "p.jsonl")
    with pytest.raises(KVLensError, match=r"p\.jsonl is a pipe or a device, which can be read only once"):
        read(tmp_path / "p.jsonl")


def test_jsonl_by_hand(tmp_path):
    path = write(
        tmp_path / "p.jsonl",
        '\ufeff{"prompt": "a", "id": "first"}',
        '{"prompt": "b\u2028b", "text": " c", "id": 7, "answer": " d", "places": [1, 2]}\r',
        '{"prompt": "e", "text": null}',
    )
    assert list(read_records(path, text="T")) == [
        Record("first", "a", "T"),
        Record("7", "b\u2028b", " c", {"answer": " d", "places": [1, 2]}),  # U+2028 ends no line
        Record("p.jsonl:3", "e", "T"),
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("", "the line is empty"),
        ("  ", "the line is empty"),
        ('{"prompt": "a"', "not JSON (Expecting"),
        ("[" * 100_000, "not JSON ("),
        ('["a"]', "expected an object with a prompt, got list"),
        ('{"promt": "a"}', '"prompt" is missing, empty, or not a string'),
        ('{"prompt": ""}', '"prompt" is missing, empty, or not a string'),
        ('{"prompt": 3}', '"prompt" is missing, empty, or not a string'),
        ('{"prompt": "a", "text": ""}', '"text" is empty or not a string'),
        ('{"prompt": "a", "text": 4}', '"text" is empty or not a string'),
        ('{"prompt": "a", "id": true}', '"id" is neither a string nor an integer'),
        ('{"prompt": "a", "id": ""}', '"id" is neither a string nor an integer'),
        ('{"prompt": "a\\ud800"}', "half a character"),
        (b'{"prompt": "\xff"}', "not UTF-8 text"),
        ('{"messages": [{"role": "user"}]}', "message 1 (user): the content must be a string that is not empty, got none"),
        ('{"messages": []}', "at least one, got none"),
        ('{"messages": null}', "expected a list of"),
        ('{"messages": [{"role": "user", "content": "a"}], "prompt": "a"}', "both given"),
    ],
)
def test_a_bad_line_is_named_and_the_rest_is_read(tmp_path, line, problem):
    path = write(tmp_path / "p.jsonl", '{"prompt": "a"}', line, '{"prompt": "b"}')
    first, bad, last = read_records(path)
    assert (first.prompt, last.prompt) == ("a", "b")
    assert isinstance(bad, BadLine) and bad.where == "p.jsonl:2" and problem in bad.problem
    found = survey(path)
    assert (found.n_prompts, found.bad) == (2, (bad,))


def test_chats(tmp_path):
    """One in each line, or one in a file of its own; other chats make another input."""
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Why?"}]
    path = write(tmp_path / "p.jsonl", json.dumps({"messages": messages, "id": 1, "about": "a"}), json.dumps({"prompt": "b"}))
    assert list(read_records(path, text="T")) == [
        Record("1", Chat(messages), "T", {"about": "a"}),
        Record("p.jsonl:2", "b", "T"),
    ]
    alone = write(tmp_path / "chat.json", json.dumps(messages))
    assert list(read_records(alone)) == [Record("chat.json", Chat(messages))]
    before = survey(path).sha256
    messages[1]["content"] = "How?"
    write(path, json.dumps({"messages": messages, "id": 1, "about": "a"}), json.dumps({"prompt": "b"}))
    assert survey(path).sha256 != before


def test_text_file_by_hand(tmp_path):
    path = write(tmp_path / "p.txt", " a {", "", "b\r", b"\xff")
    assert list(read_records(path)) == [
        Record("p.txt:1", " a {"),
        BadLine("p.txt:2", "the line is empty"),
        Record("p.txt:3", "b"),
        BadLine("p.txt:4", "not UTF-8 text; convert the file first"),
    ]


def test_folder_by_hand(tmp_path):
    (tmp_path / "sub").mkdir()
    for name, content in {"b.txt": b"two\nlines\n", "sub/a.md": b"a", "c": b" \n", "d": b"\xff", ".hidden": b"h"}.items():
        (tmp_path / name).write_bytes(content)
    assert list(read_records(tmp_path, text="T")) == [
        Record("b.txt", "two\nlines\n", "T"),
        BadLine("c", "the file is empty"),
        BadLine("d", "not UTF-8 text; convert it first"),
        Record("sub/a.md", "a", "T"),
    ]


def test_the_hash_is_of_what_is_read(tmp_path):
    base = {"prompt": "a", "id": "x", "answer": "b"}

    def digest(*records, text=None):
        return survey(write(tmp_path / "p.jsonl", *map(json.dumps, records)), text).sha256

    assert digest(base) == digest({"answer": "b", "id": "x", "prompt": "a"})
    others = [{**base, "prompt": "A"}, {**base, "id": "y"}, {**base, "answer": "c"}, {**base, "text": "t"}, {**base, "n": 1}]
    assert len({digest(base), digest(base, base | {"id": "y"}), digest(base, text="T"), *map(digest, others)}) == 8
    path = write(tmp_path / "p.jsonl", json.dumps(base), "")
    assert survey(path).sha256 != digest(base)


def test_inputs_that_are_refused(tmp_path):
    with pytest.raises(KVLensError, match="cannot read .*nowhere.jsonl: No such file"):
        survey(tmp_path / "nowhere.jsonl")
    with pytest.raises(KVLensError, match="holds no prompt; it is empty"):
        survey(tmp_path)
    with pytest.raises(KVLensError, match="one JSON document, and no list of messages; write an object per line"):
        survey(write(tmp_path / "p.json", "{}"))
    with pytest.raises(KVLensError, match="messages: .* at least one, got none"):
        survey(write(tmp_path / "p.json", "[]"))
    with pytest.raises(KVLensError, match="p.json is not JSON"):
        survey(write(tmp_path / "p.json", "[{"))
    with pytest.raises(KVLensError, match="holds no prompt: p.jsonl:1: the line is empty"):
        survey(write(tmp_path / "p.jsonl", "", ""))
    with pytest.raises(KVLensError, match="the id '5' is on lines 1 and 3 of"):
        survey(write(tmp_path / "p.jsonl", '{"prompt": "a", "id": 5}', "", '{"prompt": "b", "id": "5"}'))


def test_a_misspelled_field_is_named_and_other_fields_are_left_alone(tmp_path):
    def found(**record):
        return survey(
            write(tmp_path / "p.jsonl", '{"prompt": "a"}', json.dumps({"prompt": "b", **record})), None, ["prompt", "answer"]
        )

    assert found(answer="c", source="web", text="t", answers=["c"]).n_prompts == 2
    with pytest.raises(
        KVLensError, match="p.jsonl, line 2: no field is called 'anwser'; did you mean 'answer'.* id, prompt, text, answer"
    ):
        found(anwser="c")
    with pytest.raises(KVLensError, match="no field is called 'txt'; did you mean 'text'"):
        found(txt="t")
