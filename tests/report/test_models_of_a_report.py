"""``kvlens report`` on softmax models, exact by default and approximate on request, and on one that only the bridge runs."""

import json
from argparse import Namespace
from dataclasses import dataclass
from typing import ClassVar

import pandas as pd
import pytest
from precision import float64
from tiny_hf import tiny_hf_model, tiny_tokenizer
from tiny_text_model import tiny_text_model

from kvlens import HookedKVTransformer, KVLensError, KVTransformerBridge, analyses, load
from kvlens.__main__ import main
from kvlens.cli.prompts import _method
from kvlens.conversion import METHODS, Exact, Landmark, TaylorPolynomial
from kvlens.kv_bias import KVBias
from kvlens.report.build import build_report

pytestmark = pytest.mark.usefixtures("short_answers")

STORY = "Once upon a time, there was a little girl named Lily. She had a red ball. Tim took the ball."
PROMPT = "the cat sat on the mat. the dog sat on the log. a shift of keys and values, by one."


def report(data, folder, *options: str) -> dict:
    """The summary of a report on the llama2.c checkpoint."""
    model = ["--model", str(data / "stories260K.bin"), "--tokenizer", str(data / "tok512.bin")]
    text = ["--prompt", STORY, "--text", " Lily wanted her red", "--new-tokens", "3", "--device", "cpu"]
    assert main(["report", *model, *text, "--out", str(folder), *options]) == 0
    return json.loads((folder / "summary.json").read_text())


def test_a_llama2c_model_is_exact_by_default_and_nothing_that_is_shared_says_where_it_lies(outside_data, tmp_path, capsys):
    home, out = tmp_path / "a-private-folder", tmp_path / "out"
    home.mkdir()
    for name in ("stories260K.bin", "tok512.bin"):
        (home / name).symlink_to(outside_data / name)
    summary = report(home, out)
    assert summary["conversion"]["exact_to_rounding"] is True and summary["conversion"]["approximation"] is None
    assert summary["model"]["name"] == "stories260K.bin"
    shared = b"".join(file.read_bytes() for file in out.iterdir())
    assert b"a-private-folder" not in shared and str(outside_data).encode() not in shared
    assert "<title>kvlens report: stories260K.bin</title>" in (out / "report.html").read_text()
    printed = capsys.readouterr().out
    assert printed.startswith("kvlens report: stories260K.bin\n") and "exact to rounding" in printed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama"])  # positions that end, and rotary ones
def test_a_folder_of_transformers_with_landmark_keys(kind, tmp_path):
    context = {"n_positions": 64, "n_ctx": 64} if kind == "gpt2" else {"max_position_embeddings": 64}
    folder, out = tmp_path / kind, tmp_path / "out"
    tiny_hf_model(kind, **context).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    words = ["--method", "landmark", "--features", "8", "--prompt", PROMPT, "--text", " the dog", "--new-tokens", "2"]
    assert main(["report", "--model", str(folder), *words, "--device", "cpu", "--out", str(out)]) == 0
    figures = json.loads((out / "summary.json").read_text())["conversion"]
    assert figures["approximation"].startswith("landmark")
    assert 8 * figures["rounding_error"] < figures["relative_error"] < 1
    assert (out / "report.html").stat().st_size > 10_000


def test_landmarks_are_called_approximate(outside_data, tmp_path, capsys):
    options = ["--method", "landmark", "--features", "8", "--budget", "equal"]
    summary = report(outside_data, tmp_path / "out", *options)
    assert summary["conversion"]["exact_to_rounding"] is None
    assert summary["conversion"]["approximation"] == "landmark, 8 features per head, 100 steps of moving keys"
    assert not any("keys of all heads" in note for note in summary["notes"])  # every head uses all that it has
    assert 8 * summary["conversion"]["rounding_error"] < summary["conversion"]["relative_error"] < 0.05  # measured: 0.02
    bias = KVBias.load(tmp_path / "out" / "bias.safetensors")
    assert bias.fit.settings["budget"] == "equal"
    assert "approximate: landmark" in " ".join(capsys.readouterr().out.split())
    assert "approximate: landmark" in (tmp_path / "out" / "report.html").read_text()


