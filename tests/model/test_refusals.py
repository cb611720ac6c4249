"""What a model, its configuration and its loading refuse, and their words; folders: in the tests of their loaders."""

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

from kvlens import HookedKVTransformer, HookedKVTransformerConfig, KVLensError, KVShiftConfig, convert_prompt
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


def use_attn_in_with_groups():
    return small_model(n_heads=6, n_key_value_heads=3, use_attn_in=True)(tokens(1, 4))


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
DTYPES = "must be one of float16, bfloat16, float32, float64"
EXPECTED_TEXT = "expected a string, a list of strings, or token ids as a tensor [pos] or [batch, pos], got"
CONFIGURATIONS = [
    *(
        (f"{name} must be at least 1, got 0", {name: 0})
        for name in ("n_layers", "d_model", "d_head", "n_ctx", "d_mlp", "n_devices", "n_key_value_heads", "rotary_dim")
    ),
    ("n_layers must be from 1 to 10000", dict(n_layers=10**12)),
    ("d_model=33 is not a multiple of d_head=4; give n_heads", dict(d_model=33)),
    ("n_heads must be a whole number from 1 to 2147483647 or -1, got 0", dict(n_heads=0)),
    ("d_vocab must be a whole number from 1 to 2147483647 or -1, got -2", dict(d_vocab=-2)),
    ("act_fn: 'gelo' is none of", dict(act_fn="gelo")),
    ("eps must be above 0, got 0", dict(eps=0)),
    ("eps must be a number, got nan", dict(eps=math.nan)),
    ("attn_scale must be a number above 0 or -1, got -2.0", dict(attn_scale=-2.0)),
    ("attn_scale must be a number above 0 or -1, got inf", dict(attn_scale=math.inf)),
    (f"dtype {DTYPES}, got 'float23'; did you mean 'float32'?", dict(dtype="float23")),
    (f"dtype {DTYPES}, got torch.bool", dict(dtype=torch.bool)),
    ("kv_shift must be a KVShiftConfig, a dict, True or False or None, got 'yes'", dict(kv_shift="yes")),
    ("KVShiftConfig: unknown field 'windw'; did you mean 'window'?", dict(kv_shift={"windw": 2})),
    ("seed must be from -9223372036854775808 to 18446744073709551615", dict(seed=2**64)),
    ("normalization_type must be one of LN, LNPre, RMS, RMSPre, or None, got 'layer'", dict(normalization_type="layer")),
    ("attention_dir must be one of causal, bidirectional, got 'forward'", dict(attention_dir="forward")),
    ("positional_embedding_type must be one of standard, rotary", dict(positional_embedding_type="rotery")),
    ("init_mode must be one of gpt2, xavier_uniform", dict(init_mode="x")),
    ("feature_map must be one of identity, elu_plus_one", dict(feature_map="x")),
    ("clip_qkv must be above 0, got 0", dict(clip_qkv=0)),
    ("n_devices=900", dict(n_devices=900)),
    ("trust_remote_code=True is refused", dict(trust_remote_code=True)),
]
VARIANTS = [
    ("none is set; set regularised, augmented, negative, ridge", {}),
    ("did you mean 'regularised'", {"regularized": {"alpha": 1.0}}),
    ("form='normalised' divides by 1 - alpha, so alpha must not be 1", {"regularised": {"alpha": 1, "form": "normalised"}}),
    ("form must be one of self_attention, normalised, one_step", {"regularised": {"alpha": 1, "form": None}}),
    ("set keys or values", {"augmented": {}}),
    ("depth must be at least 1, got 0", {"augmented": {"keys": True, "depth": 0}}),
    ("depth must be from 1 to", {"augmented": {"keys": True, "depth": 10**9}}),
    ("width must be from 1 to 1048576", {"augmented": {"keys": True, "width": 2**40}}),
    ("activation must be one of gelu, relu, silu, tanh", {"augmented": {"keys": True, "activation": "x"}}),
    ("a parallel branch needs a depth of at least 2", {"augmented": {"keys": True, "parallel": 1.0}}),
    *((f"of at least 1 or a number above 0 and at most 1, got {k}", {"negative": {"k": k, "beta": 1}}) for k in (0, 1.5, True)),
    ("beta must be a finite number", {"negative": {"k": 1, "beta": math.inf}}),
    ("did you mean 'query'", {"negative": {"k": 2, "beta": 0.1, "per": "queries"}}),
    ("strength must be above 0, got 0.0", {"ridge": {"strength": 0.0}}),
    ("augmented alone", {"ridge": {"strength": 1.0}, "negative": {"k": 1, "beta": 1.0}}),
    ("be combined with decay", {"ridge": {"strength": 1.0}, "positional_embedding_type": "alibi"}),
    ("never computes", {"negative": {"k": 1, "beta": 1.0}, "attention": "linear", "linear_attention_form": "chunked"}),
    ("do not hold", {"ridge": {"strength": 1.0}, "attention": "linear", "trainable_kv_bias": True}),
]
LAYERS = dict(n_layers=3, n_heads_by_layer=[4, 2, 4], n_key_value_heads_by_layer=[2, 1, 2], d_head_by_layer=[4, 8, 4], d_head=8)
UNEQUAL_HEADS = [
    ("n_heads_by_layer: expected a number for each of 3 layers", dict(n_heads_by_layer=[4, 2])),
    ("n_heads_by_layer: expected", dict(n_heads_by_layer=[4, 0, 4])),
    ("n_heads=6", dict(n_heads=6)),
    ("d_head=4", dict(d_head=4)),
    ("n_heads (2) must be a multiple of n_key_value_heads (3)", dict(n_key_value_heads_by_layer=[2, 3, 2])),
    ("rotary_dim=6 exceeds a layer's d_head", dict(positional_embedding_type="rotary", rotary_dim=6)),
    ("alibi_slopes holds one number per head", dict(positional_embedding_type="alibi", alibi_slopes=[0.5] * 4)),
    ("decay holds one number per head", dict(attention="linear", normalizer="none", decay=[0.9] * 4)),
]
GENERATE = [
    ("generate: expected a string, strings, tokens", dict(input=3)),
    ("token ids must lie in 0..276", dict(input=torch.tensor([[10**6]]))),
    ("max_new_tokens must be at least 1, got -1", dict(max_new_tokens=-1)),
    *(("temperature must be ", dict(temperature=x)) for x in (-1.0, 1e300)),
    ("top_k must be at least 1, got 0", dict(top_k=0)),
    *((f"top_p must be above 0 and at most 1, got {x}", dict(top_p=x)) for x in (0, 1.5)),
    ("freq_penalty must be a finite number, got inf", dict(freq_penalty=math.inf)),
    ("return_type must be one of input, str, tokens, embeds", dict(return_type="text")),
    ("padding_side must be one of left, right, or None, got 'middle'", dict(padding_side="middle")),
]
PRETRAINED = [
    (f"dtype {DTYPES}, got 'flot64'; did you mean 'float64'?", dict(dtype="flot64")),
    *((f"device: {x!r} cannot be used here", dict(device=x)) for x in ("cudda", "meta", 5)),
    ("n_ctx must be at least 1, got 0", dict(n_ctx=0)),
    ("n_ctx must be a whole number", dict(n_ctx=2.5)),
    ("the model learned 96 positions, n_ctx=97 asks for more", dict(n_ctx=97)),
    ("first_n_layers must be 1 to 3 (the model's layers), got 4", dict(first_n_layers=4)),
    ("first_n_layers must be a whole number or None", dict(first_n_layers="x")),
    ("n_devices must be a whole number or None", dict(n_devices="x")),
    ("default_padding_side must be one of left, right, or None, got 'middle'", dict(default_padding_side="middle")),
    ("tokenizer must be a loaded tokenizer of transformers, got 'x'", dict(tokenizer="x")),
    ("hf_model must be a transformers PreTrainedModel, got int", dict(hf_model=5)),
]
PATTERN = "blocks.0.attn.hook_patern"
NEAREST = "did you mean 'blocks.0.attn.hook_pattern'"
WOULD_CHANGE = "would change this model's output"
REFUSED = [
    *((words, functools.partial(config, **fields)) for words, fields in CONFIGURATIONS),
    *((words, functools.partial(variant, **fields)) for words, fields in VARIANTS),
    *((words, functools.partial(config, **{**LAYERS, **fields})) for words, fields in UNEQUAL_HEADS),
    *((words, functools.partial(generate, **given)) for words, given in GENERATE),
    *((words, functools.partial(pretrained, **given)) for words, given in PRETRAINED),
    # what a model is made of
    ("d_vocab: give the number of tokens, or a tokenizer", lambda: HookedKVTransformer(config(d_vocab=-1))),
    *(("Repo id must", lambda x=x: HookedKVTransformer(config(tokenizer_name=x))) for x in ("", "no/such/name", "../x")),
    ("couldn't connect", lambda: HookedKVTransformer(config(tokenizer_name="no/such"))),
    ("does not use these weights", lambda: changed(n_layers=1)),
    ("the changes need weights that the model does not have", lambda: changed(n_layers=3)),
    (f"dtype {DTYPES}, got 'int8'", lambda: changed(dtype="int8")),
    ("device: 'cudda' cannot be used here", lambda: changed(device="cudda")),
    ("unknown field 'foo'", lambda: changed(foo=3)),
    ("attention must be one of softmax, linear, got 'linaer'; did you mean 'linear'?", lambda: changed(attention="linaer")),
    ("use_attn_in cannot be combined with grouped keys (n_key_value_heads=3 of 6", use_attn_in_with_groups),
    # texts and tokens
    *((f"forward: {EXPECTED_TEXT}", lambda x=x: forward(input=x)) for x in (None, 3, [1, 2], [])),
    ("expected token ids [pos] or [batch, pos], got a single number", lambda: forward(input=torch.tensor(3))),
    ("tokens must be integers (int64 or int32), got torch.float32", lambda: forward(input=torch.ones(3))),
    ("int64", lambda: forward(input=torch.ones(1, 3, dtype=torch.uint8))),
    ("empty", lambda: linear_model()(tokens(1, 4)[:, :0])),
    ("0..16", lambda: small_model()(torch.tensor([[3, 17]]))),
    ("0..16", lambda: small_model()(torch.tensor([[-1, 2]]))),
    ("longer than n_ctx=41", lambda: linear_model(positional_embedding_type="standard")(tokens(1, 42))),
    ("attention_mask must be a tensor [1, 14], a value per token, got 3", lambda: forward(attention_mask=3)),
    ("attention_mask must be a tensor [1, 14]", lambda: forward(attention_mask=torch.ones(2, 2))),
    *((f"to_tokens: {EXPECTED_TEXT}", lambda x=x: linear().to_tokens(x)) for x in (None, 3, [], [3], torch.arange(3))),
    ("stop_at_eos", lambda: linear_model().generate(tokens(1, 3), verbose=False)),
    # hooks and forms
    (NEAREST, lambda: small_model().run_with_cache(tokens(1, 3), names_filter=PATTERN)),
    (NEAREST, lambda: small_model().run_with_cache(tokens(1, 3), names_filter=[PATTERN])),
    (NEAREST, lambda: small_model().run_with_hooks(tokens(1, 3), fwd_hooks=[(PATTERN, print)])),
    (NEAREST, lambda: small_model().add_hook(PATTERN, print)),
    ("names_filter", lambda: linear_model(linear_attention_form="chunked").run_with_cache(tokens(1, 5))),
    # processing of weights, which would change the output
    *(
        (words, lambda fields=fields: processed(HookedKVTransformer(config(**fields))))
        for words, fields in (
            ("adds positions to keys and queries after the norm", dict(positional_embedding_type="shortformer")),
            ("experts", dict(num_experts=3, experts_per_token=2)),
            ("final RMS norm", dict(final_rms=True)),
            ("solu_ln", dict(act_fn="solu_ln", normalization_type="RMS")),
        )
    ),
    ("first token lacks a predecessor", lambda: processed(small_model(kv_shift=KVShiftConfig()), fold_value_biases=True)),
    *(
        (WOULD_CHANGE, lambda of=of, option=option: processed(linear_model(**of), **{option: True}))
        for of in ({}, dict(kv_shift=None), dict(normalizer="none"))
        for option in ("fold_value_biases", "refactor_factored_attn_matrices")
    ),
    ("turn with their positions", lambda: processed(plain_model(positional_embedding_type="rotary"), **FACTORS)),
    ("turn with their positions", lambda: processed(small_model(positional_embedding_type="rotary"), **FACTORS)),
    # a KV bias
    ("would start at position 64, but the model has positions 0 to 63 (n_ctx=64)", bias_of_all_positions),
    # files and names
    *(("expected a path", lambda x=x: linear().save(x)) for x in ("", "a\0b")),
    ("save: ", lambda: linear().save("x" * 300)),
    *(
        (f"stored_dtype {DTYPES}", lambda x=x: linear_model().save("model", stored_dtype=x))
        for x in (torch.int8, "int8", torch.bool, "float8")
    ),
    ("stored_dtype must be a dtype", lambda: linear_model().save("model", stored_dtype=16)),
    *(("expected a path", lambda x=x: HookedKVTransformer.load(x)) for x in ("", "a\0b")),
    ("load: ", lambda: HookedKVTransformer.load("x" * 300)),
    *(("expected a path", lambda x=x: HookedKVTransformer.from_llama2c(x)) for x in ("", "a\0b")),
    ("llama2.c checkpoint: ", lambda: HookedKVTransformer.from_llama2c("x" * 300)),
    ("device: 'cudda' cannot be used here", lambda: HookedKVTransformer.from_pretrained("gpt2", device="cudda")),
    ("device: 'cudda' cannot be used here", lambda: HookedKVTransformer.load("no/such/folder", device="cudda")),
    ("did you mean 'gpt2", lambda: HookedKVTransformer.from_pretrained("gpt2-smal")),
    ("did you mean 't5-large'", lambda: HookedKVTransformer.from_pretrained("t5-larg")),
    ("did you mean 'docs-linear'", lambda: HookedKVTransformer.from_zoo("doc-linear")),
    *(
        ('HookedKVTransformer.from_zoo("facts-linear")', lambda x=x: HookedKVTransformer.from_pretrained(x))
        for x in ("facts-linear", "facts-linaer")
    ),
    *(
        ("is for HookedKVTransformer.from_pretrained", lambda x=x: HookedKVTransformer.from_zoo(x))
        for x in ("gpt2", "EleutherAI/pythia-70m", ".")
    ),
    *(
        ("cannot be used here", lambda x=x: HookedKVTransformer.from_zoo("bigram-linear", device=x))
        for x in ("meta", "cudda", [])
    ),
    (f"to: dtype {DTYPES}", lambda: linear().to(torch.int8)),
    # a model of numbers
    ("17 positions are more than n_ctx=16", lambda: regressor(3, 17, 4)),
    ("'shortformer' needs tokens", lambda: regressor(3, 7, 4, positional_embedding_type="shortformer")),
    # loading
    # models in memory
    ("architecture BertLMHeadModel, ", bert),
    ("architecture GPT2Model", lambda: pretrained(hf_model=GPT2Model(tiny_hf_model("gpt2").config))),
    ("on the meta device", lambda: pretrained(hf_model=tiny_hf_model("gpt2").to("meta"))),
    ("stored as torch.uint8: a quantized model", packed),
    ("rotate by 'dynamic'", lambda: with_rotation(rope_type="dynamic", factor=2.0)),
    # arguments
    ("load_in_4bit asks for quantized weights", lambda: pretrained(load_in_4bit=True)),
    ("load_in_8bit asks for quantized weights", lambda: pretrained(load_in_8bit=True)),
    ("checkpoint_index and checkpoint_value belong to models loaded by official name", lambda: pretrained(checkpoint_index=3)),
    ("first_n_layers must be 1 to 3", lambda: pretrained(first_n_layers=0)),
    ("['revisoin'] would have no effect", lambda: pretrained(revisoin="main")),
    # names
    ("did you mean 'gpt2'", lambda: official_name("gtp2")),
    ("did you mean 'pythia-70m'", lambda: load_pretrained_parts("pythia-70n")),
    ("the files of gpt2-xl are not all in Hugging Face's cache", lambda: load_pretrained_parts("gpt2-xl")),
    *(
        (f"{name} exists only as code that comes with it", lambda name=name: HookedKVTransformer.from_pretrained(name))
        for name in ("bigcode/santacoder", "Qwen/Qwen-7B")
    ),
    # shift coefficients: tensors that fit no form
    ("layer 1 has ['alpha1'] but no alpha2; expected alpha1 and alpha2", lambda: imported(**{f"{ALPHAS}1": (3,)})),
    ("layer 1 has ['beta2'] but no beta1", lambda: imported(layers__1__attn__beta2=(3,))),
    ("but no alpha2", lambda: imported(**{f"{ALPHAS}1": (3,), f"{ALPHAS}3": (3,)})),
    ("shapes {'alpha1': [3], 'alpha2': [2]}", lambda: imported(**{f"{ALPHAS}1": (3,), f"{ALPHAS}2": (2,)})),
    ("[3, 1]", lambda: imported(**{f"{ALPHAS}1": (3, 1), f"{ALPHAS}2": (3, 1)})),
    ("two forms of the same", lambda: imported(layers__0__attn__K=(3, 2), layers__0__attn__conv_k=(1, 1, 3, 1, 2))),
    ("two forms of the same", lambda: imported(layers__0__attn__K=(3, 2), layers__0__attn__alpha1=(3,))),
    ("V of layer 0 has the shape [3]; expected", lambda: imported(layers__0__attn__V=(3,))),
    ("conv_v of layer 0 has the shape [1, 2, 3, 1, 2]", lambda: imported(layers__0__attn__conv_v=(1, 2, 3, 1, 2))),
    ("K of layer 0 has the shape [3, 1]", lambda: imported(layers__0__attn__K=(3, 1))),
    (
        "two tensors called K (one of them is layers.0.cross.K",
        lambda: imported(layers__0__K=(3, 2), layers__0__cross__K=(3, 2)),
    ),
    *(
        ("layer 0 are not finite floating-point numbers", lambda bad=bad: import_shift_coefficients({"layers.0.K": bad}))
        for bad in (torch.tensor([[0.0, float("nan")]]), torch.tensor([[0, 1]]))
    ),
    # shift coefficients: a model that they do not fit
    ("the model has 0 parameters without coefficients", lambda: onto({"kv_shift": None})),
    ("2 parameters without coefficients ['blocks.2.attn.k_shift_coef'", lambda: onto({"n_layers": 3})),
    ("2 coefficients without a parameter ['blocks.1.attn.k_shift_coef'", lambda: onto({"n_layers": 1})),
    ("without a parameter ['blocks.0.attn.v_shift_coef'", lambda: onto({"kv_shift": KVShiftConfig(values=False)})),
    ("for 1 key-value heads and window 1, the checkpoint has 5 heads", lambda: onto({"n_key_value_heads": 1})),
    ("window 3, the checkpoint has 5 heads and window 1", lambda: onto({"kv_shift": KVShiftConfig(window=3)})),
    ("2 parameters without coefficients ['blocks.0.attn.v_shift_coef'", lambda: onto(without="v")),
    (
        "no shift coefficients found; expected names like",
        lambda: small_model(kv_shift=KVShiftConfig()).load_shift_coefficients({"W_Q": torch.zeros(2)}),
    ),
]


@pytest.mark.parametrize(("words", "call"), REFUSED, ids=[words for words, _ in REFUSED])
def test_is_refused(words, call, refuses):
    models = linear().train(), softmax()
    refuses(words, call)
    assert models[0].training and all(model.attached_kv_bias is None for model in models)


def test_the_models_are_as_they_were():
    for model, fresh in ((linear(), tiny_text_model()), (softmax(), tiny_text_model(attention="softmax"))):
        assert model.fingerprint() == fresh.fingerprint() and torch.equal(model.eval()(TEXT), fresh.eval()(TEXT))


def test_no_field_of_a_configuration_takes_a_value_of_another_kind():
    for name in FIELDS:
        for value in ({3}, b"x", object()):
            with pytest.raises(KVLensError, match=name):
                config(**{name: value})
