"""Warnings, once each: the weights are no longer those of the attached bias, its normalizers are below 0, a hook that is asked
for by name does not fire; and none elsewhere."""

import copy
import itertools
import warnings
import weakref
from functools import partial

import pytest
import torch
from small_models import by_steps, linear_model, small_model, tokens, warned_of
from tiny_hf import tiny_hf_model

from kvlens import HookedKVTransformer, KVLensError, KVTransformerBridge, convert_prompt
from kvlens.components import Normalizers
from kvlens.model import fingerprint

PROMPT, OTHER, TEXT = tokens(1, 7)[0], tokens(1, 7, seed=1)[0], tokens(2, 5, seed=2)


def forward(model):
    with torch.no_grad():
        return model(TEXT)


# --- weights ---


def step(model, **options):
    model(TEXT, return_type="loss").backward()
    torch.optim.AdamW(model.parameters(), lr=1e-2, **options).step()


@torch.no_grad()
def add(model):
    model.blocks[1].attn.W_O[2].add_(0.1)


@torch.inference_mode()
def add_in_inference_mode(model):
    model.blocks[1].attn.W_O[2].add_(0.1)


def other_memory(model):
    model.W_E.data = model.W_E.data * 1.1


def through_data(model):
    model.blocks[0].mlp.W_in.data.mul_(1.1)


def other_parameter(model):
    model.blocks[0].ln1.w = torch.nn.Parameter(model.blocks[0].ln1.w * 1.1)


def load(model):
    model.load_state_dict({name: x * 1.1 if x.is_floating_point() else x for name, x in model.state_dict().items()})


def bridge(dtype=torch.float32):
    return KVTransformerBridge.boot_transformers(tiny_hf_model("llama").to(dtype), verify=False)


@torch.no_grad()
def any_weight(model):
    next(model.parameters()).mul_(1.1)


CHANGES = {
    "a step": step,
    "a fused step": lambda model: step(model, fused=True),
    "in place": add,
    "in inference mode": add_in_inference_mode,
    "other memory": other_memory,
    "through data": through_data,
    "another parameter": other_parameter,
    "load_state_dict": load,
}


@pytest.mark.parametrize(
    ("build", "change"), [*itertools.product((small_model, linear_model), CHANGES.values()), (bridge, any_weight)]
)
def test_changed_weights_are_said_once(build, change):
    model = build()
    bias = convert_prompt(model, PROMPT)
    with model.kv_bias(bias):
        assert not warned_of(lambda: forward(model))
        change(model)
        (message,) = warned_of(lambda: forward(model))
        assert "weights of this model have changed since the KV bias was attached" in message
        assert not warned_of(lambda: forward(model))
    assert not warned_of(lambda: forward(model))


@pytest.mark.parametrize("build", [small_model, bridge])
def test_changed_behind_an_inner_block_they_are_said_in_the_outer_one(build):
    model = build()
    bias, other = convert_prompt(model, PROMPT), convert_prompt(model, OTHER)
    with model.kv_bias(bias):
        with model.kv_bias(other):
            any_weight(model)
        assert len(warned_of(lambda: forward(model))) == 1


def test_a_bias_that_is_attached_after_the_change_is_that_of_the_weights():
    model = small_model()
    with model.kv_bias(convert_prompt(model, PROMPT)):
        model.detach_kv_bias()
        add(model)
        with model.kv_bias(convert_prompt(model, OTHER)):
            assert not warned_of(lambda: forward(model))
        model.attach_kv_bias(convert_prompt(model, OTHER))
        assert not warned_of(lambda: forward(model))


