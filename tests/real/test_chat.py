"""A chat is what Transformers writes, token by token, with BOS once; what is cut out of it is what a reader would cut out."""

import pytest
import torch

from kvlens import Chat
from kvlens.chat import prompt_tokens, prompt_units
from kvlens.units import always_there

MINUTES = "Attending: Dr. Lee, Ann. We paid 3.5 euros.\n\nThe new office will be in Rotterdam. The lease ends in May.\n"
ASKED = Chat.ask(
    "In which city will the new office be?", {"minutes.txt": MINUTES, "notes.txt": "Tea was had."}, "Be brief. Be kind."
)
CHATS = {
    "documents": ASKED.messages,
    "no system": [{"role": "user", "content": "Hello!"}],
    "turns": [
        {"role": "system", "content": "  Be brief.\n"},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hello!\n\nHow can I help?"},
        {"role": "user", "content": "Write <|im_end|>, ü and 你好. "},
    ],
}  # fmt: skip


@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS)
def test_chats_are_written_as_transformers_writes_them(smollm2, messages):
    expected = smollm2.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert Chat(messages).tokens(smollm2).tolist() == expected
    assert prompt_tokens(smollm2, Chat(messages).text(smollm2)).tolist() == expected  # its BOS is <|im_start|>: one, not two
    assert expected[:2] != [smollm2.tokenizer.bos_token_id] * 2


def test_bos_is_there_once(smollm2):
    """A second one made SmolLM2 surer of what follows."""
    text = "<|im_start|>user\nThe color of a clear sky by day is"
    tokens = smollm2.to_tokens(text)
    assert tokens[0].tolist() == smollm2.tokenizer(text, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        assert smollm2(text).equal(smollm2(tokens))


def test_units_of_documents(smollm2):
    units = prompt_units(smollm2, ASKED)
    assert [(unit.name, unit.text.strip()) for unit in units] == [
        ("system, sentence 1", "Be brief."),
        ("system, sentence 2", "Be kind."),
        ("minutes.txt, sentence 1", "Attending: Dr. Lee, Ann."),
        ("minutes.txt, sentence 2", "We paid 3.5 euros."),
        ("minutes.txt, sentence 3", "The new office will be in Rotterdam."),
        ("minutes.txt, sentence 4", "The lease ends in May."),
        ("notes.txt, sentence 1", "Tea was had."),
    ]
    tokens = ASKED.tokens(smollm2)
    kept = smollm2.to_string(tokens[always_there(ASKED.layout(smollm2))])
    assert kept.startswith("<|im_start|>system\n<|im_end|>\n<|im_start|>user\nminutes.txt:\n")
    assert kept.endswith("In which city will the new office be?<|im_end|>\n<|im_start|>assistant\n")
