"""Text that no tokenizer can read, and values that are not text, for every function that takes text."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_text_model import PROMPT, tiny_text_model

from kvlens import KVLensError, analyses, convert_prompt

pytestmark = pytest.mark.unhooked  # the messages are kvlens' own
model = functools.cache(tiny_text_model)
softmax_model = functools.cache(lambda: tiny_text_model(attention="softmax"))
HALF = "a\ud800b"
READERS = {
    "convert_prompt": lambda text: convert_prompt(model(), text),
    "a list": lambda text: convert_prompt(model(), ["a", text]),
    "reference": lambda text: convert_prompt(softmax_model(), PROMPT, method="landmark", n_features=1, reference=text),
    "forward": lambda text: model()(text),
    "generate": lambda text: model().generate(text, max_new_tokens=1, verbose=False),
    "to_tokens": lambda text: model().to_tokens(text),
    "to_str_tokens": lambda text: model().to_str_tokens(text),
    "prompt": lambda text: analyses.bias_by_head(model(), text, "a"),
    "text": lambda text: analyses.bias_by_head(model(), "a", text),
    "answer": lambda text: analyses.bias_decomposition(model(), "a", "b", answer=text),
}
NO_TEXTS = (b"bytes", Path("a"), None, {}, ("a", "b"), 3, np.array(["a", "b"]))


@pytest.mark.parametrize("reader", READERS)
def test_half_a_character_is_refused_where_text_becomes_tokens(reader):
    with pytest.raises(KVLensError, match=r"character 1 is '\\ud800', half of a character"):
        READERS[reader](HALF)


@pytest.mark.parametrize("reader", ["convert_prompt", "forward", "generate", "to_tokens", "prompt", "text"])
def test_a_value_that_is_not_text_is_refused(reader):
    for given in NO_TEXTS:
        with pytest.raises(KVLensError):
            READERS[reader](given)


def test_odd_characters_are_text():
    """NUL, control characters, numpy strings and a very long one are passed to the tokenizer unchanged."""
    for text in ("a\0b", "\x1b[31m\u202e", np.str_("a b"), "\U0001f600", "ab " * 100_000):
        tokens = model().to_tokens(text)
        assert tokens.shape[1] > 0 and tokens.dtype == torch.long
