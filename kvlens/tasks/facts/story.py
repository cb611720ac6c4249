"""A story with its questions, and the position of each answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import NamedTuple

from kvlens.corpus.tokenizer import BOS
from kvlens.tasks.facts.tokenizer import MARKS, token_ids, words_of
from kvlens.tasks.facts.words import KINDS, Kind

HELDOUT_SHARE = 8
"""One in this many pairs of subject and value is reserved for held-out stories."""
MOST_OF_A_KIND = 6
"""The largest number of facts of one kind in a story."""
MOST_FACTS = 3 * MOST_OF_A_KIND
LONGEST_STATEMENT = max(len(words_of(statement)) for kind in KINDS for statement in kind.statements)
LONGEST_QUESTION = max(len(words_of(kind.question)) + len(words_of(kind.answer)) for kind in KINDS)
"""With its answer."""


class Fact(NamedTuple):
    """A fact of a story: the value of one kind for one subject."""

    kind: Kind
    subject: str
    value: str


@dataclass(frozen=True)
class Sentence:
    """A statement of the story.

    Attributes:
        fact: the fact that it states.
        words: its words and marks.
        start: position of its first token; the BOS is at 0.
        outdated: whether a later sentence gives its subject another value.
        pronoun: whether it refers to its subject, that of the previous sentence, by a pronoun.
    """

    fact: Fact
    words: tuple[str, ...]
    start: int
    outdated: bool = False
    pronoun: bool = False

    @property
    def subject_position(self) -> int:
        """Position of the subject's token, or of the first token of the pronoun that replaces it."""
        return self.start if self.pronoun else self.start + self.words.index(self.fact.subject)

    @property
    def value_position(self) -> int:
        """Position of the value's token, which a model must find to answer."""
        return self.start + len(self.words) - 2


@dataclass(frozen=True)
class Question:
    """A question and its answer, which follow the story.

    Attributes:
        fact: the fact that is asked for.
        sentence: index of the sentence that states it: the last one about this subject and kind. If the answer is two hops
            away, the sentence about this subject.
        words: words of question and answer.
        start: position of its first token.
        repeated: whether it was asked before.
        outer: if the answer is two hops away, the index of the second sentence, about the value of the first.
    """

    fact: Fact
    sentence: int
    words: tuple[str, ...]
    start: int
    repeated: bool
    outer: int | None = None

    @property
    def origins(self) -> tuple[int, ...]:
        """Indices of all sentences that the answer depends on, in story order."""
        return (self.sentence,) if self.outer is None else (self.outer, self.sentence)

    @property
    def answer_start(self) -> int:
        """Position of the answer's first token."""
        return self.start + self.words.index("?") + 1

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.words)

    @property
    def value_position(self) -> int:
        """Position of the answer token; the model predicts it one position earlier."""
        return self.start + len(self.words) - 2


@dataclass(frozen=True)
class Story:
    """Statements in random order, and questions about them.

    Attributes:
        sentences: the sentences of the story.
        questions: the questions after it; the first ones ask for each fact once.
    """

    sentences: tuple[Sentence, ...]
    questions: tuple[Question, ...]

    @property
    def n_prompt_tokens(self) -> int:
        """Number of tokens of BOS and story, which together are the prompt before the questions."""
        return 1 + sum(len(sentence.words) for sentence in self.sentences)

    @property
    def n_tokens(self) -> int:
        """Tokens in all."""
        return self.n_prompt_tokens + sum(len(question.words) for question in self.questions)

    @property
    def prompt(self) -> str:
        """The story as text."""
        return written([word for sentence in self.sentences for word in sentence.words])

    @property
    def text(self) -> str:
        """Questions and answers as text."""
        return written([word for question in self.questions for word in question.words])

    @property
    def tokens(self) -> list[int]:
        """BOS, story, questions and answers as token ids."""
        ids = token_ids(pronouns=True, hops=True)  # the full vocabulary; a word has the same id in the smaller ones
        parts: tuple[Sentence | Question, ...] = (*self.sentences, *self.questions)
        return [ids[BOS], *(ids[word] for part in parts for word in part.words)]


def written(words: Sequence[str]) -> str:
    """Join words and marks into text."""
    return "".join(word if word in MARKS else " " + word for word in words).strip()


def is_heldout_pair(kind: Kind, subject: str, value: str) -> bool:
    """Whether this pair is reserved for held-out stories."""
    subjects, values = _numbers(kind)
    return (subjects[subject] + 3 * values[value]) % HELDOUT_SHARE == 0


@cache
def _numbers(kind: Kind) -> tuple[dict[str, int], dict[str, int]]:
    return {word: i for i, word in enumerate(kind.subjects)}, {word: i for i, word in enumerate(kind.values)}


