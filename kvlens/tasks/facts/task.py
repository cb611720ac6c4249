"""Answering questions about a made-up story: the task."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, ClassVar

import torch
from transformers import PreTrainedTokenizerFast

from kvlens.errors import KVLensError
from kvlens.model import HookedKVTransformer
from kvlens.signature import checked
from kvlens.tasks.batch import Batch, Model, Task
from kvlens.tasks.checks import require_between, require_drawable, require_integers
from kvlens.tasks.facts.answers import answer_shares
from kvlens.tasks.facts.story import LONGEST_QUESTION, LONGEST_STATEMENT, MOST_FACTS, Story, draw_story
from kvlens.tasks.facts.tokenizer import token_ids, word_tokenizer

MEASURED_FACTS, MEASURED_STORIES = (4, 8), 256
MEASURE_SEED = 2_000_003
"""Of the stories for a model's card; `Task.heldout` starts elsewhere."""


@dataclass(frozen=True)
class FactsTask(Task):
    """Read a story, answer questions about it.

    A held-out story joins no subject and value that a training story joins, and scored is the one word that is the answer,
    where its question is asked for the first time. In training all words of the answers are scored, and in some stories every
    word.

    Attributes:
        min_facts, max_facts: sentences of a story; any number between is as likely.
        length: tokens of story and questions together; questions are asked, again where need be, until no more fit.
        whole_share: share of the training stories of which every token is scored, story and questions included.
        update_share: share of the facts that a later sentence gives another value, which is then the one that holds. An update
            is a sentence more, and told like any other.
        pronoun_share: of the sentences whose subject was named before, the share that follows right behind the last of them
            and names it by a pronoun ("It is in the barn."). Above 0 the vocabulary has the pronouns too.
    """

    name: ClassVar[str] = "facts"

    min_facts: int = 2
    max_facts: int = 12
    length: int = 176
    whole_share: float = 0.125
    update_share: float = 0.0
    pronoun_share: float = 0.0

    def __post_init__(self) -> None:
        require_integers(self, min_facts=1, max_facts=1, length=1)
        for name in ("whole_share", "update_share", "pronoun_share"):
            require_between(self, name, 0.0, 1.0)
        if not self.min_facts <= self.max_facts <= MOST_FACTS:
            raise KVLensError(
                f"task 'facts': expected min_facts <= max_facts <= {MOST_FACTS}, got min_facts={self.min_facts}, "
                f"max_facts={self.max_facts}"
            )
        updates = self.max_facts if self.update_share else 0
        least = 1 + LONGEST_STATEMENT * (self.max_facts + updates) + LONGEST_QUESTION
        if self.length < least:
            told = f"{self.max_facts} facts" + (f" and up to {updates} updates" if updates else "")
            raise KVLensError(f"task 'facts': a story of {told} and one question need a length of {least}, got {self.length}")

    @property
    def n_positions(self) -> int:
        return self.length

    @property
    def d_input(self) -> int:
        return len(token_ids(pronouns=self.pronoun_share > 0))

    @property
    def built_tokenizer(self) -> PreTrainedTokenizerFast:
        """One token for each word."""
        return word_tokenizer(pronouns=self.pronoun_share > 0)

    def measure_more(self, model: Model, n_sequences: int, loss: float) -> dict[str, Any]:
        """Shares of right answers on stories of four and of eight facts, and what guesses would reach."""
        self._check_kind(model, HookedKVTransformer)
        assert isinstance(model, HookedKVTransformer)
        counts = [n for n in MEASURED_FACTS if self.min_facts <= n <= self.max_facts]
        tasks = [replace(self, min_facts=n, max_facts=n) for n in counts]
        drawn = [task.stories(MEASURED_STORIES, torch.Generator().manual_seed(MEASURE_SEED), "heldout") for task in tasks]
        return {"answers": [answer_shares(model, stories)._asdict() for stories in drawn]}

    def stories(self, n_stories: int, generator: torch.Generator, split: str = "train") -> list[Story]:
        """Draw stories with what is known about them: sentences, questions, and where each answer stands.

        Args:
            n_stories, generator, split: as for `sample`, which makes tokens of the same stories.
        """
        require_drawable(self, n_stories, generator, split)
        random = Random(int(torch.randint(2**62, (), generator=generator)))
        counts = [random.randint(self.min_facts, self.max_facts) for _ in range(n_stories)]
        shares = dict(update_share=self.update_share, pronoun_share=self.pronoun_share)
        return [draw_story(n, self.length, random, heldout=split == "heldout", **shares) for n in counts]

    def sample(self, batch_size: int, generator: torch.Generator, split: str = "train") -> Batch:
        stories = self.stories(batch_size, generator, split)
        if split == "heldout":
            return self.as_batch(stories, [_answer_words(story) for story in stories])
        whole = torch.rand(batch_size, generator=generator) < self.whole_share
        return self.as_batch(
            stories,
            [[(1, story.n_tokens)] if every else _answers(story) for story, every in zip(stories, whole.tolist(), strict=True)],
        )

    @checked
    def as_batch(self, stories: Sequence[Story], spans: Sequence[Sequence[tuple[int, int]]] | None = None) -> Batch:
        """Stories as tokens, padded on the right.

        Args:
            stories: of at most ``length`` tokens each.
            spans: for each story, first and past-the-last position of the tokens to predict; None takes the answer words.
        """
        inputs = torch.full((len(stories), self.length), word_tokenizer().pad_token_id)
        scored = torch.zeros_like(inputs, dtype=torch.bool)
        spans = [_answer_words(story) for story in stories] if spans is None else spans
        for row, (story, parts) in enumerate(zip(stories, spans, strict=True)):
            inputs[row, : story.n_tokens] = torch.tensor(story.tokens)
            for start, stop in parts:
                scored[row, start - 1 : stop - 1] = True  # a token is predicted one position before it
        return Batch(inputs, torch.where(scored, inputs.roll(-1, dims=1), 0), scored)


def _answer_words(story: Story) -> list[tuple[int, int]]:
    """The word that is the answer, of each question that is asked for the first time."""
    return [(q.value_position, q.value_position + 1) for q in story.questions if not q.repeated]


def _answers(story: Story) -> list[tuple[int, int]]:
    """Every answer, whole."""
    return [(q.answer_start, q.end) for q in story.questions]
