"""What a KV bias refuses to hold and to add, since it would give wrong numbers in silence."""

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
    lambda: other_model(n_layers=3),
    *(
        lambda name=name: with_stacked(linear(), **{name: linear().stacked(name)[..., :2]})
        for name in ("b_kv", "b_d", "last_k")
    ),
    lambda: with_stacked(linear(), b_kv=linear().stacked("b_kv").long()),
    lambda: moved(to=-1),
    *(lambda n=n: counted(batch(3), n) for n in (-7, 10**12, "a", True, 2.0, torch.tensor(3), torch.tensor([1, 2]))),
    lambda: with_stacked(softmax(), keys=softmax().stacked("keys")[..., :3]),
    lambda: with_stacked(softmax(), log_scale=softmax().stacked("log_scale")[:, :2]),
    lambda: with_stacked(softmax(), last_v=softmax().stacked("last_v")[..., :2, :]),
    without_features,
    # arithmetic
    lambda: linear() + moved(),
    lambda: combine(linear(), moved()),
    lambda: combine(linear(), moved(), shift_state="zero"),
    lambda: moved(batch(), torch.tensor([7, 7])) + moved(batch(), torch.tensor([7, 8])),
    lambda: softmax() + moved(softmax(), 3),
    *(lambda x=x: combine(linear(), with_stacked(linear(), **{x: linear().stacked(x) + 1})) for x in ("last_k", "last_v")),
    lambda: combine(linear(), convert_prompt(tiny_text_model(), "The widget")),
    *(lambda of=of: combine(of, batch(3)) for of in (linear(), batch())),
    lambda: combine(linear(), other_model(weights="of another model")),
    lambda: linear() + linear().to(torch.float16),
    lambda: softmax() + random(),
    lambda: random() + random(seed=1),
    *(lambda x=x: linear() * x for x in (math.nan, math.inf)),
    # a dtype that overflows
    lambda: (1e9 * linear()).to("float16"),
    # files
    lambda: linear().save("nowhere/prompt.safetensors"),
    *(lambda x=x: KVBias.load(x) for x in ("", "a\0b", "x" * 300, ".")),
]


@pytest.mark.parametrize("call", REFUSED)
def test_is_refused(call, refuses):
    refuses("", call)
