"""The journal keeps results whole, and refuses to mix settings; the table has one schema and a row group per prompt.

What counts as a prompt, and that what does not is named by its line.
"""

import json
import os

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kvlens.analyses.batch.journal import (
    Journal,
    JournalCounts,
    differences,
    read_facts,
    read_parquet,
    schema_of,
    to_bytes,
    write_parquet,
)
from kvlens.analyses.batch.records import BadLine, read_records, survey
from kvlens.analyses.batch.workers import DIED, FAILED, REFUSED, PromptResult
from kvlens.analyses.declaration import Record

from kvlens import Chat, KVLensError

SETTINGS = {"analysis": "letters", "options": {"times": 2}, "columns": ["a", "b"]}


def done(model, prompt, n_rows=3):
    return PromptResult(model, prompt, f"p{prompt}", n_rows, f"rows of {model}, {prompt}".encode())


def test_what_was_added_is_there_in_order(tmp_path):
    path = tmp_path / "j"
    with Journal(path, SETTINGS) as journal:
        journal.add([done(1, 0), done(0, 11)])
        journal.add([done(0, 2), PromptResult(0, 1, "p1", kind=REFUSED, error="no", where="a.py:3")])
    with Journal(path, SETTINGS) as journal:
        assert journal.progress() == JournalCounts(n_done=4, n_failed=1, n_rows=9)
        assert list(journal.tables()) == [b"rows of 0, 2", b"rows of 0, 11", b"rows of 1, 0"]
        assert list(journal.failures()) == [PromptResult(0, 1, "p1", kind=REFUSED, error="no", where="a.py:3")]
        assert [journal.holds(0, 1), journal.holds(1, 0), journal.holds(1, 1)] == [True, True, False]
        journal.delete()
    assert list(tmp_path.iterdir()) == []


def test_cut_off_anywhere_every_whole_line_is_there_and_the_rest_can_be_added(tmp_path):
    path, results = tmp_path / "j", [done(0, 0), PromptResult(0, 1, "p1", kind=REFUSED, error="no"), done(0, 2)]
    with Journal(path, SETTINGS) as journal:
        ends = [len(path.read_bytes())]
        for result in results:
            journal.add([result])
            ends.append(len(path.read_bytes()))
    whole = path.read_bytes()
    for size in sorted({end + more for end in ends for more in (-50, -1, 0, 1)} & set(range(ends[0], ends[-1]))):
        path.write_bytes(whole[:size])
        n_whole = sum(end <= size for end in ends[1:])
        with Journal(path, SETTINGS) as journal:
            assert [journal.holds(0, i) for i in range(3)] == [i < n_whole for i in range(3)]
            journal.add(results[n_whole:])
        assert path.read_bytes() == whole
    path.write_bytes(whole[: ends[0] - 1])
    with pytest.raises(KVLensError, match="is damaged"):
        Journal(path, SETTINGS)


