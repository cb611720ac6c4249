"""On the bridge as on HookedKVTransformer: a word where a bias no longer fits the weights, where normalizers are below 0, and
where words are unknown; and a tokenizer of another model is refused."""

import warnings

import pytest
import torch
from small_models import warned_of
from tiny_hf import tiny_hf_model, tiny_tokenizer

from kvlens import KVLensError, KVTransformerBridge, convert_prompt

PROMPT, OTHER, TEXT = torch.arange(3, 12), torch.arange(13, 22), torch.arange(5, 10)[None]


@pytest.fixture
def model():
    return KVTransformerBridge.boot_transformers(tiny_hf_model("llama"), verify=False)


def test_changed_weights_are_said_once(model):
    with model.kv_bias(convert_prompt(model, PROMPT)):
        assert not warned_of(lambda: model(TEXT))
        with torch.no_grad():
            next(model.original_model.parameters()).mul_(1.1)
        (said,) = warned_of(lambda: model(TEXT))
        assert "weights of this model have changed" in said
        assert not warned_of(lambda: model(TEXT))


def test_weights_changed_in_an_inner_block_are_said_in_the_outer_one(model):
    a, b = convert_prompt(model, PROMPT), convert_prompt(model, OTHER)
    with model.kv_bias(a):
        with model.kv_bias(b), torch.no_grad():
            next(model.original_model.parameters()).mul_(1.1)
        assert len(warned_of(lambda: model(TEXT))) == 1


def test_normalizers_below_zero_are_said_once(model):
    a, b = convert_prompt(model, PROMPT), convert_prompt(model, OTHER)
    with model.kv_bias(-10 * a), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, cache = model.run_with_cache(TEXT)
        below = [cache[f"blocks.{layer}.attn.hook_normalizer"].isnan() for layer in range(model.cfg.n_layers)]
        share = float(torch.stack(below).double().mean())
    with model.kv_bias(-10 * a):
        (said,) = warned_of(lambda: model(TEXT))
        assert share > 0 and f"{100 * share:.3g} % of the normalizers" in said
        assert not warned_of(lambda: model(TEXT))
    with model.kv_bias(a + 0.5 * (b - a)):
        assert not warned_of(lambda: model(TEXT))


def test_unknown_words_are_named():
    hybrid = KVTransformerBridge.from_zoo("facts-hybrid", dtype=torch.float64)
    with pytest.warns(UserWarning, match="lacks 'gorilla'"):
        hybrid.to_tokens("Mira keeps a gorilla.")


def test_a_tokenizer_larger_than_the_vocabulary_is_refused():
    with pytest.raises(KVLensError, match="vocabulary of this GPT2LMHeadModel only 101"):
        KVTransformerBridge.boot_transformers(tiny_hf_model("gpt2", vocab_size=101), tokenizer=tiny_tokenizer())
