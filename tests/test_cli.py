"""The command line through ``main(argv)``: what it prints and writes, its exit status, what a signal does, and controls
that become signs."""

import argparse
import contextlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from rich.cells import cell_len
from tiny_text_model import PROMPT, TEXT, tiny_text_model

import kvlens
from kvlens import HookedKVTransformer, __version__, zoo
from kvlens.cli import main
from kvlens.cli.prompts import add_explain
from kvlens.cli.settings import add_settings, add_train, settings_of
from kvlens.explanation import explanation_page
from kvlens.terminal import UNREADABLE, visible
from kvlens.training import TrainSettings, train_recipe


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch, short_answers):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_text_model().save(path)
    return str(path)


def explained(folder, *more) -> int:
    return main(["explain", "--model", str(folder), "--prompt", PROMPT, "--text", TEXT, "--depth", "units", *more])


def refused(capsys, status: int) -> str:
    """The one line on stderr of a refused command."""
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and captured.err.endswith("\n")
    assert ": error: " in captured.err
    return captured.err


# --- good input ------------------------------------------------------------------------------------------------------


def test_explain_writes_a_page_and_replaces_it_when_asked(folder, capsys):
    assert explained(folder, "--out", "new/page.html") == 0
    captured = capsys.readouterr()
    assert captured.err == "" and captured.out.startswith("Asked:")
    assert captured.out.splitlines()[-1] == "Open new/page.html in a browser; it works offline."
    assert [line for line in captured.out.splitlines() if cell_len(line) > 80] == []
    before = Path("new/page.html").read_text(encoding="utf-8")
    assert "Model: tiny, 2 layers of 3 heads, " in before and str(Path(folder).parent) not in before
    headings = re.findall("<h2>(.*?)</h2>", before)
    assert headings == ["The answer", "Prompt, heads, next token", "Effect on the text", "Layer by layer", "Exactness"]
    line = refused(capsys, explained(folder, "--out", "new/page.html"))
    assert "--out: new/page.html exists; pass --overwrite to replace it" in line
    assert Path("new/page.html").read_text(encoding="utf-8") == before
    assert explained(folder, "--out", "new/page.html", "--overwrite", "--sections", "exactness", "heads") == 0
    headings = re.findall("<h2>(.*?)</h2>", Path("new/page.html").read_text(encoding="utf-8"))
    assert headings == ["The answer", "Exactness", "Heads"]
    assert explained(folder, "--out", "answer.html", "--sections") == 0
    assert re.findall("<h2>(.*?)</h2>", Path("answer.html").read_text(encoding="utf-8")) == ["The answer"]
    assert sorted(os.listdir(".")) == ["answer.html", "new"] and os.listdir("new") == ["page.html"]


def test_explain_writes_all_tables_as_json(folder, capsys):
    assert explained(folder, "--out", "new/tables.json") == 0
    printed, written = capsys.readouterr().out, json.loads(Path("new/tables.json").read_text(encoding="utf-8"))
    assert printed.splitlines()[-1] == "Written to new/tables.json."
    assert set(kvlens.explanation.explained.TABLES) < set(written) and len(written["units"]) > 1 and written["response"]
    assert "--sections belongs to --out FILE.html" in refused(capsys, explained(folder, "--out", "a.json", "--sections"))


def test_explain_without_arguments_is_the_story_on_the_model_of_stories(capsys):
    assert main(["explain", "--out", "page.html"]) == 0
    assert "The kite is in the barn" in (page := Path("page.html").read_text()) and "Model: facts-linear, " in page
    assert "Why did the model say &#x27;donkey&#x27;?</h1>" in page and "&#x27;donkey&#x27; is lost" in page


def test_another_model_explains_the_help_page_and_your_own_prompt_the_docs_model(folder, capsys, monkeypatch):
    monkeypatch.setattr(zoo, "names", lambda: ["docs-linear"])
    monkeypatch.setattr(zoo, "folder_of", lambda name: Path(folder))
    bare = ["--depth", "units", "--by", "paragraph"]
    assert main(["explain", "--model", "docs-linear", *bare]) == 0
    assert "frobnicate(widget" in capsys.readouterr().out
    assert main(["explain", "--prompt", PROMPT, "--text", TEXT, *bare, "--out", "own.html", "--sections"]) == 0
    assert "Model: docs-linear, " in Path("own.html").read_text()


def test_explain_reads_files_and_other_dtypes(folder):
    Path("p.txt").write_text(PROMPT, encoding="utf-8")
    Path("t.txt").write_text(TEXT, encoding="utf-8")
    options = ["--prompt-file", "p.txt", "--text-file", "t.txt", "--dtype", "float64", "--device", "cpu", "--out", "a.html"]
    assert main(["explain", "--model", folder, "--depth", "units", *options, "--sections", "exactness"]) == 0
    page = Path("a.html").read_text()
    (error,) = re.findall("<td>relative error of the logits</td><td>(.*?)</td>", page)
    assert " parameters, float64." in page and float(error.replace("−", "-")) < 1e-12


