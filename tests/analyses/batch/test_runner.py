"""A batch from beginning to end on a tiny model: the same table after any interruption, and nothing half-written."""

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from batch_probes import letters
from kvlens.analyses.batch import runner, workers
from kvlens.analyses.batch.parts import Parts, folder_of_parts, is_started
from kvlens.analyses.batch.runner import Input, run_batch
from kvlens.analyses.batch.work import Work
from tiny_text_model import tiny_text_model

from kvlens import HookedKVTransformer, KVLensError
from kvlens.analyses import bias_by_head

LETTERS = "batch_probes.letters:LETTERS"
LETTERS_FILE = Path(letters.__file__)


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def silent(line):
    pytest.fail(f"told {line}")


def interrupted(*args):
    raise KeyboardInterrupt


def test_the_table_is_what_the_analysis_returns(model_folder, other_folder, tmp_path, prompts):
    source, out = prompts(n=3), tmp_path / "new" / "t.parquet"
    result = run_batch(Work("bias_by_head", (other_folder, model_folder)), source, out, tell=silent)
    frames = []
    for name in (other_folder, model_folder):
        model = HookedKVTransformer.load(name)
        for _, record in source.records():
            frame = bias_by_head(model, model.to_tokens(record.prompt)[0], model.to_tokens(record.text, prepend_bos=False)[0])
            frame.insert(0, "model", name)
            frame.insert(1, "prompt_id", record.id)
            frames.append(frame)
    pd.testing.assert_frame_equal(pd.read_parquet(out), pd.concat(frames, ignore_index=True), check_exact=True)
    metadata = pq.read_metadata(out)
    assert [metadata.row_group(i).num_rows for i in range(6)] == [3, 3, 3, 6, 6, 6]
    assert (result.n_rows, result.n_prompts, result.n_without_rows, result.errors) == (27, 3, 0, None)
    assert names(out.parent) == ["t.parquet"]


def test_prompts_without_rows_are_reported_and_the_batch_continues(model_folder, tmp_path, prompts):
    work, out, lines = Work(LETTERS, (model_folder,)), tmp_path / "t.parquet", []
    source = prompts({"prompt": "ab"}, "", {"prompt": "c", "raises": 1}, {"prompt": "d", "breaks": 1}, {"prompt": "e"})
    result = run_batch(work, source, out, tell=lines.append)
    by_line = {words.strip(): f"letters.py:{i}" for i, words in enumerate(LETTERS_FILE.read_text().splitlines(), start=1)}
    refusal = by_line['raise KVLensError("too long\\nby far")']
    bug = by_line['raise ZeroDivisionError("a bug")']
    first = f"p.jsonl:3: too long by far ({refusal})"
    assert lines == ["p.jsonl:2: the line is empty", f"{first}; the batch continues with the others"]
    assert result.first_failure == first
    assert "".join(pd.read_parquet(result.out)["letter"]) == "abe"
    assert (result.n_rows, result.n_prompts, result.n_without_rows, result.n_malformed) == (3, 4, 2, 1)
    folder, of_model = LETTERS_FILE.parent, {"model": model_folder}
    assert [json.loads(line) for line in result.errors.read_text().splitlines()] == [
        {"model": None, "prompt": "p.jsonl:2", "kind": "malformed", "error": "the line is empty", "where": None},
        {**of_model, "prompt": "p.jsonl:3", "kind": "refused", "error": "too long by far", "where": f"{folder}/{refusal}"},
        {**of_model, "prompt": "p.jsonl:4", "kind": "failed", "error": "ZeroDivisionError: a bug", "where": f"{folder}/{bug}"},
    ]
    run_batch(work, prompts({"prompt": "ab"}), out, overwrite=True, tell=silent)
    assert names(tmp_path) == ["p.jsonl", "t.parquet"], "the errors of the old table are gone with it"


def test_many_bad_lines_are_counted(model_folder, tmp_path, prompts):
    lines = []
    source = prompts({"prompt": "a"}, *"[" * 33)
    run_batch(Work(LETTERS, (model_folder,)), source, tmp_path / "t.parquet", tell=lines.append)
    assert len(lines) == 21 and lines[-1] == "... and 13 more lines without a prompt"


