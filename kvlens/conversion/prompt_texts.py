"""Reference text made of the prompt's own words: the prompt repeated, and its sentences with blanks to fill in.

Where the tokenizer has a chat template, the repetition is the answer to an instruction, and so is every sentence behind the one
that asks for half of its words; without a template there are no blanks. Repetition finds every key that a question about the
prompt may need (Kim et al. 2025, arXiv 2505.23416); blanks are asked out of order, as questions are (new in kvlens).
"""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Int
from torch import Tensor

from kvlens.chat import PLACEHOLDER, has_chat_template, written_behind
from kvlens.conversion.prompt import PromptBatch
from kvlens.marks import without_marks
from kvlens.model.protocol import KVModel
from kvlens.units import spans_of

REPEAT = "Repeat the previous text exactly."
LONGEST_PIECE = 2048
"""Tokens of a prompt that are repeated in one text; a longer prompt is repeated in several."""
FILL_IN = "Fill in the blanks: "
BLANK = "___"
MOST_IN_BLANKS = 4096
"""Tokens of a prompt's sentences with blanks; of a longer prompt every second or third of them is read, and so on."""
TEXTS_OF_A_LENGTH = 8

Texts = list[Int[Tensor, "batch _ _"]]


def repetition(model: KVModel, prompt: PromptBatch, room: int) -> Int[Tensor, "batch piece pos"]:
    """Each prompt as the model would repeat it, without special tokens, in as many pieces as needed. Shorter prompts of a batch
    begin again where they end, so that all pieces have the same length.
    """
    lead = prompt.tokens.new_tensor(turn(model, REPEAT))
    lead = lead if len(lead) < room else lead[:0]
    rows = list(_without_special_tokens(model, prompt))
    longest = max(map(len, rows))
    n_pieces = -(-longest // min(LONGEST_PIECE, room - len(lead)))
    length = -(-longest // n_pieces)
    pieces = torch.stack([_as_long_as(n_pieces * length, row) for row in rows]).unflatten(1, (n_pieces, length))
    return torch.cat([lead.expand(*pieces.shape[:2], -1), pieces], dim=-1)


def _without_special_tokens(model: KVModel, prompt: PromptBatch) -> Iterator[Int[Tensor, " pos"]]:
    """The tokens of each prompt; one that has none but special ones keeps these."""
    special = torch.tensor(getattr(model.tokenizer, "all_special_ids", None) or [-1], device=prompt.tokens.device)
    real = torch.ones_like(prompt.tokens, dtype=torch.bool) if prompt.mask is None else prompt.mask
    for row, on in zip(prompt.tokens, real, strict=True):
        words = row[on & ~torch.isin(row, special)]
        yield words if len(words) else row[on]


def _as_long_as(length: int, row: Int[Tensor, " pos"]) -> Int[Tensor, " length"]:
    """The row, begun again where it ends."""
    return row[torch.arange(length, device=row.device) % len(row)]


def blanks(model: KVModel, prompt: PromptBatch, room: int) -> Texts:
    """The sentences of each prompt as answers to the instruction to fill in the blanks, which are every second word: once the
    odd ones, once the even ones. None without a chat template.

    :data:`TEXTS_OF_A_LENGTH` texts of similar length are one group, in which shorter ones begin again where they end.
    """
    if not has_chat_template(model):
        return []
    rows = _without_special_tokens(model, prompt)
    every = [sorted(_blanks(model, row, room), key=len) or [row[:room]] for row in rows]
    found = []
    for part in torch.arange(max(map(len, every))).split(TEXTS_OF_A_LENGTH):
        some = [[each[i % len(each)] for i in part.tolist()] for each in every]
        length = max(len(row) for own in some for row in own)
        found.append(torch.stack([torch.stack([_as_long_as(length, row) for row in own]) for own in some]))
    return found


def _blanks(model: KVModel, tokens: Int[Tensor, " pos"], room: int) -> list[Int[Tensor, " _"]]:
    """Of one prompt, those that fit."""
    text, found = model.tokenizer.decode(tokens), []
    sentences = [text[start:stop].strip() for start, stop in spans_of(text, "sentence")]
    for sentence in without_marks(model.tokenizer, sentences):
        words, answer = sentence.split(), model.tokenizer(sentence, add_special_tokens=False)["input_ids"]
        for parity in (0, 1) if len(words) > 1 else ():
            asked = " ".join(BLANK if i % 2 == parity else word for i, word in enumerate(words))
            found.append(tokens.new_tensor(turn(model, FILL_IN + asked) + answer))
    found = [row for row in found if len(row) <= room]
    return found[:: max(1, math.ceil(sum(map(len, found)) / MOST_IN_BLANKS))]


def turn(model: KVModel, words: str) -> list[int]:
    """What a chat has between the end of one answer and the beginning of the next if the user says ``words``; without a chat
    template, nothing.
    """
    if not has_chat_template(model):
        return []
    behind = written_behind(model, ("user", words), ("assistant", PLACEHOLDER), ("user", words))
    return [] if behind is None else model.tokenizer(behind, add_special_tokens=False)["input_ids"]
