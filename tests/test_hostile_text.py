"""Text that no tokenizer can read, values that are not text, and words that a tokenizer does not know, where text is taken."""

import functools
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_hf import tiny_tokenizer
from tiny_text_model import PROMPT, tiny_text_model

from kvlens import HookedKVTransformer, KVLensError, analyses, convert_prompt
from kvlens.analyses import prompt_attribution
from kvlens.cli import main
from kvlens.tokenizer import warn_of_unknown_words

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


@pytest.fixture(scope="module")
def facts():
    return HookedKVTransformer.from_zoo("facts-linear")


def test_the_words_are_named(facts):
    with pytest.warns(UserWarning, match=r"lacks 'Xerxes', 'gorilla': it reads <\|unk\|>"):
        tokens = facts.to_tokens(["Mira keeps a gorilla.", "Xerxes keeps a goat.", "Xerxes keeps a gorilla."][::-1])
    assert (tokens == facts.tokenizer.unk_token_id).sum() == 4
    with pytest.warns(UserWarning, match=r"'w0', 'w1', 'w2', 'w3', 'w4' and 3 more"):
        facts.to_tokens(" ".join(f"w{i}" for i in range(8)))


def test_every_way_to_give_a_text_warns(facts, capsys, monkeypatch):
    story, question = "Mira keeps a gorilla. Pavel has a parrot.", " Which animal does Pavel keep? Pavel keeps a"
    for read in (
        lambda: convert_prompt(facts, story),
        lambda: prompt_attribution(facts, story, question),
        lambda: prompt_attribution(facts, story.replace("gorilla", "goat"), question.replace("Pavel", "Xerxes")),
    ):
        with pytest.warns(UserWarning, match="the model's vocabulary lacks '(gorilla|Xerxes)'"):
            read()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main(["explain", "--model", "facts-linear", "--prompt", story, "--text", question]) == 0
    assert "the model's vocabulary lacks 'gorilla'" in capsys.readouterr().err  # one line, once


def test_known_words_and_the_token_itself_do_not_warn(facts):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        facts.to_tokens("Mira keeps a goat. Where is Pavel?")
        facts.to_tokens("<|unk|>")
        HookedKVTransformer.from_zoo("docs-gpt2").to_tokens("Ü 漢 gorilla \U0001f98d")
        tokenizer = tiny_tokenizer()
        tokenizer.unk_token = tokenizer.eos_token = tokenizer.bos_token  # as GPT-2's: written, it is no unknown word
        texts = [f"The widget {tokenizer.eos_token}"]
        warn_of_unknown_words(tokenizer, texts, tokenizer(texts, return_tensors="pt")["input_ids"])
