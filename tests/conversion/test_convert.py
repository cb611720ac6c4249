"""Conversion: properties of exact ones on small float64 models, every kind of prompt, and what is refused in which words."""

import functools
import math

import pytest
import torch
from small_models import linear_model, logits_under, model_of, relative_error, tokens
from tiny_text_model import PROMPT, linear, softmax
from tokenizers import normalizers

from kvlens import HookedKVTransformer, HookedKVTransformerConfig, KVLensError, KVShiftConfig, carry_bias, convert_prompt
from kvlens.analyses import bias_by_head
from kvlens.conversion import Landmark
from kvlens.corpus import train_bpe_tokenizer

ROUNDING = 1e-14  # float64: tens of terms through two layers


def tokenized_model():
    tokenizer = train_bpe_tokenizer(["the cat sat on the mat and the dog ran to the man"] * 3, vocab_size=280)
    model = model_of("linear", "rope after", d_vocab=len(tokenizer))
    model.set_tokenizer(tokenizer)
    return model


def test_bos_stands_once_at_the_start():
    model = tokenized_model()
    prompt, text = "the cat sat", " on the mat"
    bias = convert_prompt(model, prompt)
    assert bias.n_prompt_tokens == model.to_tokens(prompt).shape[1]
    whole = torch.cat([model.to_tokens(prompt), model.to_tokens(text, prepend_bos=False)], dim=1)
    logits = model(whole)[:, bias.n_prompt_tokens :]
    with model.kv_bias(bias):
        assert relative_error(model(text), logits) < ROUNDING
        assert model.to_tokens(text)[0, 0] != model.tokenizer.bos_token_id
        assert model.to_tokens(text, prepend_bos=True)[0, 0] == model.tokenizer.bos_token_id
        more = convert_prompt(model, text)
    assert model.to_tokens(text)[0, 0] == model.tokenizer.bos_token_id
    assert more.n_prompt_tokens == whole.shape[1]
    assert convert_prompt(model, prompt, prepend_bos=False).n_prompt_tokens == bias.n_prompt_tokens - 1


def test_generation_under_a_bias_is_generation_after_the_prompt():
    model = tokenized_model()
    options = dict(max_new_tokens=8, do_sample=False, stop_at_eos=False, verbose=False)
    bias = convert_prompt(model, "the cat sat")
    text = model.to_tokens(" on the mat", prepend_bos=False)
    whole = torch.cat([model.to_tokens("the cat sat"), text], dim=1)
    expected = model.generate(whole, **options)[:, whole.shape[1] :]
    with model.kv_bias(bias):
        for cached in (True, False):
            assert torch.equal(model.generate(text, use_past_kv_cache=cached, **options)[:, text.shape[1] :], expected)
        assert model.generate(" on the mat", **options).startswith(" on the mat")


def test_the_context_manager_restores_what_was_there():
    model, text = model_of("linear", "learned"), tokens(1, 6)
    outer, inner = convert_prompt(model, tokens(1, 3)[0]), convert_prompt(model, tokens(1, 5)[0])
    free = model(text)
    with model.kv_bias(outer):
        under = model(text)
        with pytest.raises(RuntimeError), model.kv_bias(inner):
            raise RuntimeError
        assert model.attached_kv_bias is outer
        assert torch.equal(model(text), under)
    assert model.attached_kv_bias is None
    assert torch.equal(model(text), free)


BOTH = pytest.mark.parametrize(("attention", "name"), [("linear", "rope after"), ("softmax", "no positions")])


@BOTH
def test_zero_like_is_the_model_without_a_prompt(attention, name):
    model, text = model_of(attention, name), tokens(1, 6)
    bias = convert_prompt(model, tokens(1, 5)[0]).zero_like()
    error = relative_error(logits_under(model, bias, text), model(text))
    assert error == 0 if attention == "linear" else error < 1e-12  # keys of weight 0 change the order of a softmax's sums


@BOTH
def test_interventions_inside_the_prompts_own_pass_reach_the_bias(attention, name):
    model, prompt = model_of(attention, name), tokens(1, 5)[0]
    hook = ("blocks.1.attn.hook_v", lambda v, hook: v * 0)
    bias, plain = convert_prompt(model, prompt, fwd_hooks=[hook]), convert_prompt(model, prompt)
    assert torch.equal(bias.stacked("b_kv")[0], plain.stacked("b_kv")[0])
    assert bool((bias.stacked("b_kv")[1] == 0).all()) and bool((plain.stacked("b_kv")[1] != 0).any())
    assert torch.equal(bias.stacked("b_d"), plain.stacked("b_d"))
    assert not model.hook_dict[hook[0]].has_hooks() and model.blocks[1].attn.observer is None


