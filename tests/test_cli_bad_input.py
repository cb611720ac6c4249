"""Every bad word that a command may be given: one line on stderr, exit status 2, and nothing written."""

import io
import os

import pytest

from kvlens.cli import main
from kvlens.training import ship

pytestmark = pytest.mark.unhooked  # numbers, names and nonsense, from the command line into every settings class

TRAINING = {
    "steps": ["many", "0", "1.5", "true", "[]", "null"],
    "batch_size": ["x", "-1", "2.5", str(10**15)],
    "learning_rate": ["fast", "0", "-1", "nan", "Infinity", "null"],
    "schedule": ["5", "cosin", "null"],
    "warmup_fraction": ["x", "1", "-0.1"],
    "final_fraction": ["x", "2"],
    "weight_decay": ["x", "-1", "nan"],
    "betas": ["0.9", "[0.9]", '["a", 0.9]', "[0.9, 1]"],
    "max_grad_norm": ["x", "0", "-1", "nan"],
    "eval_every": ["x", "0"],
    "eval_sequences": ["[]", "0", str(10**15)],
    "stop_at_accuracy": ["x", "2", "0"],
    "patience": ["x", "0", "1.5"],
    "max_minutes": ["x", "0", "nan"],
    "log_every": ["x", "0"],
    "checkpoint_every": ["x", "0"],
    "watch": ["5", "[]", "true", "/etc", "shift_coef"],
    "precision": ["7", "float31"],
    "seed": ["x", "-1", "1.5", str(2**63), str(2**64)],
    "stepz": ["3"],
}
TASKS = {
    "induction": ["vocab_size=x", "vocab_size=1", "length=x", "length=0", "length=[]", "law=x", "law=5", "vocab=3"],
    "bigrams": ["n_letters=x", "n_letters=99", "n_triggers=0", "trigger_rate=x", "law=marcov", "length=1.5"],
    "ngrams": ["order=x", "order=1", "vocab_size=x", "table_seed=x", "restart_rate=2"],
    "hops": ["k=x", "k=0", "vocab_size=x", "length=1"],
    "arithmetic": ["max_ops=x", "modulus=9", "n_names=x", "scored_part=x"],
    "regression": ["functions=x", "dimensions=x", "n_points=1", "noise=x", "heldout_shift=x"],
    "text": [
        "vocab_size=x",
        "vocab_size=3",
        "length=x",
        "length=1",
        "heldout_length=x",
        "corpus=5",
        "tokenizer=5",
        "corpus=no",
    ],
}
MODEL = [
    *("n_layer=1", "n_layers=x", "n_layers=0", "n_layers=-1", "n_layers=1.5", "d_model=33", "d_model=x", "d_model=0"),
    *("d_head=0", "d_head=-4", "d_head=x", "act_fn=q", "act_fn=3", "kv_shift=5", "kv_shift=x", 'kv_shift={"windo":2}'),
    *("dtype=5", "dtype=float31", "attn_scale=0", "attn_scale=x", "eps=-1", "eps=x", "n_ctx=0", "n_ctx=x", "d_vocab=0"),
    *("d_vocab=x", "n_heads=0", "n_heads=x", "seed=x", "attention=lin", "attention=5", "positional_embedding_type=rot"),
    *("normalization_type=XX", "d_mlp=0", "d_mlp=x", "attn_only=maybe", "gated_mlp=7", "n_key_value_heads=x", "device=cpu"),
    *("attention_variant=x", "rotary_dim=x", "window_size=x", "softmax_form=x"),
]
TRAIN = ["train", "induction", "--out", "m"]
ANALYSE = ["analyse", "bias_decomposition", "p.jsonl", "--model", "docs-linear", "--out"]
BAD_OPTIONS = [
    *(["--device", device] for device in ("meta", "cudda", "")),
    *(["--workers", number] for number in ("99999999", "0", "-1", "x", "1.5")),
    *(["--threads", number] for number in ("99999999", "0", "x")),
    *(["--prompts-per-job", number] for number in ("0", "x")),
    *(["--columns", columns] for columns in ("", "layer,", "layr", "layer,layer")),
    *(["--dtype", "int8"], ["--engine", "rey"], ["--gpus-per-worker", "nan"], ["--gpus-per-worker", "1"]),
]
TEXTS = ["--prompt", "a", "--text", "b"]
TINY = ["reproduce", "landscape", "--scale", "tiny"]
WRITERS = (["report", *TEXTS], ["explain", *TEXTS], ["train", "induction"], TINY, ["reference"])
DEEP_PATHS = ("/".join("a" * 300), "/".join("a" * 2000), "/".join(["b" * 60] * 100))
HOSTILE_PATHS = ("/", *DEEP_PATHS, "a\ud800", "a\0b", "a\udcffb\ud800")
WORDS = [
    [""],
    [".."],
    ["trian"],
    ["--bogus"],
    ["train"],
    ["train", "induction"],
    ["train", "--out", "m"],
    ["train", "inducton", "--out", "m"],
    ["train", "induction", "--out", "file"],
    ["train", "induction", "--out", "file/m"],
    ["train", "induction", "--out", "x" * 300],
    [*TRAIN, "--device", "meta"],
    [*TRAIN, "--device", "cudda"],
    [*TRAIN, "--device", ""],
    [*TRAIN, "--steps", "x"],
    [*TRAIN, "--steps", "0"],
    [*TRAIN, "--seed", str(2**70)],
    [*TRAIN, "--seed", "-3"],
    [*TRAIN, "--minutes", "-1"],
    [*TRAIN, "--minutes", "x"],
    [*TRAIN, "--stepz", "3"],
    [*TRAIN, "--set"],
    [*TRAIN, "--set", "=3"],
    [*TRAIN, "--set", "steps"],
    ["report", "--promt", "x"],
    ["report", "--seed", str(2**70), *TEXTS],
    ["report", "--seed", "-1", *TEXTS],
    ["report", "--seed", "x", *TEXTS],
    ["report", "--device", "meta", *TEXTS],
    ["report", "--device", "cudda", *TEXTS],
    ["report", "--out", "file", *TEXTS],
    ["report", "--out", "file/r", *TEXTS],
    ["report", "--prompt-file", "-", "--text-file", "-"],
    ["report", "--prompt-file", "nowhere", "--text", "b"],
    ["report", "--prompt-file", ".", "--text", "b"],
    ["report", "--model", "nowhere", *TEXTS],
    ["report", "--temperature", "x", *TEXTS],
    ["report", "--dtype", "int8", *TEXTS],
    ["reproduce", "x"],
    ["reproduce", ".."],
    ["reproduce", "hops", "--scale", "huge"],
    ["reproduce", "hops", "--out", "file"],
    ["reproduce", "hops", "--out", "file/x"],
    ["reproduce", "hops", "--out", "x" * 300],
    ["reproduce", "hops", "--overwrit"],
    *(["reference", "--out", out] for out in ("file", "file/x", "", ".", "x" * 300, f"a/{'x' * 300}/r")),
    ["zoo", "x"],
    ["zoo", "--x"],
    ["analyse", "nope"],
    ["analyse", ".."],
    ["analyse", "--bogus"],
    *(
        [*ANALYSE, out]
        for out in ("file/t.parquet", "file/a/t.parquet", f"{'x' * 300}.parquet", "", ".", "t.csv", "\0.parquet")
    ),
    *([*ANALYSE, out] for out in (f"a/{'x' * 300}/t.parquet", f"a/b/{'x' * 300}.parquet")),
    *([*ANALYSE[:4], model, "--out", "t.parquet"] for model in ("", "x" * 300, "~nobody/at/all", "a\0b", "file")),
    *([*ANALYSE, "t.parquet", *more] for more in BAD_OPTIONS),
    ["explain", "--out", "file", *TEXTS],
    ["explain", "--out", "file/r", *TEXTS],
    ["explain", "--overwrite", *TEXTS],
    ["analyse", "bias_decomposition", "/dev/null", *ANALYSE[3:], "t.parquet"],
    ["analyse", "bias_decomposition", "", *ANALYSE[3:], "t.parquet"],
    ["analyse", "bias_decomposition", "x" * 300, *ANALYSE[3:], "t.parquet"],
    *(["report", "--model", model, *TEXTS] for model in ("", "x" * 300, "~nobody/at/all", "file")),
    ["report", "--out", "", *TEXTS],
    ["report", "--out", f"a/{'x' * 300}/r", *TEXTS],
    ["report", "--prompt-file", "x" * 300, "--text", "b"],
    ["report", "--prompt-file", "", "--text", "b"],
    ["reproduce", "hops", "--out", ""],
    ["reproduce", "hops", "--out", f"a/{'x' * 300}/r"],
    ["train", "induction", "--out", ""],
    ["train", "induction", "--out", f"a/{'x' * 300}/m"],
    ["train", "text", "--out", "m", "--task", "corpus=empty"],
    ["train", "text", "--out", "m", "--task", "corpus="],
    ["train", "text", "--out", "m", "--task", f"corpus={'x' * 300}"],
    *([*ANALYSE, out] for out in ("/proc/t.parquet", "/proc/x/t.parquet")),
    *([*ANALYSE, f"{out}.parquet"] for out in HOSTILE_PATHS),
    *([*command, "--out", out] for command in WRITERS for out in HOSTILE_PATHS),
    *(["report", "--prompt", prompt, "--text", "b"] for prompt in ("a\ud800", "\udc00")),
]
COMMANDS = [
    *WORDS,
    *([*TRAIN, "--set", f"{name}={value}"] for name, values in TRAINING.items() for value in values),
    *(["train", task, "--out", "m", "--task", setting] for task, settings in TASKS.items() for setting in settings),
    *([*TRAIN, "--model", setting] for setting in MODEL),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One for all refused commands, which leave it as it is: each of many folders of a name takes a look at all before it."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "file").write_text("x")
    (folder / "empty").mkdir()
    (folder / "p.jsonl").write_text('{"prompt": "Return the widget.", "text": " It is"}\n')
    return folder


@pytest.fixture(autouse=True)
def _nothing_trains(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(ship, "train", lambda *_, **__: pytest.fail("this would have trained"))


def test_the_list_is_long():
    assert len({tuple(command) for command in COMMANDS}) == len(COMMANDS) >= 150


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command)[:60])
def test_is_refused_in_one_line(command, capsys):
    assert main(command) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("kvlens: error: ") and len(captured.err) > 40
    assert sorted(os.listdir(".")) == ["empty", "file", "p.jsonl"] and not os.listdir("empty")


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        (["report", "--promt", "x"], "did you mean '--prompt'?"),
        (["report", "--promt=x"], "did you mean '--prompt'?"),
        ([*TRAIN, "--step", "3"], "did you mean '--steps'?"),
        (["reproduce", "hops", "--overwrit"], "did you mean '--overwrite'?"),
        ([*TRAIN, "--set", "stepz=3"], "did you mean 'steps'?"),
        (["train", "induction", "--ot", "x"], "required: --out; there is no --ot; did you mean '--out'?"),
        (["train", "induction", "--seed", "-1"], "required: --out (see"),
    ],
)
def test_the_nearest_option_is_proposed(command, hint, capsys):
    assert main(command) == 2
    assert hint in capsys.readouterr().err


def test_what_a_terminal_would_obey_does_not_reach_it(capsys):
    evil = "a\x1b[31mb\u202ec\u2028d\x07e\u200f"
    assert main(["report", "--model", evil, *TEXTS]) == 2
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
    assert main(["report", "--prompt-file", "-", "--text", "b"]) == 2
    assert "not UTF-8 text (byte 2)" in capsys.readouterr().err
