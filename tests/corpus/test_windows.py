"""Windows: what they contain, where they start, and that a seed decides them."""

import pytest
import torch

from kvlens.corpus import TokenWindows, train_bpe_tokenizer

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
