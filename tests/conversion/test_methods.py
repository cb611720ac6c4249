"""A conversion method is one class: the same object from its name and options, and a clear answer to a wrong option."""

import inspect
import re
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import pytest
import torch
from small_models import small_model, tokens

import kvlens
from kvlens import KVLensError, convert_prompt
from kvlens.conversion import (
    H2O,
    METHODS,
    Approximation,
    AttentionMatching,
    EluPlusOne,
    Exact,
    ExpectedAttention,
    KVzip,
    Landmark,
    Learned,
    RandomProjections,
    SnapKV,
    StreamingLLM,
    Taylor,
    Teacher,
    TextOptions,
    method_of,
)
from kvlens.conversion_methods import CONVERSION_METHODS
from kvlens.kv_bias import KVBias

PROMPT = tokens(1, 12)[0]
FEW = dict(n_continuations=2, continuation_length=4, n_held_out=1, seed=3)
SHORTHAND = {
    "exact": (Exact(), {}),
    "landmark": (Landmark(n_keys=4, budget="equal", **FEW), dict(n_features=4, budget="equal")),
    "attention_matching": (AttentionMatching(n_keys=4, keys="attention", **FEW), dict(n_features=4, keys="attention")),
    "streaming_llm": (StreamingLLM(n_keys=4, n_sink=1, **FEW), dict(n_features=4, n_sink=1)),
    "h2o": (H2O(n_keys=4, **FEW), dict(n_features=4)),
    "snapkv": (SnapKV(n_keys=4, window=2, **FEW), dict(n_features=4, window=2)),
    "expected_attention": (ExpectedAttention(ratio=0.5, **FEW), dict(ratio=0.5)),
    "kvzip": (KVzip(n_keys=4, **FEW), dict(n_features=4)),
    "random": (
        RandomProjections(n_features=5, random_feature_kind="iid", **FEW),
        dict(n_features=5, random_feature_kind="iid"),
    ),
    "taylor": (Taylor(**FEW), {}),
    "elu_plus_one": (EluPlusOne(**FEW), {}),
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
    assert list(SHORTHAND) == list(METHODS) == list(CONVERSION_METHODS)
    assert kvlens.Landmark is Landmark


@pytest.mark.parametrize("name", SHORTHAND)
def test_a_name_with_options_is_the_object(name, monkeypatch):
    monkeypatch.setattr("kvlens.conversion.softmax.learned.STEPS", 3)
    method, options = SHORTHAND[name]
    options = {**options, **({} if name == "exact" else FEW)}
    assert method_of(name, options) == method and type(method) is METHODS[name]
    by_name = convert_prompt(model(), PROMPT, method=name, verbose=False, **options)
    by_object = convert_prompt(model(), PROMPT, method=method, verbose=False)
    assert torch.equal(by_name.b_KV, by_object.b_KV) and torch.equal(by_name.b_D, by_object.b_D)
    if name != "exact":
        assert by_object.fit.method == name
        assert by_name.fit.settings == by_object.fit.settings == method.to_json()
        assert set(by_object.fit.settings) == {field.name for field in fields(method)}  # its own options alone
        assert by_object.fit.settings["reference"] == "prompt and own continuations"


@pytest.mark.parametrize("kind", [*METHODS.values(), TextOptions])
def test_the_docstring_tells_every_option(kind):
    for field in fields(kind):
        assert re.search(rf"\b{field.name}\b.*:", inspect.getdoc(kind).partition("Attributes:")[2]), field.name


def test_a_custom_method_works_as_an_object_and_by_name(monkeypatch):
    exact = convert_prompt(model(), PROMPT)
    bias = convert_prompt(model(), PROMPT, method=Half(**FEW))
    assert torch.equal(bias.b_KV, 0.5 * exact.b_KV) and torch.equal(bias.b_D, 0.5 * exact.b_D)
    assert (bias.fit.method, bias.fit.settings["factor"], bias.fit.n_reference_tokens) == ("half", 0.5, 0)
    assert float(bias.fit.answers.logits_error) > 0.01 and bool((bias.fit.head_output_error > 0).all())
    with pytest.raises(KVLensError, match="method must be one of exact, landmark"):
        convert_prompt(model(), PROMPT, method="half")
    monkeypatch.setitem(METHODS, "half", Half)
    assert torch.equal(convert_prompt(model(), PROMPT, method="half", factor=1.0, **FEW).b_KV, exact.b_KV)


@pytest.mark.unhooked
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda bias: bias.select_prompt(0), "a batch axis of 1 prompts, got none"),
        (lambda bias: replace(bias, b_D=bias.b_D * torch.nan), "Half.fit: b_D of layer 0 is not finite"),
    ],
)
def test_what_fit_returns_is_checked(monkeypatch, change, words):
    monkeypatch.setattr(Half, "fit", lambda self, teacher: change(teacher.exact.bias))
    with pytest.raises(KVLensError, match=words):
        convert_prompt(model(), PROMPT, method=Half(**FEW))


def test_an_approximation_without_a_fit_cannot_be_made():
    with pytest.raises(TypeError, match="abstract"):
        Approximation()


def test_linear_models_take_the_exact_method_alone():
    linear = small_model(attention="linear")
    plain = convert_prompt(linear, PROMPT)
    for method in ("exact", Exact()):
        assert torch.equal(convert_prompt(linear, PROMPT, method=method).b_KV, plain.b_KV)
    for method in ("taylor", Taylor()):
        with pytest.raises(KVLensError, match="method: with linear attention the conversion is always exact"):
            convert_prompt(linear, PROMPT, method=method)
