"""Made-up stories, with questions that can be answered only from the story (:mod:`kvlens.tasks.stories`).

    Mira keeps a goat. The kite is in the barn. The drum stands in the cellar. Where is the kite? The kite is in the barn.

An answer is right if the value has the largest logit, given the question and the answer up to it. Two guessing strategies serve
as baselines: without the story, any value of the kind that the question asks for; with the story but without knowing which
value belongs to which subject, any value of that kind in the story.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kvlens.bridge import KVTransformerBridge
from kvlens.checks import Within, checked
from kvlens.conversion import convert_prompt
from kvlens.errors import KVLensError
from kvlens.model import HookedKVTransformer
from kvlens.tasks.stories import (
    LONGEST_QUESTION,
    LONGEST_STATEMENT,
    MOST_FACTS,
    Story,
    StoryQuestion,
    draw_nested_story,
    draw_story,
    notes,
    token_ids,
    word_tokenizer,
)
from kvlens.tasks.task import Batch, Task

Asked = HookedKVTransformer | KVTransformerBridge
"""What can be asked: a model of kvlens, or one that Transformers runs."""


@dataclass(frozen=True)
class Answers:
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


def scored_questions(
    stories: Sequence[Story],
) -> tuple[Int[Tensor, " question"], Int[Tensor, " question"], Int[Tensor, " question"]]:
    """The scored questions, each the first time it is asked, story by story: the index of the story, the position of the
    value's token in it, with BOS at 0, and that token."""
    asked = [(row, question) for row, story in enumerate(stories) for question in story.questions if not question.repeated]
    tokens = [story.tokens for story in stories]
    return (
        torch.tensor([row for row, _ in asked]),
        torch.tensor([question.value_position for _, question in asked]),
        torch.tensor([tokens[row][question.value_position] for row, question in asked]),
    )


