"""A bias as Transformers' cache: plain Transformers gives the logits and the texts that kvlens gives under the bias; and back.

A cache that Transformers leaves of a prompt is the prompt's bias, and one of fewer keys is the bias of these.
"""

import pytest
import torch
from bridge_models import N_PROMPT, PROMPT, TEXT, some_tokens
from precision import LAW, float64, relative_error
from small_models import logits_under
from stacked_tensors import with_stacked
from tiny_hf import D_VOCAB, HYBRIDS, KINDS, ON_BOTH, ON_BRIDGE_ALONE, PURELY_RECURRENT, RWKV, WINDOW, law_of, tiny_hf_model
from transformers import DynamicCache, StaticCache

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


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ON_BRIDGE)
def test_plain_transformers_reads_a_prompt_of_the_bridge(model, family):
    hf, bias = tiny_hf_model(family), convert_prompt(model, PROMPT)
    cache = bias.to_cache()
    assert type(cache) is DynamicCache and cache.get_seq_length() == N_PROMPT
    logits = hf(TEXT, past_key_values=cache).logits
    assert relative_error(logits, logits_under(model, bias, TEXT)) < LAW
    assert relative_error(logits, hf(torch.cat([PROMPT, TEXT], dim=1)).logits[:, N_PROMPT:]) < LAW


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", KINDS)
def test_plain_transformers_reads_a_prompt_of_a_hooked_model(family):
    model, hf = hooked(family), tiny_hf_model(family)
    bias = convert_prompt(model, PROMPT)
    logits = plain_logits(hf, bias)
    assert relative_error(logits, logits_under(model, bias, TEXT)) < law_of(family)


@pytest.mark.one_in(3)
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


@pytest.mark.one_in(2)
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


# --- a cache as a bias -----------------------------------------------------------------------------------------------------


def cache_of(family, prompt=PROMPT, hf=None):
    hf = hf or tiny_hf_model(family)
    return hf(prompt, past_key_values=DynamicCache(config=hf.config), use_cache=True).past_key_values


def assert_same(found: KVBias, exact: KVBias) -> None:
    """Tensor by tensor; a layer that slides has the last keys, which no query looks behind."""
    assert found.fit is None
    assert (found.n_prompt_tokens, found.position_offset) == (exact.n_prompt_tokens, exact.position_offset)
    for own, layer in zip(found.layers, exact.layers, strict=True):
        n = layer.attention.keys.shape[2]
        last = torch.arange(n - own.attention.keys.shape[2], n)
        expected = layer.of_attention(lambda part, last=last: part.some(last))
        assert own.tensors().keys() == expected.tensors().keys()
        for name, x in own.tensors().items():
            assert x.shape == expected.tensors()[name].shape and x.dtype == expected.tensors()[name].dtype
            assert x.numel() == 0 or torch.allclose(x, expected.tensors()[name], rtol=1e-11, atol=1e-11)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ON_BRIDGE[::-1])  # backwards: each family in one of both directions always