def test_a_pencil_example():
    """Two tokens, one head, weights 1: b_KV = sum phi(k) v and b_D = sum phi(k), by hand."""
    cfg = HookedKVTransformerConfig(
        n_layers=1, d_model=1, d_head=1, n_heads=1, n_ctx=4, d_vocab=3, attn_only=True, normalization_type=None,
        attention="linear", feature_map="relu", positional_embedding_type="none", dtype=torch.float64, device="cpu",
        act_fn="relu", kv_shift=KVShiftConfig(init="identity"),
    )  # fmt: skip
    model = HookedKVTransformer(cfg).requires_grad_(False)
    model.embed.W_E.copy_(torch.tensor([[1.0], [2.0], [5.0]]))
    for name in ("W_Q", "W_K", "W_V", "W_O"):
        getattr(model.blocks[0].attn, name).fill_(1.0)
    bias = convert_prompt(model, torch.tensor([0, 1]))  # k = v = 1, then 2; phi(k) = k + 0.001
    assert bias.stacked("b_kv").item() == pytest.approx(1.001 * 1 + 2.001 * 2)
    assert bias.stacked("b_d").item() == pytest.approx(1.001 + 2.001)
    assert bias.stacked("last_k").flatten().tolist() == [2.0]
    # the text "5": z = 5.001 (1.001 + 4.002 + 5.001 * 5) / (5.001 (1.001 + 2.001 + 5.001))
    with model.kv_bias(bias):
        _, cache = model.run_with_cache(torch.tensor([[2]]))
    assert cache["z", 0].item() == pytest.approx((1.001 + 4.002 + 25.005) / (1.001 + 2.001 + 5.001))


@pytest.mark.parametrize("prepend_bos", [True, False])
@pytest.mark.parametrize("batch", [False, True])
def test_a_string_of_which_the_tokenizer_makes_nothing_is_refused(prepend_bos, batch):
    """It was converted as the BOS alone."""
    model = tokenized_model()
    model.tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\u200b", "")
    prompt = ["the cat", "\u200b"] if batch else "\u200b"
    with pytest.raises(KVLensError, match=r"prompt: the tokenizer finds no tokens in '\\u200b'"):
        convert_prompt(model, prompt, prepend_bos=prepend_bos)
    with pytest.raises(KVLensError, match=r"prompt: the tokenizer finds no tokens in '\\u200b'"):
        bias_by_head(model, "\u200b", "the cat")


def test_a_prompt_beyond_learned_positions_is_refused():
    model = model_of("linear", "learned")
    with pytest.raises(KVLensError, match="n_ctx=41"):
        convert_prompt(model, tokens(1, 42))
    bias = convert_prompt(model, tokens(1, 40))
    with model.kv_bias(bias), pytest.raises(KVLensError, match="including the attached prompt"):
        model(tokens(1, 2))


