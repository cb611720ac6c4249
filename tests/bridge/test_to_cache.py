"""A bias as Transformers' cache: plain Transformers gives the logits and the texts that kvlens gives under the bias."""

import pytest
import torch
from bridge_models import N_PROMPT, PROMPT, TEXT, some_tokens
from precision import LAW, float64, relative_error
from small_models import logits_under
from stacked_tensors import with_stacked
from tiny_hf import D_VOCAB, HYBRIDS, KINDS, ON_BOTH, ON_BRIDGE_ALONE, PURELY_RECURRENT, RWKV, law_of, tiny_hf_model
from transformers import DynamicCache

from kvlens import HookedKVTransformer, KVBias, KVLensError, KVShiftConfig, convert_prompt
from kvlens.kv_bias.cache import BiasLayer

pytestmark = [
    pytest.mark.usefixtures("without_gradients"),
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),
]

WITHOUT_KEYS = {*HYBRIDS, "lfm2", "falcon_h1", "falcon_h1_direct", "deepseek_v3", *PURELY_RECURRENT, *RWKV}
ON_BRIDGE = [*ON_BOTH, *(name for name in ON_BRIDGE_ALONE if name not in WITHOUT_KEYS)]
WEIGHTED = ["llama", "gpt2", "gpt_neox", "mistral", "gemma2", "gemma3", "gpt_oss", "smollm3"]
"""Grouped heads, learned positions, windows in all layers and in some, soft caps, sinks, layers without positions."""


@pytest.fixture
def model(family, bridge_of):
    return bridge_of(family)


@pytest.fixture
def model_of_llama(bridge_of):
    return bridge_of("llama")


def plain_logits(hf, bias, text=TEXT):
    return hf(text, past_key_values=bias.to_cache()).logits


def hooked(family, processed=False):
    load = HookedKVTransformer.from_pretrained if processed else HookedKVTransformer.from_pretrained_no_processing
    return load("x", hf_model=tiny_hf_model(family), dtype=torch.float64, device="cpu")