def test_a_cache_of_transformers_is_the_bias_of_the_bridge(model, family):
    exact, found = convert_prompt(model, PROMPT), KVBias.from_cache(model, cache_of(family))
    assert_same(found, exact)
    assert relative_error(logits_under(model, found, TEXT), logits_under(model, exact, TEXT)) < LAW
    slides = family in ("mistral", "qwen2", "gemma2", "gemma3", "gpt_oss", "phi3", "olmo3", "starcoder2")
    assert slides == (min(part.keys.shape[2] for part in found.attention) == WINDOW - 1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", KINDS[::-1])  # backwards: each family in one of both directions always
def test_a_cache_of_transformers_is_the_bias_of_a_hooked_model(family):
    model = hooked(family)
    exact, found = convert_prompt(model, PROMPT), KVBias.from_cache(model, cache_of(family))
    if family != "bloom":
        assert_same(found, exact)
    assert relative_error(logits_under(model, found, TEXT), logits_under(model, exact, TEXT)) < law_of(family)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", WEIGHTED)
@pytest.mark.parametrize("text", [None, TEXT], ids=["prompt", "prompt and text"])
def test_a_bias_as_a_cache_and_back(model, family, text):
    hf = tiny_hf_model(family)
    exact = convert_prompt(model, PROMPT)
    bias, cache = weighted(exact), weighted(exact).to_cache()
    assert_same(KVBias.from_cache(model, exact.to_cache()), exact)
    if text is not None:  # the cache has grown: then it is the bias of both
        hf.set_attn_implementation("kvlens")
        hf(text, past_key_values=cache)
        bias = convert_prompt(model, text, initial=bias)
    found = KVBias.from_cache(model, cache)
    behind = some_tokens(2, 4, seed=7)
    assert found.position_offset == bias.position_offset and found.fit.history == ("taken from a cache",)
    assert relative_error(logits_under(model, found, behind), logits_under(model, bias, behind)) < LAW


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_plain_transformers_reads_the_same_keys(model, family):
    """The same keys in every layer are a cache that Transformers itself reads, if it is told where the text stands."""
    hf, few, behind = tiny_hf_model(family), DynamicCache(), torch.arange(N_PROMPT, N_PROMPT + TEXT.shape[1])
    kept = torch.tensor([11, 0, 7, 12, 10])
    for number, layer in enumerate(hf(PROMPT, past_key_values=DynamicCache(), use_cache=True).past_key_values.layers):
        few.update(layer.keys[:, :, kept], layer.values[:, :, kept], number)
    found = logits_under(model, KVBias.from_cache(model, few, kept, n_tokens=N_PROMPT), TEXT)
    assert relative_error(found, hf(TEXT, past_key_values=few, position_ids=behind[None]).logits) < LAW


ON_FRONT_ENDS = [("bridge", "llama"), ("bridge", "gemma3"), *(("hooked", name) for name in ("gpt2", "gpt_neo", "bloom"))]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("front_end", "family"), ON_FRONT_ENDS)
def test_keys_that_another_method_keeps_stand_where_they_stood(bridge_of, family, front_end):
    """Others in each row and head, in no order, of another number in each layer, and some that are not read."""
    model, generator = bridge_of(family) if front_end == "bridge" else hooked(family), torch.Generator().manual_seed(0)
    cache = tiny_hf_model(family)(PROMPT, past_key_values=DynamicCache(), use_cache=True).past_key_values
    exact, positions = convert_prompt(model, PROMPT), []
    kept = [torch.zeros_like(part.b_d) for part in exact.attention]
    for number, layer in enumerate(cache.layers):
        at = torch.rand(layer.keys.shape[:3], generator=generator).argsort(dim=-1)[..., : 6 + number]
        layer.keys, layer.values = (
            x.gather(2, at[..., None].expand(*at.shape, x.shape[-1])) for x in (layer.keys, layer.values)
        )
        unread = torch.rand(at.shape, generator=generator) < 0.2
        kept[number].scatter_(2, at, (~unread).double())
        positions.append(at.masked_fill(unread, -1))
    parts = [
        part.with_tensors({"b_kv": part.b_kv * on[..., None], "b_d": on})
        for part, on in zip(exact.attention, kept, strict=True)
    ]
    bias = exact.with_attention(parts).narrowed()
    found = KVBias.from_cache(model, cache, positions, n_tokens=N_PROMPT)
    assert found.position_offset == N_PROMPT and found.fit.history == ("taken from a cache",)
    assert found.num_parameters == bias.num_parameters
    expected = logits_under(model, bias, TEXT)
    assert relative_error(logits_under(model, found, TEXT), expected) < law_of(family)
    closed = [torch.where(at < 0, -1, torch.arange(at.shape[-1])) for at in positions]
    moved = logits_under(model, KVBias.from_cache(model, cache, closed, n_tokens=N_PROMPT), TEXT)
    sees_positions = family in ("gemma3", "gpt_neo", "bloom")  # where distances count beside the keys themselves
    assert (relative_error(moved, expected) > 1e-6) == sees_positions


def test_half_precision_stays_and_the_cache_is_copied(bridge_of):
    hf, model = tiny_hf_model("llama").bfloat16(), bridge_of("llama")
    cache = cache_of("llama", PROMPT[:1], hf)
    found = KVBias.from_cache(model, cache)
    assert found.dtype == torch.bfloat16 and found.single and found.fit is None
    before = found.stacked("keys")
    cache.layers[0].keys.zero_()
    assert torch.equal(found.stacked("keys"), before)
    with torch.enable_grad():
        assert not KVBias.from_cache(model, cache_of("llama")).stacked("keys").requires_grad


