"""From the context or from memory."""

import pytest
import torch

import kvlens
from kvlens import KVLensError
from kvlens.explanation.context_or_memory import StatedFact, context_or_memory, origin_of
from kvlens.texts import WORD, Response, Word

LYON = StatedFact("The capital of France is {}.", "Lyon", "Nice", "What is the capital of France?")
QUESTION = " Which animal does Kaya keep? Kaya keeps a"


def said(text):
    words = tuple(Word(each, i, i + 1, each[0].isalnum()) for i, each in enumerate(WORD.findall(text)))
    return Response(torch.zeros(len(words), dtype=torch.long), words, text)


@pytest.mark.parametrize(
    ("answer", "without", "replaced", "memory", "origin"),
    [
        ("It is Lyon.", "The capital is Paris.", "It is Nice.", "Paris", "from the context"),
        ("Lyon's the capital.", "Rome", "nice", "Paris.", "from the context"),
        ("It is Lyon.", "Paris", "It is Lyon.", "Paris", "neither"),  # the sentence matters, and is not what is followed
        ("It is Lyon.", "It is Lyon.", "It is Lyon.", "Paris", "neither"),  # another sentence says so
        ("The capital of France is Paris.", "Paris.", "Paris", "Paris.", "from memory"),
        ("It is Paris.", "Paris", "Paris", "Paris, a city of two million people", "from memory"),
        ("Paris", "Paris", "Nice", "Paris", "neither"),
        ("Rome", "Rome", "Rome", "Paris", "neither"),  # another sentence is followed
        ("Lyon", "Paris", "Nice", "The capital is Lyon", "both agree"),
        ("", "", "", "", "neither"),
    ],
)
def test_verdicts(answer, without, replaced, memory, origin):
    assert origin_of(LYON, *map(said, (answer, without, replaced, memory))) == origin


@pytest.fixture(scope="module")
def model():
    return kvlens.load("facts-gpt2")


def test_a_model_that_reads_stories_answers_from_the_context(model):
    facts = [
        StatedFact("Kaya feeds a {}.", "donkey", "goat", QUESTION, behind="Pavel has a parrot."),
        StatedFact("Kaya feeds a {}.", "donkey", "goat", QUESTION, before="At night Kaya feeds a donkey."),
    ]
    found = context_or_memory(model, facts, layers=True)
    assert found["origin"].tolist() == ["from the context", "neither"]
    assert found["answer"].tolist() == ["donkey."] * 2 and found["replaced"][0] == "goat."
    assert (
        "donkey" not in found["without"][0] and found["layers"].tolist() == ["0", ""] and (found["memory"] != "donkey.").all()
    )


@pytest.mark.parametrize(
    ("fact", "message"),
    [
        (LYON._replace(sentence="The capital is Lyon."), "sentence: expected '{}'"),
        (LYON._replace(object="France"), "question: it has 'France' already"),
        (LYON._replace(other="lyon"), "other: expected another object"),
    ],
)
def test_refusals(model, fact, message):
    with pytest.raises(KVLensError, match=message):
        context_or_memory(model, [fact])
    with pytest.raises(KVLensError, match="at least one"):
        context_or_memory(model, [])
