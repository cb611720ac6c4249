"""Conversion: properties of exact ones on small float64 models, every kind of prompt, and what is refused in which words."""

import functools
import math

import pytest
import small_models
import torch
from small_models import linear_model, logits_under, relative_error, tokens
from tiny_text_model import PROMPT, TEXT, linear, softmax, tiny_text_model
from tokenizers import normalizers

from kvlens import HookedKVTransformer, HookedKVTransformerConfig, KVLensError, KVShiftConfig, carry_bias, convert_prompt
from kvlens.analyses import bias_by_head
from kvlens.conversion import H2O, KVzip, Landmark, Learned, SnapKV, TaylorPolynomial
from kvlens.corpus import train_bpe_tokenizer

ROUNDING = 1e-14  # float64: tens of terms through two layers


def model_of(name, **more):
    return small_models.model_of("linear", name, **more)


def tokenized_model():
    tokenizer = train_bpe_tokenizer(["the cat sat on the mat and the dog ran to the man"] * 3, vocab_size=280)
    model = model_of("rope after", d_vocab=len(tokenizer))
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
    model, text = model_of("learned"), tokens(1, 6)
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
    model, text = small_models.model_of(attention, name), tokens(1, 6)
    bias = convert_prompt(model, tokens(1, 5)[0]).zero_like()
    error = relative_error(logits_under(model, bias, text), model(text))
    assert error == 0 if attention == "linear" else error < 1e-12  # keys of weight 0 change the order of a softmax's sums


@BOTH
def test_interventions_inside_the_prompts_own_pass_reach_the_bias(attention, name):
    model, prompt = small_models.model_of(attention, name), tokens(1, 5)[0]
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
    model = model_of("learned")
    with pytest.raises(KVLensError, match="n_ctx=41"):
        convert_prompt(model, tokens(1, 42))
    bias = convert_prompt(model, tokens(1, 40))
    with model.kv_bias(bias), pytest.raises(KVLensError, match="including the attached prompt"):
        model(tokens(1, 2))


