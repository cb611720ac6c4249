"""``kvlens report`` on folders as transformers writes them, one for each family, with fitted keys."""

import json

import pytest
from tiny_hf import tiny_hf_model, tiny_tokenizer

from kvlens.__main__ import main

PROMPT = "the cat sat on the mat. the dog sat on the log. a shift of keys and values, by one."


@pytest.mark.parametrize("kind", ["gpt2", "neox", "llama", "qwen2"])
def test_a_folder_with_landmark_keys(kind, tmp_path):
    context = {"n_positions": 64, "n_ctx": 64} if kind == "gpt2" else {"max_position_embeddings": 64}
    folder, out = tmp_path / kind, tmp_path / "out"
    tiny_hf_model(kind, **context).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    words = ["--method", "landmark", "--features", "8", "--prompt", PROMPT, "--text", " the dog", "--new-tokens", "2"]
    assert main(["report", "--model", str(folder), *words, "--device", "cpu", "--out", str(out)]) == 0
    figures = json.loads((out / "summary.json").read_text())["conversion"]
    assert figures["approximation"].startswith("landmark") and 1e-5 < figures["relative_error"] < 1
    assert (out / "report.html").stat().st_size > 10_000