def test_what_failed_is_run_again_on_request_and_nothing_else(
    model_folder, other_folder, tmp_path, prompts, asked, monkeypatch
):
    """Refused and failed prompts, on two models: a rerun is refused; a retry gives the table of a run without failures."""
    source = prompts({"prompt": "ab"}, {"prompt": "c", "raises": 1}, {"prompt": "d", "breaks": 1}, {"prompt": "e"})
    work, out = Work(LETTERS, (model_folder, other_folder)), tmp_path / "t.parquet"
    assert run_batch(work, source, out).n_without_rows == 4
    before, table = out.read_bytes(), pd.read_parquet(out)
    for words, more in {
        r"letters of 4 prompts; 4 failed \(t.parquet.errors.jsonl says why\).*--retry-failed": {},
        "give one of them": dict(overwrite=True, retry_failed=True),
    }.items():
        with pytest.raises(KVLensError, match=words):
            run_batch(work, source, out, **more)
    with pytest.raises(KVLensError, match=r"t.parquet was started with other settings: options.times was 1, now 2"):
        run_batch(Work(LETTERS, work.models, options={"times": 2}), source, out, retry_failed=True)
    (changed := tmp_path / "letters.py").write_text(f"{Path(letters.__file__).read_text()}\n# another sign\n")
    with monkeypatch.context() as patch:
        patch.setattr(letters, "__file__", str(changed))
        with pytest.raises(KVLensError, match=r'settings: code was "letters.py \w{12}", now "letters.py \w{12}"'):
            run_batch(work, source, out, retry_failed=True)
    changed.unlink()
    assert out.read_bytes() == before and run_batch(work, source, out, retry_failed=True).n_without_rows == 4
    pd.testing.assert_frame_equal(pd.read_parquet(out), table)
    asked.clear()
    asked.mended = True
    result = run_batch(work, source, out, retry_failed=True)
    assert asked == ["c", "d", "c", "d"] and (result.n_rows, result.n_without_rows, result.errors) == (10, 0, None)
    assert "".join(pd.read_parquet(out)["letter"]) == "abcdeabcde"
    run_batch(work, source, tmp_path / "whole.parquet")
    assert out.read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert run_batch(work, source, out, retry_failed=True).n_rows == 10, "nothing failed: nothing is run, the table stands"
    assert names(tmp_path) == ["p.jsonl", "t.parquet", "whole.parquet"]


def test_a_prompt_without_a_row_has_not_failed(model_folder, tmp_path, prompts, asked):
    work = Work(LETTERS, (model_folder,), options={"times": 0})
    source = prompts({"prompt": "a"}, {"prompt": "b", "raises": 1})
    for retry_failed in (False, True):
        result = run_batch(work, source, tmp_path / "t.parquet", retry_failed=retry_failed)
        assert (result.n_rows, result.n_without_rows) == (0, 1)
        dtypes = pd.read_parquet(result.out).dtypes.astype(str).to_dict()
        assert dtypes == {"model": "str", "prompt_id": "str", **letters.COLUMNS.dtypes}
    assert asked == ["a", "b", "b"]


def test_an_interrupted_retry_resumes_and_loses_nothing(model_folder, tmp_path, monkeypatch, prompts):
    work, source = Work(LETTERS, (model_folder,)), prompts({"prompt": "ab"}, {"prompt": "c", "breaks": 1})
    run_batch(work, source, tmp_path / "t.parquet")
    for owner, name in ((Parts, "add"), (workers.Worker, "run"), (runner, "write_table")):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, interrupted)
            run_batch(work, source, tmp_path / "t.parquet", retry_failed=True)
        assert len(pd.read_parquet(tmp_path / "t.parquet")) == 2
    monkeypatch.setattr("batch_probes.letters.ZeroDivisionError", KVLensError, raising=False)
    result = run_batch(work, source, tmp_path / "t.parquet", retry_failed=True)
    assert (result.n_rows, result.n_without_rows) == (2, 1)
    assert json.loads(result.errors.read_text())["error"] == "a bug"


def test_where_an_error_was_raised_names_the_code_and_the_analysis(model_folder, tmp_path, prompts):
    for analysis, record, expected in (
        ("bias_by_head", {"prompt": "ab"}, r".*/analyses/declaration.py:\d+"),  # the text is missing: its field says so
        (LETTERS, {"prompt": "ab", "kills_once": 7}, r".*/pathlib\S*:\d+, called at .*/letters.py:\d+"),
    ):
        result = run_batch(Work(analysis, (model_folder,)), prompts(record), tmp_path / "t.parquet", overwrite=True)
        assert re.fullmatch(expected, json.loads(result.errors.read_text())["where"])


def test_an_analysis_that_needs_a_text_refuses_prompts_without_one(model_folder, tmp_path, prompts):
    work, source = Work("bias_by_head", (model_folder,)), prompts({"prompt": "ab"}, {"prompt": "cd", "text": " e"})
    result = run_batch(work, source, tmp_path / "t.parquet")
    assert "needs a text: give the record" in result.errors.read_text()
    assert set(pd.read_parquet(result.out)["prompt_id"]) == {"p.jsonl:2"}
    assert run_batch(work, Input(source.prompts, " f"), tmp_path / "u.parquet").errors is None


