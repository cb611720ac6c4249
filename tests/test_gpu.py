"""On a GPU everything measures what it measures on the CPU, whatever device the given tensors are on.

On a GPU that is stood in for (:mod:`stand_in_gpu`), or on a real one with ``KVLENS_TEST_GPU=1``; other tests use the CPU.
"""

import contextlib

import pandas as pd
import pytest
import torch
from bridge_models import error_of_conversion
from precision import LAW, float64
from stand_in_gpu import stand_in_gpu
from test_approximations import METHODS
from test_every_analysis import CALLS, OTHER, TARGET
from tiny_hf import tiny_hf_model
from tiny_text_model import PROMPT, TEXT, tiny_text_model

from kvlens import KVBias, KVTransformerBridge, convert_prompt
from kvlens.cli import main

ROUNDING = dict(rtol=1e-7, atol=1e-9)
"""Of float64; differences of logits around 1 among them, and logarithms of them."""


@pytest.fixture(scope="module", autouse=True)
def _gpu():
    with contextlib.nullcontext() if torch.cuda.is_available() else stand_in_gpu():
        yield


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def on_both_devices(attention, **changes):
    shift = {} if attention == "linear" else dict(kv_shift=None)
    made = [tiny_text_model(attention=attention, dtype=torch.float64, device=on, **shift, **changes) for on in ("cpu", "cuda")]
    assert [model.W_E.is_cuda for model in made] == [False, True]
    return made


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["linear", "softmax"])
@pytest.mark.parametrize("name", CALLS)
def test_an_analysis_gives_the_same_table(name, attention):
    here, there = (CALLS[name](model, PROMPT, TEXT, OTHER, **TARGET) for model in on_both_devices(attention))
    pd.testing.assert_frame_equal(here, there, **ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=lambda method: f"{method.name} {getattr(method, 'budget', '')}")
def test_a_method_of_conversion_gives_the_same_bias(method, monkeypatch):
    monkeypatch.setattr("kvlens.conversion.features.STEPS", 20)
    models = on_both_devices("softmax", gain=3)
    tokens = [model.to_tokens(PROMPT).cpu() for model in models]
    here, there = (convert_prompt(model, x, method=method, verbose=False) for model, x in zip(models, tokens, strict=True))
    assert there.b_KV.is_cuda
    torch.testing.assert_close(there.b_KV.cpu(), here.b_KV, **ROUNDING)
    torch.testing.assert_close(there.b_D.cpu(), here.b_D, **ROUNDING)


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_a_bias_is_saved_there_loaded_here_and_added_and_attached_where_the_model_is(attention):
    here, there = on_both_devices(attention)
    text = here.to_tokens(TEXT, prepend_bos=False)
    bias = convert_prompt(there, PROMPT)
    bias.save("bias.safetensors")
    loaded = KVBias.load("bias.safetensors")
    assert bias.b_KV.is_cuda and not loaded.b_KV.is_cuda
    with here.kv_bias(loaded):
        expected = here(text)
    for one in (bias, loaded, bias + 0.5 * loaded.select(heads=[(0, 1)]) - 0.5 * bias.select(heads=[(0, 1)])):
        with there.kv_bias(one):
            torch.testing.assert_close(there(text.to("cpu")).cpu(), expected, **ROUNDING)


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3_5"])
@torch.no_grad()
def test_a_bridge_reads_a_bias_there(family, monkeypatch):
    monkeypatch.setattr("bridge_models.PROMPT", torch.arange(26).view(2, 13).to("cuda"))
    monkeypatch.setattr("bridge_models.TEXT", torch.arange(9).repeat(2, 1).to("cuda"))
    with float64():
        model = KVTransformerBridge.boot_transformers(tiny_hf_model(family).to("cuda"))
        assert error_of_conversion(model) < LAW


@pytest.mark.slow
def test_commands_run_there_unless_told_otherwise(capsys):
    tiny_text_model(dtype=torch.float64).save("tiny")
    asked = ["--model", "tiny", "--prompt", PROMPT, "--text", TEXT]
    assert main(["report", *asked, "--dtype", "float64", "--new-tokens", "3"]) == 0
    assert "float64 on cuda" in capsys.readouterr().out
    assert main(["explain", *asked]) == 0
    small = ["--task", "vocab_size=13", "length=9", "--model", "n_layers=1", "d_model=12", "d_head=6", "--set", "batch_size=3"]
    command = ["train", "induction", "--out", "run", *small, "eval_every=2", "eval_sequences=5"]
    assert main([*command, "steps=2"]) == 0
    assert main([*command, "steps=2"]) == 0  # from its checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compaction", "conversion-accuracy", "dual-heads", "facts-recall"])
def test_an_experiment_on_a_given_model_runs_there(name, monkeypatch):
    monkeypatch.setattr("kvlens.conversion.features.STEPS", 9)
    assert main(["reproduce", name, "--scale", "tiny"]) == 0
