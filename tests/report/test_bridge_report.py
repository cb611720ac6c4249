"""The command line on a folder of a family that only the bridge runs: report, explain and batches."""

import json

import pandas as pd
import pytest
from precision import float64
from tiny_hf import tiny_hf_model, tiny_tokenizer

from kvlens import HookedKVTransformer, KVTransformerBridge, analyses, load
from kvlens.__main__ import main

pytestmark = pytest.mark.usefixtures("short_answers")

PROMPT, TEXT = "the cat sat on the mat. the dog sat on the log.", " the dog sat"


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
    words = ["--prompt", PROMPT, "--text", TEXT, "--new-tokens", "2", "--device", "cpu"]
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
    words = ["--prompt", PROMPT, "--text", TEXT, "--by", "sentence", "--device", "cpu"]
    assert main(["explain", "--model", str(folder), *words]) == 0
    assert "nats" in capsys.readouterr().out


def test_a_batch_keeps_front_ends_apart(folder, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "table.parquet"
    prompts.write_text(json.dumps({"id": "a", "prompt": PROMPT, "text": TEXT}) + "\n")
    words = ["analyse", "bias_by_head", str(prompts), "--out", str(out), "--device", "cpu"]
    assert main([*words, "--model", str(folder)]) == 0
    assert len(pd.read_parquet(out)) == 4 + 6 + 4
    assert main(["analyse", "composition", str(prompts), "--out", str(tmp_path / "no.parquet"), "--model", str(folder)]) == 2


def test_states_in_a_batch(tmp_path, capsys):
    """The rows are those of the functions, prompt by prompt."""
    stories = {"a": PROMPT, "b": "the dog sat."}
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
                found = table.loc[each].reset_index(drop=True).drop(columns="model")
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
