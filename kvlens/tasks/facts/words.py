"""Vocabulary of the stories: subjects, the kinds of fact about them, and the sentences that state and ask for each kind.

Every subject and every value is a single word, so answering means finding one word. Words carry no information about each
other: who lives where is drawn independently for each story, so only the story itself gives the answer.
"""

from dataclasses import dataclass


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


KINDS: tuple[Kind, ...] = (
    Kind(
        "place",
        THINGS,
        PLACES,
        (
            "The {s} is in the {v}.",
            "The {s} stands in the {v}.",
            "Look for the {s} in the {v}.",
            "Someone left the {s} in the {v}.",
        ),
        "It is in the {v}.",
        "Where is the {s}?",
        "The {s} is in the {v}.",
    ),
    Kind(
        "color",
        THINGS,
        COLORS,
        ("The {s} is painted {v}.", "The color of the {s} is {v}.", "Everyone knows that the {s} is {v}."),
        "It is painted {v}.",
        "What color is the {s}?",
        "The color of the {s} is {v}.",
    ),
    Kind(
        "owner",
        THINGS,
        NAMES,
        ("The {s} belongs to {v}.", "The owner of the {s} is {v}.", "They gave the {s} to {v}."),
        "It belongs to {v}.",
        "Who owns the {s}?",
        "The {s} belongs to {v}.",
    ),
    Kind(
        "food",
        NAMES,
        FOODS,
        ("{s} likes {v}.", "{s} is fond of {v}.", "Most of all {s} likes {v}."),
        "This person likes {v}.",
        "What does {s} like?",
        "{s} likes {v}.",
    ),
    Kind(
        "job",
        NAMES,
        JOBS,
        ("{s} works as a {v}.", "{s} became a {v}.", "People say that {s} is a {v}."),
        "This person works as a {v}.",
        "What is the job of {s}?",
        "{s} works as a {v}.",
    ),
    Kind(
        "town",
        NAMES,
        TOWNS,
        ("{s} lives in {v}.", "The home of {s} is {v}.", "Last year {s} moved to {v}."),
        "This person lives in {v}.",
        "Where does {s} live?",
        "{s} lives in {v}.",
    ),
    Kind(
        "pet",
        NAMES,
        ANIMALS,
        ("{s} keeps a {v}.", "{s} has a {v}.", "At night {s} feeds a {v}."),
        "This person keeps a {v}.",
        "Which animal does {s} keep?",
        "{s} keeps a {v}.",
    ),
)

INSIDE = Kind("inside", THINGS, CONTAINERS, ("The {s} is in the {v}.",), "It is in the {v}.", "Where is the {s}?", "The {v}.")
ROOM = Kind(
    "room", CONTAINERS, PLACES, ("The {s} is in the {v}.",), "It is in the {v}.", "Which room holds the {s}?", "The {v}."
)
"""The kinds of two-hop stories: a thing is in a container and the container is in a room, so the thing is in that room."""
