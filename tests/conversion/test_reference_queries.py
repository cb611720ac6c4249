"""The text that a fit reads: the prompt repeated whole, in the model's chat template, and given text of any kind."""

import pytest
import torch
from chat_templates import TEMPLATES, reader
from small_models import small_model, tokens

from kvlens import Chat, KVLensError, convert_prompt
from kvlens.conversion import reference_queries
from kvlens.conversion.prompt import PromptBatch
from kvlens.conversion.reference_queries import REPEAT, repetition

QUICK = dict(method="landmark", n_features=3, n_held_out=0, verbose=False)


def test_a_prompt_is_repeated_whole_in_pieces_of_one_length(monkeypatch):
    model, row = small_model(n_ctx=120), tokens(1, 7)
    prompt = PromptBatch(row, None, False)
    assert torch.equal(repetition(model, prompt, room=9), row[:, None])
    monkeypatch.setattr(reference_queries, "LONGEST_PIECE", 3)
    a, b, c, d, e, f, g = row[0].tolist()
    assert repetition(model, prompt, room=9)[0].tolist() == [[a, b, c], [d, e, f], [g, a, b]]  # it begins again at its end
    assert repetition(model, prompt, room=2)[0].tolist() == [[a, b], [c, d], [e, f], [g, a]]


def test_a_shorter_prompt_of_a_batch_begins_again():
    both = torch.tensor([[3, 4, 5, 6], [7, 8, 0, 0]])
    prompt = PromptBatch(both, torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool(), True)
    assert repetition(small_model(), prompt, room=20)[:, 0].tolist() == [[3, 4, 5, 6], [7, 8, 7, 8]]


LEADS = {
    "ChatML": "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    "Gemma 3": "<end_of_turn>\n<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n",
    "no system role": "\nUSER: {}\nASSISTANT:",
}
"""What the templates write between an answer and the next one."""


@pytest.mark.parametrize("template", LEADS)
def test_an_instruction_in_the_templates_words_comes_before_the_repetition_and_marks_are_not_repeated(template):
    model = reader(TEMPLATES[template])
    tokenizer, row = model.tokenizer, Chat.ask("Who?", ["The cat sat."]).tokens(reader(TEMPLATES[template]))
    special = set(tokenizer.all_special_ids)
    texts = repetition(model, PromptBatch(row[None], None, False), room=10**6)
    lead = tokenizer(LEADS[template].format(REPEAT), add_special_tokens=False)["input_ids"]
    assert texts[0, 0].tolist() == [*lead, *(token for token in row.tolist() if token not in special)]
    room = len(lead) + 4
    pieces = repetition(model, PromptBatch(row[None], None, False), room=room)
    assert pieces.shape[2] <= room and pieces[0, :, : len(lead)].unique(dim=0).tolist() == [lead]


def test_questions_with_answers_are_read_as_turns():
    for template, expected in (("ChatML", LEADS["ChatML"].format("Who?") + "She."), (None, "Who? She.")):
        model = reader(TEMPLATES.get(template))
        ids = lambda text, model=model: model.tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
        model.to_tokens = lambda text, ids=ids, **_: torch.tensor([ids(text)])
        (texts,) = reference_queries._read(model, [("Who?", "She.")], batch=2, room=999)
        assert texts[:, 0].tolist() == [ids(expected)] * 2


REFUSED = {
    "it has no text": [],
    r"expected pairs \(question, answer\)": [("a", "")],
    "a text of 97 tokens does not fit after the prompt, where n_ctx=120 leaves 96 positions; give shorter": tokens(1, 97),
    "expected a string, a list of strings, or a tensor": lambda model, prompt: 5,
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_no_text_is_refused(message):
    model = small_model(n_ctx=120)
    with pytest.raises(KVLensError, match=f"convert_prompt: reference: {message}"):
        convert_prompt(model, tokens(1, 24)[0], reference=REFUSED[message], **QUICK)
