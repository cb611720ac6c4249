"""What a model, its configuration and its loading refuse, since it would give wrong numbers in silence."""

import functools
import math
from dataclasses import fields

import pytest
import torch
from small_models import SIZES as SHIFTED
from small_models import linear_model, plain_model, small_model, tokens
from tiny_hf import tiny_hf_model
from tiny_text_model import TEXT, linear, softmax, tiny_text_model
from transformers import BertConfig, BertLMHeadModel, GPT2Model

from kvlens import HookedKVTransformer, HookedKVTransformerConfig, KVShiftConfig, convert_prompt
from kvlens.model import HookedKVRegressor
from kvlens.pretrained import import_shift_coefficients, load_pretrained_parts, official_name

pytestmark = [pytest.mark.unhooked, pytest.mark.usefixtures("no_network")]  # the messages are kvlens' own

SIZES = dict(n_layers=2, d_model=12, d_head=4, n_ctx=16, d_vocab=11, act_fn="gelu", device="cpu", seed=0)


def config(**changes):
    return HookedKVTransformerConfig(**{**SIZES, **changes})


def variant(**more):
    changes = {name: more.pop(name) for name in list(more) if name in FIELDS}
    return config(attention_variant=more, **changes)


def generate(**given):
    return linear().generate(**{"input": TEXT, "max_new_tokens": 2, "verbose": False, **given})


def forward(**given):
    return linear()(**{"input": linear().to_tokens(TEXT), **given})


def pretrained(**given):
    return HookedKVTransformer.from_pretrained("gpt2-x", **{"hf_model": tiny_hf_model("gpt2"), **given})


def changed(**changes):
    return HookedKVTransformer.from_hooked_transformer(plain_model(), **changes)


def regressor(*shape, **changes):
    model = HookedKVRegressor(HookedKVTransformerConfig(**{**SIZES, "d_vocab": 1, **changes}), 4)
    return model(torch.zeros(shape))


def bias_of_all_positions():
    model = tiny_text_model(attention="softmax", positional_embedding_type="standard", kv_shift=None)
    every = torch.arange(model.cfg.n_ctx) % 200
    with model.kv_bias(convert_prompt(model, every[:-1])):
        assert model(torch.tensor([[5]])).isfinite().all()
    model.attach_kv_bias(convert_prompt(model, every))


def processed(model, **options):
    """Process the weights, which stay as they were if that is refused."""
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    try:
        model.process_weights_(**options)
    finally:
        assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def bert():
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 7}
    return pretrained(hf_model=BertLMHeadModel(BertConfig(vocab_size=11, is_decoder=True, **sizes)))


def packed():
    model = tiny_hf_model("gpt2")
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.uint8), requires_grad=False)
    return pretrained(hf_model=model)


def with_rotation(**rotary):
    return pretrained(hf_model=tiny_hf_model("llama", rope_parameters={"rope_theta": 1234.0, **rotary}))


def imported(**shapes):
    return import_shift_coefficients({name.replace("__", "."): torch.ones(shape) for name, shape in shapes.items()})


def onto(changes=None, without=()):
    """Coefficients of two layers of five heads, one token back, onto a model with ``changes``."""
    public = {
        f"model.layers.{layer}.self_attn.conv_{x}": torch.rand(1, 1, SHIFTED["n_heads"], 1, 2)
        for layer in range(2)
        for x in "kv"
        if x not in without
    }
    shift = {"kv_shift": KVShiftConfig()} if changes is None or "kv_shift" not in changes else {}
    small_model(**shift, **(changes or {})).load_shift_coefficients(public)