def test_help_and_version_are_light():
    code = (
        "import sys; from kvlens.cli import main; codes = [main(a) for a in ([], ['--help'], ['explain', '--help'], ['zoo'])];"
        "heavy = {'torch', 'transformer_lens', 'pandas', 'numpy', 'rich'} & set(sys.modules); sys.exit(str((codes, heavy)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "([0, 0, 0, 0], set())"
    for words in ("usage: kvlens", "--overwrite", "exactness", "example"):
        assert words.lower() in done.stdout.lower()


def test_python_m_kvlens():
    done = subprocess.run([sys.executable, "-m", "kvlens", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"kvlens {__version__}\n")
    done = subprocess.run([sys.executable, "-m", "kvlens", "explian"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "did you mean 'explain'?" in done.stderr


def test_zoo_lists_what_ships(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(zoo, "_ROOT", tmp_path)
    assert main(["zoo"]) == 0
    assert "has no models" in capsys.readouterr().out
    tiny_text_model().save(tmp_path / "docs-linear")
    held = {"loss": 2.5, "accuracy": 0.5, "gain": 0.25}
    facts = {"n_parameters": 12345, "recipe": {"task": "text"}, "heldout": held}
    (tmp_path / "docs-linear" / "training.json").write_text(json.dumps(facts))
    assert main(["zoo"]) == 0
    told = capsys.readouterr().out
    row = told.splitlines()[1].split()
    assert row[:3] + row[5:] == ["docs-linear", "text", "12,345", "2.5000", "0.5000", "0.250"]
    assert 'Load a model with kvlens.load("docs-linear").' in " ".join(told.split())


def test_what_a_command_takes_is_called_as_in_python():
    """But for files, settings, and the words that say what to do with them; of a list, each is given by itself."""
    of_explain = kvlens.explain, kvlens.load, kvlens.Chat, kvlens.Chat.ask, explanation_page
    known = {
        add_explain: {name for function in of_explain for name in inspect.signature(function).parameters},
        add_train: {*(field.name for field in fields(TrainSettings)), *inspect.signature(train_recipe).parameters},
    }
    others = {"help", "prompt_file", "text_file", "out", "overwrite", "name", "task", "model", "set"}
    for add, names in known.items():
        command = argparse.ArgumentParser().add_subparsers()
        add(command)
        [parser] = command.choices.values()
        dests = {action.dest for action in parser._actions} - others
        assert len(dests) > 4 and {dest for dest in dests if not {dest, f"{dest}s"} & names} == set()


def test_settings_are_given_together_or_one_by_one():
    parser = argparse.ArgumentParser()
    add_settings(parser, "--set", "")
    for words in (["--set", "a=1", "b=x"], ["--set", "a=1", "--set", "b=x"]):
        assert settings_of("--set", parser.parse_args(words).set) == {"a": 1, "b": "x"}


def test_train_writes_run_and_model_with_a_card_and_resumes(capsys):
    command = ["train", "induction", "--out", "run", "--seed", "7", "--device", "cpu", "--task", "vocab_size=13", "length=9"]
    command += ["--model", "n_layers=1", "d_model=12", "d_head=6"]
    command += ["--set", "steps=4", "batch_size=3", "eval_every=2", "eval_sequences=5", "max_grad_norm=Infinity"]
    assert main(command) == 0
    captured = capsys.readouterr()
    assert "for 4 steps" in captured.out and "accuracy" in captured.out and "run/model" in captured.out
    assert {"checkpoint.safetensors", "metrics.parquet", "model", "seconds.json"} == set(os.listdir("run"))
    facts = json.loads(Path("run/model/training.json").read_text(), parse_constant=lambda word: pytest.fail(word))
    assert facts["recipe"]["training"]["seed"] == facts["config"]["seed"] == 7
    assert facts["recipe"]["training"]["max_grad_norm"] is None and "max_grad_norm=Infinity" in facts["command"]
    card = Path("run/model/MODEL_CARD.md").read_text()
    assert f"{facts['n_parameters']:,} parameters" in card
    command_in_card = card.split("`")[card.split("`").index("induction") + 2 :]
    assert "vocab_size=13" in " ".join(command_in_card) and "seed=7" in " ".join(command_in_card)
    assert HookedKVTransformer.load("run/model").cfg.n_layers == 1
    assert main(command) == 0  # finished: measured again, not trained


# --- bad input -------------------------------------------------------------------------------------------------------


def test_models_that_have_no_explanation(capsys, tmp_path):
    broken = tiny_text_model()
    broken.W_U[0, 0] = torch.nan
    models = {
        "n_ctx=16": tiny_text_model(positional_embedding_type="standard", n_ctx=16),
        "token ids must lie in 0..4": tiny_text_model(d_vocab=5),
        "log-probabilities are NaN": broken,
    }
    for i, (message, model) in enumerate(models.items()):
        model.save(tmp_path / f"m{i}")
        assert message in refused(capsys, explained(f"m{i}", "--out", "page.html"))
    assert sorted(os.listdir(".")) == [f"m{i}" for i in range(len(models))]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full: not Linux")
def test_an_output_that_cannot_be_written_is_one_line():
    run = [sys.executable, "-m", "kvlens", "zoo"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(run, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (2, "kvlens: error: No space left on device\n")
    closed = subprocess.run(["sh", "-c", f"{' '.join(run)} >&-"], stderr=subprocess.PIPE, text=True, timeout=120)
    assert (closed.returncode, closed.stderr) == (0, "")


@pytest.mark.parametrize("where", ["kvlens.explanation.runs.Runs.answer", "kvlens.viz.Page.to_html"])
def test_ctrl_c_leaves_nothing(folder, capsys, monkeypatch, where):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupt)
    assert explained(folder, "--out", "page.html", "--sections") == 130
    captured = capsys.readouterr()
    assert captured.err == "kvlens: interrupted\n" and ("The model answers:" in captured.out) == where.endswith("to_html")
    assert os.listdir(".") == []


def test_a_full_disk_leaves_the_old_page(folder, capsys, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    assert explained(folder, "--out", "page.html", "--sections") == 0
    before, _ = Path("page.html").read_bytes(), capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        assert explained(folder, "--out", "page.html", "--overwrite") == 2
    captured = capsys.readouterr()
    assert captured.err == "kvlens: error: cannot write page.html: No space left on device\n"
    assert captured.out.startswith("Asked:") and "Open page.html" not in captured.out
    assert os.listdir(".") == ["page.html"] and Path("page.html").read_bytes() == before


def test_memory_that_runs_out_is_one_line_and_other_errors_are_not(capsys, monkeypatch):
    monkeypatch.setattr("kvlens.cli._run", lambda argv: torch.empty(2**50))
    assert main([]) == 2
    assert capsys.readouterr().err == (
        "kvlens: error: memory has run out; give a smaller model, a shorter prompt or fewer texts\n"
    )
    monkeypatch.setattr("kvlens.cli._run", lambda argv: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="size"):
        main([])


def test_a_reader_that_leaves_early_is_no_error(folder):
    """Neither of a command that works, here in a fork, nor when the interpreter ends."""
    reader, writer = os.pipe()
    os.close(reader)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with open(writer, "w") as sys.stdout:
                status = explained(folder, "--out", "page.html", "--sections")
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert os.listdir(".") == ["page.html"]
    command = [sys.executable, "-m", "kvlens", "zoo"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        *([command, "--help"] for command in ("explain", "app", "analyse", "train", "zoo", "reproduce")),
        ["analyse", "bias_by_head", "--help"],
        ["analyse", "dual_bound", "--help"],
        ["analyse"],
        ["reproduce"],
        ["zoo"],
    ],
    ids=" ".join,
)
def test_help_and_lists_fit_a_terminal_of_80_columns(arguments, monkeypatch, capsys):
    """But for commands and lines of a file, which stand on a line of their own so that they can be copied."""
    monkeypatch.setenv("COLUMNS", "80")
    with contextlib.suppress(SystemExit):
        main(arguments)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 3
    assert [line for line in lines if len(line) > 80 and not line.startswith(("  kvlens ", '  {"prompt"'))] == []


@pytest.mark.parametrize(
    ("number", "word", "status"), [(signal.SIGTERM, "terminated", 143), (signal.SIGINT, "interrupted", 130)]
)
def test_a_signal_ends_a_command_with_a_message(number, word, status, monkeypatch, capsys):
    if number == signal.SIGINT:  # a run in the background ignores it from its start
        signal.signal(number, signal.default_int_handler)
    before = signal.getsignal(number)
    monkeypatch.setattr(zoo, "names", lambda: os.kill(os.getpid(), number))
    assert main(["zoo"]) == status
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"kvlens: {word}\n")
    assert signal.getsignal(number) is before


def test_controls_marks_and_line_ends_become_signs_and_letters_stay():
    assert visible("a\x1b[31m\x07\x9b\u202e\u2066\u200f\u2028\u2029\x85\n\ud800b") == f"a{UNREADABLE}[31m{UNREADABLE * 10}b"
    assert visible("naïve 語 ⏎ é ·") == "naïve 語 ⏎ é ·"
    assert visible("👨\u200d👩 می\u200cخواهم") == "👨\u200d👩 می\u200cخواهم"  # joiners are spelling
