"""What a KV bias refuses to hold, to add, to select and to save, and its words."""

import functools
import math
from dataclasses import replace

import pytest
import torch
from stacked_tensors import with_stacked
from tiny_text_model import PROMPT, tiny_text_model

from kvlens import KVBias, combine, convert_prompt
from kvlens.kv_bias import Features, RandomFeatures, State

pytestmark = pytest.mark.unhooked  # the messages are kvlens' own

COUNT = "must be a whole number from 0"


@functools.cache
def linear(prompts=PROMPT):
    return convert_prompt(tiny_text_model(), prompts if isinstance(prompts, str) else list(prompts))


def batch(n=2):
    return linear(("The widget",) * n)


@functools.cache
def softmax():
    return convert_prompt(tiny_text_model(attention="softmax"), PROMPT)


def random(seed=0):
    def with_random(part):
        drawn = torch.randn(part.keys.shape[1:], generator=torch.Generator().manual_seed(seed))
        return Features(part.b_kv, part.b_d, part.log_scale, RandomFeatures(drawn))

    return softmax().map_layers(lambda layer: layer.each(with_random))


def without_features():
    return softmax().map_layers(lambda layer: layer.each(lambda part: State(part.b_kv, part.b_d)))


def other_model(**fields):
    return replace(linear(), fingerprint=replace(linear().fingerprint, **fields), record=None)


def moved(bias=None, to=8):
    return replace(bias or linear(), position_offset=to, record=None)


def counted(bias, n):
    return replace(bias, n_prompt_tokens=n, record=None)


REFUSED = [
    # what it holds
    ("layer=3", lambda: other_model(n_layers=3)),
    *(
        (f"{name} of layer 0 must be", lambda name=name: with_stacked(linear(), **{name: linear().stacked(name)[..., :2]}))
        for name in ("b_kv", "b_d", "last_k")
    ),
    ("got torch.int64", lambda: with_stacked(linear(), b_kv=linear().stacked("b_kv").long())),
    ("last_k of layer 0 must hold", lambda: with_stacked(linear(), last_k=linear().stacked("last_k").long())),
    (f"position_offset {COUNT}", lambda: moved(to=-1)),
    *(
        (f"n_prompt_tokens {COUNT}", lambda n=n: counted(batch(3), n))
        for n in (-7, 10**12, "a", True, 2.0, torch.tensor(3), torch.ones(3), torch.tensor([1, 2]), torch.tensor([1, 2, -3]))
    ),
    (f"n_prompt_tokens {COUNT}", lambda: counted(linear(), torch.tensor([3]))),
    ("keys of layer 0 must be", lambda: with_stacked(softmax(), keys=softmax().stacked("keys")[..., :3])),
    ("log_scale of layer 0 must be", lambda: with_stacked(softmax(), log_scale=softmax().stacked("log_scale")[:, :2])),
    ("last_v of layer 0 must be", lambda: with_stacked(softmax(), last_v=softmax().stacked("last_v")[..., :2, :])),
    ("are only for softmax", without_features),
    # arithmetic
    ("position offsets differ (0 and 8)", lambda: linear() + moved()),
    ("position offsets differ (0 and 8)", lambda: combine(linear(), moved())),
    ("position offsets differ", lambda: combine(linear(), moved(), shift_state="zero")),
    ("position offsets differ", lambda: moved(batch(), torch.tensor([7, 7])) + moved(batch(), torch.tensor([7, 8]))),
    ("position offsets differ", lambda: softmax() + moved(softmax(), 3)),
    ("shift states differ (last_k)", lambda: combine(linear(), with_stacked(linear(), last_k=linear().stacked("last_k") + 1))),
    ("shift states differ (last_v)", lambda: combine(linear(), with_stacked(linear(), last_v=linear().stacked("last_v") + 1))),
    ("shift_state='last'", lambda: combine(linear(), convert_prompt(tiny_text_model(), "The widget"))),
    ("batch shapes differ", lambda: combine(linear(), batch())),
    ("batch shapes differ", lambda: combine(batch(), batch(3))),
    ("weights differs", lambda: combine(linear(), other_model(weights="of another model"))),
    ("dtypes differ", lambda: linear() + linear().to(torch.float16)),
    ("virtual_keys features, the other random", lambda: softmax() + random()),
    ("another seed", lambda: random() + random(seed=1)),
    *(("a factor must be a finite number", lambda x=x: linear() * x) for x in (math.nan, math.inf)),
    ("a factor must be a finite number", lambda: linear() / math.nan),
    # selection
    ("layer 2 does not exist; there are 2", lambda: linear().select(layers=[2])),
    ("layer -3", lambda: linear().select(layers=[-3])),
    ("layer 2", lambda: linear().select(heads=[(2, 0)])),
    ("head 3 does not exist; there are 3", lambda: linear().select(heads=[(0, 3)])),
    ("this bias holds a single prompt", lambda: linear().select_prompt(0)),
    # dtypes, devices and files
    ("'x' cannot be used here", lambda: linear().to("x")),
    ("must be one of float16, bfloat16, float32, float64, got torch.int8", lambda: linear().to(torch.int8)),
    ("float16 cannot hold", lambda: (1e9 * linear()).to("float16")),
    *(("expected a path", lambda x=x: linear().save(x)) for x in ("", "a\0b")),
    ("cannot write", lambda: linear().save("x" * 300)),
    ("nowhere", lambda: linear().save("nowhere/prompt.safetensors")),
    ("cannot write", lambda: linear().save(".")),
    *(("expected a path", lambda x=x: KVBias.load(x)) for x in ("", "a\0b")),
    ("KVBias.load: ", lambda: KVBias.load("x" * 300)),
    ("no file at nowhere.safetensors", lambda: KVBias.load("nowhere.safetensors")),
    ("no file at", lambda: KVBias.load(".")),
]


@pytest.mark.parametrize(("words", "call"), REFUSED, ids=[words for words, _ in REFUSED])
def test_is_refused(words, call, refuses):
    refuses(words, call)
