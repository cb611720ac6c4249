"""Commands on a hybrid model, which only the bridge runs, and on a llama2.c checkpoint, which no folder holds."""

import json

import pandas as pd
import pytest
from precision import float64
from tiny_hf import tiny_hf_model, tiny_tokenizer

from kvlens import HookedKVTransformer, KVTransformerBridge, analyses, load
from kvlens.__main__ import main

pytestmark = pytest.mark.usefixtures("short_answers")


def test_a_page_does_not_say_where_its_model_lies(outside_data, tmp_path):
    home, out = tmp_path / "a-private-folder", tmp_path / "page.html"
    home.mkdir()
    for name in ("stories260K.bin", "tok512.bin"):
        (home / name).symlink_to(outside_data / name)
    story = "Once upon a time, there was a little girl named Lily. She had a red ball. Tim took the ball."
    given = ["--model", str(home / "stories260K.bin"), "--tokenizer", str(home / "tok512.bin"), "--device", "cpu"]
    assert main(["explain", *given, "--prompt", story, "--text", " Lily wanted her red", "--out", str(out)]) == 0
    page = out.read_text(encoding="utf-8")
    assert "Model: stories260K.bin, 5 layers of 8 heads, " in page and "exact to rounding" in page
    assert "a-private-folder" not in page and str(outside_data) not in page


WIDGETS, TEXT = "the cat sat on the mat. the dog sat on the log.", " the dog sat"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return written(tmp_path_factory.mktemp("hybrid"))


def written(folder):
    """A hybrid with a tokenizer, as Transformers writes it."""
    tiny_hf_model("qwen3_5").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


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
                given = (story, "the log.") if name == "state_erasure" else (story,)
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
