"""The question in a user's last message is never removed; what it is about is cut into units."""

import pytest
import torch
from chat_templates import TEMPLATES, chat_model, reader

from kvlens import Chat, KVLensError, explain
from kvlens.question import asks, question_in
from kvlens.units import always_there

NOTE = "Everybody was there on Tuesday. The new office will be in Rotterdam. The rent is 12,500 euros."
ASKED = {
    "In which city will it be?": f"{NOTE} In which city will it be?",
    "In which city is it?": f"minutes.txt:\n{NOTE}\n\nIn which city is it?",
    "Who leads? Answer in one word.": f"{NOTE}\nWho leads? Answer in one word.",
    "1. List the fruits.\n2. Name the city.": "I have two tasks.\n1. List the fruits.\n2. Name the city.",
    "Based on the text above, name the city.": f"{NOTE}\n\nBased on the text above, name the city.",
    "Please reply with the city.": f"{NOTE} Please reply with the city.",
    "在哪个城市？": "新办公室在鹿特丹。在哪个城市？",
    "Question: Where is it?\nAnswer:": f"Context: {NOTE}\nQuestion: Where is it?\nAnswer:",
    "Where is it?\n\nAnswer:": f"{NOTE} Where is it?\n\nAnswer:",
    "Summary:": f"{NOTE}\n\nSummary:",
    "Summarize this text:": f"Summarize this text:\n\n{NOTE}\n\nIt was late.",
    "What is it about?": f"What is it about? {NOTE}",
    "Where is it?": f"{NOTE}\n\nWhere is it? Thank you.",
    "Nenne die Stadt.": f"{NOTE}\nNenne die Stadt.",
    "Where is it?\n\nThank you!": f"{NOTE}\n\nWhere is it?\n\nThank you!",
    "Where is it?\n\nWhen is it?": f"{NOTE}\n\nWhere is it?\n\nWhen is it?",
    "Where is it?\nA) Here.\nB) There.\n\nAnswer:": f"{NOTE}\n\nWhere is it?\nA) Here.\nB) There.\n\nAnswer:",
    "Where is it?\n\n### Answer": f"{NOTE}\n\n### Question\nWhere is it?\n\n### Answer",
    "What does it do?": "What does it do?\n\ndef f(x):\n    return x + 1",
    NOTE: NOTE,
    "Tell me a joke.": "Tell me a joke.",
    "???": "???",
}


@pytest.mark.parametrize("question", ASKED)
def test_what_asks_in_a_message(question):
    start, stop = question_in(ASKED[question])
    assert ASKED[question][start:stop].strip() == question


def test_sentences_that_ask():
    assert all(
        map(
            asks, ["Where?", "“Where?”", "What is it", "- Then list all.", "In one word, name it.", "(3) Answer:", "Don't say."]
        )
    )
    assert not any(
        map(asks, ["The minutes.", "He asked where? and left.", "Writers list it.", "Yes, he said so, name by name."])
    )


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("question", ["In which city will it be?", "Summarize this text:", "Where is it?"])
def test_everything_but_the_question_is_cut(name, question):
    """Words of the message are in a unit or in the question, whatever the template does with white space."""
    model, message = reader(TEMPLATES[name]), ASKED[question]
    layout = Chat([{"role": "user", "content": message}]).layout(model)
    [asked] = layout.asked
    assert layout.text[asked.start : asked.stop].strip() == question
    units = Chat([{"role": "user", "content": message}]).units(model)
    assert [unit.name for unit in units] == [f"user, sentence {i + 1}" for i in range(len(units))]
    in_units = " ".join(" ".join(unit.text for unit in units).split())
    assert in_units == " ".join(message.replace(question, " ").split())
    kept = model.tokenizer.decode(layout.tokens[always_there(layout)])
    assert question in kept and "Rotterdam" not in kept


def test_the_question_can_be_given():
    model = reader(TEMPLATES["ChatML"])
    messages = [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": f"{NOTE} The city matters. Is it nice?"},
    ]
    chat = Chat(messages, question="The city matters.")
    assert [unit.text.strip() for unit in chat.units(model)][-4:] == [
        *NOTE.replace("s. ", "s.|").replace("m. ", "m.|").replace("y. ", "y.|").split("|"),
        "Is it nice?",
    ]
    assert chat.units(model)[-1].name == "user 2, sentence 4"
    assert chat.messages == messages and chat.tokens(model).equal(Chat(messages).tokens(model))
    whole = Chat(messages[2:], question=messages[2]["content"])
    with pytest.raises(KVLensError, match="nothing but its question"):
        whole.units(model)
    for given, says in {
        "nowhere": "'nowhere' occurs 0 times in the user's last",
        "it": "'it' occurs 2 times",
        " ": "expected a string",
    }.items():
        with pytest.raises(KVLensError, match=f"question: {says}"):
            Chat(messages, question=given)
    with pytest.raises(KVLensError, match="the user has none"):
        Chat([{"role": "system", "content": "Be kind."}], question="kind")


def test_a_document_inside_the_message_is_explained(short_answers):
    """The commonest chat: a system's sentence, and one message of a document and a question."""
    model = chat_model(attention="softmax", kv_shift=None, dtype=torch.float64)
    content = "a.txt:\nThe widget is purple. The gadget is green.\n\nReturn the widget?"
    found = explain(model, [{"role": "system", "content": "Be kind."}, {"role": "user", "content": content}], depth="units")
    assert found.units["unit_text"].str.strip().tolist() == [
        "Be kind.",
        "a.txt:",
        "The widget is purple.",
        "The gadget is green.",
    ]
    assert set(found.rows("units", "each")["parts"]) == {"0", "1", "2", "3"}
