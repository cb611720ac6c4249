"""A chat is the prompt that the tokenizer's template writes, and its messages are told from the template's marks."""

import argparse
import itertools
import json

import pandas as pd
import pytest
import torch
from chat_templates import CHATML, GEMMA_3, MISTRAL, NO_SYSTEM, PHI_4, QWEN_3, TEMPLATES, chat_model, chat_tokenizer, reader
from precision import LAW, relative_error
from tiny_hf import tiny_hf_model
from tiny_text_model import tiny_tokenizer

from kvlens import Chat, KVLensError, KVTransformerBridge, convert_prompt, counterfactuals
from kvlens.analyses import Record, attribution_by_head, prompt_attribution, prompt_effect
from kvlens.chat import has_chat_template, prompt_tokens, prompt_units
from kvlens.cli.prompts import add_question, add_texts_and_model, given_chat, given_prompt_and_text
from kvlens.units import always_there

BOS = tiny_tokenizer().bos_token
SAME = "  Be kind. Be kind. \n"
MESSAGES = [
    {"role": "system", "content": SAME},
    {"role": "user", "content": "Be kind."},
    {"role": "assistant", "content": "I will.\nBe kind."},
    {"role": "user", "content": SAME},
]


def without_system(name):
    return MESSAGES[1:] if name == "no system role" else MESSAGES


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_is_what_transformers_makes_of_it_exact(name):
    model, messages = reader(TEMPLATES[name]), without_system(name)
    expected = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert Chat(messages).tokens(model).tolist() == expected
    assert prompt_tokens(model, messages).tolist() == expected
    assert Chat(messages).messages == messages and Chat(messages) == Chat(messages)


@pytest.mark.parametrize("name", TEMPLATES)
def test_messages_are_told_from_marks_where_their_words_occur_several_times(name):
    """With every message in other words the marks stay; each piece is its message's words, stripped or not."""
    model, messages = reader(TEMPLATES[name]), without_system(name)
    others = [{**message, "content": f"{i} words"} for i, message in enumerate(messages)]
    marks = []
    for given in (messages, others):
        layout = Chat(given).layout(model)
        places = sorted([*layout.pieces, *layout.asked], key=lambda piece: piece.start)
        words = [layout.text[place.start : place.stop] for place in places]
        assert sorted(word.strip() for word in words) == sorted(message["content"].strip() for message in given)
        edges = [0, *itertools.chain(*((place.start, place.stop) for place in places)), len(layout.text)]
        marks.append([layout.text[start:stop] for start, stop in zip(edges[::2], edges[1::2], strict=True)])
    assert marks[0] == marks[1]
    names = [unit.name for unit in Chat(messages).units(model, "message")]
    assert sorted(names) == sorted(["system", "user 1", "assistant"][-len(names) :])


def test_a_system_message_is_found_where_the_template_puts_it():
    gemma, mistral = (Chat(MESSAGES).layout(reader(template)) for template in (GEMMA_3, MISTRAL))
    assert gemma.text.startswith(f"{BOS}<start_of_turn>user\n{SAME}\n\nBe kind.<end_of_turn>\n")
    assert [piece.name for piece in gemma.pieces] == ["system", "user 1", "assistant"]
    assert [piece.name for piece in mistral.pieces] == ["user 1", "assistant", "system"]  # in front of the last question


def test_what_a_template_leaves_out_of_a_message_is_in_no_unit():
    thought = "<think>\nIs it purple?\n</think>\n\nIt is."
    chat = Chat([*MESSAGES[:2], {"role": "assistant", "content": thought}, MESSAGES[3]])
    assert [unit.text for unit in chat.units(reader(QWEN_3), "message") if unit.name == "assistant"] == ["It is."]


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ messages[-1].content }}", "leaves out message 1 \\(system\\)"),
        ("{% for m in messages %}{{ m.content + m.content }}{% endfor %}", "writes more than once message 1"),
        ("{% for m in messages %}{{ m.content | length }}: {{ m.content }}{% endfor %}", "depends on its words, message 1"),
    ],
)
def test_a_template_whose_marks_cannot_be_told_is_an_error(template, says):
    model = reader(template)
    assert len(Chat(MESSAGES).tokens(model))
    with pytest.raises(KVLensError, match=says):
        Chat(MESSAGES).units(model)