def draw_facts(n_facts: int, random: Random, *, heldout: bool) -> list[Fact]:
    """Draw the facts of a story in random order: one to three kinds, if possible several facts of each, with distinct values.

    Kinds about the same things (where the kite is, whose it is) share their subjects.
    """
    least = -(-n_facts // MOST_OF_A_KIND)
    n_kinds = random.randint(least, max(least, min(3, n_facts // 2)))
    while True:
        kinds = random.sample(KINDS, n_kinds)
        subjects = {kind.subjects: random.sample(kind.subjects, -(-n_facts // n_kinds)) for kind in kinds}
        counts = [n_facts // n_kinds + (i < n_facts % n_kinds) for i in range(n_kinds)]
        facts = [
            fact
            for kind, count in zip(kinds, counts, strict=True)
            for fact in paired(kind, subjects[kind.subjects][:count], random, heldout)
        ]
        if len(facts) == n_facts:
            random.shuffle(facts)
            return facts


def paired(kind: Kind, subjects: Sequence[str], random: Random, heldout: bool) -> list[Fact]:
    """Give each subject a different value, from the requested split; fewer facts if there are not enough values."""
    facts: list[Fact] = []
    left = list(kind.values)
    for subject in subjects:
        fitting = [value for value in left if is_heldout_pair(kind, subject, value) == heldout]
        if fitting:
            facts.append(Fact(kind, subject, random.choice(fitting)))
            left.remove(facts[-1].value)
    return facts


class Statement(NamedTuple):
    """A fact and how the story will state it."""

    fact: Fact
    outdated: bool = False
    pronoun: bool = False


def with_updates(statements: Sequence[Statement], share: float, random: Random, *, heldout: bool) -> list[Statement]:
    """Add later statements that give some facts a new value, which no other fact of the kind has; the last one is correct."""
    statements = list(statements)
    for old in list(statements):
        if random.random() >= share:
            continue
        taken = {each.fact.value for each in statements if each.fact.kind == old.fact.kind}
        kind, subject, _ = old.fact
        fitting = [v for v in kind.values if v not in taken and is_heldout_pair(kind, subject, v) == heldout]
        if fitting:
            index = statements.index(old)
            statements[index] = old._replace(outdated=True)
            new = random.randint(index + 1, len(statements))
            statements.insert(new, Statement(Fact(kind, subject, random.choice(fitting))))
    return statements


def with_pronouns(statements: Sequence[Statement], share: float, random: Random) -> list[Statement]:
    """Move some sentences right after the last one about the same subject, and refer to that subject by a pronoun."""
    moved: list[Statement] = []
    for each in statements:
        same = [i for i, other in enumerate(moved) if other.fact.subject == each.fact.subject]
        if same and random.random() < share:
            moved.insert(same[-1] + 1, each._replace(pronoun=True))
        else:
            moved.append(each)
    return moved


def draw_story(
    n_facts: int, n_tokens: int, random: Random, *, heldout: bool, update_share: float = 0.0, pronoun_share: float = 0.0
) -> Story:
    """Draw a story of ``n_facts`` facts, followed by as many questions as fit into ``n_tokens`` tokens in all.

    Each fact is asked for once, in random order, then again in another order, until no more questions fit. ``update_share`` of
    the facts are restated with another value; ``pronoun_share`` of the sentences about an earlier subject use a pronoun.
    """
    statements = [Statement(fact) for fact in draw_facts(n_facts, random, heldout=heldout)]
    statements = with_updates(statements, update_share, random, heldout=heldout) if update_share else statements
    statements = with_pronouns(statements, pronoun_share, random) if pronoun_share else statements
    sentences: list[Sentence] = []
    end = 1
    for fact, outdated, pronoun in statements:
        words = filled(fact.kind.pronoun if pronoun else random.choice(fact.kind.statements), fact)
        sentences.append(Sentence(fact, words, end, outdated, pronoun))
        end += len(words)
    holds = [(sentence.fact, number, None) for number, sentence in enumerate(sentences) if not sentence.outdated]
    return asked_about(sentences, holds, n_tokens, random)


def asked_about(
    sentences: Sequence[Sentence], asked: Sequence[tuple[Fact, int, int | None]], n_tokens: int, random: Random
) -> Story:
    """The story with questions in random order, then in another, until no more fit into ``n_tokens``.

    Args:
        sentences: of the story.
        asked: `Question.fact`, `sentence` and `outer` of each question.
        n_tokens: of story and questions.
        random: decides the order.
    """
    questions: list[Question] = []
    end = sentences[-1].start + len(sentences[-1].words)
    while True:
        for fact, number, outer in random.sample(asked, len(asked)):
            words = filled(fact.kind.question, fact) + filled(fact.kind.answer, fact)
            if end + len(words) > n_tokens:
                return Story(tuple(sentences), tuple(questions))
            questions.append(Question(fact, number, words, end, repeated=len(questions) >= len(asked), outer=outer))
            end += len(words)


@cache
def _template(sentence: str) -> tuple[str, ...]:
    return tuple(words_of(sentence))


def filled(sentence: str, fact: Fact) -> tuple[str, ...]:
    """The words of a sentence about a fact."""
    placed = {"{s}": fact.subject, "{v}": fact.value}
    return tuple(placed.get(word, word) for word in _template(sentence))