def test_changed_weights_are_noticed_even_when_set_in_place():
    model = model_of("linear", "rope after")
    bias = convert_prompt(model, tokens(1, 4))
    model.attach_kv_bias(bias)
    model.blocks[0].attn.W_Q.data[0, 0, 0] += 1
    with pytest.raises(KVLensError, match="the bias to continue from no longer fits: weights"):
        convert_prompt(model, tokens(1, 4))
    with pytest.raises(KVLensError, match="attach_kv_bias: weights"):
        model.attach_kv_bias(bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_is_not_part_of_the_fingerprint(dtype):
    model = model_of("linear", "rope after", dtype=torch.float32)
    bias = convert_prompt(model, tokens(1, 4))
    model.to(dtype, print_details=False)
    model.attach_kv_bias(bias)
    assert model(tokens(1, 3)).dtype == dtype


def test_nan_weights_are_refused():
    model = model_of("linear", "rope after")
    model.blocks[1].attn.W_K[0, 0, 0] = math.nan
    with pytest.raises(KVLensError, match="not finite"):
        convert_prompt(model, tokens(1, 4))


def test_a_batch_of_prompts_needs_a_batch_of_texts():
    model = model_of("linear", "rope after")
    for n_texts in (2, 4):
        with model.kv_bias(convert_prompt(model, tokens(3, 4))), pytest.raises(KVLensError, match="holds 3 prompts"):
            model(tokens(n_texts, 5))
    with pytest.raises(KVLensError, match="holds 3 prompts"):
        convert_prompt(model, tokens(2, 4), initial=convert_prompt(model, tokens(3, 4)))


def test_float64_accumulation_makes_a_float32_conversion_exact_almost_everywhere():
    model = linear_model(dtype=torch.float32, accumulation_dtype="float64").requires_grad_(False)
    prompt, text = tokens(20, 30, seed=1), tokens(20, 30)
    bias = convert_prompt(model, prompt)
    assert bias.stacked("b_kv").dtype == torch.float64
    whole = model(torch.cat([prompt, text], dim=1))[:, 30:]
    # a float64 sum rounds to the same float32 unless it lies within 1e-16 of a tie: a few values in 10^8
    assert relative_error(logits_under(model, bias, text), whole) < 1e-8


def test_attaching_to_one_model_leaves_another_of_the_same_config_alone():
    model = tokenized_model()
    other = HookedKVTransformer(model.cfg, tokenizer=model.tokenizer)
    with model.kv_bias(convert_prompt(model, "the cat")):
        assert other.to_tokens("sat")[0, 0] == model.tokenizer.bos_token_id
        assert model.to_tokens("sat")[0, 0] != model.tokenizer.bos_token_id


def test_every_shaping_field_of_the_configuration_counts():
    model = model_of("linear", "rope after")
    bias = convert_prompt(model, tokens(1, 4))
    for change in (
        dict(act_fn="relu"),
        dict(eps=1e-3),
        dict(rotary_base=500),
        dict(use_NTK_by_parts_rope=True, NTK_original_ctx_len=9),
    ):
        other = HookedKVTransformer.from_hooked_transformer(model, **change)
        with pytest.raises(KVLensError, match=f"rest differs: '{sorted(change)[-1] if len(change) == 1 else 'NTK'}"):
            other.attach_kv_bias(bias)
    with pytest.raises(KVLensError, match="rotary_placement differs"):
        model_of("linear", "rope before").attach_kv_bias(bias)
    for change in (dict(n_ctx=99), dict(linear_attention_form="parallel"), dict(use_attn_result=True)):
        HookedKVTransformer.from_hooked_transformer(model, **change).attach_kv_bias(bias)


def test_a_prompt_beyond_n_ctx_is_warned_of_where_positions_allow_it(recwarn):
    model = model_of("linear", "rope after", n_ctx=12)
    bias = convert_prompt(model, tokens(2, 12))
    assert not recwarn.list
    for options in (dict(prompt=tokens(2, 13)), dict(prompt=tokens(2, 1), initial=bias)):
        with pytest.warns(UserWarning, match="The prompt is longer than n_ctx=12, for which the model was made"):
            convert_prompt(model, **options)
    with pytest.raises(KVLensError, match="n_ctx=12"):
        convert_prompt(model_of("linear", "learned", n_ctx=12), tokens(2, 13))


FEW = dict(method="landmark", verbose=False, n_continuations=2, continuation_length=4)


def landmark(**options):
    return convert_prompt(softmax(), PROMPT, **{**FEW, "n_features": 2, **options})


def convert(prompt=PROMPT, **options):
    return convert_prompt(linear(), prompt, **options)


def carried(n):
    return carry_bias(linear(), convert(), n)


LANDMARK = [
    *(dict(method=x) for x in (None, "landmrk", Landmark)),
    *(dict(n_features=x) for x in (0, 2.5)),
    *(dict(reference=x) for x in (5, "", torch.ones(3), torch.tensor([10**6]))),
    *({name: 1} for name in ("n_continuations", "continuation_length")),
    dict(budget="best"),
    dict(objective="kk"),
    dict(polish_steps=-1),
    dict(seed=-1),
    dict(ratio=0.5),
    *(dict(ratio=x, n_features=None) for x in (0, math.nan)),
]
OF_METHODS = [
    dict(method="landmark", n_feature=3),
    dict(seed=1),
    dict(method="landmark", n_keys=3, n_features=3),
    dict(method=Landmark(n_keys=3), seed=1),
    dict(prepend_boss=True),
]
CONVERT = [
    dict(prepend_bos="yes"),
    dict(segment_length=0),
    dict(initail=None),
    *(dict(prompt=x) for x in (None, 5, [], ["a", 3], "", ["a", ""])),
    *(dict(prompt=x) for x in (torch.zeros(0, dtype=torch.long), torch.ones(3), torch.tensor([-1]))),
]
REFUSED = [
    *(functools.partial(landmark, **options) for options in LANDMARK),
    *(functools.partial(convert_prompt, softmax(), PROMPT, **options) for options in OF_METHODS),
    *(functools.partial(convert, **options) for options in CONVERT),
    lambda: Landmark(),
    *(lambda n=n: carried(n) for n in (2**70, "x", -1, 1.5)),
]


@pytest.mark.unhooked  # numbers, names and nonsense
@pytest.mark.parametrize("call", REFUSED)
def test_is_refused(call, refuses):
    refuses("", call)
    assert all(model.attached_kv_bias is None for model in (linear(), softmax()))
