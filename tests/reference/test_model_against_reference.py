"""The whole model and conversion against ``design_reference``, which uses neither kvlens nor TransformerLens."""

import functools
import math
from typing import Any

import design_reference as judge
import pytest
import torch
from precision import LAW, relative_error
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

from kvlens import HookedKVTransformer, HookedKVTransformerConfig, KVBias, KVShiftConfig, convert_prompt
from kvlens.corpus import train_bpe_tokenizer

SIZES = dict(n_layers=2, d_model=30, d_head=6, n_heads=5, n_ctx=43, act_fn="gelu", device="cpu", dtype=torch.float64)
SMALL = dict(attn_only=True, normalization_type=None)
GROUPED = dict(n_heads=6, d_model=36, n_key_value_heads=3)

VARIANTS: dict[str, dict[str, Any]] = {
    # feature map x normalizer x placement of RoPE
    "identity, kernel, after": dict(feature_map="identity"),
    "identity, none, after": dict(feature_map="identity", normalizer="none"),
    "identity, none, before": dict(feature_map="identity", normalizer="none", rotary_placement="before"),
    "elu, kernel, after": dict(feature_map="elu_plus_one"),
    "elu, kernel, before": dict(feature_map="elu_plus_one", rotary_placement="before"),
    "elu, none, after": dict(feature_map="elu_plus_one", normalizer="none"),
    "relu, kernel, after": dict(feature_map="relu"),
    "relu, kernel, before": dict(feature_map="relu", rotary_placement="before"),
    "relu, none, after": dict(feature_map="relu", normalizer="none"),
    "random, kernel, before": dict(feature_map="random", n_random_features=7),
    "random, none, before": dict(feature_map="random", n_random_features=11, random_feature_kind="iid", normalizer="none"),
    "random, kernel, after": dict(feature_map="random", n_random_features=6, rotary_placement="after"),
    "taylor, kernel, before": dict(feature_map="taylor"),
    "taylor, none, before": dict(feature_map="taylor", normalizer="none"),
    "hedgehog, kernel, before": dict(feature_map="hedgehog"),
    "hedgehog, none, before": dict(feature_map="hedgehog", normalizer="none"),
    # rotary
    "part of the head, after": dict(rotary_dim=4),
    "part of the head, before": dict(rotary_dim=2, rotary_placement="before"),
    "adjacent pairs, after": dict(rotary_adjacent_pairs=True, rotary_dim=4, rotary_base=300),
    "adjacent pairs, before": dict(rotary_adjacent_pairs=True, rotary_placement="before"),
    # other positions
    "learned positions": dict(positional_embedding_type="standard"),
    "sinusoidal positions": dict(positional_embedding_type="sinusoidal"),
    "no positions": dict(positional_embedding_type="none"),
    "no positions, taylor": dict(positional_embedding_type="none", feature_map="taylor"),
    # shift
    "no shift": dict(kv_shift=None),
    "keys only": dict(kv_shift=KVShiftConfig(values=False)),
    "values only": dict(kv_shift=KVShiftConfig(window=2, keys=False)),
    "queries too, window 1": dict(kv_shift=KVShiftConfig(window=1, queries=True)),
    "queries too, window 3": dict(kv_shift=KVShiftConfig(window=3, queries=True)),
    "queries only, before": dict(kv_shift=KVShiftConfig(keys=False, values=False, queries=True), rotary_placement="before"),
    "gate, window 1": dict(kv_shift=KVShiftConfig(parametrization="gate")),
    "gate, window 3": dict(kv_shift=KVShiftConfig(window=3, parametrization="gate", queries=True)),
    "clamp, window 2": dict(kv_shift=KVShiftConfig(window=2, parametrization="clamp")),
    "window 3, learned": dict(kv_shift=KVShiftConfig(window=3), positional_embedding_type="standard"),
    # decay
    "decay, after": dict(normalizer="none", decay=[0.9, 0.8, 0.7, 0.6, 1.0]),
    "decay, before": dict(normalizer="none", decay=[0.9, 0.8, 0.7, 0.6, 1.0], rotary_placement="before"),
    "retnet, identity": dict(normalizer="none", decay="retnet", feature_map="identity"),
    "decay, no positions": dict(normalizer="none", decay=[0.3, 0.8, 0.5, 0.6, 0.9], positional_embedding_type="none"),
    # grouped heads
    "grouped": dict(**GROUPED, kv_shift=KVShiftConfig(window=2, queries=True)),
    "grouped, decay": dict(**GROUPED, normalizer="none", decay=[0.9, 0.8, 0.7, 0.6, 0.5, 1.0]),
    "grouped, hedgehog": dict(**GROUPED, feature_map="hedgehog"),
    "grouped, random": dict(**GROUPED, feature_map="random", n_random_features=7),
    "grouped, one key-value head": dict(**{**GROUPED, "n_key_value_heads": 1}, rotary_placement="before"),
    # trained biases
    "trained bias, after": dict(trainable_kv_bias=True),
    "trained bias, before": dict(trainable_kv_bias=True, rotary_placement="before"),
    "trained bias, decay": dict(trainable_kv_bias=True, normalizer="none", decay=[0.9, 0.8, 0.7, 0.6, 1.0]),
    "trained bias, grouped": dict(**GROUPED, trainable_kv_bias=True),
    # the rest of a transformer
    "norms and MLP": dict(attn_only=False, normalization_type="LN"),
    "norms and MLP, grouped, learned": dict(
        **GROUPED, attn_only=False, normalization_type="LN", d_mlp=23, positional_embedding_type="standard"
    ),
    "one layer": dict(n_layers=1),
    "three layers": dict(n_layers=3),
    "norm on queries and keys": dict(use_qk_norm=True),
    "norm on queries and keys, before": dict(use_qk_norm=True, rotary_placement="before"),
    "no attention scale": dict(use_attn_scale=False, feature_map="taylor", normalizer="none"),
}
# For the questions that do not multiply: one variant a law of positions, shift, heads and bias.
OF_UNEQUAL_LENGTH = [
    "elu, kernel, after",
    "elu, kernel, before",
    "taylor, none, before",
    "random, kernel, before",
    "learned positions",
    "sinusoidal positions",
    "no positions",
    "queries too, window 3",
    "decay, after",
    "grouped, decay",
    "trained bias, before",
    "trained bias, decay",
    "norms and MLP, grouped, learned",
]


