"""What the corpora, tokenizers and windows refuse, and their words."""

import pytest
import torch

from kvlens.corpus import TokenWindows, build_docs_corpus, train_bpe_tokenizer

pytestmark = pytest.mark.unhooked  # the messages are kvlens' own

PACKAGES = "packages= must be a list of names from ['stdlib', 'numpy', 'torch', 'transformers'], got []"


def windows():
    return TokenWindows(torch.arange(5), 0)


def sample(batch, length):
    return windows().sample(batch, length, torch.Generator())


REFUSED = [
    ("at most", lambda: train_bpe_tokenizer(["a"], 10**12)),
    ("at least 259", lambda: train_bpe_tokenizer(["a"], 258)),
    ("texts must be a list of strings, got 'text'", lambda: train_bpe_tokenizer("text")),
    ("of strings", lambda: train_bpe_tokenizer([3], 300)),
    ("texts is empty; there is nothing to learn merges from", lambda: train_bpe_tokenizer([])),
    (PACKAGES, lambda: build_docs_corpus([])),
    ("packages must be a list of strings, got 'numpy'", lambda: build_docs_corpus("numpy")),
    ("did you mean 'numpy'", lambda: build_docs_corpus(["nunpy"])),
    ("did you mean 'torch'", lambda: build_docs_corpus(max_chars={"toch": 1})),
    ("must be in (0, 1)", lambda: build_docs_corpus(heldout_fraction=1.0)),
    ("roots='a': expected a path, got 3", lambda: build_docs_corpus(roots={"a": 3})),
    ("roots= has 'a' -> nowhere, which is not a folder", lambda: build_docs_corpus(roots={"a": "nowhere"})),
    ("batch must be at least 1, got 0", lambda: sample(0, 4)),
    ("length must be from 2 to 6 (the text has 5 tokens), got 7", lambda: sample(1, 7)),
    ("length must be from 2 to 6 (the text has 5 tokens), got 1", lambda: sample(2, 1)),
    ("length must be from 2 to 6 (the text has 5 tokens), got 1", lambda: windows().consecutive(1)),
    ("max_windows must be at least 1, got 0", lambda: windows().consecutive(2, max_windows=0)),
]


@pytest.mark.parametrize(("words", "call"), REFUSED, ids=[words for words, _ in REFUSED])
def test_is_refused(words, call, refuses):
    refuses(words, call)
