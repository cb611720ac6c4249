"""Made-up stories: their words, the tokenizer, drawing a story with its questions, and the position of each answer.

**Words**: every subject and every value is a single word, so answering means finding one word. Words carry no information about
each other: who lives where is drawn independently for each story, so only the story itself gives the answer.

**The tokenizer** is word-level: one token per word and per punctuation mark. A token includes the space before it (shown as
U+2581), so concatenating the texts of the tokens gives the text: " kite" and "." for "kite.". The first word of a text gets
that space too, so a text has the same tokens alone and after another text; decoded, it begins with a space. Words outside the
vocabulary become ``<|unk|>``. Pronouns come after all other words, and the words of two-hop stories after the pronouns, so a
word has the same id in every vocabulary that contains it.

**Two hops**: things in containers, containers in rooms.

    The box is in the cellar. The sack is in the barn. The key is in the box. Which room holds the key? The cellar.

The answer depends on both sentences. The room of a container is stated before the thing in it, so that a model can already
store the room at the word for the container in the later sentence (:func:`notes`). All sentences have the same form
and the same number of tokens, so they can be swapped.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import NamedTuple

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvlens.corpus.tokenized import BOS_TOKEN, EOS_TOKEN, PAD_TOKEN, SPECIAL_TOKENS
from kvlens.tokenizer import with_bos


def _words(listed: str) -> tuple[str, ...]:
    return tuple(listed.split())


NAMES = _words(
    "Ada Bela Cora Dario Edda Fenn Gita Hugo Ines Joris Kaya Liam Mira Nils Olga Pavel "
    "Quinn Rosa Sven Tilda Umar Vera Wanda Xenia Yusuf Zora Anouk Bruno Celia Diego Elmo Freya"
)
THINGS = _words(
    "kite drum lamp clock book bell mirror basket violin ladder saddle kettle compass puzzle lantern trumpet "
    "blanket hammer bottle candle wagon anchor globe flute shovel teapot pillow ribbon chest barrel sled vase"
)
PLACES = _words(
    "barn cellar attic garden kitchen tower stable harbor forest chapel library workshop tunnel meadow bakery theater "
    "castle hallway orchard museum station tent cave boathouse"
)
COLORS = _words("red blue green yellow white black brown gray pink purple orange silver golden violet crimson teal")
FOODS = _words(
    "plums pears beans cherries noodles walnuts olives pancakes carrots grapes dates figs muffins lentils tomatoes peaches "
    "pickles radishes waffles almonds dumplings mushrooms berries crackers"
)
JOBS = _words(
    "baker teacher doctor farmer painter sailor tailor miner singer pilot judge plumber weaver banker gardener dancer "
    "barber cook shepherd carpenter nurse hunter clown smith"
)
TOWNS = _words(
    "Arlen Borvik Calder Dunmore Elster Farwick Galdo Hestia Ilmar Jessen Korva Lunden Marlow Norvik Ostra Perin "
    "Quill Rovan Selby Tarn Ulmen Varga Wexel Yarrow"
)
CONTAINERS = _words("box crate sack drawer trunk jar bag suitcase cupboard bucket tin case urn pouch bin tub")
ANIMALS = _words("goat cat dog horse parrot rabbit turtle hen fox donkey pig swan lizard hamster camel monkey")


@dataclass(frozen=True)
class Kind:
    """A kind of fact: its possible subjects and values, and the sentences that state, ask for and answer it.

    Attributes:
        name: name of the kind.
        subjects: possible subjects, one word each.
        values: possible values, one word each.
        statements: ways of stating the fact; ``{s}`` is the subject, ``{v}`` the value, which comes last.
        pronoun: the statement with a pronoun for the subject of the previous sentence.
        question: asks for the value.
        answer: states the fact again, so that subject and value are in one sentence.
    """

    name: str
    subjects: tuple[str, ...]
    values: tuple[str, ...]
    statements: tuple[str, ...]
    pronoun: str
    question: str
    answer: str


# fmt: off
STATEMENT_KINDS: tuple[Kind, ...] = (
    Kind(
        "place", THINGS, PLACES,
        ("The {s} is in the {v}.", "The {s} stands in the {v}.",
         "Look for the {s} in the {v}.", "Someone left the {s} in the {v}."),
        "It is in the {v}.", "Where is the {s}?", "The {s} is in the {v}.",
    ),
    Kind(
        "color", THINGS, COLORS,
        ("The {s} is painted {v}.", "The color of the {s} is {v}.", "Everyone knows that the {s} is {v}."),
        "It is painted {v}.", "What color is the {s}?", "The color of the {s} is {v}.",
    ),
    Kind(
        "owner", THINGS, NAMES,
        ("The {s} belongs to {v}.", "The owner of the {s} is {v}.", "They gave the {s} to {v}."),
        "It belongs to {v}.", "Who owns the {s}?", "The {s} belongs to {v}.",
    ),
    Kind(
        "food", NAMES, FOODS,
        ("{s} likes {v}.", "{s} is fond of {v}.", "Most of all {s} likes {v}."),
        "This person likes {v}.", "What does {s} like?", "{s} likes {v}.",
    ),
    Kind(
        "job", NAMES, JOBS,
        ("{s} works as a {v}.", "{s} became a {v}.", "People say that {s} is a {v}."),
        "This person works as a {v}.", "What is the job of {s}?", "{s} works as a {v}.",
    ),
    Kind(
        "town", NAMES, TOWNS,
        ("{s} lives in {v}.", "The home of {s} is {v}.", "Last year {s} moved to {v}."),
        "This person lives in {v}.", "Where does {s} live?", "{s} lives in {v}.",
    ),
    Kind(
        "pet", NAMES, ANIMALS,
        ("{s} keeps a {v}.", "{s} has a {v}.", "At night {s} feeds a {v}."),
        "This person keeps a {v}.", "Which animal does {s} keep?", "{s} keeps a {v}.",
    ),
)
# fmt: on

INSIDE = Kind("inside", THINGS, CONTAINERS, ("The {s} is in the {v}.",), "It is in the {v}.", "Where is the {s}?", "The {v}.")
ROOM = Kind(
    "room", CONTAINERS, PLACES, ("The {s} is in the {v}.",), "It is in the {v}.", "Which room holds the {s}?", "The {v}."
)
"""The kinds of two-hop stories: a thing is in a container and the container is in a room, so the thing is in that room."""


UNK = "<|unk|>"
SPACE = "\u2581"
MARKS = (".", "?")


def words_of(sentence: str) -> list[str]:
    """Split ``"Where is Mira?"`` into words and punctuation marks; ``{s}`` and ``{v}`` count as words."""
    return re.findall(r"[\w{}]+|[.?]", sentence)


@cache
def token_ids(pronouns: bool = False, hops: bool = False) -> dict[str, int]:
    """The id of every word and mark, after the special tokens; words of two-hop stories require ``pronouns=True`` as well."""
    words: dict[str, None] = dict.fromkeys((BOS_TOKEN, EOS_TOKEN, PAD_TOKEN, UNK, *MARKS, *_words_of_kinds(STATEMENT_KINDS)))
    if pronouns or hops:
        words.update(dict.fromkeys(word for kind in STATEMENT_KINDS for word in words_of(kind.pronoun) if word != "{v}"))
    if hops:
        words.update(dict.fromkeys(_words_of_kinds((INSIDE, ROOM))))
    return {word: number for number, word in enumerate(words)}


def _words_of_kinds(kinds: Sequence[Kind]) -> list[str]:
    """The words of the kinds' sentences, then their subjects and values."""
    sentences = [sentence for kind in kinds for sentence in (*kind.statements, kind.question, kind.answer)]
    frame = [word for sentence in sentences for word in words_of(sentence) if word not in ("{s}", "{v}")]
    return [*frame, *(word for kind in kinds for word in (*kind.subjects, *kind.values))]


