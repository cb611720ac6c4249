"""Parts keep results whole, and refuse to mix settings; the table has one schema and a row group per prompt.

What counts as a prompt, and that what does not is named by its line.
"""

import json
import os
import shutil

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kvlens.analyses.batch.parts import (
    DIED,
    FAILED,
    PARTS,
    REFUSED,
    Parts,
    PromptResult,
    differences,
    is_started,
    read_facts,
    read_row_groups,
    schema_of,
    write_table,
)
from kvlens.analyses.batch.records import BadLine, own_value, read_records, survey
from kvlens.analyses.declaration import Record

from kvlens import Chat, KVLensError
from kvlens.files import work_on

SETTINGS = {"analysis": "letters", "options": {"times": 2}, "columns": ["a", "b"]}
SCHEMA = schema_of({"name": "str", "loss": "float64"})


def done(model, prompt, n_rows=3):
    rows = pa.table({"name": [f"{model}, {prompt}"] * n_rows, "loss": [float("nan"), 0.5, -1.0][:n_rows]}, schema=SCHEMA)
    return PromptResult(model, prompt, f"p{prompt}", n_rows, rows=rows)


def refused(prompt, kind=REFUSED):
    return PromptResult(0, prompt, f"p{prompt}", kind=kind, error="no", where="a.py:3")


def opened(path, settings=SETTINGS, **how):
    return Parts(path, settings, SCHEMA, **how)


def names(parts):
    return [table["name"][0].as_py() for table in parts.tables()]


def test_what_was_added_is_there_in_order(tmp_path):
    first = opened(tmp_path / "j")
    for result in (done(1, 0), done(0, 11), done(0, 2, n_rows=0), done(0, 3), refused(1)):
        first.add(result)
    for parts in (first, opened(tmp_path / "j")):
        assert [list(table["loss"].to_pylist()[1:]) for table in parts.tables()] == [[], [0.5, -1.0], [0.5, -1.0], [0.5, -1.0]]
        assert [table.schema for table in parts.tables()] == [SCHEMA] * 4
        assert sorted(parts.done) == [(0, 1), (0, 2), (0, 3), (0, 11), (1, 0)]
        assert sum(result.n_rows for result in parts.done.values()) == 9
        assert parts.failures == [refused(1)]
    parts.delete()
    assert list(tmp_path.iterdir()) == []


def test_a_part_is_whole_or_not_there_and_what_a_dead_writer_left_of_it_is_cleared(tmp_path, monkeypatch):
    parts = opened(tmp_path / "j")
    parts.add(done(0, 0))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(KeyboardInterrupt))
        parts.add(done(0, 1))
    (tmp_path / "j" / ".0-2.parquet.kvlens-new").write_bytes(b"PAR1")
    assert names(opened(tmp_path / "j")) == ["0, 0"]
    assert sorted(path.name for path in (tmp_path / "j").iterdir()) == ["0-0.parquet", "settings.json"]


