"""On a GPU everything measures what it measures on the CPU, whatever device the given tensors are on.

On a GPU that is stood in for, or on a real one with ``KVLENS_TEST_GPU=1``; other tests use the CPU. The stand-in: tensors in
memory that say they are on ``cuda:0``. Inside `stand_in_gpu` torch reports a GPU. What is moved there, or made there, carries a
mark, and so does all that is computed from it; `Tensor.device` reads the mark. What a GPU refuses is refused: operations on
tensors of both devices (numbers without axes may come from the CPU, and so may indices), ``.numpy()``, and random draws there
with a generator of the CPU. All numbers are those of the CPU, so that results can be compared exactly.

Not seen: what happens inside one call of torch, such as functions that torch transforms (``torch.func``).
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
import pytest
import torch
from bridge_models import error_of_conversion
from precision import LAW, float64
from test_approximations import METHODS
from test_every_analysis import CALLS, OTHER, TARGET
from tiny_hf import tiny_hf_model
from tiny_text_model import PROMPT, TEXT, tiny_text_model
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves

from kvlens import KVBias, KVTransformerBridge, convert_prompt
from kvlens.arguments import SECTIONS
from kvlens.cli import main

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ANYWHERE = {"copy_", "set_", "_has_compatible_shallow_copy_type"}
"""Operations between tensors of two devices."""
BOTH = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"


def tensors(given: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]


def is_there(tensor: Tensor) -> bool:
    return tensor.__dict__.get("_is_there", False)


def marked(result: Any, there: bool) -> Any:
    for tensor in tensors(result):
        tensor.__dict__["_is_there"] = there
    return result


class StandIn(TorchFunctionMode):
    """Reads and sets the marks around every call of torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name, of = dict(kwargs or {}), func.__name__, getattr(func, "__self__", None)
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if name == "__get__":
            own = {Tensor.device: GPU, Tensor.is_cuda: True, Tensor.is_cpu: False}
            return own[of] if of in own and is_there(first) else marked(func(*args, **kwargs), is_there(first))
        if name == "__set__":
            func(*args, **kwargs)
            if of is Tensor.data:
                marked(first, is_there(args[1]))
            return None
        if name in ("to", "cuda", "cpu", "type_as"):
            return _moved(func, first, args[1:], kwargs)
        if name in ("numpy", "__array__") and is_there(first):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        if func in _device_constructors() and name not in ("as_tensor", "asarray"):
            there = name.endswith("_like") and is_there(first)
        elif name == "grad" and first is None and len(args) > 1:  # torch.autograd.grad(outputs, inputs)
            found = func(*args, **kwargs)
            return type(found)(marked(g, is_there(x)) for g, x in zip(found, tensors(args[1]), strict=True))
        elif name in ("__getitem__", "__setitem__", *ANYWHERE) or name.startswith("new_"):
            there = is_there(first)
            if any(map(is_there, tensors(args[1:2]))) > there and name not in ANYWHERE:
                raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
            if name == "__setitem__" and tensors(args[1:2]) and any(x.ndim and is_there(x) != there for x in tensors(args[2:])):
                raise RuntimeError(f"{BOTH} ({name})")
        else:
            places = {is_there(x) for x in tensors((args, kwargs)) if x.ndim or is_there(x)}
            if len(places) > 1:
                raise RuntimeError(f"{BOTH} ({name})")
            there = True in places
        if kwargs.get("device") is not None:
            there, kwargs["device"] = torch.device(kwargs["device"]).type == "cuda", CPU
        if there and kwargs.get("generator") is not None:
            raise RuntimeError(f"Expected a 'cuda' device type for generator but found 'cpu' ({name})")
        return marked(func(*args, **kwargs), there)


def _moved(func: Any, tensor: Tensor, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """``tensor.to(...)``, ``.cuda()``, ``.cpu()`` and ``.type_as(other)``: a copy, unless nothing changes."""
    there = {"cuda": True, "cpu": False}.get(func.__name__, is_there(tensor))
    given = {**dict(enumerate(args)), **kwargs}
    for place, value in given.items():
        if isinstance(value, Tensor):
            there = is_there(value)
        elif value is not None and not isinstance(value, (torch.dtype, bool, torch.memory_format)):
            there, given[place] = torch.device(value).type == "cuda", CPU
    if func.__name__ == "cuda":
        moved = tensor.clone()
    else:
        moved = func(tensor, *(given[i] for i in range(len(args))), **{name: given[name] for name in kwargs})
    return marked(moved.clone() if moved is tensor and there != is_there(tensor) else moved, there)


@contextlib.contextmanager
def stand_in_gpu() -> Iterator[None]:
    new, fork = nn.Parameter.__new__, torch.random.fork_rng

    def parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> nn.Parameter:
        made = new(cls, data, requires_grad)
        return made if data is None else marked(made, is_there(data))

    functions = dict(is_available=lambda: True, is_initialized=lambda: False, device_count=lambda: 1)
    functions |= dict(synchronize=lambda *_: None, manual_seed_all=lambda seed: None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **functions))
        stack.enter_context(mock.patch.object(nn.Parameter, "__new__", parameter))
        stack.enter_context(mock.patch.object(torch.random, "fork_rng", lambda devices=None, **more: fork(devices=[], **more)))
        stack.enter_context(StandIn())
        yield


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
    for name in ("b_kv", "b_d"):
        assert there.stacked(name).is_cuda
        torch.testing.assert_close(there.stacked(name).cpu(), here.stacked(name), **ROUNDING)


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_a_bias_is_saved_there_loaded_here_and_added_and_attached_where_the_model_is(attention):
    here, there = on_both_devices(attention)
    text = here.to_tokens(TEXT, prepend_bos=False)
    bias = convert_prompt(there, PROMPT)
    bias.save("bias.safetensors")
    loaded = KVBias.load("bias.safetensors")
    assert bias.stacked("b_kv").is_cuda and not loaded.stacked("b_kv").is_cuda
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
def test_commands_run_there_unless_told_otherwise():
    tiny_text_model(dtype=torch.float64).save("tiny")
    asked = ["--model", "tiny", "--prompt", PROMPT, "--text", TEXT]
    assert main(["explain", *asked, "--dtype", "float64", "--out", "page.html", "--sections", *SECTIONS]) == 0
    page = Path("page.html").read_text(encoding="utf-8")
    assert "parameters, float64." in page and "It is not shown" not in page
    small = ["--task", "vocab_size=13", "length=9", "--model", "n_layers=1", "d_model=12", "d_head=6", "--set", "batch_size=3"]
    command = ["train", "induction", "--out", "run", *small, "eval_every=2", "eval_sequences=5"]
    assert main([*command, "steps=2"]) == 0
    assert main([*command, "steps=2"]) == 0  # from its checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compaction", "conversion-accuracy", "dual-heads"])
def test_an_experiment_on_a_given_model_runs_there(name, monkeypatch):
    monkeypatch.setattr("kvlens.conversion.features.STEPS", 9)
    assert main(["reproduce", name, "--scale", "tiny"]) == 0
