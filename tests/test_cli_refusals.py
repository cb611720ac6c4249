"""Every bad word that a command may be given: one line on stderr, exit status 2, and nothing written."""

import io
import os
import shlex

import pytest

from kvlens.cli import main
from kvlens.training import ship

pytestmark = pytest.mark.unhooked  # numbers, names and nonsense, from the command line into every settings class

TEXTS = ["--prompt", "a", "--text", "b"]
TRAIN = ["train", "induction", "--out", "m"]
EXPLAIN = "explain --prompt a --text b"
ANALYSE = "analyse bias_decomposition p.jsonl --model docs-linear --out"
REFUSED = [
    "''",
    "..",
    "--bogus",
    # train
    "train",
    "train induction --seed -1",
    "train inducton --out m",
    "train docs-linear --out photos",
    *(
        f"train induction --out m {x}"
        for x in ("--device meta", "--steps x", "--steps 0", f"--seed {2**70}", "--max-minutes nan")
    ),
    *(f"train induction --out m {x}" for x in ("--stepz 3", "--set", "--set =3", "--set steps", "--set steps=many")),
    *(f"train induction --out m --set {x}" for x in ("learning_rate=Infinity", "learning_rate=nan", "'betas=[\"a\", 0.9]'")),
    *(f"train induction --out m --task {x}" for x in ("vocab=3", "length=[]")),
    *(f"train text --out m --task corpus={x}" for x in ("no", "empty", "''", "x" * 300, "5", "photos/units.parquet")),
    *(f"train induction --out m --model {x}" for x in ("n_layer=1", "device=cpu", "attn_only=maybe")),
    # explain
    *(
        f"{EXPLAIN} {x}"
        for x in ("--device meta", "--dtype int8", "--over", "--prompt-file file", "--budget 0", "--by chapter")
    ),
    *(f"{EXPLAIN} {x}" for x in ("--overwrite", "--budget 0", "--sections heads", "--question c", "--document file")),
    *(f"{EXPLAIN} --out {x}" for x in (".", "a.htm", "photos.html --overwrite", "/proc/a.html", "a.html --sections haeds")),
    *(f"{EXPLAIN} --model {x}" for x in ("nowhere", "''", "'~nobody/at/all'", "x" * 300, "empty", "file")),
    *(f"explain --prompt-file {x} --text b" for x in ("bytes", "nowhere", ".", "photos/units.parquet", "''", "x" * 300)),
    *(f"explain --prompt {x} --text b" for x in ("''", "a\ud800")),
    "explain --prompt-file - --text-file -",
    "explain --text b",
    *(f"explain {x}" for x in ("--messages file --document file", "--messages photos/units.parquet")),
    *(f"explain --question a --document {x}" for x in ("nowhere", "photos/units.parquet")),
    "explain --model facts-linear --prompt 'Mira keeps a goat.' --text ' Mira keeps a' --answer ' '",
    # reproduce, zoo
    *(f"reproduce {x}" for x in ("x", "..", "--set seeds=4 hops", "hops --set sead=4", "hops --scale huge", "hops --overwrit")),
    "zoo x",
    # analyse
    *(f"analyse {x}" for x in ("nope", "..", "--bogus")),
    *(f"{ANALYSE} {x}" for x in (".", "t.csv", "/.parquet", "/proc/t.parquet", "/proc/x/t.parquet")),
    *(f"analyse bias_decomposition p.jsonl --model {x} --out t.parquet" for x in ("''", "a\0b", "x" * 300, "file")),
    *(f"analyse bias_decomposition {x} --model docs-linear --out t.parquet" for x in ("/dev/null", "''", "x" * 300)),
    *(f"{ANALYSE} t.parquet {x}" for x in ("--device meta", "--workers 0", "--threads 0", "--dtype int8", "--engine rey")),
    f"{ANALYSE} t.parquet --gpus-per-worker 1",
]
WRITERS = ["train induction", "reproduce landscape --scale tiny", ANALYSE]
PATHS = ["", "a\0b", "x" * 300, f"a/{'x' * 300}/r", "file", "file/r", "/", "/".join(["b" * 60] * 100), "a\ud800"]
"""What no command writes to. A batch writes a file, all others a folder."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One for all refused commands, which leave it as it is: each of many folders of a name takes a look at all before it."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "file").write_text("x")
    (folder / "bytes").write_bytes(b"ab\xff")
    (folder / "empty").mkdir()
    (folder / "photos").mkdir()
    (folder / "photos.html").mkdir()
    os.mkfifo(folder / "photos" / "units.parquet")  # opening it would wait for a reader
    (folder / "p.jsonl").write_text('{"prompt": "Return the widget.", "text": " It is"}\n')
    return folder


@pytest.fixture(autouse=True)
def _nothing_trains(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(ship, "train", lambda *_, **__: pytest.fail("this would have trained"))


def refused(command, capsys):
    """A command prints one line, and leaves the folder as it is."""
    assert main(command) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("kvlens: error: ") and len(captured.err) > 40
    assert sorted(os.listdir(".")) == ["bytes", "empty", "file", "p.jsonl", "photos", "photos.html"] and not os.listdir("empty")
    assert os.listdir("photos") == ["units.parquet"]


@pytest.mark.parametrize("command", REFUSED, ids=lambda command: command[:60])
def test_is_refused_in_one_line(command, capsys):
    refused(shlex.split(command), capsys)


@pytest.mark.parametrize("command", WRITERS, ids=lambda command: command.split()[0])
def test_what_is_no_path_is_refused_by_all_that_write(command, capsys):
    for out in PATHS:
        if command != ANALYSE:
            refused([*command.split(), "--out", out], capsys)
        elif out not in ("", "/", "file"):
            refused([*command.split(), f"{out}.parquet"], capsys)


def test_what_a_terminal_would_obey_does_not_reach_it(capsys):
    evil = "a\x1b[31mb\u202ec\u2028d\x07e\u200f"
    assert main(["explain", "--model", evil, *TEXTS]) == 2
    line = capsys.readouterr().err
    assert not set(line[:-1]) & set("\x1b\u202e\u2028\x07\u200f")
    assert main([*TRAIN, "--task", f"law={evil}"]) == 2
    assert not set(capsys.readouterr().err[:-1]) & set("\x1b\u202e\u2028\x07\u200f")


def test_names_of_files_that_a_batch_tells_of_are_made_visible(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    evil = "a\x1b[31m\u202eb\u2028"
    lines = '{"prompt": "Return the widget.", "text": " It is"}\nno JSON\n{"text": "no prompt"}\n'
    with open(f"{evil}.jsonl", "w", encoding="utf-8") as file:
        file.write(lines)
    assert main(["analyse", "bias_decomposition", f"{evil}.jsonl", "--model", "docs-linear", "--out", f"{evil}.parquet"]) == 1
    captured = capsys.readouterr()
    told = captured.out + captured.err
    assert "errors.jsonl" in told and "not JSON" in told and not set(told) & set("\x1b\u202e\u2028")


def test_a_prompt_from_standard_input_that_is_no_text(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
    assert main(["explain", "--prompt-file", "-", "--text", "b"]) == 2
    assert "not UTF-8 text (byte 2)" in capsys.readouterr().err