@functools.cache
def tokenizer():
    return train_bpe_tokenizer(["the cat sat on the mat and the dog ran to the man"] * 3, vocab_size=270)


@functools.cache
def model_and_spec(name: str) -> tuple[HookedKVTransformer, judge.Spec, judge.Weights]:
    """A model with weights large enough that nothing is nearly linear, its structure, and its weights in float64."""
    defaults = dict(
        attention="linear",
        positional_embedding_type="rotary",
        kv_shift=KVShiftConfig(window=2),
        seed=1,
        d_vocab=len(tokenizer()),
    )
    options = {**SIZES, **SMALL, **defaults, **VARIANTS[name]}
    model = HookedKVTransformer(HookedKVTransformerConfig(**options), tokenizer=tokenizer()).requires_grad_(False)
    redraw(model)
    weights = {key: value.double() for key, value in model.state_dict().items()}
    return model, spec_of(options), weights


def redraw(model: HookedKVTransformer) -> None:
    generator = torch.Generator().manual_seed(5)
    for name, parameter in sorted(model.named_parameters()):
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "b_D":
            parameter.data = drawn.abs() + 1  # a normalizer that is positive whatever the queries
        elif leaf in ("W_E", "W_pos", "b_KV"):
            parameter.data = drawn
        elif "_shift_coef" in leaf:
            parameter.data = 0.5 * drawn + torch.eye(1, drawn.shape[1], dtype=torch.float64)
        elif parameter.dim() == 1 or leaf.lstrip("_").startswith("b_"):
            parameter.data = parameter.data + 0.3 * drawn
        else:
            parameter.data = drawn / math.sqrt(parameter.shape[-2])


