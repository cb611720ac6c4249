"""A warning, once per call, for hooks requested by name that do not fire, and for no others."""

import warnings
from functools import partial

import pytest
import torch
from small_models import linear_model, small_model, tokens, warned_of

from kvlens import convert_prompt
from kvlens.model import inputs, transformer

AT = "blocks.1.attn."
TEXT = tokens(1, 5)
OF_A_BIAS = ["hook_b_kv", "hook_b_d", "hook_z_context", "hook_z_bias"]
WITHOUT_A_BIAS = {
    "linear": (linear_model, [*OF_A_BIAS, "hook_last_k", "hook_last_v"]),
    "softmax": (small_model, [*OF_A_BIAS, "hook_b_keys", "hook_phi_q", "hook_normalizer"]),
}


def look(x: torch.Tensor, hook) -> None:
    """A hook that only reads."""


@pytest.mark.parametrize("kind", WITHOUT_A_BIAS)
def test_by_name_without_a_bias(kind):
    build, points = WITHOUT_A_BIAS[kind]
    model, point = build(), points[0]
    name = AT + point

    def chosen(name: str) -> bool:
        return name.endswith(point)

    ways = [
        lambda: model.run_with_hooks(TEXT, fwd_hooks=[(name, look)]),
        lambda: model.run_with_hooks(TEXT, bwd_hooks=[(name, look)], reset_hooks_end=False),
        lambda: model.run_with_hooks(TEXT, fwd_hooks=[(chosen, look)]),
        lambda: model.run_with_cache(TEXT, names_filter=name),
        lambda: model.run_with_cache(TEXT, names_filter=[name], pos_slice=1),
        lambda: model.run_with_cache(TEXT, names_filter=chosen),
        lambda: (model.add_hook(name, look), model(TEXT)),
        lambda: (model.add_perma_hook(name, look), model(TEXT)),
    ]
    others = [(each, partial(model.run_with_hooks, TEXT, fwd_hooks=[(AT + each, look)])) for each in points[1:]]
    for asked, way in [*((point, way) for way in ways), *others]:
        for _ in range(2):
            (message,) = warned_of(way)
            assert asked in message and "no KV bias is attached" in message
        model.reset_hooks(including_permanent=True)


@pytest.mark.parametrize("kind", WITHOUT_A_BIAS)
def test_a_bias_given_in_time_and_everything_at_once(kind):
    build, points = WITHOUT_A_BIAS[kind]
    model = build()
    bias = convert_prompt(model, tokens(1, 4, seed=1))
    called = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.run_with_cache(TEXT)
        model.run_with_cache(TEXT, names_filter=lambda name: ".attn." in name)
        model.run_with_cache(TEXT, names_filter=[AT + "hook_b_kv", AT + "hook_z"])
        model.run_with_hooks(TEXT, fwd_hooks=[(lambda name: True, look)])
        model.run_with_hooks(TEXT, fwd_hooks=[(AT + point, look) for point in (*points, "hook_z")])
        hooks = [(AT + point, lambda x, hook: called.append(hook.name)) for point in points]
        with model.hooks(fwd_hooks=hooks), model.kv_bias(bias):
            model(TEXT)
        convert_prompt(model, TEXT, initial=bias, fwd_hooks=[(AT + "hook_b_kv", look)])
        model.get_caching_hooks(AT + "hook_b_kv")
        model(TEXT)  # nothing was hooked
    assert sorted(called) == sorted(AT + point for point in points)


def test_a_pass_without_hooks_looks_at_nothing(monkeypatch):
    model = small_model()

    def looked(*args):
        raise AssertionError("an unhooked pass asked about hooks")

    monkeypatch.setattr(transformer, "warn_of_silent_hooks", looked)
    monkeypatch.setattr(inputs, "is_silent", looked)
    model(TEXT)