def test_changed_weights_are_noticed_even_when_set_in_place():
    model = model_of("rope after")
    bias = convert_prompt(model, tokens(1, 4))
    model.attach_kv_bias(bias)
    model.blocks[0].attn.W_Q.data[0, 0, 0] += 1
    with pytest.raises(KVLensError, match="the bias to continue from no longer fits: weights"):
        convert_prompt(model, tokens(1, 4))
    with pytest.raises(KVLensError, match="attach_kv_bias: weights"):
        model.attach_kv_bias(bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_is_not_part_of_the_fingerprint(dtype):
    model = model_of("rope after", dtype=torch.float32)
    bias = convert_prompt(model, tokens(1, 4))
    model.to(dtype, print_details=False)
    model.attach_kv_bias(bias)
    assert model(tokens(1, 3)).dtype == dtype


def test_nan_weights_are_named():
    model = model_of("rope after")
    model.blocks[1].attn.W_K[0, 0, 0] = math.nan
    with pytest.raises(KVLensError, match=r"not finite: blocks\.1\.attn\.W_K"):
        convert_prompt(model, tokens(1, 4))


def test_a_batch_of_prompts_needs_a_batch_of_texts():
    model = model_of("rope after")
    for n_texts in (2, 4):
        with model.kv_bias(convert_prompt(model, tokens(3, 4))), pytest.raises(KVLensError, match="holds 3 prompts"):
            model(tokens(n_texts, 5))
    with pytest.raises(KVLensError, match="the bias to continue from holds 3 prompts, this prompt 2"):
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
    model = model_of("rope after")
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
        model_of("rope before").attach_kv_bias(bias)
    for change in (dict(n_ctx=99), dict(linear_attention_form="parallel"), dict(use_attn_result=True)):
        HookedKVTransformer.from_hooked_transformer(model, **change).attach_kv_bias(bias)


def test_a_prompt_beyond_n_ctx_is_warned_of_where_positions_allow_it(recwarn):
    model = model_of("rope after", n_ctx=12)
    bias = convert_prompt(model, tokens(2, 12))
    assert not recwarn.list
    for options in (dict(prompt=tokens(2, 13)), dict(prompt=tokens(2, 1), initial=bias)):
        with pytest.warns(UserWarning, match="The prompt is longer than n_ctx=12, for which the model was made"):
            convert_prompt(model, **options)
    with pytest.raises(KVLensError, match="n_ctx=12"):
        convert_prompt(model_of("learned", n_ctx=12), tokens(2, 13))


FEW = dict(method="landmark", verbose=False, n_continuations=2, continuation_length=4)


def landmark(**options):
    return convert_prompt(softmax(), PROMPT, **{**FEW, "n_features": 2, **options})


def convert(prompt=PROMPT, **options):
    return convert_prompt(linear(), prompt, **options)


def carried(n):
    return carry_bias(linear(), convert(), n)


LANDMARK = [
    ("method must be a string or a ConversionMethod, got None", dict(method=None)),
    ("got 'landmrk'; did you mean 'landmark'?", dict(method="landmrk")),
    ("n_keys must be at least 1, got 0", dict(n_features=0)),
    ("n_keys must be a whole number from 1 to 16777216 or None, got 2.5", dict(n_features=2.5)),
    ("budget must be one of logits, equal", dict(budget="best")),
    ("got 5", dict(reference=5)),
    ("reference: it has no text; give at least one", dict(reference=[])),
    ("reference: the tokenizer finds no tokens in ''", dict(reference="")),
    ("tokens must be integers (int64 or int32), got torch.float32", dict(reference=torch.ones(3))),
    ("token ids must lie in 0..276 (d_vocab=277)", dict(reference=torch.tensor([10**6]))),
    ("n_continuations must be at least 2, got 1", dict(n_continuations=1)),
    ("continuation_length must be at least 2, got 1", dict(continuation_length=1)),
    ("polish_steps must be at least 0, got -1", dict(polish_steps=-1)),
    ("texts_per_step must be at least 1, got 0", dict(texts_per_step=0)),
    ("objective must be one of logits, kl, got 'kk'; did you mean 'kl'?", dict(objective="kk")),
    ("fitted must be True or False", dict(fit="yes")),
    ("seed must be at least 0, got -1", dict(seed=-1)),
    ("seed must be from 0 to 2**63 - 1", dict(seed=2**64)),
    ("give n_keys or ratio, not both", dict(ratio=0.5)),
    ("ratio must be above 0 and at most 1, got 0", dict(ratio=0, n_features=None)),
    ("ratio must be a number above 0 and at most 1 or None, got nan", dict(ratio=math.nan, n_features=None)),
]
OF_METHODS = [
    ("method=\"landmark\" has no option 'n_feature'; did you mean 'n_features'?; it has", dict(method="landmark", n_feature=3)),
    ("method=\"exact\" has no option 'seed'; it has none", dict(seed=1)),
    ("n_features and n_keys are the same option: give one of them", dict(method="landmark", n_keys=3, n_features=3)),
    ("method must be a string or a ConversionMethod, got <class", dict(method=Landmark)),
    ("seed: options of a method belong into Landmark(", dict(method=Landmark(n_keys=3), seed=1)),
    ("'prepend_boss'; did you mean 'prepend_bos'", dict(prepend_boss=True)),
]
CONVERT = [
    ("initial must be a KVBias or None, got 3", dict(initial=3)),
    ("prepend_bos must be True or False or None, got 'yes'", dict(prepend_bos="yes")),
    ("fwd_hooks must be a list of pairs", dict(fwd_hooks=[("blocks.0.hook_resid_pre", 3)])),
    ("segment_length must be at least 1, got 0", dict(segment_length=0)),
    ("always exact and has no options; did you mean 'initial'?", dict(initail=None)),
    *(("expected a string, a list of strings, or a tensor of token ids", dict(prompt=x)) for x in (None, 5, [], ["a", 3])),
    *(("the tokenizer finds no tokens in ''", dict(prompt=x)) for x in ("", ["a", ""])),
    ("the text is empty: give at least one token", dict(prompt=torch.zeros(0, dtype=torch.long))),
    ("tokens must be integers (int64 or int32), got torch.float32", dict(prompt=torch.ones(3))),
    ("expected tokens [pos] or [batch, pos], got shape []", dict(prompt=torch.tensor(3))),
    ("expected tokens [pos] or [batch, pos], got shape [1, 1, 1]", dict(prompt=torch.ones(1, 1, 1))),
    ("token ids must lie in 0..276 (d_vocab=277), got -1..-1", dict(prompt=torch.tensor([-1]))),
]
REFUSED = [
    *((words, functools.partial(landmark, **options)) for words, options in LANDMARK),
    *((words, functools.partial(convert_prompt, softmax(), PROMPT, **options)) for words, options in OF_METHODS),
    *((words, functools.partial(convert, **options)) for words, options in CONVERT),
    ("Landmark: budget must be one of logits, equal, got 'logit'; did", lambda: Landmark(n_keys=3, budget="logit")),
    ("Landmark: needs n_keys (or n_features), the keys per key-value head, or ratio", lambda: Landmark()),
    ("H2O: needs n_keys", lambda: H2O()),
    ("give n_keys or ratio, not both", lambda: KVzip(n_keys=3, ratio=0.5)),
    ("SnapKV: kernel_size must be odd, got 4", lambda: SnapKV(n_keys=3, kernel_size=4)),
    ("Learned: n_features must be at least 1", lambda: Learned(n_features=0)),
    ("TaylorPolynomial: n_continuations must be at least 2", lambda: TaylorPolynomial(n_continuations=1)),
    ("prompt: this model has no tokenizer, so it cannot read strings", lambda: convert_prompt(linear_model(), "some text")),
    ("carry_bias: n_tokens must be from 0 to 16777216", lambda: carried(2**70)),
    *(("carry_bias: n_tokens must be", lambda n=n: carried(n)) for n in ("x", -1, 1.5)),
]


@pytest.mark.unhooked  # the messages are kvlens' own
@pytest.mark.parametrize(("words", "call"), REFUSED, ids=[words for words, _ in REFUSED])
def test_is_refused(words, call, refuses):
    refuses(words, call)
    assert all(model.attached_kv_bias is None for model in (linear(), softmax()))


def test_the_models_are_as_they_were():
    for model, fresh in ((linear(), tiny_text_model()), (softmax(), tiny_text_model(attention="softmax"))):
        assert model.fingerprint() == fresh.fingerprint() and torch.equal(model(TEXT), fresh(TEXT))
