"""What loading refuses of models in memory, arguments, names and shift coefficients; folders: in the tests of their loaders."""

import functools

import pytest
import torch
from small_models import SIZES, small_model
from tiny_hf import tiny_hf_model
from transformers import BertConfig, BertLMHeadModel, GPT2Model

from kvlens import HookedKVTransformer, KVShiftConfig
from kvlens.pretrained import import_shift_coefficients, load_pretrained_parts, official_name

pytestmark = [pytest.mark.unhooked, pytest.mark.usefixtures("no_network")]

gpt2 = functools.cache(lambda: tiny_hf_model("gpt2"))


def parts(model=None, **arguments):
    return load_pretrained_parts("x", hf_model=model if model is not None else gpt2(), **arguments)


def bert():
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 7}
    return parts(BertLMHeadModel(BertConfig(vocab_size=11, is_decoder=True, **sizes)))


def packed():
    model = tiny_hf_model("gpt2")
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.uint8), requires_grad=False)
    return parts(model)


def with_rotation(**rotary):
    return parts(tiny_hf_model("llama", rope_parameters={"rope_theta": 1234.0, **rotary}))


def imported(**shapes):
    return import_shift_coefficients({name.replace("__", "."): torch.ones(shape) for name, shape in shapes.items()})


def onto(changes=None, without=()):
    """Coefficients of two layers of five heads, one token back, onto a model with ``changes``."""
    public = {
        f"model.layers.{layer}.self_attn.conv_{x}": torch.rand(1, 1, SIZES["n_heads"], 1, 2)
        for layer in range(2)
        for x in "kv"
        if x not in without
    }
    shift = {"kv_shift": KVShiftConfig()} if changes is None or "kv_shift" not in changes else {}
    small_model(**shift, **(changes or {})).load_shift_coefficients(public)


ALPHAS = "layers__1__attn__alpha"
REFUSED = [
    # models in memory
    ("architecture BertLMHeadModel, ", bert),
    ("architecture GPT2Model", lambda: parts(GPT2Model(gpt2().config))),
    ("must be a transformers PreTrainedModel, got Linear", lambda: parts(torch.nn.Linear(2, 3))),
    ("on the meta device", lambda: parts(tiny_hf_model("gpt2").to("meta"))),
    ("stored as torch.uint8: a quantized model", packed),
    ("rotate by 'dynamic'", lambda: with_rotation(rope_type="dynamic", factor=2.0)),
    # arguments
    ("dtype must be one of", lambda: parts(dtype=torch.int8)),
    ("did you mean 'float32'", lambda: parts(dtype="float23")),
    ("load_in_4bit asks for quantized weights", lambda: parts(load_in_4bit=True)),
    ("load_in_8bit asks for quantized weights", lambda: parts(load_in_8bit=True)),
    ("checkpoint_index and checkpoint_value belong to models loaded by official name", lambda: parts(checkpoint_index=3)),
    ("first_n_layers must be 1 to 3 (the model's layers), got 4", lambda: parts(first_n_layers=4)),
    ("first_n_layers must be 1 to 3", lambda: parts(first_n_layers=0)),
    ("n_ctx must be at least 1", lambda: parts(n_ctx=0)),
    ("learned 96 positions, n_ctx=150", lambda: parts(n_ctx=150)),
    ("['revisoin'] would have no effect", lambda: parts(revisoin="main")),
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
    refuses(words, call)