def scoring_hops(stories: Sequence[Story], hops: int) -> list[Story]:
    """Return the same stories with only questions that need ``hops`` sentences scored; the others are marked as repeated."""

    def marked(question: StoryQuestion) -> StoryQuestion:
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
def answer_shares(model: Asked, stories: Sequence[Story], *, batch_size: int = 32) -> dict[str, float | int | None]:
    """Measure a model on stories of one length.

    Args:
        model: a model trained on the task; with linear attention, or on a bridge, the converted story is measured too.
        stories: stories with the same number of sentences.
        batch_size: stories at a time.

    Returns:
        ``n_facts`` of a story; ``n_answers`` scored; the accuracy ``with_story`` before the question, ``converted``, with the
        story as a KV bias (None of a model that cannot convert exactly), and ``without_story``, after BOS and the earlier
        questions alone; the accuracy expected of a ``guess`` of any value of the right kind, and of ``guess_in_story``, of one
        that the story names.
    """
    asked = [question for story in stories for question in story.questions if not question.repeated]
    parts = [stories[start : start + batch_size] for start in range(0, len(stories), batch_size)]
    exact = isinstance(model, KVTransformerBridge) or model.cfg.attention == "linear"
    return dict(
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


MEASURED_FACTS, MEASURED_STORIES = {1: (4, 8), 2: (4, 6)}, 256
"""For a model's card: sentences per story, by number of hops, and the number of stories."""
MEASURE_SEED = 2_000_003
"""Seed of the stories for a model's card, different from those of `Task.heldout`."""


@dataclass(frozen=True)
class FactsTask(Task):
    """Read a story, answer questions about it.

    No pair of subject and value occurs in both training and held-out stories. In held-out stories only the answer word is
    scored, and only the first time its question is asked. In training all words of the answers are scored, and in some stories
    every word.

    Attributes:
        min_facts, max_facts: number of sentences in a story, uniform between the two.
        length: tokens of story and questions together; questions are asked, repeatedly if necessary, until no more fit.
        whole_share: share of the training stories of which every token is scored, story and questions included.
        update_share: share of the facts that a later sentence changes to another value, which is then the correct one. An
            update is an additional sentence, worded like any other.
        pronoun_share: among sentences whose subject was mentioned before, the share that is moved right after the last such
            mention and refers to the subject by a pronoun ("It is in the barn."). Above 0 the vocabulary includes the pronouns.
        hops: 1, or 2 for stories of things in containers and containers in rooms (:mod:`kvlens.tasks.stories`), in which
            half of the sentences give the room of a thing only together with another sentence. The vocabulary then includes
            the words of these stories.
        notes: when training on two hops, also predict the room of a container at the container's word in the sentence that
            puts a thing into it, so that a text that reads only this sentence can find the room there.
    """

    name: ClassVar[str] = "facts"

    min_facts: Annotated[int, Within(1)] = 2
    max_facts: Annotated[int, Within(1)] = 12
    length: Annotated[int, Within(1)] = 176
    whole_share: Annotated[float, Within(0.0, 1.0)] = 0.125
    update_share: Annotated[float, Within(0.0, 1.0)] = 0.0
    pronoun_share: Annotated[float, Within(0.0, 1.0)] = 0.0
    hops: int = 1
    notes: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.min_facts <= self.max_facts <= MOST_FACTS:
            raise KVLensError(
                f"task 'facts': expected min_facts <= max_facts <= {MOST_FACTS}, got min_facts={self.min_facts}, "
                f"max_facts={self.max_facts}"
            )
        if self.hops not in (1, 2) or (self.hops == 2 and (self.update_share or self.pronoun_share)):
            raise KVLensError(
                "task 'facts': hops must be 1, or 2 without updates and pronouns, got "
                f"hops={self.hops!r}, update_share={self.update_share}, pronoun_share={self.pronoun_share}"
            )
        if self.hops == 2 and self.min_facts < 2:
            raise KVLensError(f"task 'facts': two hops need min_facts of at least 2, got {self.min_facts}")
        if self.notes and self.hops == 1:
            raise KVLensError("task 'facts': notes needs hops=2, got notes=True and hops=1")
        updates = self.max_facts if self.update_share else 0
        least = 1 + LONGEST_STATEMENT * (self.max_facts + updates) + LONGEST_QUESTION
        if self.length < least:
            facts = f"{self.max_facts} facts" + (f" and up to {updates} updates" if updates else "")
            raise KVLensError(f"task 'facts': a story of {facts} and one question need a length of {least}, got {self.length}")

    @property
    def n_positions(self) -> int:
        return self.length

    @property
    def d_input(self) -> int:
        return len(token_ids(pronouns=self.pronoun_share > 0, hops=self.hops == 2))

    @property
    def built_tokenizer(self) -> PreTrainedTokenizerFast:
        """The word-level tokenizer of the stories."""
        return word_tokenizer(pronouns=self.pronoun_share > 0, hops=self.hops == 2)

    def measure_more(self, model: Any, n_sequences: int, loss: float) -> Mapping[str, object]:
        """Accuracy on stories of four and of eight (two hops: six) facts, and the accuracy of guessing."""
        if not isinstance(model, KVTransformerBridge):
            self._check_kind(model, HookedKVTransformer)
        assert isinstance(model, Asked)
        counts = [n for n in MEASURED_FACTS[self.hops] if self.min_facts <= n <= self.max_facts]
        tasks = [replace(self, min_facts=n, max_facts=n) for n in counts]
        drawn = [task.stories(MEASURED_STORIES, torch.Generator().manual_seed(MEASURE_SEED), "heldout") for task in tasks]
        hops = (None,) if self.hops == 1 else (1, 2)
        return {"answers": [_measured(model, stories, n) for stories in drawn for n in hops]}

    def stories(self, n_stories: int, generator: torch.Generator, split: str = "train") -> list[Story]:
        """Draw stories with their ground truth: sentences, questions, and the position of each answer.

        Args:
            n_stories, generator, split: as for `sample`, which tokenizes the same stories.
        """
        self.check_drawable(n_stories, generator, split)
        random = Random(int(torch.randint(2**62, (), generator=generator)))
        counts = [random.randint(self.min_facts, self.max_facts) for _ in range(n_stories)]
        if self.hops == 2:
            return [draw_nested_story(n, self.length, random, heldout=split == "heldout") for n in counts]
        shares = dict(update_share=self.update_share, pronoun_share=self.pronoun_share)
        return [draw_story(n, self.length, random, heldout=split == "heldout", **shares) for n in counts]

    def sample(self, batch_size: int, generator: torch.Generator, split: str = "train") -> Batch:
        stories = self.stories(batch_size, generator, split)
        if split == "heldout":
            asked = [[q.value_position for q in story.questions if not q.repeated] for story in stories]
            return self.as_batch(stories, [[(position, position + 1) for position in row] for row in asked])
        whole = torch.rand(batch_size, generator=generator) < self.whole_share
        spans = [[(q.answer_start, q.end) for q in story.questions] for story in stories]
        for row in whole.nonzero()[:, 0].tolist():
            spans[row] = [(1, stories[row].n_tokens)]
        batch = self.as_batch(stories, spans)
        if self.notes:
            ids = token_ids(hops=True)
            for row, story in enumerate(stories):
                for position, room in notes(story):
                    batch.targets[row, position], batch.scored[row, position] = ids[room], True
        return batch

    @checked
    def as_batch(self, stories: Sequence[Story], spans: Sequence[Sequence[tuple[int, int]]]) -> Batch:
        """Stories as tokens, padded on the right.

        Args:
            stories: of at most ``length`` tokens each.
            spans: for each story, (start, stop) of the tokens to predict.
        """
        inputs = torch.full((len(stories), self.length), word_tokenizer().pad_token_id)
        scored = torch.zeros_like(inputs, dtype=torch.bool)
        for row, (story, parts) in enumerate(zip(stories, spans, strict=True)):
            inputs[row, : story.n_tokens] = torch.tensor(story.tokens)
            for start, stop in parts:
                scored[row, start - 1 : stop - 1] = True  # a token is predicted one position before it
        return Batch(inputs, torch.where(scored, inputs.roll(-1, dims=1), 0), scored)


def _measured(model: Asked, stories: Sequence[Story], hops: int | None) -> dict[str, object]:
    """Accuracy on questions that need ``hops`` sentences; None for all questions."""
    if hops is None:
        return dict(answer_shares(model, stories))
    return {**answer_shares(model, scoring_hops(stories, hops)), "hops": hops}
