"""Approximate conversions on the bridge: the fits of the other front end, and the same laws in every family of attention."""

from functools import partial

import pytest
import torch
from bridge_models import some_tokens
from precision import LAW, relative_error
from tiny_hf import tiny_hf_model

from kvlens import KVBias, KVLensError, KVTransformerBridge, convert_prompt
from kvlens.conversion import (
    AttentionMatching,
    KVzip,
    Landmark,
    Learned,
    RandomProjections,
    TaylorPolynomial,
)
from kvlens.conversion.gradients import effects_on_logits
from kvlens.conversion.prompt import PromptBatch
from kvlens.model import attention_parts
from kvlens.ops.softmax_features import virtual_key_scores

PROMPT, TEXT = some_tokens(20), some_tokens(3, 10, seed=1)
FEW = dict(n_continuations=9, continuation_length=6, n_held_out=2)
METHODS = [
    Landmark(n_keys=5, budget="equal", key_steps=3, **FEW),
    Landmark(n_keys=5, key_steps=0, polish_steps=2, **FEW),
    Landmark(n_keys=5, key_steps=0, reference="prompt", **FEW),
    AttentionMatching(n_keys=5, on_policy=True, **FEW),
    KVzip(n_keys=6, n_sink=1, **FEW),
    RandomProjections(n_features=7, **FEW),
    TaylorPolynomial(**FEW),
    Learned(n_features=4, **FEW),
]
FAMILIES = ["gpt2", "opt", "llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_5", "falcon_h1"]
"""Learned positions; scaled queries; grouped heads; a soft cap and windows; sinks; latent attention; a gate, among states;
states beside it."""
REST = ["gpt_neox", "gptj", "phi3", "qwen3", "gemma3", "olmo2", "smollm3", "granite"]
REST += ["kimi_linear", "nemotron_h", "minimax", "lfm2"]


FITTED = 1e-9
"""Of fitted numbers: their systems have condition numbers of up to 1 / ``RIDGE_WEIGHTS``, 1e9, by which rounding grows."""


def slow(families):
    return [pytest.param(family, marks=pytest.mark.slow) for family in families]


def error(model, bias: KVBias) -> float:
    """The relative error of the logits on a text that no fit has read."""
    with torch.no_grad():
        whole = model.logits_on(TEXT, TEXT.shape[1], before=PROMPT.expand(3, -1))
        with model.kv_bias(bias):
            return float((model.logits_on(TEXT, TEXT.shape[1]) - whole).norm() / whole.norm())


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("family", "method"),
    [*(("gpt2", method) for method in METHODS), *((family, method) for family in ("opt", "llama") for method in METHODS[::3])],
    ids=lambda of: of if isinstance(of, str) else f"{of.name} {getattr(of, 'budget', '')}",
)
def test_both_front_ends_fit_the_same_bias(family, method, both_of, monkeypatch):
    monkeypatch.setattr("kvlens.conversion.features.STEPS", 20)
    theirs, ours = (convert_prompt(model, PROMPT, method=method, verbose=False) for model in both_of(family))
    assert theirs.fit.settings == ours.fit.settings and torch.equal(theirs.fit.n_keys, ours.fit.n_keys)
    part = theirs.attention[0]
    names = {**part.tensors(), **part.features.tensors()}
    pairs = {name: (theirs.stacked(name), ours.stacked(name)) for name in names}
    pairs |= {name: (getattr(theirs.fit, name), getattr(ours.fit, name)) for name in ("head_output_error", "mass_error")}
    pairs["logits"] = theirs.fit.answers.logits_error, ours.fit.answers.logits_error
    for name, (a, b) in pairs.items():
        assert relative_error(b, a) < (FITTED if method.fits_on_text and name in ("b_kv", "b_d") else LAW), name


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", [*FAMILIES, *slow(REST)], scope="module")
def test_the_queries_and_the_rule_are_those_of_the_scores(model):
    """log n of every head, once more from the queries, the keys of the bias and of the text, and the rule."""
    bias = convert_prompt(model, PROMPT)
    with model.holding(bias):
        read = model.read_queries(TEXT)
        keys = model.read_prompt(PromptBatch(TEXT, None, True)).keys
    n, positions = TEXT.shape[1], torch.arange(TEXT.shape[1])[None]
    assert len(read) == len(keys) == len(attention_parts(model)) > 0
    for layer, (part, (q, _, log_n)) in enumerate(zip(attention_parts(model), read, strict=True)):
        rule, whole = part.score_rule(), bias.attention[layer]
        of_bias = virtual_key_scores(q, whole.keys, rule, whole.distance, positions)
        of_text = virtual_key_scores(q, keys[layer], rule._replace(window=None))
        apart = positions[0][:, None] - positions[0]
        unseen = (apart < 0) | (apart >= (rule.window or n))
        parts = [of_bias.logsumexp(dim=-1), of_text.masked_fill(unseen[None, :, None], -torch.inf).logsumexp(dim=-1)]
        parts += [] if part.sinks is None else [part.sinks.expand_as(log_n)]
        assert relative_error(torch.stack(parts).logsumexp(dim=0), log_n) < LAW


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", *slow(["gemma2", "qwen3_5", "falcon_h1"])], scope="module")
def test_more_fitted_keys_are_nearer_to_the_prompt_and_all_of_them_are_exact(model):
    """On GPT-2 and Llama the fits are those of the other front end: above."""
    at = dict(n_continuations=16, continuation_length=5, n_held_out=1)
    exact = convert_prompt(model, PROMPT)
    found = {r: convert_prompt(model, PROMPT, method=Landmark(n_keys=r, key_steps=3, **at)) for r in (2, 8, 20)}
    for name in ("b_kv", "keys"):
        assert torch.equal(found[20].stacked(name), exact.stacked(name))
    without = convert_prompt(model, PROMPT, method=KVzip(n_keys=8, n_sink=1, **at))
    unfitted = convert_prompt(model, PROMPT, method=Landmark(n_keys=8, fitted=False, **at))
    errors = {r: error(model, bias) for r, bias in found.items()}
    assert errors[20] < LAW < errors[8] < errors[2] and errors[8] < min(error(model, b) for b in (without, unfitted))
    fit = found[8].fit
    assert fit.head_output_error.shape == (len(attention_parts(model)), model.cfg.n_heads)
    assert float(fit.answers.logits_error) < float(without.fit.answers.logits_error)


