"""From the context or from memory: where the answer comes from when the prompt states a fact that the model may know otherwise.

Each fact is asked about four times: as it is stated, without the sentence that states it, with another object in its place, and
without the whole document, which is what the model says from memory. What is said then decides:

- *both agree*: the answer has the stated object, and it has it from memory as well.
- *from the context*: it has the stated object, not without the sentence, and follows the replacement.
- *from memory*: it says what the model says from memory, or the shorter of both what the longer one does; it has not the
  stated object, nor follows the replacement.
- *neither*: everything else, such as an answer that the sentence changes without being followed, or another sentence's.

Names are compared by their content words, without case, accents and possessive endings.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from kvlens import KVLensError, KVModel
from kvlens.analyses.declaration import Columns
from kvlens.chat import Chat, has_chat_template, one_sequence, prompt_tokens
from kvlens.explanation.claims import content_words
from kvlens.explanation.runs import ENDS, responses
from kvlens.explanation.steps import explain
from kvlens.terminal import progress_bar
from kvlens.texts import WORD, Response, Word

CONTEXT, MEMORY, AGREE, NEITHER = "from the context", "from memory", "both agree", "neither"
LONGEST, AT_ONCE = 32, 8
ORIGINS = Columns(
    fact=("int64", "its number, from 0"),
    object=("str", "that the prompt states"),
    answer=("str", "what the model says"),
    without=("str", "what it says without the sentence that states the fact"),
    replaced=("str", "what it says with the other object in the sentence"),
    memory=("str", "what it says without the document"),
    origin=("str", "`from the context`, `from memory`, `both agree` or `neither`"),
    layers=("str", "each of which alone loses the object when it reads the prompt without the sentence, such as ``20,23``"),
)


@dataclass(frozen=True, eq=False)
class StatedFact:
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
    prompts = [
        _prompt(model, fact.question, document)
        for fact in facts
        for document in (fact.document(fact.object), fact.document(None), fact.document(fact.other), "")
    ]
    texts = _said(model, prompts)
    rows = []
    for number, fact in enumerate(facts):
        said = texts[4 * number : 4 * number + 4]
        origin = origin_of(fact, *said)
        losing = _losing_layers(model, fact) if layers and origin == CONTEXT else ""
        rows.append((number, fact.object, *(each.text for each in said), origin, losing))
    return ORIGINS.frame({name: list(values) for name, values in zip(ORIGINS, zip(*rows, strict=True), strict=True)})


def _check(fact: StatedFact) -> None:
    if "{}" not in fact.sentence:
        raise KVLensError(f"sentence: expected '{{}}' in its object's place, got {fact.sentence!r}")
    for name in (fact.object, fact.other):
        if name.casefold() in fact.question.casefold():
            raise KVLensError(f"question: it has {name!r} already, which any answer may repeat: {fact.question!r}")
    if fact.object.casefold() == fact.other.casefold():
        raise KVLensError(f"other: expected another object than {fact.object!r}")


def _prompt(model: KVModel, question: str, document: str) -> Int[Tensor, " pos"]:
    if has_chat_template(model):
        return Chat.ask(question, [document] if document else None).tokens(model)
    if not document:
        return prompt_tokens(model, question)
    return torch.cat([prompt_tokens(model, document), one_sequence(model, "question", question)])


def origin_of(fact: StatedFact, answer: Response, without: Response, replaced: Response, memory: Response) -> str:
    """The verdict on four answers: with the fact, without it, with another object in its place, and without the document."""
    asked = set(_words(fact.question))
    says, left, followed, known = (set(content_words(each.words)) - asked for each in (answer, without, replaced, memory))
    stated, other = (set(_words(name)) - asked for name in (fact.object, fact.other))
    if stated <= says:
        follows = not stated <= left and other <= followed
        return AGREE if stated <= known else CONTEXT if follows else NEITHER
    alike = says and known and (known <= says or says <= known)  # either may go on where the other has ended
    return MEMORY if alike and not other <= followed else NEITHER


def _said(model: KVModel, prompts: list[Int[Tensor, " _"]]) -> list[Response]:
    ends = () if has_chat_template(model) else ENDS
    texts: list[list[int]] = []
    with progress_bar("answers") as bar:
        for start in range(0, len(prompts), AT_ONCE):
            texts += responses(model, prompts[start : start + AT_ONCE], LONGEST, ends)
            bar("answers", len(texts) / len(prompts))
    return [Response.of(model, prompt, prompt.new_tensor(text)) for prompt, text in zip(prompts, texts, strict=True)]


def _words(name: str) -> tuple[str, ...]:
    """The content words of a name or a question."""
    found = [Word(each, 0, 0, each[0].isalnum()) for each in WORD.findall(name)]
    return content_words(found) or tuple(word.text.casefold() for word in found)


def _losing_layers(model: KVModel, fact: StatedFact) -> str:
    document = fact.document(fact.object)
    chat = Chat.ask(fact.question, [document]) if has_chat_template(model) else document
    text = None if has_chat_template(model) else fact.question
    found = explain(model, chat, text, about=fact.object, depth="layers")
    return ",".join(row.parts for row in found.rows("layers", "breaking").itertuples() if "+" not in row.parts)
