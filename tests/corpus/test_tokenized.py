"""The tokenizer loses nothing, comes out the same twice, survives a folder, and suits TransformerLens without a network.

Windows: what they contain, where they start, and that a seed decides them.

Tokens that are kept are those made anew: made once, and again when anything that decides them changes.
"""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvlens.corpus import TokenWindows, encode_texts, tokenized, train_bpe_tokenizer
from kvlens.tasks import TextTask, text

os.environ["HF_HUB_OFFLINE"] = "1"


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


BOS = 0


def counting(total: int) -> TokenWindows:
    """Tokens 0, 1, 2 ..., so that a window's content shows its position."""
    return TokenWindows(torch.arange(total), BOS)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_documents_stand_one_after_the_other_each_behind_bos():
    texts = ["one two", "", "three\n"]
    tokenizer = train_bpe_tokenizer(texts, 259)
    windows = TokenWindows.from_texts(texts, tokenizer)
    assert windows.tokens.tolist() == [i for text in texts for i in tokenizer.encode(text)]
    assert windows.n_documents == 3
    assert windows.chars_per_token == 1.0  # no merges were learned: one byte per token


def test_samples_are_consecutive_tokens_behind_bos():
    sample = counting(23).sample(101, 5, generator(0))
    assert sample.shape == (101, 5) and (sample[:, 0] == BOS).all()
    text = sample[:, 1:]
    assert (text.diff(dim=1) == 1).all()
    assert set(text[:, 0].tolist()) == set(range(23 - text.shape[1] + 1)), "every position is reached, including the last one"


def test_the_generator_alone_decides():
    windows = counting(1000)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = windows.sample(3, 7, generator(5))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first, windows.sample(3, 7, generator(5)))
    assert not torch.equal(first, windows.sample(3, 7, generator(6)))


@pytest.mark.parametrize("total", [20, 23])
def test_consecutive_windows_hold_each_token_once(total):
    text = counting(total).consecutive(6)[:, 1:]
    assert text.flatten().tolist() == list(range(total // 5 * 5))


def test_fewer_windows_are_spread_over_the_text():
    windows = counting(100)
    assert windows.consecutive(11, max_windows=5)[:, 1].tolist() == [0, 20, 40, 60, 80]
    assert torch.equal(windows.consecutive(11, max_windows=99), windows.consecutive(11))


def test_a_window_may_be_as_long_as_the_text():
    assert counting(5).sample(1, 6, generator(0)).tolist() == [[0, 0, 1, 2, 3, 4]]
    assert counting(5).consecutive(6).tolist() == [[0, 0, 1, 2, 3, 4]]


@pytest.fixture
def kept_here(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenized, "cached_assets_path", lambda *args, **kwargs: tmp_path)
    return tmp_path


@pytest.fixture
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text("one two three four, one two five. " * 40)
    return path


def made(monkeypatch):
    """One entry for each time that tokens are made."""
    calls, whole = [], text.tokenized
    monkeypatch.setattr(text, "tokenized", lambda *args: calls.append(args) or whole(*args))
    return calls


def test_kept_tokens_and_tokenizer_are_those_made_anew(kept_here, file, monkeypatch):
    calls = made(monkeypatch)
    first, again = TextTask(str(file), vocab_size=270, length=8), TextTask(str(file), vocab_size=270, length=9)
    assert first.data_hash() == again.data_hash() and len(calls) == 1
    for split, windows in first.windows.items():
        of_kept = again.windows[split]
        assert torch.equal(windows.tokens, of_kept.tokens) and of_kept.tokens.dtype == torch.int64
        assert vars(windows).keys() == vars(of_kept).keys() and windows.chars_per_token == of_kept.chars_per_token
    ours, theirs = first.built_tokenizer, again.built_tokenizer
    assert ours.encode("one é <|bos|>") == theirs.encode("one é <|bos|>") and len(ours) == len(theirs)
    assert ours.init_kwargs["add_bos_token"] and theirs.init_kwargs["name_or_path"] == ours.init_kwargs["name_or_path"]


def test_another_text_or_vocabulary_is_another_file(kept_here, file, monkeypatch):
    calls = made(monkeypatch)
    for size in (270, 271):
        assert TextTask(str(file), vocab_size=size).windows
    file.write_text(file.read_text() + "six")
    assert TextTask(str(file), vocab_size=270).windows
    assert len(calls) == len(list(kept_here.glob("*.safetensors"))) == 3


def test_a_damaged_file_is_reported_and_its_tokens_are_made_again(kept_here, file, monkeypatch, logged):
    whole = TextTask(str(file), vocab_size=270).data_hash()
    (path,) = kept_here.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    assert TextTask(str(file), vocab_size=270).data_hash() == whole
    assert "match its checksum" in logged[0]


def test_tokens_that_cannot_be_kept_are_made(file, monkeypatch, tmp_path):
    monkeypatch.setattr(tokenized, "cached_assets_path", lambda *args, **kwargs: tmp_path / "nowhere")
    assert TextTask(str(file), vocab_size=270).windows
    assert not (tmp_path / "nowhere").exists()
