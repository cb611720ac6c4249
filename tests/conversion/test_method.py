"""A method is one class, the same object from its name and options; prompts and sizes at its limits give finite numbers.

Methods that keep some keys unchanged: the selected keys, against TransformerLens' own attention patterns.
"""

import inspect
import io
import re
import sys
import warnings
from dataclasses import dataclass, fields
from typing import ClassVar

import pytest
import torch
from precision import LAW, relative_error
from small_models import peaked, sharp, small_model, tokens
from tiny_text_model import tiny_text_model
from tqdm.auto import tqdm

import kvlens
from kvlens import KVBias, KVLensError, convert_prompt
from kvlens.conversion import (
    METHODS,
    Approximation,
    AttentionMatching,
    EluKernel,
    Exact,
    KVzip,
    Landmark,
    Learned,
    RandomProjections,
    TaylorPolynomial,
    Teacher,
    TextOptions,
    features,
    method_of,
    option_names,
)
from kvlens.conversion.few_keys import FewKeys
from kvlens.conversion.gradients import logit_metrics

PROMPT = tokens(1, 12)[0]
FEW = dict(n_continuations=2, continuation_length=4, n_held_out=1, seed=3)
SHORTHAND = {
    "exact": (Exact(), {}),
    "landmark": (Landmark(n_keys=4, budget="equal", key_steps=3, **FEW), dict(n_features=4, budget="equal", key_steps=3)),
    "attention_matching": (AttentionMatching(n_keys=4, keys="attention", **FEW), dict(n_features=4, keys="attention")),
    "kvzip": (KVzip(n_keys=4, **FEW), dict(n_features=4)),
    "random": (
        RandomProjections(n_features=5, random_feature_kind="iid", **FEW),
        dict(n_features=5, random_feature_kind="iid"),
    ),
    "taylor": (TaylorPolynomial(**FEW), {}),
    "elu_plus_one": (EluKernel(**FEW), {}),
    "learned": (Learned(n_features=4, kernel="hedgehog", **FEW), dict(n_features=4, kernel="hedgehog")),
}


@dataclass(frozen=True, kw_only=True)
class Half(Approximation):
    """Every key at half its weight.

    Attributes:
        factor: of the weights.
    """

    name: ClassVar[str] = "half"

    factor: float = 0.5

    def fit(self, teacher: Teacher) -> KVBias:
        return self.factor * teacher.exact.bias


def model():
    return small_model(n_ctx=40, positional_embedding_type="rotary")


def test_every_method_has_shorthand_here():
    assert list(SHORTHAND) == list(METHODS)
    assert kvlens.Landmark is Landmark


@pytest.mark.parametrize("name", SHORTHAND)
def test_a_name_with_options_is_the_object(name, monkeypatch):
    monkeypatch.setattr("kvlens.conversion.features.STEPS", 3)
    method, options = SHORTHAND[name]
    options = {**options, **({} if name == "exact" else FEW)}
    assert method_of(name, options) == method and type(method) is METHODS[name]
    by_name = convert_prompt(model(), PROMPT, method=name, verbose=False, **options)
    by_object = convert_prompt(model(), PROMPT, method=method, verbose=False)
    assert torch.equal(by_name.stacked("b_kv"), by_object.stacked("b_kv")) and torch.equal(
        by_name.stacked("b_d"), by_object.stacked("b_d")
    )
    if name != "exact":
        assert by_object.fit.method == name
        assert by_name.fit.settings == by_object.fit.settings == method.to_json()
        assert set(by_object.fit.settings) == {field.name for field in fields(method)}  # its own options alone
        assert by_object.fit.settings["reference"] == "prompt, blanks and own continuations"


FITS = {name: method for name, (method, _) in SHORTHAND.items() if name != "exact"} | {
    "moved and polished": Landmark(n_keys=4, key_steps=2, polish_steps=2, **FEW),
    "as they are": Landmark(n_keys=4, fitted=False, **FEW),
    "on policy": AttentionMatching(n_keys=4, budget="logits", on_policy=True, **FEW),
}


@pytest.mark.parametrize("name", FITS)
def test_a_fit_tells_how_far_it_is(name, monkeypatch):
    monkeypatch.setattr("kvlens.conversion.features.STEPS", 3)
    done = []
    convert_prompt(model(), PROMPT, method=FITS[name], verbose=False, on_progress=done.append)
    assert done == sorted(done) and done[0] < 0.5 and done[-1] == 1.0 and len(done) > 2


def test_a_method_of_ones_own_need_not_name_its_steps():
    @dataclass(frozen=True, kw_only=True)
    class Weighed(Half):
        fits_on_text: ClassVar[bool] = True

        def fit(self, teacher: Teacher) -> KVBias:
            logit_metrics(teacher)
            return super().fit(teacher)

    assert convert_prompt(model(), PROMPT, method=Weighed(**FEW), verbose=False).fit.method == "half"