def spec_of(options: dict[str, Any]) -> judge.Spec:
    """The structure as it is defined, defaults included, from the arguments and not from the configuration object."""
    shift, positions = options["kv_shift"], options["positional_embedding_type"]
    feature_map = options.get("feature_map", "elu_plus_one")
    placement = "after" if feature_map in ("identity", "elu_plus_one", "relu") else "before"
    decay = options.get("decay")
    if decay == "retnet":
        decay = [1 - 2 ** (-5 - head) for head in range(options["n_heads"])]
    return judge.Spec(
        n_layers=options["n_layers"],
        n_heads=options["n_heads"],
        n_kv_heads=options.get("n_key_value_heads", options["n_heads"]),
        d_head=options["d_head"],
        feature_map=feature_map,
        normalizer=options.get("normalizer", "kernel"),
        positions=positions,
        attn_scale=math.sqrt(options["d_head"]) if options.get("use_attn_scale", True) else 1.0,
        rotary_placement=options.get("rotary_placement", placement) if positions == "rotary" else None,
        rotary_dim=options.get("rotary_dim", options["d_head"]),
        rotary_base=options.get("rotary_base", 10000),
        adjacent_pairs=options.get("rotary_adjacent_pairs", False),
        decay=None if decay is None else tuple(decay),
        parametrization="free" if shift is None else shift.parametrization,
        window=0 if shift is None else shift.window,
        layer_norm=options["normalization_type"] == "LN",
        mlp=not options["attn_only"],
    )


def tokens(batch: int, pos: int, seed: int) -> torch.Tensor:
    return torch.randint(0, len(tokenizer()), (batch, pos), generator=torch.Generator().manual_seed(seed))


def assert_same_bias(got: KVBias, expected: judge.Bias, spec: judge.Spec) -> None:
    assert relative_error(got.stacked("b_kv"), torch.stack([layer.b_KV for layer in expected.layers])) < LAW
    if spec.normalizer == "kernel":
        assert relative_error(got.stacked("b_d"), torch.stack([layer.b_D for layer in expected.layers])) < LAW
    else:
        assert not got.stacked("b_d").any()
    for letter in "kvq":
        rows = got.stacked(f"last_{letter}")
        if rows.shape[1]:
            wanted = torch.stack([layer.last[letter] for layer in expected.layers])
            assert relative_error(rows, wanted) < LAW
    assert (got.n_prompt_tokens, got.position_offset) == (expected.n_tokens, expected.offset)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", VARIANTS)