def test_what_a_full_disk_left_is_written_over(tmp_path, monkeypatch):
    with Journal(tmp_path / "j", SETTINGS) as journal:
        journal.add([done(0, 0)])
        with (
            monkeypatch.context() as patch,
            pytest.raises(KVLensError, match="cannot write .*No space.*earlier results are kept"),
        ):
            patch.setattr("os.fsync", lambda file: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            journal.add([done(0, 1)])
        journal.add([done(0, 2)])
    with Journal(tmp_path / "j", SETTINGS) as journal:
        assert list(journal.tables()) == [b"rows of 0, 0", b"rows of 0, 2"]


def test_of_two_lines_on_a_prompt_the_later_counts(tmp_path):
    refused = PromptResult(0, 0, "p0", kind=REFUSED, error="no")
    with Journal(tmp_path / "j", SETTINGS, known=iter([refused, done(0, 1)])) as journal:
        assert journal.progress() == JournalCounts(2, 1, 3)
    with Journal(tmp_path / "j", SETTINGS, retry_failed=True, known=iter([done(0, 2)])) as journal:
        assert [journal.holds(0, i) for i in range(3)] == [False, True, False], "what is known counts where it is created"
        journal.add([done(0, 0)])
    with Journal(tmp_path / "j", SETTINGS) as journal:
        assert journal.progress() == JournalCounts(2, 0, 6) and list(journal.failures()) == []


def test_what_failed_for_another_reason_than_the_prompt_is_tried_again(tmp_path):
    with Journal(tmp_path / "j", SETTINGS) as journal:
        journal.add([PromptResult(0, i, f"p{i}", kind=kind, error="x") for i, kind in enumerate([FAILED, REFUSED, DIED])])
    with Journal(tmp_path / "j", SETTINGS) as journal:
        assert [journal.holds(0, i) for i in range(3)] == [False, True, False]
        journal.add([done(0, 3)])
    with Journal(tmp_path / "j", SETTINGS, retry_failed=True) as journal:
        assert [journal.holds(0, i) for i in range(4)] == [False, False, False, True]


def test_other_settings_are_refused_by_name_unless_restarted(tmp_path):
    with Journal(tmp_path / "j", SETTINGS) as journal:
        journal.add([done(0, 0)])
    others = {**SETTINGS, "options": {"times": 3, "upper": True}, "columns": ["a"]}
    with pytest.raises(KVLensError) as refusal:
        Journal(tmp_path / "j", others)
    for words in ("options.times was 2, now 3", "options.upper was null, now true", 'columns was ["a", "b"], now ["a"]'):
        assert words in str(refusal.value)
    assert "analysis" not in str(refusal.value)
    with Journal(tmp_path / "j", others, restart=True) as journal:
        assert journal.progress().n_done == 0
    with Journal(tmp_path / "j", others) as journal:
        assert journal.progress().n_done == 0
    assert differences(SETTINGS, SETTINGS) == []


def test_one_run_at_a_time(tmp_path):
    with Journal(tmp_path / "j", SETTINGS), pytest.raises(KVLensError, match="another run is writing"):
        Journal(tmp_path / "j", SETTINGS, restart=True)


def test_files_that_are_no_journal(tmp_path):
    (tmp_path / "j").write_text("a photo of a cat, longer than the head of a database would be " * 9)
    for content in ((tmp_path / "j").read_bytes(), b"", b"\n"):
        (tmp_path / "j").write_bytes(content)
        with pytest.raises(KVLensError, match="is not the journal of a batch"):
            Journal(tmp_path / "j", SETTINGS, restart=True)
        assert (tmp_path / "j").read_bytes() == content
    with pytest.raises(KVLensError, match="cannot write"):
        Journal(tmp_path / "nowhere" / "j", SETTINGS)


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


def test_the_table_is_the_frames_one_row_group_each(tmp_path):
    schema = schema_of(COLUMNS)
    path = tmp_path / "t.parquet"
    write_parquet(path, schema, [to_bytes(frame(n), schema) for n in (3, 0, 1, 2)], {"analysis": "é"})
    file = pq.ParquetFile(path)
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [3, 1, 2]
    expected = pd.concat([frame(3), frame(1), frame(2)], ignore_index=True)
    expected["loss"] = expected["loss"].astype("float32")
    pd.testing.assert_frame_equal(pd.read_parquet(path), expected, check_categorical=False)
    assert read_facts(path) == {"analysis": "é"}
    assert list(tmp_path.iterdir()) == [path]


def test_a_table_without_rows_has_its_columns(tmp_path):
    write_parquet(tmp_path / "t.parquet", schema_of(COLUMNS), [], {})
    table = pd.read_parquet(tmp_path / "t.parquet")
    assert {name: str(dtype) for name, dtype in table.dtypes.items()} == COLUMNS
    table.to_csv(tmp_path / "t.csv", index=False)
    assert list(pd.read_csv(tmp_path / "t.csv").columns) == list(COLUMNS)


def test_a_table_is_read_as_it_was_written(tmp_path):
    schema, path = schema_of({"model": "str", "prompt_id": "str", **COLUMNS}), tmp_path / "t.parquet"
    named = [frame(n).assign(model="m", prompt_id=f"p{n}")[schema.names] for n in (3, 1)]
    write_parquet(path, schema, [to_bytes(x, schema) for x in named], {})
    found = list(read_parquet(path, schema))
    assert [x[:3] for x in found] == [("m", "p3", 3), ("m", "p1", 1)]
    write_parquet(tmp_path / "again.parquet", schema, [rows for *_, rows in found], {})
    pd.testing.assert_frame_equal(pd.read_parquet(path), pd.read_parquet(tmp_path / "again.parquet"))
    with pytest.raises(KVLensError, match="cannot be read as the table of a batch"):
        list(read_parquet(path, schema_of({"place": "int64"})))


def test_values_that_a_column_cannot_hold_are_refused():
    with pytest.raises(pa.ArrowException, match="truncated"):
        to_bytes(pd.DataFrame({"layer": [0.5]}), schema_of({"layer": "int64"}))


def test_nothing_half_written(tmp_path):
    def prompts():
        yield to_bytes(frame(2), schema_of(COLUMNS))
        raise OSError(28, "No space left on device")

    (tmp_path / "t.parquet").write_text("the old table")
    with pytest.raises(KVLensError, match=r"cannot write .*t.parquet: No space left on device"):
        write_parquet(tmp_path / "t.parquet", schema_of(COLUMNS), prompts(), {})
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