class Terminal(io.StringIO):
    def isatty(self):
        return True


class OftenDrawn(tqdm):
    def __init__(self, **options):
        super().__init__(mininterval=0, miniters=0, **options)


@pytest.mark.parametrize("verbose", [True, False])
def test_the_bar_of_a_fit_names_its_step_and_leaves_nothing_behind(verbose, monkeypatch):
    monkeypatch.setattr("kvlens.conversion.convert.SHOWN_AFTER", 0)
    monkeypatch.setattr("tqdm.auto.tqdm", OftenDrawn)
    monkeypatch.setattr(sys, "stderr", Terminal())
    convert_prompt(model(), PROMPT, method=Landmark(n_keys=4, key_steps=3, **FEW), verbose=verbose)
    shown = sys.stderr.getvalue()
    assert ("moving keys" in shown) == verbose and shown.split("\r")[-1].strip() == ""


@pytest.mark.parametrize("kind", [*METHODS.values(), TextOptions])
def test_the_docstring_tells_every_option(kind):
    for field in fields(kind):
        assert re.search(rf"\b{field.name}\b.*:", inspect.getdoc(kind).partition("Attributes:")[2]), field.name


def test_a_custom_method_works_as_an_object_and_by_name(monkeypatch):
    exact = convert_prompt(model(), PROMPT)
    bias = convert_prompt(model(), PROMPT, method=Half(**FEW))
    assert torch.equal(bias.stacked("b_kv"), 0.5 * exact.stacked("b_kv")) and torch.equal(
        bias.stacked("b_d"), 0.5 * exact.stacked("b_d")
    )
    assert (bias.fit.method, bias.fit.settings["factor"], bias.fit.n_reference_tokens) == ("half", 0.5, 0)
    assert float(bias.fit.answers.logits_error) > 0.01 and bool((bias.fit.head_output_error > 0).all())
    with pytest.raises(KVLensError, match="method must be one of exact, landmark"):
        convert_prompt(model(), PROMPT, method="half")
    monkeypatch.setitem(METHODS, "half", Half)
    assert torch.equal(convert_prompt(model(), PROMPT, method="half", factor=1.0, **FEW).stacked("b_kv"), exact.stacked("b_kv"))


def test_what_fit_returns_is_finite(monkeypatch):
    monkeypatch.setattr(Half, "fit", lambda self, teacher: torch.nan * teacher.exact.bias)
    with pytest.raises(KVLensError):
        convert_prompt(model(), PROMPT, method=Half(**FEW))


def test_an_approximation_without_a_fit_cannot_be_made():
    with pytest.raises(TypeError, match="abstract"):
        Approximation()


def test_linear_models_take_the_exact_method_alone():
    linear = small_model(attention="linear")
    plain = convert_prompt(linear, PROMPT)
    for method in ("exact", Exact()):
        assert torch.equal(convert_prompt(linear, PROMPT, method=method).stacked("b_kv"), plain.stacked("b_kv"))
    for method in ("taylor", TaylorPolynomial()):
        with pytest.raises(KVLensError, match="method: with linear attention the conversion is always exact"):
            convert_prompt(linear, PROMPT, method=method)


QUICK = dict(n_continuations=4, continuation_length=6, n_held_out=2)
PROMPTS = {"one token": tokens(1, 1)[0], "repeated token": torch.full((9,), 5), "plain": tokens(1, 9)[0]}
SIZES = {"one key": dict(n_features=1), "some": dict(n_features=4), "as many as tokens": dict(n_features=9)}
METHODS_AND_SIZES = [
    pytest.param(name, options, id=f"{name}, {size}")
    for name, kind in METHODS.items()
    for size, options in SIZES.items()
    if size == "some" or issubclass(kind, FewKeys)
]
TEXT = tokens(2, 5, seed=7)


def in_extremes(dtype=torch.float64):
    """Attention so sharp that a prompt gets all of it, up to rounding, at some queries and none at others."""
    return peaked("softmax, rotary, grouped", peak=60, n_ctx=64, dtype=dtype)


@pytest.fixture(scope="module")
def sharp_model():
    return in_extremes(torch.float32)


def options_of(method, options):
    return {name: value for name, value in options.items() if name in option_names(METHODS[method])}


def finite(bias: KVBias) -> bool:
    numbers = [bias.stacked("b_kv"), bias.stacked("b_d")]
    if bias.fit is not None:
        numbers += [bias.fit.head_output_error, bias.fit.mass_error, *bias.fit.answers.to_tensors().values()]
    return all(bool(x.isfinite().all()) for x in numbers)


