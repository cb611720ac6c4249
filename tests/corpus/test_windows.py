"""Windows: what they contain, where they start, and that a seed decides them."""

import pytest
import torch

from kvlens.corpus import TokenWindows, train_bpe_tokenizer

BOS = 0


def counting(total: int, **options) -> TokenWindows:
    """Tokens 0, 1, 2 ..., so that a window's content shows its position."""
    return TokenWindows(torch.arange(total), BOS, **options)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_documents_stand_one_after_the_other_each_behind_bos():
    texts = ["one two", "", "three\n"]
    tokenizer = train_bpe_tokenizer(texts, 259)
    windows = TokenWindows.from_texts(texts, tokenizer)
    assert windows.tokens.tolist() == [i for text in texts for i in tokenizer.encode(text)]
    assert windows.n_documents == 3
    assert windows.chars_per_token == 1.0  # no merges were learned: one byte per token


@pytest.mark.parametrize("bos_first", [True, False])
def test_samples_are_consecutive_tokens(bos_first):
    sample = counting(23, bos_first=bos_first).sample(101, 5, generator(0))
    assert sample.shape == (101, 5)
    text = sample[:, 1:] if bos_first else sample
    assert (text.diff(dim=1) == 1).all()
    assert not bos_first or (sample[:, 0] == BOS).all()
    assert set(text[:, 0].tolist()) == set(range(23 - text.shape[1] + 1)), "every position is reached, including the last one"


def test_the_generator_alone_decides():
    windows = counting(1000)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = windows.sample(3, 7, generator(5))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first, windows.sample(3, 7, generator(5)))
    assert not torch.equal(first, windows.sample(3, 7, generator(6)))


@pytest.mark.parametrize("bos_first", [True, False])
@pytest.mark.parametrize("total", [20, 23])
def test_consecutive_windows_hold_each_token_once(total, bos_first):
    windows = counting(total, bos_first=bos_first).consecutive(6)
    text = windows[:, 1:] if bos_first else windows
    assert text.flatten().tolist() == list(range(total // text.shape[1] * text.shape[1]))


def test_fewer_windows_are_spread_over_the_text():
    windows = counting(100, bos_first=False)
    assert windows.consecutive(10, max_windows=5)[:, 0].tolist() == [0, 20, 40, 60, 80]
    assert torch.equal(windows.consecutive(10, max_windows=99), windows.consecutive(10))


def test_a_window_may_be_as_long_as_the_text():
    assert counting(5).sample(1, 6, generator(0)).tolist() == [[0, 0, 1, 2, 3, 4]]
    assert counting(5, bos_first=False).consecutive(5).tolist() == [[0, 1, 2, 3, 4]]