@cache
def word_tokenizer(pronouns: bool = False, hops: bool = False) -> PreTrainedTokenizerFast:
    """Build the tokenizer: it prepends BOS unless ``add_special_tokens=False``, and pads on the right."""
    special = (BOS_TOKEN, EOS_TOKEN, PAD_TOKEN, UNK)
    ids = {word if word in (*special, *MARKS) else SPACE + word: number for word, number in token_ids(pronouns, hops).items()}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always"),
            pre_tokenizers.Split(Regex(r"[^\w\u2581]"), behavior="isolated"),
        ]
    )
    tokenizer.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="never")
    more = "-pronouns-and-hops" if hops else "-and-pronouns" if pronouns else ""
    return with_bos(tokenizer, f"kvlens-facts-words{more}", **SPECIAL_TOKENS, unk_token=UNK)


HELDOUT_SHARE = 8
"""One in this many pairs of subject and value is reserved for held-out stories."""
MOST_OF_A_KIND = 6
"""The largest number of facts of one kind in a story."""
MOST_FACTS = 3 * MOST_OF_A_KIND
LONGEST_STATEMENT = max(len(words_of(statement)) for kind in STATEMENT_KINDS for statement in kind.statements)
LONGEST_QUESTION = max(len(words_of(kind.question)) + len(words_of(kind.answer)) for kind in STATEMENT_KINDS)
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
    def value_position(self) -> int:
        """Position of the value's token, which a model must find to answer."""
        return self.start + len(self.words) - 2