@pytest.mark.parametrize(("method", "options"), METHODS_AND_SIZES)
def test_any_prompt_gives_finite_numbers_and_a_record(sharp_model, method, options, monkeypatch):
    monkeypatch.setattr(features, "STEPS", 5)
    for prompt in PROMPTS.values():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of more keys than tokens
            bias = convert_prompt(sharp_model, prompt, method=method, **options_of(method, {**QUICK, **options}), verbose=False)
        with sharp_model.kv_bias(bias):
            logits = sharp_model(TEXT)
        assert finite(bias) and bool(logits.isfinite().all())
        if bias.fit is None:  # every key is kept
            assert torch.equal(bias.stacked("b_kv"), convert_prompt(sharp_model, prompt).stacked("b_kv"))
        else:
            assert bias.fit.method == method


def test_every_key_kept_is_any_prompt():
    model = in_extremes()
    for prompt in PROMPTS.values():
        whole = model(torch.cat([prompt.expand(2, -1), TEXT], dim=1))[:, len(prompt) :]
        with model.kv_bias(convert_prompt(model, prompt)):
            assert relative_error(model(TEXT), whole) < LAW


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("method", "options"), [each for each in METHODS_AND_SIZES if "some" in each.id])
def test_padded_prompts_are_converted_like_single_ones(method, options, monkeypatch):
    """On the same reference text; random continuations differ between a batch and a single prompt."""
    monkeypatch.setattr(features, "STEPS", 5)
    if method == "learned":
        pytest.skip("its features are learned for all prompts of a batch together")
    model = tiny_text_model(attention="softmax", kv_shift=None, gain=8, dtype=torch.float64)
    prompts = ["The widget is purple and the gadget is green.", "widget", "Return the gadget. Frobnicate both of them."]
    text = dict(reference=" the widget is green and the gadget is purple", n_held_out=0, continuation_length=2, key_steps=10)
    given = options_of(method, {**text, **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batch = convert_prompt(model, prompts, method=method, verbose=False, **given)
        singles = [convert_prompt(model, prompt, method=method, verbose=False, **given) for prompt in prompts]
    for row, single in enumerate(singles):
        with model.kv_bias(batch.select_prompt(row)):
            one = model(" The widget", prepend_bos=False)
        with model.kv_bias(single):
            assert torch.allclose(one, model(" The widget", prepend_bos=False), atol=1e-8), row


N, KEPT = 14, 6
KEEPING = KVzip(n_keys=KEPT, n_continuations=2, continuation_length=4, n_held_out=0)


def peaked_model(**changes):
    return sharp("softmax, rotary, grouped", gain=1, n_heads=4, n_key_value_heads=2, d_head=8, d_model=32, **changes)


def kept_positions(bias) -> list[list[set[int]]]:
    """By layer and key-value head; the bias of one prompt."""
    distance, on = bias.stacked("distance"), bias.stacked("b_d") != 0
    return [[{N - int(d) for d in distance[i, g][on[i, g]]} for g in range(on.shape[1])] for i in range(on.shape[0])]


def patterns(it, text) -> list[torch.Tensor]:
    """[head, query, key] of every layer."""
    _, cache = it.run_with_cache(text)
    return [cache["pattern", layer][0] for layer in range(it.cfg.n_layers)]


def by_group(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(0, (2, -1))


def test_kvzip_keeps_keys_as_they_are():
    it, prompt = peaked_model(), tokens(1, N)[0]
    bias, exact = convert_prompt(it, prompt, method=KEEPING, verbose=False), convert_prompt(it, prompt)
    on = bias.stacked("b_d") != 0
    assert bool(((bias.stacked("b_d") == 1) | ~on).all())
    assert float(on.sum(dim=-1).double().mean()) == KEPT
    place = (N - bias.stacked("distance"))[..., None].expand_as(bias.stacked("b_kv"))
    assert torch.equal(bias.stacked("b_kv"), exact.stacked("b_kv").gather(2, place) * on[..., None])
    assert torch.equal(bias.stacked("keys") * on[..., None], exact.stacked("keys").gather(2, place) * on[..., None])


def test_kvzip_keeps_what_repeating_the_prompt_attends_to():
    it, prompt = peaked_model(), tokens(1, N)[0]
    kept = kept_positions(convert_prompt(it, prompt, method=KEEPING, verbose=False))
    largest = torch.stack([by_group(each[:, N:, :N].amax(dim=1)).amax(dim=1) for each in patterns(it, prompt.repeat(2))])
    largest[..., :4] = 9.0
    threshold = largest.flatten().topk(KEPT * 4).values.min()
    for layer in range(2):
        for g in range(2):
            assert kept[layer][g] == set((largest[layer, g] >= threshold).nonzero().flatten().tolist())
