"""``kvlens report`` on softmax models: exact by default, approximate where asked, and it says which."""

import json

import pytest

from kvlens.__main__ import main
from kvlens.kv_bias import KVBias

STORY = "Once upon a time, there was a little girl named Lily. She had a red ball. Tim took the ball."


def report(outside_data, folder, *options: str) -> dict:
    """The summary of a report on the llama2.c checkpoint."""
    model = ["--model", str(outside_data / "stories260K.bin"), "--tokenizer", str(outside_data / "tok512.bin")]
    text = ["--prompt", STORY, "--text", " Lily wanted her red", "--new-tokens", "3", "--device", "cpu"]
    assert main(["report", *model, *text, "--out", str(folder), *options]) == 0
    return json.loads((folder / "summary.json").read_text())


def test_a_llama2c_model_is_exact_by_default(outside_data, tmp_path, capsys):
    figures = report(outside_data, tmp_path / "out")["conversion"]
    assert figures["exact_to_rounding"] is True
    assert figures["approximation"] is None
    assert "exact to rounding" in capsys.readouterr().out


def test_landmarks_are_called_approximate(outside_data, tmp_path, capsys):
    options = ["--method", "landmark", "--features", "8", "--budget", "greedy"]
    summary = report(outside_data, tmp_path / "out", *options)
    assert summary["conversion"]["exact_to_rounding"] is None
    assert summary["conversion"]["approximation"] == "landmark, 8 features per head"
    assert 1e-4 < summary["conversion"]["relative_error"] < 0.05
    bias = KVBias.load(tmp_path / "out" / "bias.safetensors")
    assert bias.fit.settings["budget"] == "greedy"
    assert "approximate: landmark" in " ".join(capsys.readouterr().out.split())
    assert "approximate: landmark" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--method", "landmark"], "needs --features"),
        (["--features", "4"], "no number of features to choose"),
    ],
)
def test_options_that_do_not_go_together(outside_data, tmp_path, capsys, options, words):
    model = ["--model", str(outside_data / "stories260K.bin"), "--tokenizer", str(outside_data / "tok512.bin")]
    assert main(["report", *model, "--prompt", STORY, "--text", " Lily", "--out", str(tmp_path / "out"), *options]) != 0
    assert words in " ".join(capsys.readouterr().err.split())
