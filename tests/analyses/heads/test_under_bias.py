"""The attention under an exact bias is that of a pass over prompt and text; under another one it is that of its keys."""

import pytest
import torch
from precision import LAW, float64, relative_error
from tiny_hf import tiny_hf_model
from tiny_text_model import PROMPT, TEXT, linear, tiny_text_model

from kvlens import HookedKVTransformer, KVLensError, KVTransformerBridge, convert_prompt
from kvlens.analyses import attention_under_bias

N_PROMPT, LAYERS = 13, (0, 2)
PATTERN = "blocks.{}.attn.hook_pattern"


def on_bridge(name):
    return KVTransformerBridge.boot_transformers(tiny_hf_model(name), verify=False)


def hooked(name):
    return HookedKVTransformer.from_pretrained(
        name, hf_model=tiny_hf_model(name), verify=False, dtype=torch.get_default_dtype()
    )


MODELS = {
    "grouped heads": lambda: hooked("llama"),
    "window": lambda: hooked("gemma3"),
    "soft cap and window": lambda: hooked("gemma2"),
    "ALiBi": lambda: hooked("bloom"),
    "bridge": lambda: on_bridge("qwen2"),
    "bridge, soft cap and window": lambda: on_bridge("gemma2"),
}


def tokens_of(seed=0):
    tokens = torch.randint(3, 300, (1, 19), generator=torch.Generator().manual_seed(seed))
    return tokens, tokens[0, :N_PROMPT], tokens[0, N_PROMPT:]


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_rows_sum_to_one_and_are_those_of_the_pass_over_prompt_and_text(make):
    with float64():
        model = make()
        whole, prompt, text = tokens_of()
        _, cache = model.run_with_cache(whole, names_filter=[PATTERN.format(layer) for layer in LAYERS])
        for layer in LAYERS:
            found = attention_under_bias(model, prompt, text, layer)
            assert found.n_prompt == N_PROMPT and len(found.tokens) == whole.shape[1] == found.pattern.shape[1]
            assert relative_error(found.pattern, cache[PATTERN.format(layer)][0]) < LAW
            assert relative_error(found.pattern.sum(dim=-1), torch.ones_like(found.pattern[..., 0])) < LAW


def test_an_attention_sink_is_what_rows_lack():
    with float64():
        model = hooked("gpt_oss")
        whole, prompt, text = tokens_of()
        _, cache = model.run_with_cache(whole, names_filter=[PATTERN.format(1)])
        found = attention_under_bias(model, prompt, text, 1).pattern
        assert relative_error(found, cache[PATTERN.format(1)][0]) < LAW and (found.sum(dim=-1) < 1).all()


def test_strings_get_the_names_of_their_tokens():
    model = tiny_text_model(attention="softmax", kv_shift=None)
    found = attention_under_bias(model, PROMPT, TEXT, 1)
    assert found.tokens[0] == model.tokenizer.bos_token and "".join(found.tokens[found.n_prompt :]) == TEXT


def test_few_keys_stand_at_the_tokens_that_they_were_taken_from():
    """And their shares are those of the pass that reads this bias."""
    with float64():
        model = hooked("llama")
        _, prompt, text = tokens_of()
        texts = dict(n_continuations=2, continuation_length=4)
        few = convert_prompt(model, prompt, method="streaming_llm", n_features=5, n_sink=2, **texts)
        found = attention_under_bias(model, prompt, text, 1, bias=few).pattern[:, N_PROMPT:]
        kept = [0, 1, 10, 11, 12]
        assert set(found[..., :N_PROMPT].abs().amax(dim=(0, 1)).nonzero().flatten().tolist()) == set(kept)
        assert relative_error(found.sum(dim=-1), torch.ones_like(found[..., 0])) < LAW
        by_key = attention_under_bias(model, few, text, 1)
        assert by_key.tokens[: by_key.n_prompt] == [f"key {i}" for i in range(5)]
        assert relative_error(by_key.pattern[..., :5], found[..., kept]) < LAW
        with model.kv_bias(few):
            _, cache = model.run_with_cache(text[None], names_filter=[PATTERN.format(1)])
        assert relative_error(found[..., N_PROMPT:], cache[PATTERN.format(1)][0]) < LAW


def test_a_difference_of_biases_has_negative_entries_and_rows_that_sum_to_one():
    with float64():
        model = hooked("llama")
        (_, prompt, text), (_, other, _) = tokens_of(), tokens_of(1)
        a, b = convert_prompt(model, prompt), convert_prompt(model, other)
        found = attention_under_bias(model, 1.25 * a - 0.25 * b, text, 1)
        assert found.n_prompt == 2 * N_PROMPT and (found.pattern < 0).any()
        assert relative_error(found.pattern.sum(dim=-1), torch.ones_like(found.pattern[..., 0])) < LAW


def test_what_has_no_columns_is_refused():
    model = linear()
    with pytest.raises(KVLensError, match="sums of features there and no keys.*head_details"):
        attention_under_bias(model, PROMPT, TEXT, 1)
    softmax = tiny_text_model(attention="softmax", kv_shift=None)
    with pytest.raises(KVLensError, match="has layers 0 to 1"):
        attention_under_bias(softmax, PROMPT, TEXT, 2)
    bias = convert_prompt(softmax, PROMPT)
    with pytest.raises(KVLensError, match="under this bias, and the prompt has"):
        attention_under_bias(softmax, PROMPT + TEXT, TEXT, 0, bias=bias)
    with softmax.kv_bias(bias), pytest.raises(KVLensError, match="is attached"):
        attention_under_bias(softmax, bias, TEXT, 0)