ALPHAS = "layers__1__attn__alpha"
FACTORS = dict(refactor_factored_attn_matrices=True)
FIELDS = [field.name for field in fields(HookedKVTransformerConfig) if field.name != "n_params"]
LAYERS = dict(n_layers=3, n_heads_by_layer=[4, 2, 4], n_key_value_heads_by_layer=[2, 1, 2], d_head_by_layer=[4, 8, 4], d_head=8)
CONFIGURATIONS = [
    *({name: 0} for name in ("n_layers", "n_heads", "n_key_value_heads", "rotary_dim", "eps", "clip_qkv", "n_random_features")),
    *(dict(attn_scale=x) for x in (-2.0, math.inf, math.nan)),
    *(dict(dtype=x) for x in ("float23", torch.bool)),
    dict(n_layers=10**12),
    dict(d_model=33),
    dict(act_fn="gelo"),
    dict(kv_shift={"windw": 2}),
    dict(kv_shift={"parametrization": "gate", "init": "identity"}),
    dict(seed=2**64),
    dict(normalization_type="layer"),
    dict(positional_embedding_type="rotery"),
    dict(feature_map="x"),
    dict(trust_remote_code=True),
    {**LAYERS, "n_heads_by_layer": [4, 2]},
    {**LAYERS, "n_key_value_heads_by_layer": [2, 3, 2]},
    {**LAYERS, "n_heads": 6},
    {**LAYERS, "positional_embedding_type": "alibi", "alibi_slopes": [0.5] * 4},
    {**LAYERS, "attention": "linear", "normalizer": "none", "decay": [0.9] * 4},
    dict(attention="linear", decay="retnet"),
    dict(attention="linear", normalizer="none", decay=[0.9, 0.9]),
    dict(attention="linear", normalizer="none", decay=[0.9, 0.9, 2.0]),
    dict(trainable_kv_bias=True),
    dict(alibi_slopes=[0.5] * 3),
    dict(kv_shift={}, attention_dir="bidirectional"),
]
VARIANTS = [
    {"regularized": {"alpha": 1.0}},
    {"regularised": {"alpha": 1, "form": "normalised"}},
    *({"negative": {"k": k, "beta": 1}} for k in (0, 1.5, True)),
    {"negative": {"k": 1, "beta": math.inf}},
    {"ridge": {"strength": 0.0}},
    {"ridge": {"strength": 1.0}, "negative": {"k": 1, "beta": 1.0}},
    {"ridge": {"strength": 1.0}, "positional_embedding_type": "alibi"},
    {"negative": {"k": 1, "beta": 1.0}, "attention": "linear", "linear_attention_form": "chunked"},
    {"ridge": {"strength": 1.0}, "attention": "linear", "trainable_kv_bias": True},
]
GENERATE = [
    dict(input=torch.tensor([[10**6]])),
    dict(max_new_tokens=-1),
    dict(temperature=-1.0),
    dict(top_k=0),
    *(dict(top_p=x) for x in (0, 1.5)),
    dict(freq_penalty=math.inf),
    dict(return_type="text"),
    dict(padding_side="middle"),
]
PRETRAINED = [dict(dtype="flot64"), dict(n_ctx=97), dict(first_n_layers=4), dict(first_n_layers=0), dict(load_in_4bit=True)]
PRETRAINED += [dict(revisoin="main"), dict(checkpoint_index=3)]
REFUSED = [
    *(functools.partial(config, **fields) for fields in CONFIGURATIONS),
    *(functools.partial(variant, **fields) for fields in VARIANTS),
    *(functools.partial(generate, **given) for given in GENERATE),
    *(functools.partial(pretrained, **given) for given in PRETRAINED),
    # weights that a changed configuration does not read, or lacks
    *(lambda n=n: changed(n_layers=n) for n in (1, 3)),
    # texts and tokens
    *(lambda x=x: forward(input=x) for x in (None, [1, 2], [], torch.ones(3), torch.ones(1, 3, dtype=torch.uint8))),
    *(lambda x=x: small_model()(torch.tensor([x])) for x in ([3, 17], [-1, 2])),
    lambda: linear_model()(tokens(1, 4)[:, :0]),
    lambda: linear_model(positional_embedding_type="standard")(tokens(1, 42)),
    lambda: forward(attention_mask=torch.ones(2, 2)),
    lambda: linear_model().generate(tokens(1, 3), verbose=False),  # stop_at_eos, and no tokenizer that has one
    # hooks that would not be called
    lambda: small_model().run_with_cache(tokens(1, 3), names_filter=[PATTERN]),
    lambda: small_model().run_with_hooks(tokens(1, 3), fwd_hooks=[(PATTERN, print)]),
    lambda: small_model().add_hook(PATTERN, print),
    lambda: linear_model(linear_attention_form="chunked").run_with_cache(tokens(1, 5)),
    # processing of weights, which would change the output
    *(
        lambda fields=fields: processed(HookedKVTransformer(config(**fields)))
        for fields in (
            dict(positional_embedding_type="shortformer"),
            dict(num_experts=3, experts_per_token=2),
            dict(final_rms=True),
            dict(act_fn="solu_ln", normalization_type="RMS"),
        )
    ),
    lambda: processed(small_model(kv_shift=KVShiftConfig()), fold_value_biases=True),
    *(
        lambda of=of, option=option: processed(linear_model(**of), **{option: True})
        for of in ({}, dict(kv_shift=None), dict(normalizer="none"))
        for option in ("fold_value_biases", "refactor_factored_attn_matrices")
    ),
    lambda: processed(plain_model(positional_embedding_type="rotary"), **FACTORS),
    lambda: processed(small_model(positional_embedding_type="rotary"), **FACTORS),
    # positions beyond the table, and those that a model of numbers would leave out
    bias_of_all_positions,
    lambda: regressor(3, 17, 4),
    lambda: regressor(3, 7, 4, positional_embedding_type="shortformer"),
    # models in memory
    bert,
    packed,
    lambda: pretrained(hf_model=GPT2Model(tiny_hf_model("gpt2").config)),
    lambda: pretrained(hf_model=tiny_hf_model("gpt2").to("meta")),
    lambda: with_rotation(rope_type="dynamic", factor=2.0),
    # names
    lambda: HookedKVTransformer.from_pretrained("gpt2-smal"),
    lambda: HookedKVTransformer.from_pretrained("facts-linaer"),
    lambda: HookedKVTransformer.from_zoo("gpt2"),
    lambda: official_name("gtp2"),
    lambda: load_pretrained_parts("gpt2-xl"),
    *(lambda name=name: HookedKVTransformer.from_pretrained(name) for name in ("bigcode/santacoder", "Qwen/Qwen-7B")),
    # shift coefficients: tensors that fit no form
    lambda: imported(**{f"{ALPHAS}1": (3,)}),
    lambda: imported(layers__1__attn__beta2=(3,)),
    lambda: imported(**{f"{ALPHAS}1": (3,), f"{ALPHAS}3": (3,)}),
    lambda: imported(**{f"{ALPHAS}1": (3,), f"{ALPHAS}2": (2,)}),
    lambda: imported(**{f"{ALPHAS}1": (3, 1), f"{ALPHAS}2": (3, 1)}),
    lambda: imported(layers__0__attn__K=(3, 2), layers__0__attn__conv_k=(1, 1, 3, 1, 2)),
    lambda: imported(layers__0__attn__V=(3,)),
    lambda: imported(layers__0__attn__conv_v=(1, 2, 3, 1, 2)),
    lambda: imported(layers__0__attn__K=(3, 1)),
    lambda: imported(layers__0__K=(3, 2), layers__0__cross__K=(3, 2)),
    *(
        lambda bad=bad: import_shift_coefficients({"layers.0.K": bad})
        for bad in (torch.tensor([[0.0, float("nan")]]), torch.tensor([[0, 1]]))
    ),
    # shift coefficients: a model that they do not fit
    lambda: onto({"kv_shift": None}),
    *(lambda n=n: onto({"n_layers": n}) for n in (1, 3)),
    lambda: onto({"kv_shift": KVShiftConfig(values=False)}),
    lambda: onto({"kv_shift": KVShiftConfig(window=3)}),
    lambda: onto({"n_key_value_heads": 1}),
    lambda: onto(without="v"),
    lambda: small_model(kv_shift=KVShiftConfig()).load_shift_coefficients({"W_Q": torch.zeros(2)}),
]
PATTERN = "blocks.0.attn.hook_patern"


@pytest.mark.parametrize("call", REFUSED)
def test_is_refused(call, refuses):
    refuses("", call)
    assert all(model.attached_kv_bias is None for model in (linear(), softmax()))


def test_the_models_are_as_they_were():
    for model, fresh in ((linear(), tiny_text_model()), (softmax(), tiny_text_model(attention="softmax"))):
        assert model.fingerprint() == fresh.fingerprint() and torch.equal(model.eval()(TEXT), fresh.eval()(TEXT))