def kills_until_done(work, source, out, seconds_of_a_run) -> int:
    """Run the batch in forks, which the system kills by a timer of processor time; how many were killed.

    A fork has imported everything, so that it is killed at its work; it ends at once, as by SIGKILL, and as far in its work on
    a busy machine.
    """
    pause, kills = random.Random(0), 0
    while True:
        seconds = 0.001 + pause.uniform(0, seconds_of_a_run * (kills + 1) / 8)  # ever later, so that it comes to an end
        child = os.fork()
        if child == 0:
            status = 1
            try:
                signal.setitimer(signal.ITIMER_PROF, seconds)
                run_batch(work, source, out, progress=False)
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0, status
            return kills
        kills += 1
        if out.exists() and not is_started(folder_of_parts(out)):  # killed when all was done
            with pytest.raises(KVLensError, match="is complete"):  # and removes what the kill left
                run_batch(work, source, out)
            return kills


def test_killed_often_the_table_is_that_of_an_uninterrupted_run(model_folder, tmp_path, prompts):
    work, source, out = Work(LETTERS, (model_folder,)), prompts(n=13), tmp_path / "killed" / "t.parquet"
    run_batch(work, source, tmp_path / "whole.parquet")
    began = time.process_time()
    run_batch(work, source, tmp_path / "timed.parquet", progress=False)
    assert kills_until_done(work, source, out, time.process_time() - began) >= 3
    assert out.read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert names(out.parent) == ["t.parquet"]


def test_a_kill_loses_the_prompt_in_hand_alone(model_folder, tmp_path, prompts, asked):
    """And what is damaged since is told, and run again."""
    work, out, lines, killed = Work(LETTERS, (model_folder,)), tmp_path / "t.parquet", [], tmp_path / "killed"
    source = prompts(*({"prompt": f"{i}", **({"kills_once": str(killed)} if i == 4 else {})} for i in range(7)))
    child = os.fork()
    if child == 0:
        run_batch(work, source, out)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    parts = [f"0-{i}.parquet" for i in range(4)]
    assert names(tmp_path / "t.parquet.partial") == [*parts, "settings.json"]
    (damaged := tmp_path / "t.parquet.partial" / parts[2]).write_bytes(b"PAR1")
    run_batch(work, source, out, tell=lines.append)
    assert lines == [f"{damaged} is damaged; its prompt is run again", "3 of 7 already done, in t.parquet.partial; 4 to run"]
    assert asked == ["2", "4", "5", "6"]
    run_batch(work, source, tmp_path / "whole.parquet")
    assert out.read_bytes() == (tmp_path / "whole.parquet").read_bytes()


@pytest.mark.parametrize("where", ["Parts.add", "Parts.tables", "write_atomically", "write_table", "Parts.delete"])
@pytest.mark.parametrize("after", [False, True])
def test_a_batch_interrupted_anywhere_resumes(model_folder, tmp_path, monkeypatch, where, after, prompts):
    work = Work(LETTERS, (model_folder,))
    source = prompts(*({"prompt": f"{i}", **({"raises": 1} if i == 3 else {})} for i in range(5)))
    run_batch(work, source, tmp_path / "whole.parquet")
    owner, name = (Parts, where.split(".")[1]) if "." in where else (runner, where)
    real, calls = getattr(owner, name), []

    def once(*args, **kwargs):
        calls.append(1)
        if len(calls) != (2 if name == "add" else 1):
            return real(*args, **kwargs)
        if after:
            real(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, once)
        run_batch(work, source, tmp_path / "t.parquet")
    if where == "Parts.delete" and after:
        with pytest.raises(KVLensError, match=r"5 prompts; 1 failed"):
            run_batch(work, source, tmp_path / "t.parquet")
    else:
        assert "t.parquet.partial" in names(tmp_path)
        run_batch(work, source, tmp_path / "t.parquet")
    for suffix in ("", ".errors.jsonl"):
        assert (tmp_path / f"t.parquet{suffix}").read_bytes() == (tmp_path / f"whole.parquet{suffix}").read_bytes()
    assert len(names(tmp_path)) == 5


def test_what_is_done_is_not_done_again(model_folder, tmp_path, monkeypatch, prompts, asked):
    real, work, source = Parts.add, Work(LETTERS, (model_folder,)), prompts({"prompt": "ab"}, {"prompt": "c"})
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Parts, "add", lambda self, result: (real(self, result), interrupted()))
        run_batch(work, source, tmp_path / "t.parquet")
    assert run_batch(work, source, tmp_path / "t.parquet").n_rows == 3 and asked == ["ab", "c"]


