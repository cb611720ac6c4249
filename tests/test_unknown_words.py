"""Words that a tokenizer does not know are read as one and the same token: the user is told, at every way to give a text."""

import warnings

import pytest
from tiny_hf import tiny_tokenizer

from kvlens import HookedKVTransformer, convert_prompt
from kvlens.analyses import prompt_attribution
from kvlens.cli import main
from kvlens.tokenizer import warn_of_unknown_words


@pytest.fixture(scope="module")
def model():
    return HookedKVTransformer.from_zoo("facts-linear")


def test_the_words_are_named(model):
    with pytest.warns(UserWarning, match=r"lacks 'Xerxes', 'gorilla': it reads <\|unk\|>"):
        tokens = model.to_tokens(["Mira keeps a gorilla.", "Xerxes keeps a goat.", "Xerxes keeps a gorilla."][::-1])
    assert (tokens == model.tokenizer.unk_token_id).sum() == 4
    with pytest.warns(UserWarning, match=r"'w0', 'w1', 'w2', 'w3', 'w4' and 3 more"):
        model.to_tokens(" ".join(f"w{i}" for i in range(8)))


def test_every_way_to_give_a_text_warns(model, capsys, monkeypatch):
    story, question = "Mira keeps a gorilla. Pavel has a parrot.", " Which animal does Pavel keep? Pavel keeps a"
    for read in (
        lambda: convert_prompt(model, story),
        lambda: prompt_attribution(model, story, question),
        lambda: prompt_attribution(model, story.replace("gorilla", "goat"), question.replace("Pavel", "Xerxes")),
    ):
        with pytest.warns(UserWarning, match="the model's vocabulary lacks '(gorilla|Xerxes)'"):
            read()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main(["explain", "--model", "facts-linear", "--prompt", story, "--text", question]) == 0
    assert "the model's vocabulary lacks 'gorilla'" in capsys.readouterr().err  # one line, once


def test_known_words_and_the_token_itself_do_not_warn(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.to_tokens("Mira keeps a goat. Where is Pavel?")
        model.to_tokens("<|unk|>")
        HookedKVTransformer.from_zoo("docs-gpt2").to_tokens("Ü 漢 gorilla \U0001f98d")
        tokenizer = tiny_tokenizer()
        tokenizer.unk_token = tokenizer.eos_token = tokenizer.bos_token  # as GPT-2's: written, it is no unknown word
        texts = [f"The widget {tokenizer.eos_token}"]
        warn_of_unknown_words(tokenizer, texts, tokenizer(texts, return_tensors="pt")["input_ids"])
