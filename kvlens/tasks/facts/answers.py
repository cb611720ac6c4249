"""Which answers of a model are right: with the story in front, with the story as a bias, and without the story.

An answer is right if the value has the largest logit, given the question and the answer up to it. Two guessing strategies serve
as baselines: without the story, any value of the kind that the question asks for; with the story but without knowing which
value belongs to which subject, any value of that kind in the story.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.bridge import KVTransformerBridge
from kvlens.conversion import convert_prompt
from kvlens.model import HookedKVTransformer
from kvlens.tasks.facts.story import Question, Story
from kvlens.tasks.facts.tokenizer import word_tokenizer

Asked = HookedKVTransformer | KVTransformerBridge
"""What can be asked: a model of kvlens, or one that Transformers runs."""


class ScoredQuestions(NamedTuple):
    """The scored questions: each question the first time it is asked, story by story.

    Attributes:
        story: index of the story.
        position: position of the value's token in the tokens of that story, with BOS at 0.
        token: token id of the value.
    """

    story: Int[Tensor, " question"]
    position: Int[Tensor, " question"]
    token: Int[Tensor, " question"]


class Answers(NamedTuple):
    """A model's answers to the scored questions: the logits one position before each value, and the value's token id."""

    logits: Float[Tensor, "question d_vocab"]
    token: Int[Tensor, " question"]

    @property
    def is_right(self) -> Bool[Tensor, " question"]:
        """Whether the value has the largest logit."""
        return self.logits.argmax(dim=-1) == self.token

    @property
    def log_p(self) -> Float[Tensor, " question"]:
        """The log-probability of the value."""
        return self.logits.double().log_softmax(dim=-1).gather(1, self.token[:, None])[:, 0]


class AnswerShares(NamedTuple):
    """Accuracy on stories of one length.

    Attributes:
        n_facts: facts per story.
        n_answers: number of answers scored.
        with_story: accuracy after reading the story.
        converted: accuracy with the story as a KV bias; None if the model cannot convert prompts exactly.
        without_story: accuracy after only BOS and the earlier questions.
        guess: expected accuracy of guessing any value of the right kind.
        guess_in_story: expected accuracy of guessing any value of the right kind in the story.
    """

    n_facts: int
    n_answers: int
    with_story: float
    converted: float | None
    without_story: float
    guess: float
    guess_in_story: float


def scored_questions(stories: Sequence[Story]) -> ScoredQuestions:
    """Collect the questions that are asked for the first time."""
    asked = [(row, question) for row, story in enumerate(stories) for question in story.questions if not question.repeated]
    tokens = [story.tokens for story in stories]
    return ScoredQuestions(
        torch.tensor([row for row, _ in asked]),
        torch.tensor([question.value_position for _, question in asked]),
        torch.tensor([tokens[row][question.value_position] for row, question in asked]),
    )


def scoring_hops(stories: Sequence[Story], hops: int) -> list[Story]:
    """Return the same stories with only questions that need ``hops`` sentences scored; the others are marked as repeated."""

    def marked(question: Question) -> Question:
        return replace(question, repeated=question.repeated or len(question.origins) != hops)

    return [replace(story, questions=tuple(map(marked, story.questions))) for story in stories]


def guess_in_story(stories: Sequence[Story]) -> float:
    """The accuracy of guessing any value of the right kind in the story."""
    asked = [(story, question.fact.kind) for story in stories for question in story.questions if not question.repeated]
    return sum(1 / sum(each.fact.kind == kind for each in story.sentences) for story, kind in asked) / len(asked)


def question_tokens(stories: Sequence[Story]) -> Int[Tensor, "story pos"]:
    """Questions and answers without BOS and story, padded on the right."""
    return _padded([story.tokens[story.n_prompt_tokens :] for story in stories])


def answers_after_story(model: Asked, stories: Sequence[Story]) -> Answers:
    """The answers with the story in context."""
    return _answers(model, _padded([story.tokens for story in stories]), stories, [0] * len(stories))


def answers_with_bias(model: Asked, stories: Sequence[Story]) -> Answers:
    """The answers from the questions alone, with the attached bias."""
    return _answers(model, question_tokens(stories), stories, [story.n_prompt_tokens for story in stories])


def answers_without_story(model: Asked, stories: Sequence[Story]) -> Answers:
    """The answers after BOS and the questions alone."""
    bos = torch.full((len(stories), 1), word_tokenizer().bos_token_id)
    texts = torch.cat([bos, question_tokens(stories)], dim=1)
    return _answers(model, texts, stories, [story.n_prompt_tokens - 1 for story in stories])


@torch.no_grad()
def answer_shares(model: Asked, stories: Sequence[Story], *, batch_size: int = 32) -> AnswerShares:
    """Measure a model on stories of one length.

    Args:
        model: a model trained on the task; with linear attention, or on a bridge, the converted story is measured too.
        stories: stories with the same number of sentences.
        batch_size: stories at a time.
    """
    asked = [question for story in stories for question in story.questions if not question.repeated]
    parts = [stories[start : start + batch_size] for start in range(0, len(stories), batch_size)]
    exact = isinstance(model, KVTransformerBridge) or model.cfg.attention == "linear"
    return AnswerShares(
        n_facts=len(stories[0].sentences),
        n_answers=len(asked),
        with_story=_share(answers_after_story(model, part) for part in parts),
        converted=_share(_converted(model, part) for part in parts) if exact else None,
        without_story=_share(answers_without_story(model, part) for part in parts),
        guess=sum(1 / len(question.fact.kind.values) for question in asked) / len(asked),
        guess_in_story=guess_in_story(stories),
    )


def _converted(model: Asked, stories: Sequence[Story]) -> Answers:
    with model.kv_bias(convert_prompt(model, [story.prompt for story in stories], prepend_bos=True)):
        return answers_with_bias(model, stories)


def _share(answers: Iterable[Answers]) -> float:
    return float(torch.cat([each.is_right for each in answers]).double().mean())


def _answers(model: Asked, texts: Int[Tensor, "story pos"], stories: Sequence[Story], cut: Sequence[int]) -> Answers:
    """The answers after the texts, from which the first ``cut`` tokens of each story are missing."""
    story, position, token = scored_questions(stories)
    return Answers(model(texts)[story, position - 1 - torch.tensor(cut)[story]].cpu(), token)


def _padded(rows: Sequence[Sequence[int]]) -> Int[Tensor, "story pos"]:
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[word_tokenizer().pad_token_id] * (longest - len(row))] for row in rows])
