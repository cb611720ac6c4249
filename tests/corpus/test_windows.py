"""Windows: what they contain, where they start, and that a seed decides them.

Tokens that are kept are those made anew: made once, and again when anything that decides them changes.
"""

import pytest
import torch

from kvlens.corpus import TokenWindows, tokenized, train_bpe_tokenizer
from kvlens.tasks import TextTask, text

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