def weighted(exact: KVBias, n: int = 7) -> KVBias:
    """``n`` keys per head, other ones in every head, with weights of which some are 0."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(exact.stacked("distance").shape, generator=generator)
    kept = drawn.argsort(dim=-1)[..., :n]
    weights = torch.rand(kept.shape, generator=generator) * 3
    weights = weights.masked_fill(torch.rand(kept.shape, generator=generator) < 0.2, 0.0).to(exact.stacked("b_d"))
    every = (exact.stacked(name) for name in ("keys", "b_kv"))
    keys, values = (x.gather(-2, kept[..., None].expand(*kept.shape, x.shape[-1])) for x in every)
    distance, log_scale = exact.stacked("distance").gather(-1, kept), exact.stacked("log_scale") + 0.3
    few = dict(keys=keys, distance=distance, b_kv=values * weights[..., None], b_d=weights, log_scale=log_scale)
    return with_stacked(exact, **few)


@pytest.mark.parametrize("family", ON_BRIDGE)
def test_plain_transformers_reads_a_prompt_of_the_bridge(model, family):
    hf, bias = tiny_hf_model(family), convert_prompt(model, PROMPT)
    cache = bias.to_cache()
    assert type(cache) is DynamicCache and cache.get_seq_length() == N_PROMPT
    logits = hf(TEXT, past_key_values=cache).logits
    assert relative_error(logits, logits_under(model, bias, TEXT)) < LAW
    assert relative_error(logits, hf(torch.cat([PROMPT, TEXT], dim=1)).logits[:, N_PROMPT:]) < LAW


@pytest.mark.parametrize("family", KINDS)
def test_plain_transformers_reads_a_prompt_of_a_hooked_model(family):
    model, hf = hooked(family), tiny_hf_model(family)
    bias = convert_prompt(model, PROMPT)
    logits = plain_logits(hf, bias)
    assert relative_error(logits, logits_under(model, bias, TEXT)) < law_of(family)


@pytest.mark.parametrize("family", WEIGHTED)
def test_keys_with_weights_are_read_by_the_attention_function_of_kvlens(model, family):
    hf, bias = tiny_hf_model(family), weighted(convert_prompt(model, PROMPT))
    hf.set_attn_implementation("kvlens")
    cache = bias.to_cache()
    first, then = (hf(text, past_key_values=cache).logits for text in TEXT.split([5, TEXT.shape[1] - 5], dim=1))
    expected = logits_under(model, bias, TEXT)
    assert relative_error(torch.cat([first, then], dim=1), expected) < LAW
    assert relative_error(expected, logits_under(model, convert_prompt(model, PROMPT), TEXT)) > 1e-3  # the weights matter
    without_cache = tiny_hf_model(family)(TEXT).logits
    assert relative_error(hf(TEXT).logits, without_cache) < LAW  # without a bias it is Transformers' own attention


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
@pytest.mark.parametrize("change", [lambda bias: bias, weighted], ids=["exact", "weighted"])
def test_generate_continues_with_the_same_text(model, family, change):
    hf, bias = tiny_hf_model(family), change(convert_prompt(model, PROMPT))
    hf.set_attn_implementation("kvlens" if change is weighted else "sdpa")
    with model.kv_bias(bias):
        expected = model.generate(TEXT, max_new_tokens=8, do_sample=False, stop_at_eos=False, verbose=False)
    counted = torch.cat([torch.zeros_like(PROMPT), TEXT], dim=1)  # of the prompt only the number of tokens matters
    options = dict(max_new_tokens=8, do_sample=False, eos_token_id=D_VOCAB, pad_token_id=D_VOCAB)
    found = hf.generate(counted, attention_mask=torch.ones_like(counted), past_key_values=bias.to_cache(), **options)
    assert torch.equal(found[:, N_PROMPT:], expected)


def test_beams_and_repeated_prompts_take_their_rows(model_of_llama):
    bias = weighted(convert_prompt(model_of_llama, PROMPT[0]))
    hf = tiny_hf_model("llama")
    hf.set_attn_implementation("kvlens")
    cache = bias.to_cache()
    cache.batch_repeat_interleave(2)
    assert relative_error(hf(TEXT, past_key_values=cache).logits, logits_under(model_of_llama, bias, TEXT)) < LAW
    cache.crop(-TEXT.shape[1])
    assert relative_error(hf(TEXT, past_key_values=cache).logits, logits_under(model_of_llama, bias, TEXT)) < LAW
    cache.reset()
    assert cache.get_seq_length() == N_PROMPT and cache.layers[0].keys.shape[-2] == 7
    with pytest.raises(RuntimeError):  # Transformers' own attention cannot read it by mistake
        tiny_hf_model("llama")(TEXT, past_key_values=cache)


@pytest.mark.parametrize("positions", ["kept", "closed"])
def test_a_prompt_without_some_tokens_keeps_its_positions(model_of_llama, positions):
    bias = convert_prompt(model_of_llama, PROMPT[0], without=[(3, 6)], positions=positions)
    cache, hf = bias.to_cache(), tiny_hf_model("llama")
    hf.set_attn_implementation("kvlens")
    assert cache.get_seq_length() == N_PROMPT - 3 * (positions == "closed")
    assert relative_error(hf(TEXT[:1], past_key_values=cache).logits, logits_under(model_of_llama, bias, TEXT[:1])) < LAW


def test_a_continued_prompt_and_a_copy_of_its_own(model_of_llama):
    first = convert_prompt(model_of_llama, PROMPT)
    bias, hf = convert_prompt(model_of_llama, TEXT, initial=first), tiny_hf_model("llama")
    text, cache = some_tokens(2, 4, seed=7), bias.to_cache()
    expected = hf(torch.cat([PROMPT, TEXT, text], dim=1)).logits[:, -4:]
    assert type(cache) is DynamicCache and not isinstance(cache.layers[0], BiasLayer)
    for _ in range(2):  # a cache grows, the bias does not
        assert relative_error(plain_logits(hf, bias, text), expected) < LAW


def test_weights_are_finer_than_half_precision(model_of_llama):
    exact = convert_prompt(model_of_llama, PROMPT)
    bias = (1.25 * exact).to(torch.bfloat16)
    columns = bias.to_cache().layers[0].keys[..., -4:]
    assert columns.dtype == torch.bfloat16
    coarse, rest, far, near = columns.double().unbind(dim=-1)
    log_w = torch.tensor(1.25).double().log()
    assert float((coarse - log_w).abs().min()) > 2**-12 and float((coarse + rest - log_w).abs().max()) < 2**-16
    assert torch.equal((far * 128 + near).long(), exact.stacked("distance")[0])


def test_what_is_processed_without_changing_values_is_a_cache():
    model = hooked("llama", processed=True)
    bias = convert_prompt(model, PROMPT)
    found, expected = plain_logits(tiny_hf_model("llama"), bias), logits_under(model, bias, TEXT)
    assert relative_error(found.log_softmax(-1), expected.log_softmax(-1)) < LAW  # the processed model's logits are centered


@pytest.mark.unhooked
def test_refusals(bridge_of):
    llama = bridge_of("llama")
    exact = convert_prompt(llama, PROMPT)
    folded = convert_prompt(hooked("gpt2", processed=True), PROMPT)
    unequal = KVBias.batch([convert_prompt(llama, tokens[:1]) for tokens in (PROMPT, TEXT)])
    with float64():
        shifted = HookedKVTransformer.from_hooked_transformer(hooked("llama"), kv_shift=KVShiftConfig(init="identity"))
    refused = [
        ("linear attention has no keys", convert_prompt(HookedKVTransformer.from_zoo("bigram-linear"), PROMPT % 20)),
        ("states of recurrent layers", convert_prompt(bridge_of("qwen3_5"), PROMPT)),
        ("latent attention holds no keys", convert_prompt(bridge_of("deepseek_v3"), PROMPT)),
        ("no model of Transformers shifts", convert_prompt(shifted, PROMPT)),
        ("single heads were selected", exact.select(heads=[(0, 1)])),
        ("biases of values into b_O", folded),
        ("negative weight", -1.0 * exact),
        ("features are no keys", convert_prompt(llama, PROMPT, method="taylor", n_continuations=2, continuation_length=4)),
        ("differ in length", unequal),
        ("ALiBi", 2.0 * convert_prompt(hooked("bloom"), PROMPT)),
    ]
    for words, bias in refused:
        with pytest.raises(KVLensError, match=words):
            bias.to_cache()
