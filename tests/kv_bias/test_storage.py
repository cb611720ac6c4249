"""A bias that is held by groups of heads: the same numbers as its padded tensors, in less memory, on both front ends."""

from dataclasses import replace

import pytest
import torch
from precision import LAW, relative_error
from small_models import logits_under, sharp, tokens
from tiny_hf import tiny_hf_model

from kvlens import KVBias, KVTransformerBridge, combine, convert_prompt
from kvlens.conversion import Landmark

pytestmark = pytest.mark.usefixtures("in_float64")
N_PROMPT = 20
PROMPT = tokens(1, N_PROMPT)[0]
WINDOWS = dict(use_local_attn=True, window_size=6, attn_types=["global", "local"])
HOOKED = {
    **{f"softmax, {row}": {} for row in ("rotary, grouped", "learned", "soft-capped", "sinks")},
    "softmax, alibi": WINDOWS,
}
BRIDGE = ["llama", "gpt2", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_5", "falcon_h1"]
"""Grouped heads; learned positions; a soft cap and windows; sinks; latent attention; states among and beside attention."""


def thinned(exact: KVBias, seed: int = 0) -> KVBias:
    """Some keys of a prompt, in every head another number, with weights; one head of the first layer has none."""
    generator = torch.Generator().manual_seed(seed)
    shape = exact.features.distance.shape
    n = (torch.rand(shape[:-1], generator=generator).square() * shape[-1]).long() + 1
    n[0, ..., 0] = 0
    rank = torch.rand(shape, generator=generator).argsort(dim=-1).argsort(dim=-1)
    weights = torch.rand(shape, generator=generator) * (rank < n[..., None]) * 2
    weights = weights.repeat_interleave(exact.b_D.shape[-2] // shape[-2], dim=-2).to(exact.b_D)
    return replace(exact, b_D=weights, b_KV=exact.b_KV * weights[..., None], log_scale=exact.log_scale + 0.3)


def n_stored(bias: KVBias) -> int:
    return sum(x.numel() for x in bias.stored().values())


def compact_of(padded: KVBias) -> KVBias:
    compact = padded.compact()
    assert n_stored(compact) < n_stored(padded)
    return compact


@pytest.fixture(scope="module", params=[*HOOKED, *BRIDGE])
def model(request, bridge_of):
    if request.param in BRIDGE:
        return bridge_of(request.param)
    return sharp(request.param, gain=1, **HOOKED[request.param]).requires_grad_(True)


@pytest.fixture
def rotary():
    return sharp("softmax, rotary, grouped", gain=1)


@torch.no_grad()
@pytest.mark.parametrize("prompt", [PROMPT, tokens(2, N_PROMPT)], ids=["one prompt", "a batch"])
def test_a_model_reads_it_as_the_padded_one(model, prompt):
    padded = thinned(convert_prompt(model, prompt))
    compact, text = compact_of(padded), tokens(2, 9, seed=1)
    for some in (text, text[:, :1]):  # one query has a form of its own
        assert relative_error(logits_under(model, compact, some), logits_under(model, padded, some)) < LAW
    assert compact._groups is not None  # nobody asked for the padded tensors


def test_gradients_of_the_text_are_the_same(model):
    padded, text = thinned(convert_prompt(model, PROMPT)), tokens(1, 5, seed=1)
    weights = [p for p in model.parameters() if p.requires_grad]
    compact, found = compact_of(padded), []
    for bias in (compact, padded):
        gradients = torch.autograd.grad(logits_under(model, bias, text).square().sum(), weights, allow_unused=True)
        found.append(torch.cat([x.flatten() for x in gradients if x is not None]))
    assert compact._groups is not None and relative_error(*found) < LAW


def test_gradients_of_the_bias_pass_through_its_groups(rotary):
    exact, text = convert_prompt(rotary, PROMPT), tokens(1, 5, seed=1)
    found = []
    for form in (KVBias.compact, KVBias.padded):
        padded = thinned(exact)
        leaf = padded.b_KV.clone().requires_grad_()
        bias = form(replace(padded, b_KV=leaf))
        (gradient,) = torch.autograd.grad(logits_under(rotary, bias, text).square().sum(), leaf)
        found.append(gradient * (padded.b_D != 0)[..., None])
    assert relative_error(*found) < LAW


@torch.no_grad()
def test_hooks_see_the_shapes_of_the_padded_one(rotary):
    bias = compact_of(thinned(convert_prompt(rotary, PROMPT)))
    padded, text = bias.padded(), tokens(1, 5, seed=1)
    caches = []
    for each in (bias, padded):
        with rotary.kv_bias(each):
            caches.append(rotary.run_with_cache(text)[1])
    assert caches[0].keys() == caches[1].keys()
    for name in caches[1]:
        torch.testing.assert_close(caches[0][name], caches[1][name], rtol=1e-11, atol=1e-11)
    assert bias._groups is not None


@torch.no_grad()
def test_arithmetic_is_that_of_the_padded_one_and_stays_compact(rotary):
    exact = convert_prompt(rotary, PROMPT)
    a, b = (thinned(exact, seed) for seed in (1, 2))
    text = tokens(1, 5, seed=1)
    made = {
        "sum": lambda a, b: a + b,
        "multiple": lambda a, b: 2 * a,
        "toward": lambda a, b: a.toward(b, 0.3),
        "combine": lambda a, b: combine(b, a, weights=[0.5, 0.2]),
        "heads": lambda a, b: a.select(heads=[(1, 2), (0, 4)]),
        "layers": lambda a, b: a.select(layers=[1]),
        "zeros": lambda a, b: a.zero_like() + a,
        "float32 and back": lambda a, b: a.to("float32").to("float64"),
        "by query head": lambda a, b: a.per_query_head(),
    }
    for name, make in made.items():
        expected, found = make(a, b), make(a.compact(), b.compact())
        assert n_stored(found) < n_stored(expected), name
        assert relative_error(logits_under(rotary, found, text), logits_under(rotary, expected, text)) < LAW, name
        assert found.num_parameters == expected.num_parameters, name
    batch = a.compact().repeat(2)
    assert relative_error(logits_under(rotary, batch, text.repeat(2, 1)), logits_under(rotary, a, text.repeat(2, 1))) < LAW
    assert relative_error(logits_under(rotary, batch.select_prompt(1), text), logits_under(rotary, a, text)) < LAW


@torch.no_grad()
def test_a_fit_is_compact_and_so_is_what_its_file_gives(rotary, tmp_path):
    way = Landmark(n_keys=3, n_continuations=4, continuation_length=5, n_held_out=0)
    bias = convert_prompt(rotary, PROMPT, method=way, verbose=False)
    assert repr(bias) == repr(bias.padded()) and bias.d_phi == bias.padded().d_phi
    assert bias._groups is not None
    bias.save(tmp_path / "a")
    bias.padded().save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    again = KVBias.load(tmp_path / "a")
    assert n_stored(again) == n_stored(bias) < n_stored(bias.padded())
    whole, same = bias.tensors(), again.tensors()
    used = whole["b_D"] != 0
    for name in ("b_KV", "b_D", "log_scale"):
        assert torch.equal(same[name], whole[name])
    for name in ("features.keys", "features.distance"):
        assert torch.equal(same[name][used], whole[name][used])
    assert again.fit.history == bias.fit.history == ()
    text = tokens(1, 5, seed=1)
    assert torch.equal(logits_under(rotary, again, text), logits_under(rotary, bias, text))


@torch.no_grad()
def test_its_padded_tensors_can_be_written_to_while_it_is_attached(model):
    bias = compact_of(thinned(convert_prompt(model, PROMPT)))
    text = tokens(1, 5, seed=1)
    model.attach_kv_bias(bias)
    before = model(text)
    bias.b_KV.mul_(2)
    after = model(text)
    model.detach_kv_bias()
    assert relative_error(after, before) > 1e-6
    assert relative_error(after, logits_under(model, replace(bias, b_KV=bias.b_KV.clone()), text)) < LAW


def test_a_replaced_field_is_recorded_as_that_of_any_other(rotary):
    way = Landmark(n_keys=3, n_continuations=4, continuation_length=5, n_held_out=0)
    bias = convert_prompt(rotary, PROMPT, method=way, verbose=False)
    assert replace(bias.compact(), n_prompt_tokens=N_PROMPT).fit is bias.fit
    b_kv = bias.padded().b_KV * 2
    assert "b_KV replaced" in replace(bias.compact(), b_KV=b_kv).fit.history[-1]
    whole = bias.padded()
    fields = dict(b_KV=whole.b_KV, b_D=whole.b_D * 2, features=whole.features)
    assert "b_D" in replace(bias.compact(), **fields).fit.history[-1]


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_cache_of_transformers_is_no_wider_than_its_layers(family):
    hf, model = (tiny_hf_model(family) for _ in range(2))
    model = KVTransformerBridge.boot_transformers(model)
    bias = compact_of(thinned(convert_prompt(model, PROMPT)))
    caches = [each.to_cache() for each in (bias, bias.padded())]
    hf.set_attn_implementation("kvlens")
    text = tokens(1, 5, seed=1)
    assert relative_error(*(hf(text, past_key_values=cache).logits for cache in caches)) < LAW
    sizes = [sum(layer.keys.numel() for layer in each.to_cache().layers) for each in (bias, bias.padded())]
    assert sizes[0] < sizes[1]
