"""What a KV bias refuses to hold, to add, to select and to save, and its words."""

import functools
import math
from dataclasses import replace

import pytest
import torch
from tiny_text_model import PROMPT, tiny_text_model

from kvlens import KVBias, combine, convert_prompt
from kvlens.kv_bias import RandomFeatures

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
    shape = softmax().features.keys.shape
    return replace(softmax(), features=RandomFeatures(torch.randn(shape, generator=torch.Generator().manual_seed(seed))))


def narrow_keys():
    return replace(softmax(), features=replace(softmax().features, keys=softmax().features.keys[..., :3]))


def other_model(**fields):
    return replace(linear(), fingerprint=replace(linear().fingerprint, **fields))


def moved(bias=None, to=8):
    return replace(bias or linear(), position_offset=to)


REFUSED = [
    # what it holds
    ("layer=3", lambda: other_model(n_layers=3)),
    ("b_KV must be", lambda: other_model(d_phi=99)),
    ("b_KV must be", lambda: other_model(n_heads=99)),
    ("b_KV must be", lambda: other_model(d_head=99)),
    ("last_k must be", lambda: other_model(n_kv_heads=99)),
    ("b_KV must hold floating-point numbers, got torch.int64", lambda: replace(linear(), b_KV=linear().b_KV.long())),
    ("last_k must hold floating-point numbers", lambda: replace(linear(), last_k=linear().last_k.long())),
    (f"position_offset {COUNT}", lambda: moved(to=-1)),
    *(
        (f"n_prompt_tokens {COUNT}", lambda n=n: replace(batch(3), n_prompt_tokens=n))
        for n in (-7, 10**12, "a", True, 2.0, torch.tensor(3), torch.ones(3), torch.tensor([1, 2]), torch.tensor([1, 2, -3]))
    ),
    (f"n_prompt_tokens {COUNT}", lambda: replace(linear(), n_prompt_tokens=torch.tensor([3]))),
    ("features.keys must be", narrow_keys),
    ("log_scale must be", lambda: replace(softmax(), log_scale=softmax().log_scale[:, :2])),
    ("last_v must be", lambda: replace(softmax(), last_v=softmax().last_v[..., :2, :])),
    ("are only for softmax", lambda: replace(softmax(), features=None, log_scale=None)),
    # arithmetic
    ("position offsets differ (0 and 8)", lambda: linear() + moved()),
    ("position offsets differ (0 and 8)", lambda: combine(linear(), moved())),
    ("position offsets differ", lambda: combine(linear(), moved(), shift_state="zero")),
    ("position offsets differ", lambda: moved(batch(), torch.tensor([7, 7])) + moved(batch(), torch.tensor([7, 8]))),
    ("position offsets differ", lambda: softmax() + moved(softmax(), 3)),
    ("shift states differ (last_k)", lambda: combine(linear(), replace(linear(), last_k=linear().last_k + 1))),
    ("shift states differ (last_v)", lambda: combine(linear(), replace(linear(), last_v=linear().last_v + 1))),
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