def test_weights_and_their_scale_come_back(model_of_llama):
    """Weights beyond float64's largest number, and a head without keys."""
    bias = weighted(convert_prompt(model_of_llama, PROMPT))
    on = torch.tensor([1.0, 0.0, 1.0])[:, None]
    large = dict(
        log_scale=bias.stacked("log_scale") + 900, b_kv=bias.stacked("b_kv") * on[..., None], b_d=bias.stacked("b_d") * on
    )
    bias = with_stacked(bias, **large)
    found = KVBias.from_cache(model_of_llama, bias.to_cache())
    expected = logits_under(model_of_llama, bias, TEXT)
    assert relative_error(logits_under(model_of_llama, found, TEXT), expected) < LAW


@pytest.mark.unhooked
def test_caches_that_are_refused(bridge_of):
    llama, few, short = bridge_of("llama"), cache_of("llama"), cache_of("gemma3")
    whole, empty, at = cache_of("llama"), DynamicCache(), torch.arange(N_PROMPT)
    few.layers[1].keys, few.layers[1].values = few.layers[1].keys[:, :, 3:], few.layers[1].values[:, :, 3:]
    short.layers[0].keys, short.layers[0].values = short.layers[0].keys[:, :, 1:], short.layers[0].values[:, :, 1:]
    static = StaticCache(config=tiny_hf_model("llama").config, max_cache_len=20)
    rounded = DynamicCache()
    rounded.layers = [type("QuantoQuantizedLayer", (type(whole.layers[0]),), {})()]
    weighted_cache = weighted(convert_prompt(llama, PROMPT)).to_cache()
    broken, half = cache_of("llama"), DynamicCache(config=tiny_hf_model("llama").config)
    half.update(whole.layers[1].keys, whole.layers[1].values, 1)
    broken.layers[2].values[0, 0, 0, 0] = torch.nan
    refused = [
        ("got StaticCache of StaticLayer", llama, static, {}),
        ("got DynamicCache of QuantoQuantizedLayer", llama, rounded, {}),
        ("got tuple", llama, tuple((layer.keys, layer.values) for layer in whole.layers), {}),
        (r"\[2, 3, 13, 4\]\] in layer 0, got \[\[2, 5, 13, 4\]", llama, cache_of("gpt2"), {}),
        ("3 layers, got 0", llama, empty, {}),
        ("in layer 0, got nothing", llama, half, {}),
        ("counts 10 to 13 tokens; give positions", llama, few, {}),
        ("counts 13 tokens; give positions", bridge_of("gemma3"), short, {}),
        ("counts 13 tokens of 20", llama, whole, {"n_tokens": 20}),
        ("n_tokens must be at least 1", llama, whole, {"n_tokens": 0}),
        ("expected n_tokens", llama, whole, {"positions": at}),
        ("none for a bias's cache", llama, weighted_cache, {"positions": at, "n_tokens": 13}),
        ("positions of the 10 keys of layer 1", llama, few, {"positions": [at, at, at], "n_tokens": 13}),
        ("below n_tokens=12", llama, whole, {"positions": at, "n_tokens": 12}),
        ("or -1", llama, whole, {"positions": at - 2, "n_tokens": 13}),
        ("got .*", llama, whole, {"positions": at.double(), "n_tokens": 13}),
        ("positions of the 13 keys of layer 0", llama, whole, {"positions": at.expand(2, 6, 13), "n_tokens": 13}),
        ("positions of the 3 layers, got those of 2", llama, whole, {"positions": [at, at], "n_tokens": 13}),
        ("positions of the 13 keys", llama, whole, {"positions": "all", "n_tokens": 13}),
        ("not finite", llama, broken, {}),
        ("states of recurrent layers", bridge_of("qwen3_5"), whole, {}),
        ("latent attention holds no keys", bridge_of("deepseek_v3"), whole, {}),
        ("linear attention has no keys", HookedKVTransformer.from_zoo("bigram-linear"), whole, {}),
        ("biases of values into b_O", hooked("gpt2", processed=True), cache_of("gpt2"), {}),
    ]
    for words, model, cache, options in refused:
        with pytest.raises(KVLensError, match=words):
            KVBias.from_cache(model, cache, **options)