def test_a_question_about_documents():
    chat = Chat.ask(
        "Where is it?", documents={"minutes.txt": "\nDr. Lee came. It is in 3.5.\n", "b": "No."}, system="Be kind. Be brief."
    )
    assert chat.messages[1]["content"] == "minutes.txt:\nDr. Lee came. It is in 3.5.\n\nb:\nNo.\n\nWhere is it?"
    model = reader(CHATML)
    units = chat.units(model)
    assert [unit.name for unit in units] == [
        *("system, sentence 1", "system, sentence 2", "minutes.txt, sentence 1", "minutes.txt, sentence 2", "b, sentence 1"),
    ]
    assert [unit.text.strip() for unit in units] == ["Be kind.", "Be brief.", "Dr. Lee came.", "It is in 3.5.", "No."]
    tokens = chat.tokens(model)
    assert all(model.tokenizer.decode(tokens[unit.start : unit.stop]) == unit.text for unit in units)
    kept = tokens[always_there(chat.layout(model))]
    assert model.tokenizer.decode(kept) == (
        "<|im_start|>system\n<|im_end|>\n<|im_start|>user\nminutes.txt:\n\n\nb:\n\n\nWhere is it?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert [unit.name for unit in chat.units(model, "document")] == ["system", "minutes.txt", "b"]
    assert [unit.name for unit in Chat.ask("Why?", ["One.", "Two."]).units(model, "message")] == ["document 1", "document 2"]
    assert [unit.text.strip() for unit in chat.units(model, ["Where", "kind"])] == ["kind", "Where"]


def test_a_chat_of_nothing_but_a_question_has_no_unit():
    with pytest.raises(KVLensError, match="nothing but its question.*Chat.ask"):
        prompt_units(reader(CHATML), [{"role": "user", "content": "Where is the widget?"}])


def test_the_template_that_refuses_is_quoted():
    with pytest.raises(KVLensError, match=r"cannot write these messages \(system, user.*System role not supported"):
        Chat(MESSAGES).tokens(reader(NO_SYSTEM))
    with pytest.raises(KVLensError, match="Roles must alternate"):
        Chat([MESSAGES[1], MESSAGES[1]]).tokens(reader(GEMMA_3))
    with pytest.raises(KVLensError, match="no chat template.*--prompt and --text"):
        Chat(MESSAGES).tokens(reader(None))
    assert has_chat_template(reader(PHI_4)) and not has_chat_template(reader(None))


def test_documents_that_fill_the_context():
    model = reader(CHATML, n_ctx=120)
    Chat.ask("Why?", documents={"short.txt": "The widget."}).tokens(model)
    with pytest.raises(KVLensError, match=r"n_ctx=120 leaves no room for an answer; shorten it \(long.txt alone has 519"):
        Chat.ask("Why?", documents={"short.txt": "The widget.", "long.txt": "The widget is purple. " * 40}).tokens(model)


@pytest.mark.parametrize(
    "call",
    [
        *(lambda x=x: Chat(x) for x in ([], "Hello", ["a"], MESSAGES[:3])),
        *(lambda x=x: Chat([{"role": "user", "content": x}]) for x in (" \n", ["a"], "a\ud800")),
        *(lambda x=x: Chat([x]) for x in ({"role": "user"}, {"content": "a"}, {"role": "usr", "content": "a"})),
        lambda: Chat([{"role": "user", "content": "a", "name": "b"}]),
        lambda: Chat.ask(""),
        *(lambda x=x: Chat.ask("a", documents=x) for x in ({"b": ""}, [3])),
        lambda: Chat.ask("a", system=""),
    ],
)
def test_bad_messages(call):
    with pytest.raises(KVLensError):
        call()


# --- models -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_a_chat_is_taken_wherever_a_prompt_is(attention):
    model = chat_model(attention=attention, dtype=torch.float64)
    chat = Chat.ask("Return the widget?", documents={"a.txt": "The widget is purple. The gadget is green."})
    tokens = chat.tokens(model)
    expected = convert_prompt(model, tokens)
    for prompt in (chat, chat.messages):
        assert torch.equal(convert_prompt(model, prompt).stacked("b_kv"), expected.stacked("b_kv"))
    of_two = convert_prompt(model, [chat, "The widget"])
    assert of_two.n_prompt_tokens.tolist() == [len(tokens), len(model.to_tokens("The widget")[0])]
    assert counterfactuals(model, chat, [[]]).tokens[0].equal(tokens)
    assert prompt_effect(model, chat.messages, "The widget").equals(prompt_effect(model, tokens, "The widget"))


def test_a_chat_in_a_batch_is_cut_as_it_is_alone():
    model = chat_model(dtype=torch.float64)
    chat = Chat.ask("Return the widget?", ["The widget is purple."], system="Be kind. Be brief.")
    record = Record("a", Chat(chat.messages), "The", {"answer": 5})
    frame = prompt_attribution.analysis.run(model, record)
    pd.testing.assert_frame_equal(frame, prompt_attribution(model, chat.messages, "The", answer=5))
    assert frame["unit_text"].str.strip().tolist() == ["Be kind.", "Be brief.", "document 1:", "The widget is purple."]
    effect = prompt_effect.analysis.run(model, record)
    pd.testing.assert_frame_equal(effect, prompt_effect(model, chat, "The"))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("attention", ["linear", "softmax"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_rest_of_a_chat_reads_what_stands_in_front_of_its_question_law(name, attention):
    """As the whole chat does that is read at once."""
    model = chat_model(TEMPLATES[name], attention=attention, dtype=torch.float64)
    system = None if name == "no system role" else "Be kind."
    chat = Chat.ask("Is the widget green?", {"a.txt": "The widget is purple."}, system)
    prompt, text = chat.split(model)
    assert torch.cat([prompt, text]).equal(chat.tokens(model))
    in_front, behind = (model.tokenizer.decode(tokens) for tokens in (prompt, text))
    assert in_front.endswith("purple.\n\n") and behind.startswith("Is the widget green?")
    bias = convert_prompt(model, chat, upto="question")
    assert bias.n_prompt_tokens == len(prompt)
    with model.kv_bias(bias):
        found = model(text[None])
    assert relative_error(found, model(chat.tokens(model)[None])[:, len(prompt) :]) < LAW


def test_one_prompt_serves_every_question_exact():
    """What is converted is the same whatever is asked, and begins no answer where nobody asks."""
    model = chat_model()
    asked = [Chat.ask(question, {"a.txt": "The widget is purple."}) for question in ("Is it green?", "What is purple?")]
    assert asked[0].split(model)[0].equal(asked[1].split(model)[0])
    alone, header = Chat(MESSAGES[:1]).split(model)
    assert model.tokenizer.decode(header) == "<|im_start|>assistant\n"
    assert Chat(MESSAGES[:2]).tokens(model)[: len(alone)].equal(alone)
    of_both = convert_prompt(model, [asked[0], MESSAGES[:1]], upto="question")
    assert of_both.n_prompt_tokens.tolist() == [len(asked[0].split(model)[0]), len(alone)]


def test_recall_is_of_the_part_that_was_converted():
    model = chat_model(attention="softmax", kv_shift=None)
    chat = Chat([{"role": "user", "content": "The widget is purple. Is it? The gadget is green."}], question="Is it?")
    bias = convert_prompt(model, chat, upto="question", method="landmark", n_keys=2, key_steps=0, verbose=False)
    assert bias.fit.recall.sentences == ("The widget is purple.",)
    with pytest.raises(KVLensError, match="nothing stands in front of the question"):
        Chat(MESSAGES[1:2]).split(reader("{% for m in messages %}{{ m.content }}{% endfor %}"))
    with pytest.raises(KVLensError, match="upto: only a chat has a question"):
        convert_prompt(model, "The widget", upto="question")


def arguments(*words):
    parser = argparse.ArgumentParser()
    add_texts_and_model(parser, "text")
    add_question(parser)
    return parser.parse_args(words)


def test_chats_on_the_command_line(tmp_path):
    (tmp_path / "a.txt").write_text("One. Two.\n")
    (tmp_path / "chat.json").write_text(json.dumps(MESSAGES))
    document, messages = str(tmp_path / "a.txt"), str(tmp_path / "chat.json")
    asked = given_chat(arguments("--question", "Why?", "--document", document, "--system", "Be kind."))
    assert asked == Chat.ask("Why?", {"a.txt": "One. Two."}, "Be kind.")
    assert given_chat(arguments("--messages", messages)) == Chat(MESSAGES) and given_chat(arguments()) is None
    assert given_prompt_and_text(arguments("--messages", messages, "--text", "a")) == (Chat(MESSAGES), "a")
    for words, says in {
        ("--messages", messages, "--document", "a"): "--messages and --document are both given",
        ("--messages", messages, "--question", "Be"): "question: 'Be' occurs 2 times",
        ("--question", "a", "--prompt", "b"): "--question and --prompt are both given",
        ("--document", document): "--document belongs to --question",
        ("--question", "a", "--document", document, "--document", document): "two documents are called a.txt",
        ("--question", "a", "--document", "nowhere"): "--document: cannot read nowhere",
        ("--messages", document): "--messages: .*a.txt is not JSON",
        ("--question", " "): "question: expected a string that is not empty",
    }.items():
        with pytest.raises(KVLensError, match=says):
            given_chat(arguments(*words))


def test_units_of_a_chat_are_those_of_an_attribution():
    """The baseline keeps marks and question: with the one document gone, nothing else is."""
    model = chat_model(dtype=torch.float64)
    chat = Chat.ask("Return the widget?", documents={"a.txt": "The widget is purple. The gadget is green."})
    table = prompt_attribution(model, chat, "The", by="document", answer=5)
    [unit] = chat.units(model, "document")
    assert table[["start", "stop"]].iloc[0].tolist() == [unit.start, unit.stop]
    assert table["total_share"][0] == pytest.approx(1.0, abs=1e-11)
    by_sentence = prompt_attribution(model, chat, "The", answer=5)
    assert by_sentence["unit_text"].str.strip().tolist() == ["The widget is purple.", "The gadget is green."]
    whole = attribution_by_head(model, chat, "The", by="document", answer=5)
    assert len(set(whole["whole"])) == 1 and set(whole["start"]) == {unit.start}


def test_bos_stands_in_front_once():
    """A string that begins with BOS is the prompt that it is without, alone and among others."""
    model = chat_model(attention="softmax", kv_shift=None)
    bos = model.tokenizer.bos_token_id
    for text in ("Return the widget.", ""):
        assert model.to_tokens("<|im_start|>" + text).equal(model.to_tokens(text))
    assert model.to_tokens(["<|im_start|>The", "The"]).tolist()[0] == model.to_tokens("The")[0].tolist()
    assert model.to_tokens("<|im_start|>The", prepend_bos=False)[0, 0] == bos
    assert model.to_tokens("The<|im_start|>The")[0].tolist().count(bos) == 2
    chat = Chat(MESSAGES)
    assert model.to_tokens(chat.text(model))[0].equal(chat.tokens(model))
    assert prompt_tokens(model, chat.text(model)).equal(chat.tokens(model))


def test_bos_stands_in_front_once_on_the_bridge():
    tokenizer = chat_tokenizer(CHATML, "<|im_start|>")
    bridge = KVTransformerBridge.boot_transformers(tiny_hf_model("gpt2", vocab_size=len(tokenizer)), tokenizer=tokenizer)
    chat = Chat(MESSAGES[1:2])
    assert bridge.to_tokens(chat.text(bridge))[0].equal(chat.tokens(bridge))
    assert bridge.to_tokens(["<|im_start|>The", "The"]).tolist() == bridge.to_tokens(["The", "The"]).tolist()
    assert bridge.to_tokens("<|im_start|>The", prepend_bos=False).equal(bridge.to_tokens("The"))
