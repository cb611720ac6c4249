"""What kvlens 0.1.0 and the code before it wrote stays readable: models, biases that still attach, a run and a batch to resume.

The files next to this test were written once, by ``write.py`` with that code, and are never rewritten. Everything in them is
float64, so that another order of a sum (another machine, another form of the same attention) changes a logit, which is of size
1 to 10, by some 1e-15: 2e-15 was seen. A weight, coefficient or field that is read wrongly changes it by 1e-3 and more.
"""

import contextlib
import shutil
import sqlite3
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from kvlens import HookedKVTransformer, KVBias
from kvlens.cli import main
from kvlens.model import HookedKVRegressor
from kvlens.tasks import InductionTask
from kvlens.training import build_model, train

HERE = Path(__file__).parent
EXPECTED = load_file(HERE / "expected.safetensors")
EARLIER = {name: load_file(HERE / name / "expected.safetensors") for name in ("format_1", "format_2")}
TOLERANCE = dict(rtol=0, atol=1e-12)


def names(kind: str) -> list[str]:
    return sorted(name.removeprefix(kind) for name in EXPECTED if name.startswith(kind))


def logits(model: HookedKVTransformer, bias: KVBias | None = None) -> torch.Tensor:
    """Of the first tokens of the vocabulary, on one text of five tokens, or one for every prompt of the bias."""
    n = 1 if bias is None or bias.batch_size is None else bias.batch_size
    text = torch.randint(model.cfg.d_vocab, (n, 5), generator=torch.Generator().manual_seed(1))
    if bias is not None:
        model.attach_kv_bias(bias)
    return model(text)[..., :16].detach()


def test_every_file_is_looked_at():
    assert {path.name for path in (HERE / "models").iterdir()} == set(names("models/"))
    assert {path.name for path in (HERE / "regressors").iterdir()} == set(names("regressors/"))
    assert {path.stem for path in (HERE / "biases").iterdir()} == set(names("biases/"))
    for folder, expected in EARLIER.items():
        assert {path.stem for path in (HERE / folder).glob("*.*.safetensors")} == {name for name in expected if "." in name}


@pytest.mark.parametrize("name", names("models/"))
def test_models(name):
    model = HookedKVTransformer.load(HERE / "models" / name, device="cpu")
    torch.testing.assert_close(logits(model), EXPECTED[f"models/{name}"], **TOLERANCE)


@pytest.mark.parametrize("name", names("regressors/"))
def test_regressors(name):
    model = HookedKVRegressor.load(HERE / "regressors" / name, device="cpu")
    inputs = torch.randn(2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(model(inputs).detach(), EXPECTED[f"regressors/{name}"], **TOLERANCE)


@pytest.mark.parametrize("name", names("biases/"))
def test_biases_load_and_attach(name):
    model = HookedKVTransformer.load(HERE / "models" / name.partition(".")[0], device="cpu")
    bias = KVBias.load(HERE / "biases" / f"{name}.safetensors")
    torch.testing.assert_close(logits(model, bias), EXPECTED[f"biases/{name}"], **TOLERANCE)
    kind = name.partition(".")[2].removeprefix("ragged-")
    if kind in ("landmark", "greedy", "random", "taylor", "learned"):
        assert bias.fit.method == kind.replace("greedy", "landmark") and bias.fit.rows()


def test_a_bias_of_the_full_precision_model_attaches_to_its_rounded_copy():
    model = HookedKVTransformer.load(HERE / "models" / "linear-rounded", device="cpu")
    model.attach_kv_bias(KVBias.load(HERE / "biases" / "linear.exact.safetensors"))


def test_kinds_of_features_and_counts_of_a_ragged_batch():
    kinds = {
        name: KVBias.load(HERE / "biases" / f"softmax.{name}.safetensors").features.kind
        for name in ("exact", "greedy", "random", "taylor", "learned")
    }
    assert kinds == dict(exact="virtual_keys", greedy="virtual_keys", random="random", taylor="taylor", learned="learned")
    ragged = KVBias.load(HERE / "biases" / "softmax-text.ragged.safetensors")
    assert len(set(ragged.n_prompt_tokens.tolist())) == 2
    assert ragged.position_offset.tolist() == ragged.n_prompt_tokens.tolist()
    greedy = KVBias.load(HERE / "biases" / "softmax.greedy.safetensors")
    assert (greedy.fit.method, greedy.fit.settings["budget"], greedy.fit.settings["n_features"]) == ("landmark", "greedy", 4)


@pytest.mark.parametrize("name", ["linear", "softmax"])
def test_models_of_format_1(name):
    model = HookedKVTransformer.load(HERE / "format_1" / name, device="cpu")
    torch.testing.assert_close(logits(model), EARLIER["format_1"][name], **TOLERANCE)


@pytest.mark.parametrize(
    ("folder", "name"), [(folder, name) for folder, expected in EARLIER.items() for name in expected if "." in name]
)
def test_biases_of_formats_1_and_2_load_and_attach(folder, name):
    model = HookedKVTransformer.load(HERE / "format_1" / name.partition(".")[0], device="cpu")
    bias = KVBias.load(HERE / folder / f"{name}.safetensors")
    torch.testing.assert_close(logits(model, bias), EARLIER[folder][name], **TOLERANCE)


def test_a_training_run_is_resumed_to_the_same_end(tmp_path):
    """AdamW divides by the root of averaged squares, which lets rounding grow: 1e-9 is a millionth of a step of this run."""
    shutil.copytree(HERE / "run", tmp_path / "run")
    task = InductionTask(vocab_size=9, length=8, law="both")
    model = build_model(task, dict(n_layers=1, d_model=8, d_head=4, kv_shift=True, dtype="float64", seed=1), device="cpu")
    model.cfg.seed = 0  # the run's own weights are drawn by another seed: what stands at the end comes from its checkpoint
    settings = dict(steps=8, batch_size=3, learning_rate=5e-3, eval_every=2, eval_sequences=5, checkpoint_every=4, watch="coef")
    result = train(model, task, folder=tmp_path / "run", progress=False, **settings)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), EXPECTED[f"run/{name}"], rtol=0, atol=1e-9, msg=name)
    metrics = torch.tensor(result.metrics[["step", "loss", "accuracy", "tokens"]].to_numpy(float))
    torch.testing.assert_close(metrics, EXPECTED["run metrics"], rtol=0, atol=1e-9)
    assert sorted(set(result.watched["step"])) == [2, 4, 6, 8]


def test_a_batch_resumes_where_it_was_interrupted(tmp_path, monkeypatch):
    shutil.copytree(HERE / "batch", tmp_path / "batch")
    shutil.copytree(HERE / "models" / "linear-text", tmp_path / "models" / "linear-text")
    monkeypatch.chdir(tmp_path / "batch")
    command = ["analyse", "own_analysis:ENTROPIES", "prompts.jsonl", "--model", "../models/linear-text", "--text", " is green"]
    command += ["--temperature", "2.0", "--prompts-per-job", "1"]
    with contextlib.closing(sqlite3.connect("table.parquet.partial")) as journal:
        assert journal.execute("SELECT prompt_id FROM done").fetchall() == [("a",), ("b",)]
    assert main([*command, "--out", "table.parquet"]) == 0
    table = pd.read_parquet("table.parquet")
    assert list(table["prompt_id"].unique()) == ["a", "b", "c", "4"]
    found = torch.tensor(table[["position", "entropy"]].to_numpy(float))
    torch.testing.assert_close(found, EXPECTED["batch"], rtol=0, atol=1e-12)