def test_an_interrupted_run_of_other_settings_or_weights_is_not_resumed(other_folder, tmp_path, monkeypatch, prompts):
    model, folder = tiny_text_model(), str(tmp_path / "m")
    model.save(folder)
    work, out, source = Work(LETTERS, (folder,)), tmp_path / "t.parquet", prompts(n=3)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(runner, "write_table", interrupted)
        run_batch(work, source, out)
    for words, other in {
        "options.times was 1, now 2": Work(LETTERS, (folder,), options={"times": 2}),
        'dtype was null, now "float64"': Work(LETTERS, (folder,), dtype="float64"),
        f"models.{other_folder} was null": Work(LETTERS, (folder, other_folder)),
    }.items():
        with pytest.raises(KVLensError, match="was started with other settings") as refusal:
            run_batch(other, source, out)
        assert words in str(refusal.value)
    model.W_E[0, 0] += 1
    model.save(folder, overwrite=True)
    with pytest.raises(KVLensError, match=r"m\.weights was"):
        run_batch(work, source, out)
    with pytest.raises(KVLensError, match="n_prompts was 3, now 4; prompts was"):
        run_batch(work, prompts(n=4), out)
    assert names(tmp_path) == ["m", "p.jsonl", "t.parquet.partial"]
    assert run_batch(work, source, out, overwrite=True).n_prompts == 4


def test_outputs_that_exist(model_folder, tmp_path, prompts):
    work, source, out = Work(LETTERS, (model_folder,)), prompts(n=2), tmp_path / "t.parquet"
    run_batch(work, source, out)
    before = out.read_bytes()
    with pytest.raises(KVLensError, match=r"t.parquet is complete: letters of 2 prompts; pass --overwrite"):
        run_batch(work, source, out)
    assert out.read_bytes() == before
    run_batch(work, source, out, overwrite=True)
    assert out.read_bytes() == before
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "mine.parquet")
    (tmp_path / "folder.parquet").mkdir()
    for name in ("mine.parquet", "folder.parquet"):
        with pytest.raises(KVLensError, match="exists and is not the table of a batch, so it is not replaced"):
            run_batch(work, source, tmp_path / name, overwrite=True)
    with pytest.raises(KVLensError, match=r"ends in .parquet, got .*t.csv"):
        run_batch(work, source, tmp_path / "t.csv")
    assert names(tmp_path) == ["folder.parquet", "mine.parquet", "p.jsonl", "t.parquet"]


def test_a_model_that_will_not_do(tmp_path, prompts):
    tiny_text_model(attention="softmax", kv_shift=None).save(tmp_path / "softmax")
    with pytest.raises(KVLensError, match="letters cannot be run on .*softmax: it is not linear"):
        run_batch(Work(LETTERS, (str(tmp_path / "softmax"),)), prompts(n=1), tmp_path / "t.parquet")
    assert names(tmp_path) == ["p.jsonl", "softmax"]


def test_fields_of_ones_own_are_columns_before_those_of_the_analysis(model_folder, tmp_path, prompts):
    work, out = Work(LETTERS, (model_folder,)), tmp_path / "t.parquet"
    source = prompts(
        {"prompt": "ab", "case": 7, "tags": ["x"]}, {"prompt": "c", "raises": 1, "share": 0.5}, {"prompt": "d", "share": 1}
    )
    assert run_batch(work, source, out).n_without_rows == 1
    table = pd.read_parquet(out)
    own = {"case": "Int64", "tags": "str", "share": "float64"}
    assert table.dtypes.astype(str).to_dict() == {"model": "str", "prompt_id": "str", **own, **letters.COLUMNS.dtypes}
    assert table["case"].tolist() == [7, 7, pd.NA] and table["tags"].fillna("").tolist() == ['["x"]', '["x"]', ""]
    assert table["share"].tolist()[2] == 1.0 and table["share"].isna().tolist() == [True, True, False]
    before = out.read_bytes()
    assert run_batch(work, source, out, retry_failed=True).n_rows == 3 and out.read_bytes() == before
    for name in ("letter", "prompt_id"):
        with pytest.raises(KVLensError, match=f"the field '{name}' of the records would be a column.*such as 'my_{name}'"):
            run_batch(work, prompts({"prompt": "a", name: 1}), tmp_path / "u.parquet")
    assert names(tmp_path) == ["p.jsonl", "t.parquet", "t.parquet.errors.jsonl"]


def test_a_second_process_on_the_same_output_says_so_before_it_loads_a_model(model_folder, tmp_path, prompts, monkeypatch):
    work, source, out = Work(LETTERS, (model_folder,)), prompts(n=2), tmp_path / "t.parquet"

    def second(*args):
        monkeypatch.undo()
        child = os.fork()
        if child == 0:
            try:
                with pytest.raises(KVLensError, match="another process is at work on .*t.parquet.partial; wait for it"):
                    run_batch(Work(LETTERS, ("no/such/model",)), source, out, overwrite=True)
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return Parts.add(*args)

    monkeypatch.setattr(Parts, "add", second)
    assert run_batch(work, source, out).n_prompts == 2
