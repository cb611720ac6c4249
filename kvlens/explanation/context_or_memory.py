"""From the context or from memory: where the answer comes from when the prompt states a fact that the model may know otherwise.

Each fact is asked about three times: as it is stated, without the sentence that states it, and with another object in its
place. What is said then decides:

- *from the context*: the answer has the stated object, it has not without the sentence, and it follows the replacement.
- *both agree*: it has the stated object, without the sentence as well.
- *from memory*: it does not have the stated object but what the model says without the sentence, and no replacement either.
- *neither*: everything else, such as an answer that the sentence changes without being followed.

Names are compared by their content words, without case, accents and possessive endings.
"""

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from kvlens import KVLensError, KVModel
from kvlens.analyses.declaration import Columns
from kvlens.analyses.segments import terminal_bar
from kvlens.chat import Chat, has_chat_template, one_sequence, prompt_tokens
from kvlens.explanation.claims import content_words
from kvlens.explanation.response import responses
from kvlens.explanation.runs import ENDS
from kvlens.explanation.steps import explain
from kvlens.texts import WORD, Response, Word

CONTEXT, MEMORY, AGREE, NEITHER = "from the context", "from memory", "both agree", "neither"
MOST_TOKENS, AT_ONCE = 32, 8
ORIGINS = Columns(
    fact=("int64", "its number, from 0"),
    object=("str", "that the prompt states"),
    answer=("str", "what the model says"),
    without=("str", "what it says without the sentence that states the fact"),
    replaced=("str", "what it says with the other object in the sentence"),
    origin=("str", "`from the context`, `from memory`, `both agree` or `neither`"),
    layers=("str", "each of which alone loses the object when it reads the prompt without the sentence, such as ``20,23``"),
)


class StatedFact(NamedTuple):
    """A fact in a prompt, and a question about it.

    Attributes:
        sentence: that states it, with ``{}`` in its object's place.
        object: that is stated.
        other: another object, which could stand there.
        question: of the user, who is given the sentence as a document; for a model without a chat template, the text that
            follows the sentence and that the answer continues.
        before, behind: the rest of the document.
    """

    sentence: str
    object: str
    other: str
    question: str
    before: str = ""
    behind: str = ""

    def document(self, stated: str | None) -> str:
        """The document with an object, or without the sentence."""
        sentence = "" if stated is None else self.sentence.format(stated)
        return " ".join(filter(None, (self.before, sentence, self.behind)))


def context_or_memory(model: KVModel, facts: Sequence[StatedFact], layers: bool = False) -> pd.DataFrame:
    """For each fact, whether the model's answer comes from the prompt's sentence or from what it says anyway.

    Args:
        model: that is asked; one with a chat template is asked by it.
        facts: each stated in a prompt of its own.
        layers: look for the layers that lose an answer from the context, by :func:`kvlens.explain`.

    Returns:
        `ORIGINS`, a row for each fact.

    Raises:
        KVLensError: no facts, a sentence without ``{}``, an object that the question has already, equal objects.
    """
    if not facts:
        raise KVLensError("facts: expected at least one StatedFact, got none")
    for fact in facts:
        _check(fact)
    prompts = [_prompt(model, fact, stated) for fact in facts for stated in (fact.object, None, fact.other)]
    texts = _said(model, prompts)
    rows = []
    for number, fact in enumerate(facts):
        answer, without, replaced = texts[3 * number : 3 * number + 3]
        origin = origin_of(fact, answer, without, replaced)
        losing = _losing_layers(model, fact) if layers and origin == CONTEXT else ""
        rows.append((number, fact.object, answer.text, without.text, replaced.text, origin, losing))
    return ORIGINS.frame({name: list(values) for name, values in zip(ORIGINS, zip(*rows, strict=True), strict=True)})


def _check(fact: StatedFact) -> None:
    if "{}" not in fact.sentence:
        raise KVLensError(f"sentence: expected '{{}}' in its object's place, got {fact.sentence!r}")
    for name in (fact.object, fact.other):
        if name.casefold() in fact.question.casefold():
            raise KVLensError(f"question: it has {name!r} already, which any answer may repeat: {fact.question!r}")
    if fact.object.casefold() == fact.other.casefold():
        raise KVLensError(f"other: expected another object than {fact.object!r}")


def _prompt(model: KVModel, fact: StatedFact, stated: str | None) -> Int[Tensor, " pos"]:
    document = fact.document(stated)
    if has_chat_template(model):
        return Chat.ask(fact.question, [document] if document else None).tokens(model)
    return torch.cat([prompt_tokens(model, document), one_sequence(model, "question", fact.question)])


def origin_of(fact: StatedFact, answer: Response, without: Response, replaced: Response) -> str:
    """The verdict on three answers: with the fact, without it, and with another object in its place."""
    asked = set(_words(fact.question))
    says = [set(content_words(each.words)) - asked for each in (answer, without, replaced)]
    stated, other = (set(_words(name)) - asked for name in (fact.object, fact.other))
    if stated <= says[0]:
        if stated <= says[1]:
            return AGREE
        return CONTEXT if other <= says[2] else NEITHER
    return MEMORY if says[1] and says[1] <= says[0] and not other <= says[2] else NEITHER


def _said(model: KVModel, prompts: list[Int[Tensor, " _"]]) -> list[Response]:
    ends = () if has_chat_template(model) else ENDS
    texts: list[list[int]] = []
    with terminal_bar("answers") as bar:
        for start in range(0, len(prompts), AT_ONCE):
            texts += responses(model, prompts[start : start + AT_ONCE], MOST_TOKENS, ends)
            bar.update(len(texts) / len(prompts) - bar.n)
    return [Response.of(model, prompt, prompt.new_tensor(text)) for prompt, text in zip(prompts, texts, strict=True)]


def _words(name: str) -> tuple[str, ...]:
    """The content words of a name or a question."""
    found = [Word(each, 0, 0, each[0].isalnum()) for each in WORD.findall(name)]
    return content_words(found) or tuple(word.text.casefold() for word in found)


def _losing_layers(model: KVModel, fact: StatedFact) -> str:
    document = fact.document(fact.object)
    chat = Chat.ask(fact.question, [document]) if has_chat_template(model) else document
    text = None if has_chat_template(model) else fact.question
    found = explain(model, chat, text, about=fact.object)
    return ",".join(row.parts for row in found.rows("layers", "breaking").itertuples() if "+" not in row.parts)