def test_padded_batches_equal_the_reference_without_the_padding(name):
    model, spec, weights = model_and_spec(name)
    x = tokens(3, 7, seed=2)
    # left, right and nothing; then both sides and the middle
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1], [0, 1, 0, 0, 1, 1, 0]])
    got = model(x, attention_mask=mask)
    for row in range(3):
        real = mask[row].bool()
        expected = judge.logits(spec, weights, x[row][real].tolist())
        assert relative_error(got[row][real], expected) < LAW


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", VARIANTS)
def test_conversions_of_two_prompts_in_a_row_equal_the_reference(name):
    model, spec, weights = model_and_spec(name)
    first, second, text = tokens(2, 5, seed=3), tokens(2, 2, seed=4), tokens(2, 4, seed=5)
    bias = convert_prompt(model, first)
    both = convert_prompt(model, second, initial=bias)
    with model.kv_bias(both):
        got = model(text)
    judged = judge.convert(spec, weights, first[1].tolist())  # the rows of a batch: below
    assert_same_bias(bias.select_prompt(1), judged, spec)
    judged = judge.convert(spec, weights, second[1].tolist(), judged)
    assert_same_bias(both.select_prompt(1), judged, spec)
    assert relative_error(got[1], judge.logits(spec, weights, text[1].tolist(), judged)) < LAW
    # and the reference itself: converted equals concatenated
    whole = torch.cat([first[1], second[1], text[1]]).tolist()
    assert relative_error(got[1], judge.logits(spec, weights, whole)[7:]) < LAW


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", OF_UNEQUAL_LENGTH)
def test_strings_of_unequal_length_equal_the_reference(name):
    model, spec, weights = model_and_spec(name)
    prompts, more = ["the cat", "t", "the dog ran to the man and sat"], [" sat on", " on the mat and", "e"]
    bias = convert_prompt(model, prompts)
    both = convert_prompt(model, more, initial=bias)
    text, mask = tokens(3, 5, seed=6), torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 0, 1, 0]])
    with model.kv_bias(both):
        got = model(text, attention_mask=mask)
    for row in range(3):
        ids = [tokenizer().bos_token_id, *tokenizer().encode(prompts[row], add_special_tokens=False)]
        judged = judge.convert(spec, weights, ids)
        assert_same_bias(bias.select_prompt(row), judged, spec)
        judged = judge.convert(spec, weights, tokenizer().encode(more[row], add_special_tokens=False), judged)
        assert_same_bias(both.select_prompt(row), judged, spec)
        real = mask[row].bool()
        expected = judge.logits(spec, weights, text[row][real].tolist(), judged)
        assert relative_error(got[row][real], expected) < LAW


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", OF_UNEQUAL_LENGTH)
def test_decoding_on_a_converted_prompt_equals_the_reference(name):
    model, spec, weights = model_and_spec(name)
    prompt, text = tokens(1, 1, seed=7), tokens(1, 6, seed=8)  # a prompt shorter than the window
    cache = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", 1)
    with model.kv_bias(convert_prompt(model, prompt)):
        pieces = [model(text[:, i:j], past_kv_cache=cache) for i, j in ((0, 1), (1, 4), (4, 5), (5, 6))]
    judged = judge.convert(spec, weights, prompt[0].tolist())
    assert relative_error(torch.cat(pieces, 1)[0], judge.logits(spec, weights, text[0].tolist(), judged)) < LAW


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", OF_UNEQUAL_LENGTH)
def test_gradients_through_conversion_and_text_equal_the_reference(name):
    model, spec, weights = model_and_spec(name)
    prompt, text = tokens(1, 4, seed=11), tokens(1, 5, seed=12)
    parameters = dict(model.requires_grad_(True).named_parameters())
    try:
        with model.kv_bias(convert_prompt(model, prompt, detach=False)):
            loss = (model(text)[0].square()).sum()
        got = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        judged = judge.convert(spec, {**weights, **parameters}, prompt[0].tolist())
        loss = judge.logits(spec, {**weights, **parameters}, text[0].tolist(), judged).square().sum()
        expected = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    finally:
        model.requires_grad_(False)
    assert [g is None for g in got] == [g is None for g in expected]
    both = [(a, b) for a, b in zip(got, expected, strict=True) if a is not None]
    got, expected = (torch.cat([pair[i].flatten() for pair in both]) for i in (0, 1))
    assert relative_error(got, expected) < LAW


def test_a_rebased_bias_still_fits_far_from_the_origin():
    """R_{-M} of hundreds of positions."""
    model, spec, weights = model_and_spec("adjacent pairs, after")
    n = 200
    prompt, text = tokens(1, n, seed=9), tokens(1, 3, seed=10)
    with model.kv_bias(convert_prompt(model, prompt)):
        got = model(text)[0]
    expected = judge.logits(spec, weights, torch.cat([prompt, text], dim=1)[0].tolist())[n:]
    assert relative_error(got, expected) < LAW