def same_values(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


@pytest.mark.parametrize("move", [same_values, lambda model: model.to(torch.float64, print_details=False)])
def test_the_same_weights_in_another_place_are_no_change(move):
    model = small_model()
    with model.kv_bias(convert_prompt(model, PROMPT)):
        move(model)
        own = copy.deepcopy(model)
        assert not warned_of(lambda: forward(model)) and not warned_of(lambda: forward(own))
        assert not model._weights_then.changed()
        add(own)
        assert warned_of(lambda: forward(own)) and not warned_of(lambda: forward(model))


def test_a_trained_bias_is_no_weight_of_the_attached_one():
    model = linear_model(trainable_kv_bias=True)
    with model.kv_bias(convert_prompt(model, PROMPT)):
        model.blocks[0].attn.b_KV.data.add_(1)
        assert not model._weights_then.changed() and not warned_of(lambda: forward(model))


def test_nobody_looks_without_a_bias():
    model = small_model()
    bias = convert_prompt(model, PROMPT)
    forward(model)
    model.attach_kv_bias(bias)
    model.detach_kv_bias()
    forward(model)
    assert model._weights_then is None  # it would keep weights in memory that were exchanged since


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_weights_are_hashed_once_for_each_change(change, monkeypatch):
    model, hashed = small_model(), []
    read = fingerprint.weights_hash
    monkeypatch.setattr(fingerprint, "weights_hash", lambda state: (hashed.append(1), read(state))[1])
    bias = convert_prompt(model, PROMPT)
    for _ in range(3):
        with model.kv_bias(bias):
            forward(model)
    assert len(hashed) == 1
    change(model)
    for _ in range(2):
        with pytest.raises(KVLensError, match="weights"):
            model.attach_kv_bias(bias)
    assert len(hashed) == 2


def test_a_module_in_place_of_another_is_a_change():
    model, other = small_model(), small_model(seed=9)
    bias = convert_prompt(model, PROMPT)
    model.blocks[0].mlp = other.blocks[0].mlp
    with pytest.raises(KVLensError, match="weights"):
        model.attach_kv_bias(bias)


def test_the_hash_keeps_no_weight_in_memory():
    model = small_model()
    model.fingerprint()
    weight = weakref.ref(model.blocks[0].mlp.W_in)
    other_parameter = torch.nn.Parameter(model.blocks[0].mlp.W_in.detach().clone())
    model.blocks[0].mlp.W_in = other_parameter
    assert weight() is None


def test_a_saved_model_has_the_hash_of_its_own_weights(tmp_path):
    """Also after a write that nobody sees, to other numbers than the first."""
    model = small_model()
    before = model.fingerprint()
    model.W_E.data[1:] += 1
    assert model.fingerprint() == before
    model.save(tmp_path / "m")
    assert HookedKVTransformer.load(tmp_path / "m").fingerprint() == model.fingerprint() != before


# --- normalizers ---


def counted_below_zero(model, bias) -> float:
    """The share of normalizers below 0 in percent, from the hook point."""
    found = []
    hooks = [(lambda name: name.endswith("hook_normalizer"), lambda n, hook: found.append(n.detach().clone()))]
    with warnings.catch_warnings(), torch.no_grad(), model.kv_bias(bias):
        warnings.simplefilter("ignore")
        model.run_with_hooks(TEXT, fwd_hooks=hooks)
    n = torch.stack(found)
    below = n.isnan() if model.cfg.attention == "softmax" else n < 0
    return 100 * float(below.double().mean())


@pytest.mark.parametrize(("build", "steps"), [*itertools.product((small_model, linear_model), (True, False)), (bridge, False)])
def test_normalizers_below_zero_are_said_once_with_their_share(build, steps):
    model = build(dtype=torch.float64)
    a, b = (convert_prompt(model, prompt) for prompt in (PROMPT, OTHER))
    with by_steps(model, steps):
        for bias in (-1 * a, b - a, a + 10 * (b - a), (-1 * a).select(layers=[1])):
            share = counted_below_zero(model, bias)
            assert 1 < share <= 100
            with model.kv_bias(bias):
                (message,) = warned_of(lambda: forward(model))
                assert f"{share:.3g} % of the normalizers" in message
                assert not warned_of(lambda: forward(model))
        for bias in (a, a + b, 0.3 * a, a + 0.7 * (b - a), a + (b - a), a.select(heads=[(1, 2)]), a - a):
            assert counted_below_zero(model, bias) == 0
            with model.kv_bias(bias):
                assert not warned_of(lambda: forward(model))


def test_the_share_below_zero_is_that_of_one_pass():
    normalizers = Normalizers()
    normalizers.see_positive(torch.ones(1, 3, 2))
    assert not warned_of(normalizers.tell)
    normalizers.see(torch.tensor([[[True, False, False, False]]]))
    (message,) = warned_of(normalizers.tell)
    assert "25 % of the normalizers of this pass" in message


def test_with_gradients_too_but_not_of_maps_whose_normalizers_have_any_sign():
    for model, n_warnings in ((small_model(), 1), (linear_model(feature_map="identity"), 0)):
        with model.kv_bias(-1 * convert_prompt(model, PROMPT)):
            assert len(warned_of(lambda model=model: model(TEXT))) == n_warnings


def test_the_warning_names_the_line_that_ran_the_model():
    model: HookedKVTransformer = small_model()
    with model.kv_bias(-1 * convert_prompt(model, PROMPT)), pytest.warns(UserWarning, match="normalizers") as found:
        model.generate(TEXT[:1], max_new_tokens=3, verbose=False, stop_at_eos=False)
    (warning,) = found
    assert warning.filename == __file__


AT = "blocks.1.attn."
ONE_TEXT = tokens(1, 5)
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
        lambda: model.run_with_hooks(ONE_TEXT, fwd_hooks=[(name, look)]),
        lambda: model.run_with_hooks(ONE_TEXT, bwd_hooks=[(name, look)], reset_hooks_end=False),
        lambda: model.run_with_hooks(ONE_TEXT, fwd_hooks=[(chosen, look)]),
        lambda: model.run_with_cache(ONE_TEXT, names_filter=name),
        lambda: model.run_with_cache(ONE_TEXT, names_filter=[name], pos_slice=1),
        lambda: model.run_with_cache(ONE_TEXT, names_filter=chosen),
        lambda: (model.add_hook(name, look), model(ONE_TEXT)),
        lambda: (model.add_perma_hook(name, look), model(ONE_TEXT)),
    ]
    others = [(each, partial(model.run_with_hooks, ONE_TEXT, fwd_hooks=[(AT + each, look)])) for each in points[1:]]
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
        model.run_with_cache(ONE_TEXT)
        model.run_with_cache(ONE_TEXT, names_filter=lambda name: ".attn." in name)
        model.run_with_cache(ONE_TEXT, names_filter=[AT + "hook_b_kv", AT + "hook_z"])
        model.run_with_hooks(ONE_TEXT, fwd_hooks=[(lambda name: True, look)])
        model.run_with_hooks(ONE_TEXT, fwd_hooks=[(AT + point, look) for point in (*points, "hook_z")])
        hooks = [(AT + point, lambda x, hook: called.append(hook.name)) for point in points]
        with model.hooks(fwd_hooks=hooks), model.kv_bias(bias):
            model(ONE_TEXT)
        convert_prompt(model, ONE_TEXT, initial=bias, fwd_hooks=[(AT + "hook_b_kv", look)])
        model.get_caching_hooks(AT + "hook_b_kv")
        model(ONE_TEXT)  # nothing was hooked
    assert sorted(called) == sorted(AT + point for point in points)
