"""The tokenizer loses nothing, comes out the same twice, survives a folder, and suits TransformerLens without a network."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvlens.corpus import encode_texts, train_bpe_tokenizer

TEXTS = ["def double(x):\n    return x + x\n" * 5, "the cat sat on the mat, the dog sat on the log. " * 5]
TOKENIZER = train_bpe_tokenizer(TEXTS, vocab_size=280)
SPECIAL = ("<|bos|>", "<|eos|>", "<|pad|>")


def round_trip(text: str) -> str:
    return TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "  two  spaces  ",
        "\n\n\t\r\n",
        "\x00\x01\x7f\x1b[0m",
        "👩‍🔬🇳🇱é́",
        "𝔘𐍈\u202e\ufeff",
        "don't , do . n't",
        "Ġ Ċ Ã",
    ],
)
def test_round_trip_is_lossless(text):
    assert round_trip(text) == text


@given(st.text())
@settings(max_examples=60, deadline=None)
def test_round_trip_is_lossless_for_any_text(text):
    assert round_trip(text) == text


def test_special_tokens_are_distinct_and_first():
    assert TOKENIZER.convert_tokens_to_ids(list(SPECIAL)) == [0, 1, 2]
    assert (TOKENIZER.bos_token, TOKENIZER.eos_token, TOKENIZER.pad_token) == SPECIAL
    assert len(TOKENIZER) == 280
    assert TOKENIZER.padding_side == "right"


def test_equal_texts_give_an_equal_tokenizer():
    again = train_bpe_tokenizer(iter(TEXTS), vocab_size=280)
    assert again.backend_tokenizer.to_str() == TOKENIZER.backend_tokenizer.to_str()


def test_merges_are_learned():
    assert len(encode_texts(TOKENIZER, [TEXTS[1]])[0]) < len(TEXTS[1]) / 2


def test_batches_equal_single_texts_without_bos():
    assert encode_texts(TOKENIZER, TEXTS) == [TOKENIZER.encode(text)[1:] for text in TEXTS]
    assert all(TOKENIZER.encode(text)[0] == TOKENIZER.bos_token_id for text in TEXTS)


def test_a_folder_restores_the_same_tokenizer(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)):
        assert loaded(TEXTS)["input_ids"] == TOKENIZER(TEXTS)["input_ids"]
        assert loaded.padding_side == "right"
        assert (loaded.bos_token, loaded.eos_token, loaded.pad_token) == SPECIAL


@pytest.mark.parametrize("origin", ["memory", "folder"])
def test_transformer_lens_takes_it_offline(origin, tmp_path):
    from kvlens.base import HookedTransformer, HookedTransformerConfig

    tokenizer = TOKENIZER
    if origin == "folder":
        TOKENIZER.save_pretrained(tmp_path)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    cfg = HookedTransformerConfig(n_layers=1, d_model=6, d_head=3, n_ctx=17, act_fn="relu", device="cpu")
    model = HookedTransformer(cfg, tokenizer=tokenizer)
    ids = TOKENIZER.encode("the cat", add_special_tokens=False)
    assert model.cfg.d_vocab == 280
    assert model.to_tokens("the cat").tolist() == [[0, *ids]]
    assert model.to_tokens("the cat", prepend_bos=False).tolist() == [ids]
    assert model.to_tokens(["the cat", ""]).tolist() == [[0, *ids], [0] + [2] * len(ids)]
    assert model.to_string(model.to_tokens("the cat", prepend_bos=False)[0]) == "the cat"
