"""A batch from beginning to end on a tiny model: the same table after any interruption, and nothing half-written."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from batch_probes import letters
from batch_probes.killed_often import run_killed_often
from batch_probes.letters import letters_of
from kvlens.analyses.batch import runner
from kvlens.analyses.batch.journal import Journal
from kvlens.analyses.batch.runner import Input, run_batch
from kvlens.analyses.batch.work import Resources, Work
from tiny_text_model import tiny_text_model

from kvlens import HookedKVTransformer, KVLensError
from kvlens.analyses import bias_by_head

LETTERS = "batch_probes.letters:LETTERS"
LETTERS_FILE = Path(__file__).parents[1] / "batch_probes" / "letters.py"
WORDS = ["The widget", "is purple. Return the gadget.", "Frobnicate", "both", "and the color of the widget"]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_text_model().save(folder)
    return str(folder)


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("models") / "other"
    tiny_text_model(n_layers=1, seed=2).save(folder)
    return str(folder)


def prompts(folder, *records, n=0) -> Input:
    records = records or [{"prompt": f"{WORDS[i % 5]} {i}", "id": f"p{i}", "text": " is green"} for i in range(n)]
    path = folder / "p.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" if isinstance(r, dict) else f"{r}\n" for r in records))
    return Input(path)


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def silent(line):
    pytest.fail(f"told {line}")


def test_the_table_is_what_the_analysis_returns(model_folder, other_folder, tmp_path):
    source = prompts(tmp_path, n=3)
    out = tmp_path / "new" / "t.parquet"
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


def test_columns_and_options(model_folder, tmp_path):
    source = prompts(tmp_path, {"prompt": "ab", "id": "x"})
    work = Work(LETTERS, (model_folder,), columns=("letter", "place"), options={"upper": True, "times": 2})
    run_batch(work, source, tmp_path / "t.parquet")
    table = pd.read_parquet(tmp_path / "t.parquet")
    assert list(table.columns) == ["model", "prompt_id", "letter", "place"]
    assert "".join(table["letter"]) == "ABAB"


def test_prompts_without_rows_are_reported_and_the_batch_continues(model_folder, tmp_path):
    lines = []
    source = prompts(
        tmp_path, {"prompt": "ab"}, "", {"prompt": "c", "raises": 1}, {"prompt": "d", "breaks": 1}, {"prompt": "e"}
    )
    result = run_batch(Work(LETTERS, (model_folder,)), source, tmp_path / "t.parquet", tell=lines.append)
    by_line = {words: f"letters.py:{number}" for number, words in enumerate(LETTERS_FILE.read_text().splitlines(), start=1)}
    refusal, bug = (
        by_line[f"        raise {error}"] for error in ('KVLensError("too long\\nby far")', 'ZeroDivisionError("a bug")')
    )
    first = f"p.jsonl:3: too long by far ({refusal})"
    assert (
        lines == ["p.jsonl:2: the line is empty", f"{first}; the batch continues with the others"]
        and result.first_failure == first
    )
    assert "".join(pd.read_parquet(result.out)["letter"]) == "abe"
    assert (result.n_rows, result.n_prompts, result.n_without_rows, result.n_malformed) == (3, 4, 2, 1)
    folder, of_model = LETTERS_FILE.parent, {"model": model_folder}
    assert [json.loads(line) for line in result.errors.read_text().splitlines()] == [
        {"model": None, "prompt": "p.jsonl:2", "kind": "malformed", "error": "the line is empty", "where": None},
        {**of_model, "prompt": "p.jsonl:3", "kind": "refused", "error": "too long by far", "where": f"{folder}/{refusal}"},
        {**of_model, "prompt": "p.jsonl:4", "kind": "failed", "error": "ZeroDivisionError: a bug", "where": f"{folder}/{bug}"},
    ]
    prompts(tmp_path, {"prompt": "ab"})
    run_batch(Work(LETTERS, (model_folder,)), source, tmp_path / "t.parquet", overwrite=True, tell=silent)
    assert names(tmp_path) == ["p.jsonl", "t.parquet"], "the errors of the old table are gone with it"


def test_what_failed_is_run_again_on_request_and_nothing_else(model_folder, other_folder, tmp_path, monkeypatch):
    """Refused and failed prompts, on two models: a rerun is refused; a retry gives the table of a run without failures."""
    records = [{"prompt": "ab"}, {"prompt": "c", "raises": 1}, {"prompt": "d", "breaks": 1}, {"prompt": "e"}]
    work, source, out = Work(LETTERS, (model_folder, other_folder)), prompts(tmp_path, *records), tmp_path / "t.parquet"
    source = Input(source.prompts)
    assert run_batch(work, source, out).n_without_rows == 4
    before = out.read_bytes()
    with pytest.raises(
        KVLensError, match=r"letters of 4 prompts; 4 failed \(t.parquet.errors.jsonl says why\).*--retry-failed"
    ):
        run_batch(work, source, out)
    with pytest.raises(KVLensError, match="give one of them"):
        run_batch(work, source, out, overwrite=True, retry_failed=True)
    with pytest.raises(KVLensError, match=r"t.parquet was started with other settings: options.times was 1, now 2"):
        run_batch(Work(LETTERS, work.models, options={"times": 2}), source, out, retry_failed=True)
    assert out.read_bytes() == before and run_batch(work, source, out, retry_failed=True).n_without_rows == 4
    pd.testing.assert_frame_equal(pd.read_parquet(out), table_of(before, tmp_path))

    asked = []

    def mended(model, prompt, raises, breaks, kills_once, *, upper=False, times=1):
        asked.append(prompt)
        return letters_of(model, prompt, None, None, kills_once, upper=upper, times=times)

    monkeypatch.setattr(letters, "LETTERS", replace(letters.LETTERS, function=mended))
    result = run_batch(work, source, out, retry_failed=True)
    assert asked == ["c", "d", "c", "d"] and (result.n_rows, result.n_without_rows, result.errors) == (10, 0, None)
    assert "".join(pd.read_parquet(out)["letter"]) == "abcdeabcde"
    run_batch(work, source, tmp_path / "whole.parquet")
    assert out.read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert run_batch(work, source, out, retry_failed=True).n_rows == 10, "nothing failed: nothing is run, the table stands"
    assert names(tmp_path) == ["p.jsonl", "t.parquet", "whole.parquet"]


def test_a_prompt_without_a_row_has_not_failed(model_folder, tmp_path, monkeypatch):
    asked = []

    def counted(model, prompt, raises, breaks, kills_once, *, upper=False, times=1):
        asked.append(prompt)
        return letters_of(model, prompt, raises, breaks, kills_once, upper=upper, times=times)

    monkeypatch.setattr(letters, "LETTERS", replace(letters.LETTERS, function=counted))
    work = Work(LETTERS, (model_folder,), options={"times": 0})
    source = prompts(tmp_path, {"prompt": "a"}, {"prompt": "b", "raises": 1})
    for retry_failed in (False, True):
        result = run_batch(work, source, tmp_path / "t.parquet", retry_failed=retry_failed)
        assert (result.n_rows, result.n_without_rows) == (0, 1)
    assert asked == ["a", "b", "b"]


def test_an_interrupted_retry_resumes_and_loses_nothing(model_folder, tmp_path, monkeypatch):
    work, source = Work(LETTERS, (model_folder,)), prompts(tmp_path, {"prompt": "ab"}, {"prompt": "c", "breaks": 1})
    run_batch(work, source, tmp_path / "t.parquet")
    for where in ("Journal.add", "Worker.run", "write_parquet"):
        with monkeypatch.context() as patch:
            patch.setattr(f"kvlens.analyses.batch.runner.{where}".replace("runner.Worker", "worker.Worker"), interrupted)
            with pytest.raises(KeyboardInterrupt):
                run_batch(work, source, tmp_path / "t.parquet", retry_failed=True)
        assert len(pd.read_parquet(tmp_path / "t.parquet")) == 2
    monkeypatch.setattr("batch_probes.letters.ZeroDivisionError", KVLensError, raising=False)
    result = run_batch(work, source, tmp_path / "t.parquet", retry_failed=True)
    assert (result.n_rows, result.n_without_rows) == (2, 1)
    assert json.loads(result.errors.read_text())["error"] == "a bug"


def interrupted(*args):
    raise KeyboardInterrupt


def table_of(data, folder):
    (folder / "before.parquet").write_bytes(data)
    table = pd.read_parquet(folder / "before.parquet")
    (folder / "before.parquet").unlink()
    return table


def test_when_every_prompt_fails_the_table_has_its_columns(model_folder, tmp_path):
    source = prompts(tmp_path, *[{"prompt": "ab", "breaks": 1}] * 3)
    result = run_batch(Work(LETTERS, (model_folder,)), source, tmp_path / "t.parquet")
    table = pd.read_parquet(result.out)
    assert table.dtypes.astype(str).to_dict() == {"model": "str", "prompt_id": "str", **letters.COLUMNS.dtypes}
    assert (len(table), result.n_without_rows) == (0, 3)


def test_where_an_error_was_raised_names_the_code_and_the_analysis(model_folder, tmp_path):
    source = prompts(tmp_path, {"prompt": "ab"})
    result = run_batch(Work("bias_by_head", (model_folder,)), source, tmp_path / "t.parquet")
    found = json.loads(result.errors.read_text())["where"]
    assert re.fullmatch(r".*/analyses/declaration.py:\d+", found)  # the text is missing: its field says so
    breaks = Work(LETTERS, (model_folder,))
    result = run_batch(breaks, prompts(tmp_path, {"prompt": "ab", "kills_once": 7}), tmp_path / "u.parquet")
    assert re.fullmatch(r".*/pathlib\S*:\d+, called at .*/letters.py:\d+", json.loads(result.errors.read_text())["where"])


def test_the_number_of_ablations_is_reported_before_they_start(model_folder, tmp_path):
    lines = []
    work = Work("bias_effects", (model_folder,), options={"by": "layer", "methods": "zero", "parts": "bias"})
    source = prompts(tmp_path, {"prompt": "The widget", "text": " is green"})
    result = run_batch(work, source, tmp_path / "t.parquet", tell=lines.append)
    n_layers = pd.read_parquet(result.out)["layer"].nunique()
    assert lines == [f"{model_folder}: {n_layers} ablations or patches per prompt, in batches"]
    assert result.n_rows == n_layers


def test_an_analysis_that_needs_a_text_refuses_prompts_without_one(model_folder, tmp_path):
    source = prompts(tmp_path, {"prompt": "ab"}, {"prompt": "cd", "text": " e"})
    result = run_batch(Work("bias_by_head", (model_folder,)), source, tmp_path / "t.parquet")
    assert "needs a text: give the record" in result.errors.read_text()
    assert set(pd.read_parquet(result.out)["prompt_id"]) == {"p.jsonl:2"}
    result = run_batch(Work("bias_by_head", (model_folder,)), Input(source.prompts, " f"), tmp_path / "u.parquet")
    assert result.errors is None


def test_many_bad_lines_are_counted(model_folder, tmp_path):
    lines = []
    run_batch(
        Work(LETTERS, (model_folder,)), prompts(tmp_path, {"prompt": "a"}, *"[" * 33), tmp_path / "t.parquet", tell=lines.append
    )
    assert len(lines) == 21 and lines[-1] == "... and 13 more lines without a prompt"


def test_killed_often_the_table_is_that_of_an_uninterrupted_run(model_folder, tmp_path):
    source = prompts(tmp_path, n=13)
    work, out = Work("bias_by_head", (model_folder,)), tmp_path / "killed" / "t.parquet"
    run_batch(work, source, tmp_path / "whole.parquet")
    assert run_killed_often(work, source, out) >= 3
    assert out.read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert names(out.parent) == ["t.parquet"]


@pytest.mark.parametrize("where", ["Journal.add", "Journal.failures", "write_atomically", "write_parquet", "Journal.delete"])
@pytest.mark.parametrize("after", [False, True])
def test_a_batch_interrupted_anywhere_resumes(model_folder, tmp_path, monkeypatch, where, after):
    work, resources = Work(LETTERS, (model_folder,)), Resources(prompts_per_job=2)
    source = prompts(tmp_path, *({"prompt": f"{i}", **({"raises": 1} if i == 3 else {})} for i in range(5)))
    run_batch(work, source, tmp_path / "whole.parquet", resources=resources)
    owner, name = (Journal, where.split(".")[1]) if "." in where else (runner, where)
    real, calls = getattr(owner, name), []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) != (2 if name == "add" else 1):
            return real(*args, **kwargs)
        if after:
            real(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_batch(work, source, tmp_path / "t.parquet", resources=resources)
    if where == "Journal.delete" and after:
        with pytest.raises(KVLensError, match=r"5 prompts; 1 failed"):
            run_batch(work, source, tmp_path / "t.parquet")
    else:
        assert "t.parquet.partial" in names(tmp_path)
        run_batch(work, source, tmp_path / "t.parquet")
    for suffix in ("", ".errors.jsonl"):
        assert (tmp_path / f"t.parquet{suffix}").read_bytes() == (tmp_path / f"whole.parquet{suffix}").read_bytes()
    assert len(names(tmp_path)) == 5


def test_what_is_done_is_not_done_again(model_folder, tmp_path, monkeypatch):
    def add_once(self, results):
        added(self, results)
        raise KeyboardInterrupt

    added, source, marker = (
        Journal.add,
        prompts(tmp_path, {"prompt": "ab", "kills_once": str(tmp_path / "m")}, {"prompt": "c"}),
        tmp_path / "m",
    )
    marker.touch()
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", add_once)
        with pytest.raises(KeyboardInterrupt):
            run_batch(Work(LETTERS, (model_folder,)), source, tmp_path / "t.parquet", resources=Resources(prompts_per_job=1))
    marker.unlink()  # whoever runs the first prompt again, dies
    assert run_batch(Work(LETTERS, (model_folder,)), source, tmp_path / "t.parquet").n_rows == 3


def test_an_interrupted_run_of_other_settings_is_not_resumed(model_folder, other_folder, tmp_path, monkeypatch):
    work, out = Work(LETTERS, (model_folder,)), tmp_path / "t.parquet"
    with monkeypatch.context() as patch:
        patch.setattr(runner, "write_parquet", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_batch(work, prompts(tmp_path, n=3), out)
    for words, other in {
        "options.times was 1, now 2": Work(LETTERS, (model_folder,), options={"times": 2}),
        'dtype was null, now "float64"': Work(LETTERS, (model_folder,), dtype="float64"),
        f"models.{other_folder} was null": Work(LETTERS, (model_folder, other_folder)),
        "columns was": Work(LETTERS, (model_folder,), columns=("letter",)),
    }.items():
        with pytest.raises(KVLensError, match="was started with other settings") as refusal:
            run_batch(other, Input(tmp_path / "p.jsonl"), out)
        assert words in str(refusal.value)
    with pytest.raises(KVLensError, match="n_prompts was 3, now 4; prompts was"):
        run_batch(work, prompts(tmp_path, n=4), out)
    assert names(tmp_path) == ["p.jsonl", "t.parquet.partial"]
    assert run_batch(work, prompts(tmp_path, n=4), out, overwrite=True).n_prompts == 4


def test_a_model_that_was_trained_on_is_another_model(tmp_path, monkeypatch):
    model = tiny_text_model()
    model.save(tmp_path / "m")
    work, out, source = Work(LETTERS, (str(tmp_path / "m"),)), tmp_path / "t.parquet", prompts(tmp_path, n=2)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "write_parquet", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_batch(work, source, out)
    model.W_E[0, 0] += 1
    model.save(tmp_path / "m", overwrite=True)
    with pytest.raises(KVLensError, match=r"m\.weights was"):
        run_batch(work, source, out)


def test_outputs_that_exist(model_folder, tmp_path):
    work, source, out = Work(LETTERS, (model_folder,)), prompts(tmp_path, n=2), tmp_path / "t.parquet"
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


def test_a_model_that_will_not_do(tmp_path):
    tiny_text_model(attention="softmax", kv_shift=None).save(tmp_path / "softmax")
    source, out = prompts(tmp_path, n=1), tmp_path / "t.parquet"
    with pytest.raises(KVLensError, match="letters cannot be run on .*softmax: it is not linear"):
        run_batch(Work(LETTERS, (str(tmp_path / "softmax"),)), source, out)
    assert names(tmp_path) == ["p.jsonl", "softmax"]
