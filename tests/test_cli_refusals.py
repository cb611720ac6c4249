"""Every bad word that a command may be given: one line on stderr, exit status 2, and nothing written."""

import io
import os
import shlex

import pytest

from kvlens.cli import COMMANDS, main
from kvlens.training import ship

pytestmark = pytest.mark.unhooked  # numbers, names and nonsense, from the command line into every settings class

TEXTS = ["--prompt", "a", "--text", "b"]
TRAIN = ["train", "induction", "--out", "m"]
EXPLAIN, STORY = "explain --prompt a --text b", "Mira keeps a goat."
ANALYSE = "analyse bias_decomposition p.jsonl --model docs-linear --out"
NO_MODEL = "is neither a shipped model nor a folder or file that holds one; shipped are: bigram-linear"
REFUSED = [
    ("there is no command ''; the commands are explain, analyse, train", "''"),
    ("there is no command '..'", ".."),
    (f"there is no command 'trian'; the commands are {', '.join(COMMANDS)}; did you mean 'train'?", "trian"),
    ("unrecognized arguments: --bogus (see kvlens --help)", "--bogus"),
    # train
    ("the following arguments are required: NAME, --out (see kvlens train --help)", "train"),
    ("required: --out; there is no --ot; did you mean '--out'?", "train induction --ot x"),
    ("required: --out (see", "train induction --seed -1"),
    ("required: NAME", "train --out m"),
    ("no recipe or task is called 'inducton'; did you mean 'induction'?", "train inducton --out m"),
    ("no recipe or task is called 'docs-linea'; did you mean 'docs-linear'?", "train docs-linea --out m"),
    ("photos is not empty and not a run with a checkpoint, so it is left alone", "train docs-linear --out photos"),
    ("--device: 'meta' cannot be used here", "train induction --out m --device meta"),
    ("--device: '' cannot be used here", "train induction --out m --device ''"),
    ("argument --steps: invalid int value: 'x' (see kvlens train --help)", "train induction --out m --steps x"),
    ("steps must be at least 1, got 0", "train induction --out m --steps 0"),
    ("seed must be from 0 to 2**63 - 1", f"train induction --out m --seed {2**70}"),
    ("max_minutes must be a number above 0", "train induction --out m --minutes nan"),
    ("argument --minutes: invalid float value: 'x'", "train induction --out m --minutes x"),
    ("unrecognized arguments: --stepz 3; did you mean '--steps'?", "train induction --out m --stepz 3"),
    ("did you mean '--steps'?", "train induction --out m --step 3"),
    ("argument --set: expected at least one argument", "train induction --out m --set"),
    ("--set: expected NAME=VALUE, got '=3'; other arguments come before --set", "train induction --out m --set =3"),
    ("--set: expected NAME=VALUE, got 'steps'", "train induction --out m --set steps"),
    ("train: unknown setting 'stepz'; did you mean 'steps'?", "train induction --out m --set stepz=3"),
    ("steps must be a whole number of at least 1, got 'many'", "train induction --out m --set steps=many"),
    ("learning", "train induction --out m --set learning_rate=Infinity"),
    ("learning_rate must be a number above 0, got 'nan'", "train induction --out m --set learning_rate=nan"),
    ("betas", "train induction --out m --set 'betas=[\"a\", 0.9]'"),
    ("task 'induction' has no setting 'vocab'; did you mean 'vocab_size'?", "train induction --out m --task vocab=3"),
    ("task 'induction': length must be a whole number of at least 3, got []", "train induction --out m --task length=[]"),
    ("task 'text': cannot read no: No such file or directory", "train text --out m --task corpus=no"),
    ("task 'text': the folder empty holds no .txt file", "train text --out m --task corpus=empty"),
    ("task 'text': corpus: expected a path, got ''", "train text --out m --task corpus="),
    ("task 'text': corpus: ", f"train text --out m --task corpus={'x' * 300}"),
    ("task 'text': corpus must be a string, got 5", "train text --out m --task corpus=5"),
    ("model: unknown field 'n_layer'; did you mean 'n_layers'?", "train induction --out m --model n_layer=1"),
    ("model: unknown field 'device'", "train induction --out m --model device=cpu"),
    (
        "KVShiftConfig: unknown field 'windo'; did you mean 'window'?",
        "train induction --out m --model 'kv_shift={\"windo\":2}'",
    ),
    ("attn_only must be True or False, got 'maybe'", "train induction --out m --model attn_only=maybe"),
    # explain
    ("unrecognized arguments: --promt x; did you mean '--prompt'? (see kvlens explain --help)", "explain --promt x"),
    ("did you mean '--prompt'?", "explain --promt=x"),
    ("--device: 'meta' cannot be used here", f"{EXPLAIN} --device meta"),
    ("argument --dtype: invalid choice: 'int8'", f"{EXPLAIN} --dtype int8"),
    ("unrecognized arguments: --over", f"{EXPLAIN} --over"),
    ("--prompt is empty; give at least one character", "explain --prompt '' --text b"),
    ("--text is empty; give at least one character", "explain --prompt a --text ''"),
    ("--prompt is missing: give both a prompt and a text, or neither", "explain --text b"),
    ("--text is missing: give both a prompt and a text", "explain --prompt a"),
    ("--prompt and --prompt-file are both given; use only one", f"{EXPLAIN} --prompt-file file"),
    ("--prompt-file: bytes is not UTF-8 text (byte 2); convert it first", "explain --prompt-file bytes --text b"),
    ("--prompt-file and --text-file are both -; only one can be read from standard", "explain --prompt-file - --text-file -"),
    ("--prompt-file: cannot read nowhere: No such file or directory", "explain --prompt-file nowhere --text b"),
    ("--prompt-file: . is a folder, not a file", "explain --prompt-file . --text b"),
    ("--prompt-file: photos/units.parquet is a pipe, not a file", "explain --prompt-file photos/units.parquet --text b"),
    ("--text-file: photos/units.parquet is a pipe, not a file", "explain --prompt a --text-file photos/units.parquet"),
    ("--document: photos/units.parquet is a pipe", "explain --question a --document photos/units.parquet"),
    ("--messages: photos/units.parquet is a pipe", "explain --messages photos/units.parquet"),
    ("task 'text': photos/units.parquet is a pipe", "train text --out m --task corpus=photos/units.parquet"),
    ("--prompt-file: 'xxx", f"explain --prompt-file {'x' * 300} --text b"),
    ("--prompt-file: expected a path, got ''", "explain --prompt-file '' --text b"),
    *((f"--model: '{name}' {NO_MODEL}", f"{EXPLAIN} --model '{name}'") for name in ("nowhere", "", "~nobody/at/all")),
    ("--model: 'xxx", f"{EXPLAIN} --model {'x' * 300}"),
    (f"--model: 'docs-liner' {NO_MODEL}", f"{EXPLAIN} --model docs-liner"),
    ("; did you mean 'docs-linear'? (a name on the hub", f"{EXPLAIN} --model docs-liner"),
    ("empty holds no config.json", f"{EXPLAIN} --model empty"),
    ("from_llama2c: file is truncated: the header has 28 bytes, the file 1", f"{EXPLAIN} --model file"),
    *(("half of a character (a lone surrogate)", f"explain --prompt {prompt} --text b") for prompt in ("a\ud800", "\udc00")),
    *(
        (f"{words.split()[0]} belongs to --out FILE.html", f"{EXPLAIN} {words}")
        for words in ("--overwrite", "--sections heads")
    ),
    *(
        (f"--out: expected a file that ends in .html, for the page, got '{x}'", f"{EXPLAIN} --out {x}")
        for x in (".", "a.htm", "a")
    ),
    ("--out: photos.html is no file; choose another one", f"{EXPLAIN} --out photos.html --overwrite"),
    ("cannot make a folder in /proc: ", f"{EXPLAIN} --out /proc/a.html"),
    ("--sections must be one of heads, patterns, shares, effect, ", f"{EXPLAIN} --out a.html --sections effect haeds"),
    ("exactness, got 'haeds'; did you mean 'heads'?", f"{EXPLAIN} --out a.html --sections haeds"),
    ("--budget must be at least 1, got 0", f"{EXPLAIN} --budget 0"),
    ("argument --by: invalid choice: 'chapter'", f"{EXPLAIN} --by chapter"),
    ("--question and --prompt are both given, and each is a whole prompt", f"{EXPLAIN} --question c"),
    ("--document belongs to --question; give the question, too", "explain --document file"),
    ("--messages and --document are both given, and each is a whole prompt", "explain --messages file --document file"),
    ("--document: cannot read nowhere: No such file or directory", "explain --question a --document nowhere"),
    ("unrecognized arguments: --answr x; did you mean '--answer'?", f"{EXPLAIN} --answr x"),
    ("at least one token", f"explain --model facts-linear --prompt '{STORY}' --text ' Mira keeps a' --answer ' '"),
    # reproduce, zoo
    ("no experiment is called 'x'; there are induction-depth", "reproduce x"),
    ("no experiment is called 'induction-dept'; did you mean 'induction-depth'?", "reproduce induction-dept"),
    ("--set: expected NAME=VALUE, got 'hops'; other arguments come before --set", "reproduce --set seeds=4 hops"),
    ("hops has no setting 'sead'; did you mean 'seeds'?", "reproduce hops --set sead=4"),
    ("the setting keys must be a nonempty list", "reproduce softmax-conversion --set keys=4"),
    ("no experiment is called '..'", "reproduce .."),
    ("argument --scale: invalid choice: 'huge' (choose from 'small', 'paper', 'tiny')", "reproduce hops --scale huge"),
    ("unrecognized arguments: --overwrit; did you mean '--overwrite'?", "reproduce hops --overwrit"),
    ("unrecognized arguments: x (see kvlens zoo --help)", "zoo x"),
    (". is not empty and not a reference of kvlens, so it is left alone", "reference --out ."),
    # analyse
    ("no analysis is called 'nope'; there are activation_patching", "analyse nope"),
    ("no analysis is called '..'", "analyse .."),
    ("expected the name of an analysis, got '--bogus'; `kvlens analyse` lists them", "analyse --bogus"),
    *((f"out: expected a file that ends in .parquet, got '{out}'", f"{ANALYSE} {out}") for out in (".", "t.csv", "/.parquet")),
    *(("cannot make a folder in /proc: ", f"{ANALYSE} {out}") for out in ("/proc/t.parquet", "/proc/x/t.parquet")),
    *(
        (f"--model: '{name}' {NO_MODEL}", f"analyse bias_decomposition p.jsonl --model '{name}' --out t.parquet")
        for name in ("", "~nobody/at/all")
    ),
    ("--model: 'a\\x00b' ", "analyse bias_decomposition p.jsonl --model a\0b --out t.parquet"),
    ("--model: 'xxx", f"analyse bias_decomposition p.jsonl --model {'x' * 300} --out t.parquet"),
    ("--model: 'file' is a file; give a shipped model", "analyse bias_decomposition p.jsonl --model file --out t.parquet"),
    ("prompts: /dev/null is a pipe or a device", "analyse bias_decomposition /dev/null --model docs-linear --out t.parquet"),
    ("prompts: expected a path, got ''", "analyse bias_decomposition '' --model docs-linear --out t.parquet"),
    ("prompts: 'xxx", f"analyse bias_decomposition {'x' * 300} --model docs-linear --out t.parquet"),
    *(
        (f"device: '{device}' cannot be used here", f"{ANALYSE} t.parquet --device '{device}'")
        for device in ("meta", "cudda", "")
    ),
    ("--workers must be at least 1, got 0", f"{ANALYSE} t.parquet --workers 0"),
    (
        "argument --workers: invalid int value: '1.5' (see kvlens analyse bias_decomposition",
        f"{ANALYSE} t.parquet --workers 1.5",
    ),
    ("--threads must be at least 1, got 0", f"{ANALYSE} t.parquet --threads 0"),
    ("argument --dtype: invalid choice: 'int8'", f"{ANALYSE} t.parquet --dtype int8"),
    ("argument --engine: invalid choice: 'rey'", f"{ANALYSE} t.parquet --engine rey"),
    ("gpus_per_worker is for the engine ray", f"{ANALYSE} t.parquet --gpus-per-worker 1"),
]
WRITERS = ["train induction", "reproduce landscape --scale tiny", "reference", ANALYSE]
PATHS = {
    "": "expected a path, got ''",
    "a\0b": "expected a path",
    "x" * 300: "xxx",
    f"a/{'x' * 300}/r": "cannot make a folder in",
    "file": "is a file, not a folder",
    "file/r": "Not a directory",
    "/": "expected a path that ends in a name",
    "/".join("a" * 300): "300 folders inside each other; give a path of at most 200",
    "/".join("a" * 2000): "2,000 folders inside each other",
    "/".join(["b" * 60] * 100): "bbb",
    "a\ud800": "half a character (a lone surrogate)",
    "a\udcffb\ud800": "half a character (a lone surrogate)",
}
"""By what no command writes to: words of the message. A batch writes a file, all others a folder."""


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
    """The line that a refused command prints, in a folder that it leaves as it is."""
    assert main(command) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("kvlens: error: ") and len(captured.err) > 40
    assert sorted(os.listdir(".")) == ["bytes", "empty", "file", "p.jsonl", "photos", "photos.html"] and not os.listdir("empty")
    assert os.listdir("photos") == ["units.parquet"]
    return captured.err


@pytest.mark.parametrize(("words", "command"), REFUSED, ids=[command[:60] for _, command in REFUSED])
def test_is_refused_in_one_line(words, command, capsys):
    assert words in refused(shlex.split(command), capsys)


@pytest.mark.parametrize("command", WRITERS, ids=lambda command: command.split()[0])
def test_what_is_no_path_is_refused_by_all_that_write(command, capsys):
    for out, words in PATHS.items():
        if command == ANALYSE and out not in ("", "/"):
            is_taken = out == "file"
            assert is_taken or words in refused([*command.split(), f"{out}.parquet"], capsys)
        elif command != ANALYSE:
            assert words in refused([*command.split(), "--out", out], capsys)


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