def test_a_full_disk_is_told_and_keeps_what_is_done(tmp_path, monkeypatch):
    parts = opened(tmp_path / "j")
    parts.add(done(0, 0))
    with monkeypatch.context() as patch, pytest.raises(KVLensError, match="cannot write .*No space"):
        patch.setattr("os.fsync", lambda file: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        parts.add(done(0, 1))
    parts.add(done(0, 2))
    assert names(parts) == names(opened(tmp_path / "j")) == ["0, 0", "0, 2"]


@pytest.mark.parametrize("damage", [lambda x: x[:-1], lambda x: x[:40], lambda x: b"", lambda x: x[:60] + b"?" + x[61:]])
def test_a_damaged_part_is_as_none_and_never_read(tmp_path, damage):
    parts = opened(tmp_path / "j")
    for prompt in range(3):
        parts.add(done(0, prompt))
    path = tmp_path / "j" / "0-1.parquet"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(KVLensError, match="0-1.parquet is damaged"):
        names(parts)
    again = opened(tmp_path / "j")
    assert again.damaged == [path] and sorted(again.done) == [(0, 0), (0, 2)]
    again.add(done(0, 1))
    assert names(opened(tmp_path / "j")) == ["0, 0", "0, 1", "0, 2"]


def test_a_part_of_another_prompt_or_batch_is_not_read(tmp_path):
    parts, other = opened(tmp_path / "j"), opened(tmp_path / "other", {**SETTINGS, "options": {"times": 3}})
    parts.add(done(0, 0))
    other.add(done(0, 1))
    shutil.copy(tmp_path / "j" / "0-0.parquet", tmp_path / "j" / "0-2.parquet")
    shutil.copy(tmp_path / "other" / "0-1.parquet", tmp_path / "j")
    again = opened(tmp_path / "j")
    assert list(again.done) == [(0, 0)] and {path.name for path in again.damaged} == {"0-1.parquet", "0-2.parquet"}


def test_what_is_known_counts_where_it_is_created(tmp_path):
    parts = opened(tmp_path / "j", known=iter([refused(0), done(0, 1)]))
    assert (sorted(parts.done), names(parts)) == ([(0, 0), (0, 1)], ["0, 1"])
    parts = opened(tmp_path / "j", retry_failed=True, known=iter([done(0, 2)]))
    assert list(parts.done) == [(0, 1)]
    parts.add(done(0, 0))
    assert names(opened(tmp_path / "j")) == ["0, 0", "0, 1"]


def test_what_failed_for_another_reason_than_the_prompt_is_tried_again(tmp_path):
    parts = opened(tmp_path / "j")
    for prompt, kind in enumerate([FAILED, REFUSED, DIED]):
        parts.add(refused(prompt, kind))
    parts = opened(tmp_path / "j")
    assert list(parts.done) == [(0, 1)]
    parts.add(done(0, 3))
    assert list(opened(tmp_path / "j", retry_failed=True).done) == [(0, 3)]


def test_other_settings_are_refused_by_name_unless_restarted(tmp_path):
    opened(tmp_path / "j").add(done(0, 0))
    others = {**SETTINGS, "options": {"times": 3, "upper": True}, "columns": ["a"]}
    with pytest.raises(KVLensError) as refusal:
        opened(tmp_path / "j", others)
    for words in ("options.times was 2, now 3", "options.upper was null, now true", 'columns was ["a", "b"], now ["a"]'):
        assert words in str(refusal.value)
    assert "analysis" not in str(refusal.value)
    assert not opened(tmp_path / "j", others, restart=True).done and not opened(tmp_path / "j", others).done
    assert differences(SETTINGS, SETTINGS) == []
    settings = tmp_path / "j" / "settings.json"
    for damaged in (settings.read_text()[:-1], "[7]", ""):
        settings.write_text(damaged)
        with pytest.raises(KVLensError, match="pass --overwrite to start from scratch"):
            opened(tmp_path / "j", others)


def test_what_a_kill_left_of_finished_parts_is_removed_and_a_folder_of_ones_own_is_not(tmp_path):
    opened(tmp_path / "j").add(done(0, 0))
    assert is_started(tmp_path / "j")
    (tmp_path / "j" / "settings.json").unlink()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "cat.jpg").touch()
    assert not is_started(tmp_path / "j") and not is_started(tmp_path / "mine")
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "cat.jpg"]
    for path in ("mine", "mine/cat.jpg"):
        with pytest.raises(KVLensError, match="is not empty and not the parts of a batch|is a file, not a folder"):
            opened(tmp_path / path, restart=True)
        with pytest.raises(KVLensError), work_on(tmp_path / path, PARTS):
            pass
    assert (tmp_path / "mine" / "cat.jpg").exists()


COLUMNS = {"token": "str", "kind": "category", "layer": "int64", "flag": "bool", "loss": "float32", "rank": "Int64"}


def frame(n):
    return pd.DataFrame(
        {
            "token": pd.Series(["x", None, "<é\n"][:n], dtype="str"),
            "kind": pd.Categorical(["u", "v", "u"][:n], categories=["u", "v"]),
            "layer": pd.Series(range(n), dtype="int64"),
            "flag": pd.Series([True, False, True][:n], dtype="bool"),
            "loss": pd.Series([0.5, float("nan"), float("inf")][:n], dtype="float32"),
            "rank": pd.Series([1, None, 3][:n], dtype="Int64"),
        }
    )


def in_arrow(frame, schema):
    return pa.Table.from_pandas(frame, schema=schema, preserve_index=False)


def test_the_table_is_the_frames_one_row_group_each(tmp_path):
    schema = schema_of(COLUMNS)
    path = tmp_path / "t.parquet"
    write_table(path, schema, [in_arrow(frame(n), schema) for n in (3, 0, 1, 2)], {"analysis": "é"})
    file = pq.ParquetFile(path)
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [3, 1, 2]
    expected = pd.concat([frame(3), frame(1), frame(2)], ignore_index=True)
    expected["loss"] = expected["loss"].astype("float32")
    pd.testing.assert_frame_equal(pd.read_parquet(path), expected, check_categorical=False)
    assert read_facts(path) == {"analysis": "é"}
    assert list(tmp_path.iterdir()) == [path]


def test_a_table_without_rows_has_its_columns(tmp_path):
    write_table(tmp_path / "t.parquet", schema_of(COLUMNS), [], {})
    table = pd.read_parquet(tmp_path / "t.parquet")
    assert {name: str(dtype) for name, dtype in table.dtypes.items()} == COLUMNS
    table.to_csv(tmp_path / "t.csv", index=False)
    assert list(pd.read_csv(tmp_path / "t.csv").columns) == list(COLUMNS)