def test_keys_that_are_not_read_are_counted_with_a_reason(outside_data, tmp_path, capsys):
    summary = report(outside_data, tmp_path / "out", "--method", "landmark", "--features", "16", "--budget", "equal")
    bias = KVBias.load(tmp_path / "out" / "bias.safetensors")
    assert summary["conversion"]["approximation"] == "landmark, 16 features per head, 100 steps of moving keys"
    (note,) = [note for note in summary["notes"] if "keys of all heads" in note]
    not_read = (bias.stacked("b_d") == 0) & (bias.stacked("b_kv") == 0).all(dim=-1)
    assert bias.d_phi == 16 and (bias.stacked("b_d") >= 0).all() and 0 < not_read.sum() < 16
    assert note.startswith(f"Of the {bias.stacked('b_d').numel()} keys of all heads, {int(not_read.sum())} are unused:")
    assert note in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--method", "landmark"], "needs --features"),
        (["--features", "4"], "--features has no effect with --method exact; it belongs to --method landmark, "),
        (["--method", "random", "--features", "4", "--budget", "equal"], "--budget has no effect with --method random"),
        (["--method", "landmark", "--features", "0"], "--features must be at least 1, got 0"),
        (["--method", "landmark", "--features", "4", "--polish", "-1"], "--polish must be at least 0, got -1"),
    ],
)
def test_options_that_do_not_go_together(tmp_path, capsys, options, words):
    given = ["--model", "facts-gpt2", "--prompt", STORY, "--text", " Lily", "--out", str(tmp_path / "out")]
    assert main(["report", *given, *options]) != 0
    assert words in " ".join(capsys.readouterr().err.split())


@dataclass(frozen=True, kw_only=True)
class OfOnesOwn(Exact):
    """A method whose ``--features`` is a shorthand alone.

    Attributes:
        n_keys: as many.
        seed: unused.
    """

    name: ClassVar[str] = "own"
    shorthand: ClassVar[dict[str, str]] = {"n_features": "n_keys"}
    n_keys: int = 8
    seed: int = 0


def test_the_flags_belong_to_every_registered_method_that_has_their_options(monkeypatch):
    monkeypatch.setitem(METHODS, "own", OfOnesOwn)

    def made(method, features=None, budget=None, polish=None):
        return _method(Namespace(method=method, features=features, budget=budget, polish=polish, seed=0))

    assert made("own", features=3) == OfOnesOwn(n_keys=3) and made("own") == OfOnesOwn()
    need = {name for name in METHODS if name not in ("exact", "taylor", "elu_plus_one", "own")}
    for name in METHODS:
        if name in need:
            with pytest.raises(KVLensError, match=f"--method {name} needs --features"):
                made(name)
            assert made(name, features=5).name == name
        else:
            assert made(name).name == name
    with pytest.raises(KVLensError, match="--polish has no effect with --method h2o; it belongs to --method landmark$"):
        made("h2o", features=3, polish=2)
    assert made("attention_matching", features=3, budget="logits").budget == "logits"


def test_a_report_takes_a_methods_object():
    model, few = tiny_text_model(attention="softmax"), dict(n_continuations=2, continuation_length=4)
    for method, words in ((Landmark(n_keys=2, **few), "landmark, 2 features per head"), (TaylorPolynomial(**few), "taylor, ")):
        made = build_report(model, "Lily", " Tim", new_tokens=1, method=method)
        assert made.summary["conversion"]["approximation"].startswith(words)
        assert made.bias.fit.settings == method.to_json()


WIDGETS, TEXT = "the cat sat on the mat. the dog sat on the log.", " the dog sat"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return written(tmp_path_factory.mktemp("hybrid"))


def written(folder):
    """A hybrid with a tokenizer, as Transformers writes it."""
    tiny_hf_model("qwen3_5").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def is_rounding(figures):
    """In float32: against what the model's own pass is off float64, as the page measures it. The law is test_bridge's."""
    return figures["relative_error"] < 8 * figures["rounding_error"]