@pytest.mark.parametrize("family", ["deepseek_v3", *slow(["qwen3_5"])], scope="module")
def test_features_that_are_not_keys_are_read_and_stored(model, tmp_path, monkeypatch):
    """In the dimension of keys, which in latent attention is not that of values."""
    monkeypatch.setattr("kvlens.conversion.features.STEPS", 60)
    exact = convert_prompt(model, PROMPT)
    dropped = error(model, exact.map_layers(lambda layer: layer.of_attention(lambda part: part.times(0.0))))
    for method in (RandomProjections(n_features=1000, **FEW), Learned(n_features=16, **FEW), TaylorPolynomial(**FEW)):
        bias = convert_prompt(model, PROMPT, method=method, verbose=False)
        assert error(model, bias) < 0.5 * dropped
        bias.save(tmp_path / f"{method.name}.safetensors")
        assert error(model, KVBias.load(tmp_path / f"{method.name}.safetensors")) == error(model, bias)


@pytest.mark.parametrize("family", ["gpt2", "qwen3_5"], scope="module")
def test_the_effect_of_an_output_is_what_a_small_change_of_it_does(model):
    """In front of the gate where there is one."""
    bias, texts = convert_prompt(model, PROMPT), TEXT[:2]
    found = effects_on_logits(model, bias, texts, [3, 4])
    part = attention_parts(model)[0]
    with model.holding(bias), torch.no_grad():
        logits = model(texts)
        generators = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
        direction = torch.stack([torch.randn(logits.shape[1:], generator=each) for each in generators]).double()
        gate: list[torch.Tensor] = []
        if "gate" in part.attention_points():
            point, form = part.attention_points()["gate"]
            handle = point.register_forward_hook(lambda module, args, x: gate.append(form(x)))
            model(texts)
            handle.remove()

        def moved(z, hook, by):
            z = z.clone()
            z[1, 6, 0, 2] += by * (1 if not gate else gate[0][1, 6, 0, 2])
            return z

        hooks = ((f"blocks.{part.layer}.attn.hook_z", partial(moved, by=by)) for by in (1e-5, -1e-5))
        above, below = (model.run_with_hooks(texts, fwd_hooks=[hook]) for hook in hooks)
    slope = (direction * (above - below) / logits.norm(dim=-1, keepdim=True)).sum() / 2e-5
    # of two steps h, off by h^2 and by float64's rounding over h, both about 1e-10 of a slope of order 1
    assert float(found[0][1, 6, 0, 2]) == pytest.approx(float(slope), rel=1e-7)


def test_what_cannot_work_is_refused(bridge_of):
    mamba2, gemma2 = bridge_of("mamba2"), bridge_of("gemma2")
    llama = KVTransformerBridge.boot_transformers(tiny_hf_model("llama"))
    for model, method in ((mamba2, "landmark"), (gemma2, "random")):
        with pytest.raises(KVLensError):
            convert_prompt(model, PROMPT, method=method, n_features=4)
    part = llama.layers()[1].parts[0]
    part.rule = part.rule._replace(scale=3 * part.rule.scale)
    with pytest.raises(KVLensError):
        convert_prompt(llama, PROMPT, method="landmark", n_features=4)