def test_a_table_is_read_as_it_was_written(tmp_path):
    schema, path = schema_of(COLUMNS), tmp_path / "t.parquet"
    write_table(path, schema, [in_arrow(frame(n), schema) for n in (3, 1)], {})
    found = list(read_row_groups(path, schema))
    assert [table.num_rows for table in found] == [3, 1]
    write_table(tmp_path / "again.parquet", schema, found, {})
    pd.testing.assert_frame_equal(pd.read_parquet(path), pd.read_parquet(tmp_path / "again.parquet"))
    with pytest.raises(KVLensError, match="cannot be read as the table of a batch"):
        list(read_row_groups(path, schema_of({"place": "int64"})))


def test_nothing_half_written(tmp_path):
    def prompts():
        yield in_arrow(frame(2), schema_of(COLUMNS))
        raise OSError(28, "No space left on device")

    (tmp_path / "t.parquet").write_text("the old table")
    with pytest.raises(KVLensError, match=r"cannot write .*t.parquet: No space left on device"):
        write_table(tmp_path / "t.parquet", schema_of(COLUMNS), prompts(), {})
    assert [p.name for p in tmp_path.iterdir()] == ["t.parquet"]
    assert (tmp_path / "t.parquet").read_text() == "the old table"
    assert read_facts(tmp_path / "t.parquet") is None and read_facts(tmp_path / "nowhere") is None


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
        ('{"prompt": "a", "mine": ["\\ud800"]}', "half a character"),
        (b'{"prompt": "\xff"}', "not UTF-8 text"),
        *((f'{{"messages": {x}}}', "message 1: expected") for x in ('[{"role": "user"}]', "[]", "null")),
        ('{"messages": [{"role": "user", "content": "a"}], "prompt": "a"}', "both given"),
        ('{"question": 3}', "question: expected a string"),
        ('{"question": "Why?", "documents": 3}', "documents: expected texts by name, or a list of texts, got 3"),
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
    asked = {"question": "Why?", "documents": {"a.txt": "It is."}, "system": "Be kind."}
    write(tmp_path / "q.jsonl", json.dumps(asked | {"about": "a"}), json.dumps({"question": "b", "prompt": "c"}))
    chat = Chat.ask("Why?", {"a.txt": "It is."}, "Be kind.")
    assert list(read_records(tmp_path / "q.jsonl")) == [
        Record("q.jsonl:1", chat, None, {"about": "a"}),
        Record("q.jsonl:2", "c", None, {"question": "b"}),  # a prompt with a field of its own
    ]
    hashes = set()
    for line in (asked, {"messages": chat.messages}):  # the same words, of which other ones are units
        hashes.add(survey(write(tmp_path / "q.jsonl", json.dumps(line))).sha256)
    assert len(hashes) == 2
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
    with pytest.raises(KVLensError, match="message 1: expected"):
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


@pytest.mark.parametrize(
    ("values", "dtype", "column"),
    [
        ([7, -2], "int64", [7, -2]),
        ([7, None], "Int64", [7, None]),
        ([7, ...], "Int64", [7, None]),
        ([2**62, 1], "int64", [2**62, 1]),
        ([7, 0.5], "float64", [7.0, 0.5]),
        ([0.5, ...], "float64", [0.5, None]),
        ([2**53 + 1, 0.5], "str", ["9007199254740993", "0.5"]),
        ([2**63, 1], "str", ["9223372036854775808", "1"]),
        ([True, False], "bool", [True, False]),
        ([True, ...], "boolean", [True, None]),
        ([True, 1], "str", ["true", "1"]),
        (["a", ...], "str", ["a", None]),
        (["a", 7], "str", ["a", "7"]),
        ([[1, "é"], {"a": None}], "str", ['[1, "é"]', '{"a": null}']),
        ([None, ...], "str", [None, None]),
    ],
)
def test_a_field_of_ones_own_becomes_a_column_of_the_type_of_its_values(tmp_path, values, dtype, column):
    lines = [{"prompt": "a", "read": 1, **({} if value is ... else {"own": value})} for value in values]
    path = write(tmp_path / "p.jsonl", *map(json.dumps, lines))
    assert survey(path, fields=["read"]).own_fields == {"own": dtype}
    field = schema_of({"own": dtype}).field("own")
    found = pa.array([own_value(record.fields.get("own"), dtype) for record in read_records(path)], field.type)
    assert found.to_pylist() == column and [type(x) for x in found.to_pylist()] == [type(x) for x in column]


def test_fields_of_ones_own_keep_their_order(tmp_path):
    path = write(
        tmp_path / "p.jsonl", '{"z": 1, "prompt": "a", "b": "x", "id": 3, "text": "t"}', '{"prompt": "b", "a": true, "z": 2}'
    )
    assert list(survey(path).own_fields.items()) == [("z", "int64"), ("b", "str"), ("a", "boolean")]
