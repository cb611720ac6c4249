"""Stories of two hops: things in containers, containers in rooms.

    The box is in the cellar. The sack is in the barn. The key is in the box. Which room holds the key? The cellar.

The answer depends on both sentences. The room of a container is stated before the thing in it, so that a model can already
store the room at the word for the container in the later sentence (:func:`notes`). All sentences have the same form
and the same number of tokens, so they can be swapped.
"""

from random import Random

from kvlens.tasks.facts.story import Fact, Sentence, Story, asked_about, filled, is_heldout_pair, paired
from kvlens.tasks.facts.words import CONTAINERS, INSIDE, ROOM, THINGS


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