@dataclass(frozen=True)
class StoryQuestion:
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
    questions: tuple[StoryQuestion, ...]

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
        return text_of_words([word for sentence in self.sentences for word in sentence.words])

    @property
    def text(self) -> str:
        """Questions and answers as text."""
        return text_of_words([word for question in self.questions for word in question.words])

    @property
    def tokens(self) -> list[int]:
        """BOS, story, questions and answers as token ids."""
        ids = token_ids(pronouns=True, hops=True)  # the full vocabulary; a word has the same id in the smaller ones
        parts: tuple[Sentence | StoryQuestion, ...] = (*self.sentences, *self.questions)
        return [ids[BOS_TOKEN], *(ids[word] for part in parts for word in part.words)]


def text_of_words(words: Sequence[str]) -> str:
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
        kinds = random.sample(STATEMENT_KINDS, n_kinds)
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
        asked: `StoryQuestion.fact`, `sentence` and `outer` of each question.
        n_tokens: of story and questions.
        random: decides the order.
    """
    questions: list[StoryQuestion] = []
    end = sentences[-1].start + len(sentences[-1].words)
    while True:
        for fact, number, outer in random.sample(asked, len(asked)):
            words = filled(fact.kind.question, fact) + filled(fact.kind.answer, fact)
            if end + len(words) > n_tokens:
                return Story(tuple(sentences), tuple(questions))
            questions.append(StoryQuestion(fact, number, words, end, repeated=len(questions) >= len(asked), outer=outer))
            end += len(words)


@cache
def _template(sentence: str) -> tuple[str, ...]:
    return tuple(words_of(sentence))


def filled(sentence: str, fact: Fact) -> tuple[str, ...]:
    """The words of a sentence about a fact."""
    placed = {"{s}": fact.subject, "{v}": fact.value}
    return tuple(placed.get(word, word) for word in _template(sentence))


def draw_nested_facts(n_facts: int, random: Random, *, heldout: bool) -> list[Fact]:
    """Draw containers in rooms (half of the facts, rounded up) and things in these containers, each after its container."""
    n_inside = n_facts // 2
    while True:
        outer = paired(ROOM, random.sample(CONTAINERS, n_facts - n_inside), random, heldout)
        left, facts = list(THINGS), list(outer)
        for container in [fact.subject for fact in outer[:n_inside]]:
            fitting = [thing for thing in left if is_heldout_pair(INSIDE, thing, container) == heldout]
            if fitting:
                facts.append(Fact(INSIDE, random.choice(fitting), container))
                left.remove(facts[-1].subject)
        if len(facts) == n_facts:
            return _in_random_order(facts, random)


def _in_random_order(facts: list[Fact], random: Random) -> list[Fact]:
    """Shuffle the facts, then swap pairs in which a thing would come before its container."""
    facts = random.sample(facts, len(facts))
    for number, inner in enumerate(facts):
        later = [i for i in range(number + 1, len(facts)) if facts[i].subject == inner.value]
        if inner.kind == INSIDE and later:
            facts[number], facts[later[0]] = facts[later[0]], inner
    return facts


def draw_nested_story(n_facts: int, n_tokens: int, random: Random, *, heldout: bool) -> Story:
    """Draw a story and questions of at most ``n_tokens`` tokens: one question per sentence, and one per thing for its room."""
    facts = draw_nested_facts(n_facts, random, heldout=heldout)
    sentences: list[Sentence] = []
    end = 1
    for fact in facts:
        words = filled(fact.kind.statements[0], fact)
        sentences.append(Sentence(fact, words, end))
        end += len(words)
    number_of = {fact.subject: number for number, fact in enumerate(facts)}
    asked: list[tuple[Fact, int, int | None]] = [(fact, number, None) for number, fact in enumerate(facts)]
    for number, inner in enumerate(facts):
        if inner.kind == INSIDE:
            outer = number_of[inner.value]
            asked.append((Fact(ROOM, inner.subject, facts[outer].value), number, outer))
    return asked_about(sentences, asked, n_tokens, random)


def notes(story: Story) -> list[tuple[int, str]]:
    """(position, room) for every sentence at which a room can be stored."""
    rooms = {sentence.fact.subject: sentence.fact.value for sentence in story.sentences if sentence.fact.kind == ROOM}
    return [(s.value_position, rooms[s.fact.value]) for s in story.sentences if s.fact.kind == INSIDE]
