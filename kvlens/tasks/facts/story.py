"""A story with its questions, and where in it each answer stands."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import NamedTuple

from kvlens.corpus.tokenizer import BOS
from kvlens.tasks.facts.tokenizer import MARKS, token_ids, words_of
from kvlens.tasks.facts.words import KINDS, Kind

HELDOUT_SHARE = 8
"""One pair of subject and value in this many is kept for held-out stories."""
MOST_OF_A_KIND = 6
"""Facts of one kind in a story."""
MOST_FACTS = 3 * MOST_OF_A_KIND
LONGEST_STATEMENT = max(len(words_of(statement)) for kind in KINDS for statement in kind.statements)
LONGEST_QUESTION = max(len(words_of(kind.question)) + len(words_of(kind.answer)) for kind in KINDS)
"""With its answer."""


class Fact(NamedTuple):
    """One thing that a story says: of this subject this value holds."""

    kind: Kind
    subject: str
    value: str


@dataclass(frozen=True)
class Sentence:
    """A statement of the story.

    Attributes:
        fact: what it states.
        words: how.
        start: position of its first token; the BOS is at 0.
        outdated: whether a later sentence gives its subject another value.
        pronoun: whether a pronoun stands for its subject, which is that of the sentence before.
    """

    fact: Fact
    words: tuple[str, ...]
    start: int
    outdated: bool = False
    pronoun: bool = False

    @property
    def subject_position(self) -> int:
        """Position of the subject's token, or of the first one of the pronoun that stands for it."""
        return self.start if self.pronoun else self.start + self.words.index(self.fact.subject)

    @property
    def value_position(self) -> int:
        """Position of the value's token: what a model must find to answer."""
        return self.start + len(self.words) - 2


@dataclass(frozen=True)
class Question:
    """A question and its answer, which follow the story.

    Attributes:
        fact: what is asked for.
        sentence: which sentence of the story states it: the last one about this subject and kind. Where the answer is two hops
            away, the one about this subject.
        words: of question and answer.
        start: position of its first token.
        repeated: whether it was asked before.
        outer: where the answer is two hops away, the sentence that states the value of what the other one names.
    """

    fact: Fact
    sentence: int
    words: tuple[str, ...]
    start: int
    repeated: bool
    outer: int | None = None

    @property
    def origins(self) -> tuple[int, ...]:
        """Every sentence that the answer needs, in the order in which they are told."""
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
        """Position of the token that is the answer; the model predicts it one position earlier."""
        return self.start + len(self.words) - 2


@dataclass(frozen=True)
class Story:
    """Statements in random order, and questions about them.

    Attributes:
        sentences: of the story.
        questions: after it; the first ones ask for each fact once.
    """

    sentences: tuple[Sentence, ...]
    questions: tuple[Question, ...]

    @property
    def n_prompt_tokens(self) -> int:
        """Tokens of BOS and story, which are the prompt of the questions."""
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
        ids = token_ids(pronouns=True, hops=True)  # the fullest vocabulary: a word has the same number in all of them
        parts: tuple[Sentence | Question, ...] = (*self.sentences, *self.questions)
        return [ids[BOS], *(ids[word] for part in parts for word in part.words)]


def written(words: Sequence[str]) -> str:
    """Words and marks as text."""
    return "".join(word if word in MARKS else " " + word for word in words).strip()


def is_heldout_pair(kind: Kind, subject: str, value: str) -> bool:
    """Whether stories to train on never join these two."""
    subjects, values = _numbers(kind)
    return (subjects[subject] + 3 * values[value]) % HELDOUT_SHARE == 0


@cache
def _numbers(kind: Kind) -> tuple[dict[str, int], dict[str, int]]:
    return {word: i for i, word in enumerate(kind.subjects)}, {word: i for i, word in enumerate(kind.values)}


def draw_facts(n_facts: int, random: Random, *, heldout: bool) -> list[Fact]:
    """Facts of a story in random order: one to three kinds, where possible several of a kind, and no value twice in a kind.

    Kinds that are about the same things (where the kite is, whose it is) share their subjects.
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
    """Give each subject a value of its own, on the right side of the split; fewer facts where the values do not suffice."""
    facts: list[Fact] = []
    left = list(kind.values)
    for subject in subjects:
        fitting = [value for value in left if is_heldout_pair(kind, subject, value) == heldout]
        if fitting:
            facts.append(Fact(kind, subject, random.choice(fitting)))
            left.remove(facts[-1].value)
    return facts


class Told(NamedTuple):
    """A fact as the story will tell it."""

    fact: Fact
    outdated: bool = False
    pronoun: bool = False


def with_updates(told: Sequence[Told], share: float, random: Random, *, heldout: bool) -> list[Told]:
    """Some facts restated later, with a value that nothing else of their kind has; the last statement holds."""
    told = list(told)
    for old in list(told):
        if random.random() >= share:
            continue
        taken = {each.fact.value for each in told if each.fact.kind == old.fact.kind}
        kind, subject, _ = old.fact
        fitting = [v for v in kind.values if v not in taken and is_heldout_pair(kind, subject, v) == heldout]
        if fitting:
            place = told.index(old)
            told[place] = old._replace(outdated=True)
            told.insert(random.randint(place + 1, len(told)), Told(Fact(kind, subject, random.choice(fitting))))
    return told


def with_pronouns(told: Sequence[Told], share: float, random: Random) -> list[Told]:
    """Some sentences moved right behind the last one about the same subject, which a pronoun then names."""
    moved: list[Told] = []
    for each in told:
        same = [i for i, other in enumerate(moved) if other.fact.subject == each.fact.subject]
        if same and random.random() < share:
            moved.insert(same[-1] + 1, each._replace(pronoun=True))
        else:
            moved.append(each)
    return moved


def draw_story(
    n_facts: int, n_tokens: int, random: Random, *, heldout: bool, update_share: float = 0.0, pronoun_share: float = 0.0
) -> Story:
    """A story of ``n_facts`` facts and as many questions as fit into ``n_tokens`` with it.

    Each fact is asked for once, in random order, then each again in another order, until no question fits. Of the facts a share
    is restated with another value, of the sentences whose subject was named before a share names it by a pronoun.
    """
    told = [Told(fact) for fact in draw_facts(n_facts, random, heldout=heldout)]
    told = with_updates(told, update_share, random, heldout=heldout) if update_share else told
    told = with_pronouns(told, pronoun_share, random) if pronoun_share else told
    sentences: list[Sentence] = []
    end = 1
    for fact, outdated, pronoun in told:
        words = filled(fact.kind.pronoun if pronoun else random.choice(fact.kind.statements), fact)
        sentences.append(Sentence(fact, words, end, outdated, pronoun))
        end += len(words)
    holds = [number for number, sentence in enumerate(sentences) if not sentence.outdated]
    questions: list[Question] = []
    while True:
        for number in random.sample(holds, n_facts):
            fact = sentences[number].fact
            words = filled(fact.kind.question, fact) + filled(fact.kind.answer, fact)
            if end + len(words) > n_tokens:
                return Story(tuple(sentences), tuple(questions))
            questions.append(Question(fact, number, words, end, repeated=len(questions) >= n_facts))
            end += len(words)


@cache
def _template(sentence: str) -> tuple[str, ...]:
    return tuple(words_of(sentence))


def filled(sentence: str, fact: Fact) -> tuple[str, ...]:
    """The words of a sentence about a fact."""
    placed = {"{s}": fact.subject, "{v}": fact.value}
    return tuple(placed.get(word, word) for word in _template(sentence))