def test_a_report(folder, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["--prompt", WIDGETS, "--text", TEXT, "--new-tokens", "2", "--device", "cpu"]
    assert main(["report", "--model", str(folder), *words, "--out", str(out)]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert is_rounding(summary["conversion"]) and summary["generation"]["converted_equals_with_prompt"]
    tables = {path.stem for path in out.glob("*.parquet")}
    assert {"bias_by_head", "prompt_by_depth", "prompt_effect", "layer_contributions", "prompt_copies"} <= tables
    assert "why it is not shown for this model" not in (out / "report.html").read_text()
    heads = pd.read_parquet(out / "bias_by_head.parquet").groupby("layer")["head"].count()
    assert heads.tolist() == [4, 6, 4]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["falcon_h1", "lfm2"])
def test_a_report_without_direct_logits(family, tmp_path, capsys):
    """Heads behind factors, and layers without heads: everything but the contributions to logits is there."""
    tiny_hf_model(family).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    words = ["--prompt", "the cat. the dog.", "--text", TEXT, "--new-tokens", "2", "--device", "cpu"]
    assert main(["report", "--model", str(tmp_path / "model"), *words, "--out", str(tmp_path / "out")]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert is_rounding(summary["conversion"]) and summary["answer"]["statements"]
    tables = {path.stem for path in (tmp_path / "out").glob("*.parquet")}
    assert {"bias_by_head", "prompt_by_depth", "prompt_effect", "answer_units"} <= tables
    assert "layer_contributions" not in tables
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("why it is not shown for this model") == 1


def test_an_explanation(folder, capsys):
    words = ["--prompt", WIDGETS, "--text", TEXT, "--by", "sentence", "--device", "cpu"]
    assert main(["explain", "--model", str(folder), *words]) == 0
    assert "nats" in capsys.readouterr().out


def test_a_batch_keeps_front_ends_apart(folder, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "table.parquet"
    prompts.write_text(json.dumps({"id": "a", "prompt": WIDGETS, "text": TEXT}) + "\n")
    words = ["analyse", "bias_by_head", str(prompts), "--out", str(out), "--device", "cpu"]
    assert main([*words, "--model", str(folder)]) == 0
    assert len(pd.read_parquet(out)) == 4 + 6 + 4
    assert main(["analyse", "composition", str(prompts), "--out", str(tmp_path / "no.parquet"), "--model", str(folder)]) == 2


def test_states_in_a_batch(tmp_path, capsys):
    """The rows are those of the functions, prompt by prompt."""
    stories = {"a": WIDGETS, "b": "the dog sat."}
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"id": name, "prompt": story, "earlier": "the log."}) for name, story in stories.items()]
    prompts.write_text("\n".join(lines))
    with float64():
        folder = written(tmp_path / "model")
        words = ["--device", "cpu", "--dtype", "float64", "--model", str(folder)]
        model = load(folder, device="cpu", dtype="float64")
        for name in ("state_memory", "state_erasure"):
            out = tmp_path / f"{name}.parquet"
            assert main(["analyse", name, str(prompts), "--out", str(out), *words]) == 0
            table = pd.read_parquet(out).set_index("prompt_id")
            for each, story in stories.items():
                given = ("the log.", story) if name == "state_erasure" else (story,)
                expected = getattr(analyses, name)(model, *given)
                found = table.loc[each].reset_index(drop=True)[expected.columns]
                pd.testing.assert_frame_equal(found, expected, check_dtype=False, rtol=1e-11)
    assert (
        main(["analyse", "state_memory", str(prompts), "--out", str(tmp_path / "no.parquet"), "--model", "bigram-linear"]) == 2
    )
    assert "no layer of the model is recurrent" in capsys.readouterr().err


def test_a_folder_goes_to_the_front_end_that_runs_it(folder, tmp_path):
    assert isinstance(load(folder, device="cpu"), KVTransformerBridge)
    tiny_hf_model("llama").save_pretrained(tmp_path)
    hooked = load(str(tmp_path), device="cpu")
    assert isinstance(hooked, HookedKVTransformer)
    bridge = KVTransformerBridge.boot_transformers(tmp_path)
    assert bridge.fingerprint() != hooked.fingerprint()
