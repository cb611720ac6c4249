"""Which answers of a model are right: with the story in front, with the story as a bias, and without the story.

An answer is right if the value has the largest logit, given the question and the answer up to it. Two guessing strategies serve
as baselines: without the story, any value of the kind that the question asks for; with the story but without knowing which
value belongs to which subject, any value of that kind in the story.
"""

from collections.abc import Sequence
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

Answers = HookedKVTransformer | KVTransformerBridge
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

    def marked(story: Story) -> Story:
        return replace(
            story, questions=tuple(replace(q, repeated=q.repeated or len(q.origins) != hops) for q in story.questions)
        )

    return [marked(story) for story in stories]


def question_tokens(stories: Sequence[Story]) -> Int[Tensor, "story pos"]:
    """Questions and answers without BOS and story, padded on the right."""
    return _padded([story.tokens[story.n_prompt_tokens :] for story in stories])


def right_after_story(model: Answers, stories: Sequence[Story]) -> Bool[Tensor, " question"]:
    """Which of `scored_questions` the model answers correctly with the story in context."""
    scored = scored_questions(stories)
    return _right(model(_padded([story.tokens for story in stories])), scored, torch.zeros(len(stories), dtype=torch.long))


def right_with_bias(model: Answers, stories: Sequence[Story]) -> Bool[Tensor, " question"]:
    """Which of them the model answers correctly from the questions alone, with the attached bias."""
    scored = scored_questions(stories)
    return _right(model(question_tokens(stories)), scored, torch.tensor([story.n_prompt_tokens for story in stories]))


def right_without_story(model: Answers, stories: Sequence[Story]) -> Bool[Tensor, " question"]:
    """Which of them the model answers correctly after BOS and the questions alone."""
    scored = scored_questions(stories)
    bos = torch.full((len(stories), 1), word_tokenizer().bos_token_id)
    cut = torch.tensor([story.n_prompt_tokens - 1 for story in stories])
    return _right(model(torch.cat([bos, question_tokens(stories)], dim=1)), scored, cut)


def log_probs_after_story(model: Answers, stories: Sequence[Story]) -> Float[Tensor, " question"]:
    """Log-probability of the right answer to each of `scored_questions` with the story in context."""
    scored = scored_questions(stories)
    logits = model(_padded([story.tokens for story in stories]))
    return _log_probs(logits, scored, torch.zeros(len(stories), dtype=torch.long))


def log_probs_with_bias(model: Answers, stories: Sequence[Story]) -> Float[Tensor, " question"]:
    """The same from the questions alone, with the attached bias."""
    scored = scored_questions(stories)
    return _log_probs(model(question_tokens(stories)), scored, torch.tensor([story.n_prompt_tokens for story in stories]))


@torch.no_grad()
def answer_shares(model: Answers, stories: Sequence[Story], *, batch_size: int = 32) -> AnswerShares:
    """Measure a model on stories of one length.

    Args:
        model: a model trained on the task; with linear attention, or on a bridge, the converted story is measured too.
        stories: stories with the same number of sentences.
        batch_size: stories at a time.
    """
    asked = [(story, question) for story in stories for question in story.questions if not question.repeated]
    parts = [stories[start : start + batch_size] for start in range(0, len(stories), batch_size)]
    exact = isinstance(model, KVTransformerBridge) or model.cfg.attention == "linear"
    return AnswerShares(
        n_facts=len(stories[0].sentences),
        n_answers=len(asked),
        with_story=_share([right_after_story(model, part) for part in parts]),
        converted=_share([_right_converted(model, part) for part in parts]) if exact else None,
        without_story=_share([right_without_story(model, part) for part in parts]),
        guess=sum(1 / len(question.fact.kind.values) for _, question in asked) / len(asked),
        guess_in_story=sum(1 / _values_of_its_kind(story, question) for story, question in asked) / len(asked),
    )


def _right_converted(model: Answers, stories: Sequence[Story]) -> Bool[Tensor, " question"]:
    with model.kv_bias(convert_prompt(model, [story.prompt for story in stories], prepend_bos=True)):
        return right_with_bias(model, stories)


def _share(right: list[Tensor]) -> float:
    return float(torch.cat(right).double().mean())


def _values_of_its_kind(story: Story, question: Question) -> int:
    return sum(sentence.fact.kind == question.fact.kind for sentence in story.sentences)


def _right(
    logits: Float[Tensor, "story pos d_vocab"], scored: ScoredQuestions, cut: Int[Tensor, " story"]
) -> Bool[Tensor, " question"]:
    """Whether the value has the largest logit one position before it; the first ``cut`` tokens are missing from ``logits``."""
    return _before(logits, scored, cut).argmax(dim=-1) == scored.token


def _log_probs(
    logits: Float[Tensor, "story pos d_vocab"], scored: ScoredQuestions, cut: Int[Tensor, " story"]
) -> Float[Tensor, " question"]:
    return _before(logits, scored, cut).double().log_softmax(dim=-1).gather(1, scored.token[:, None])[:, 0]


def _before(
    logits: Float[Tensor, "story pos d_vocab"], scored: ScoredQuestions, cut: Int[Tensor, " story"]
) -> Float[Tensor, "question d_vocab"]:
    """The logits one position before each value."""
    return logits[scored.story, scored.position - 1 - cut[scored.story]].cpu()


def _padded(rows: Sequence[Sequence[int]]) -> Int[Tensor, "story pos"]:
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[word_tokenizer().pad_token_id] * (longest - len(row))] for row in rows])
