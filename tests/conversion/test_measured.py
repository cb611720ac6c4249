"""The recall of a bias: which words of the prompt's own sentences the model would still say."""

import math

import pytest
import torch
from chat_templates import CHATML, reader
from precision import LAW
from tiny_text_model import tiny_text_model, tiny_tokenizer

from kvlens import Chat, KVBias, KVLensError, convert_prompt
from kvlens.conversion import recall
from kvlens.conversion.measured import lead_of
from kvlens.kv_bias import Recall
from kvlens.kv_bias.fit import RecalledWord
from kvlens.texts import Response
from kvlens.units import layout_of_tokens

PROMPT = "The widget is purple and the gadget is green. Return the color. Frobnicate the widget, and the depth."
SENTENCES = ["The widget is purple and the gadget is green.", "Return the color.", "Frobnicate the widget, and the depth."]
FEW = dict(method="landmark", n_features=3, key_steps=2, n_continuations=3, continuation_length=6, n_held_out=1, verbose=False)


@pytest.fixture(scope="module")
def model():
    return tiny_text_model(attention="softmax", kv_shift=None, dtype=torch.float64, n_ctx=256, gain=60)


@pytest.fixture(scope="module")
def few(model):
    return convert_prompt(model, PROMPT, **FEW)


def log_p_of_words(model, before, sentence):
    """Word by word, from one plain pass over tokens that come before and the sentence behind a line end."""
    lead, tokens = (torch.tensor(tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]) for text in ("\n", sentence))
    whole = torch.cat([before, lead, tokens])
    log_p = model(whole[None])[0].log_softmax(dim=-1)
    each = log_p[len(whole) - len(tokens) - 1 : -1].gather(-1, tokens[:, None])[:, 0]
    words = Response.of(model, lead, tokens).words
    return [(word.text, float(each[word.start : word.stop].sum())) for word in words if word.is_word]


def test_effects_and_losses_are_those_of_plain_passes(model, few):
    tokens = model.to_tokens(PROMPT)[0]
    base = tokens[:1] if int(tokens[0]) == model.tokenizer.bos_token_id else tokens[:0]
    expected = []
    for number, sentence in enumerate(SENTENCES):
        p, w = (log_p_of_words(model, before, sentence) for before in (tokens, base))
        with model.kv_bias(few):
            b = log_p_of_words(model, tokens[:0], sentence)
        expected += [(number, word, x - z, x - y) for (word, x), (_, y), (_, z) in zip(p, b, w, strict=True) if x - z > 1]
    found = few.fit.recall
    assert found.sentences == tuple(SENTENCES) and len(expected) > 3
    assert [(word.sentence, word.word) for word in found.words] == [each[:2] for each in expected]
    for word, (*_, effect, loss) in zip(found.words, expected, strict=True):
        assert math.isclose(word.effect, effect, abs_tol=1e-10) and math.isclose(word.loss, loss, abs_tol=1e-10)
    assert max(abs(word.loss) for word in found.words) > 0.1  # three keys lose something


def test_an_exact_bias_loses_nothing(model, few):
    found = recall(model, PROMPT, convert_prompt(model, PROMPT))
    assert found.share == 1 and not found.worst and max(abs(word.loss) for word in found.words) < LAW
    assert all(word.is_first == word.was_first for word in found.words)
    again = recall(model, PROMPT, few)
    assert again.sentences == few.fit.recall.sentences
    for a, b in zip(again.words, few.fit.recall.words, strict=True):
        assert a[:2] == b[:2] and math.isclose(a.loss, b.loss, abs_tol=1e-10)


def test_it_is_saved_with_the_bias_shown_and_forgotten_when_the_bias_changes(model, few, tmp_path):
    few.save(tmp_path / "few.safetensors")
    loaded = KVBias.load(tmp_path / "few.safetensors")
    assert loaded.fit.recall == few.fit.recall and few.fit.recall.summary() in repr(loaded.fit)
    assert (2.0 * few).fit.recall is None and (2.0 * few).fit.parts[0].recall == few.fit.recall


WORDS = (
    RecalledWord(0, "Rotterdam", 7.0, 4.0, True, False),
    RecalledWord(0, "office", 2.0, -0.5, True, True),
    RecalledWord(2, "Pavel", 5.0, 1.5, False, False),
)


def test_shares_and_tables_by_hand():
    found = Recall(("The office moves to Rotterdam.", "Yes.", "Pavel has left."), WORDS)
    assert found.share == 1 / 3 and [word.word for word in found.worst] == ["Rotterdam", "Pavel"]
    table = found.table()
    assert table["n_words"].tolist() == [2, 0, 1] and table["worst_word"].tolist() == ["Rotterdam", "", "Pavel"]
    assert table["first_share"].fillna(-1).tolist() == [0.5, -1, -1]
    assert table["largest_loss"].fillna(-1).tolist() == [4.0, -1, 1.5]
    assert found.summary() == "recall 33% of 3 words of the prompt; lost most: 'Rotterdam' (4.0 nats), 'Pavel' (1.5 nats)"
    assert "no word" in Recall(("Yes.",), ()).summary() and math.isnan(Recall(("Yes.",), ()).share)


def test_where_there_is_none(model):
    tokens = torch.arange(3, 20)
    assert convert_prompt(model, PROMPT, **{**FEW, "n_held_out": 0}).fit.recall is None
    assert convert_prompt(model, [PROMPT, PROMPT], **FEW).fit.recall is None
    without_tokenizer = tiny_text_model(attention="softmax", kv_shift=None)
    without_tokenizer.tokenizer = None
    assert convert_prompt(without_tokenizer, tokens, **FEW).fit.recall is None
    assert convert_prompt(model, PROMPT, without=[(2, 4)], **FEW).fit.recall is None
    assert (of_tokens := convert_prompt(model, model.to_tokens(PROMPT)[0], **FEW)).fit.recall is None
    assert recall(model, model.to_tokens(PROMPT)[0], of_tokens).sentences == tuple(SENTENCES)


@pytest.mark.unhooked
def test_refusals(model, few):
    with pytest.raises(KVLensError, match="expected the bias of one prompt"), model.kv_bias(few):
        recall(model, PROMPT, few)
    with pytest.raises(KVLensError, match="expected the bias of one prompt"):
        recall(model, PROMPT, few.repeat(2))


def test_a_sentence_is_said_in_the_assistants_turn():
    reads, chat = reader(CHATML), Chat.ask("Return the color.", ["The widget is purple. The gadget is green."])
    assert lead_of(reads, layout_of_tokens(reads, chat.tokens(reads)[:9])) == "<|im_end|>\n<|im_start|>assistant\n"
    assert lead_of(reads, chat.layout(reads)) == ""  # the chat ends with it
