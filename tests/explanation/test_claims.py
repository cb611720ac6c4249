"""Words, claims and verdicts, by hand."""

import math

import pytest
import torch

import kvlens
from kvlens import KVLensError
from kvlens.explanation.claims import FIRM, claim_of, claims_of, content_words, normal, verdict, walk
from kvlens.explanation.context_or_memory import StatedFact, context_or_memory, origin_of
from kvlens.texts import WORD, Response, Word, _words


def response(*tokens: str) -> Response:
    return Response(torch.arange(len(tokens)), tuple(_words(list(tokens))), "".join(tokens).strip())


def claimed(tokens: list[str], marked: dict[str, float], asked: frozenset[str] = frozenset()) -> list[str]:
    found = response(*tokens)
    falls = [marked.get(word.text, 0.0) for word in found.words]
    return [claim.text for claim in claims_of(found, falls, asked)]


def test_a_token_belongs_to_the_word_that_has_most_of_it():
    words = _words([" The", " price", " is", " 3", ".", "5", " m", "illion", ".", '"'])
    assert [(word.text, word.start, word.stop) for word in words] == [
        ("The", 0, 1),
        ("price", 1, 2),
        ("is", 2, 3),
        ("3.5", 3, 6),
        ("million", 6, 8),
        (".", 8, 9),
        ('"', 9, 10),
    ]
    assert [word.is_word for word in words[-3:]] == [True, False, False]


@pytest.mark.parametrize(
    ("tokens", "marked", "claims"),
    [
        (["The", " meeting", " was", " held", " in", " Rotterdam", "."], {"Rotterdam": 8.0}, ["Rotterdam"]),
        (["On", " July", " 4", ",", " 17", "76", "."], {"4": 5.0}, ["July 4, 1776"]),
        (["Paris", ",", " Rome", "."], {"Paris": 5.0, "Rome": 5.0}, ["Paris", "Rome"]),
        (["the", " Bank", " of", " England", " said"], {"England": 5.0}, ["Bank of England"]),
        (["red", " big", " apple"], {"red": 5.0, "apple": 5.0}, ["red big apple"]),
        (["red", " very", " big", " old", " apple"], {"red": 5.0, "apple": 5.0}, ["red", "apple"]),
        (["It", " is", " in", " the", " house"], {"is": 5.0, "the": 5.0}, []),
        (["One", ".", " Two"], {"One": 5.0, "Two": 5.0}, ["One", "Two"]),
        (["falls", " little"], {"falls": 1.9}, []),
    ],
)
def test_claims_are_the_words_that_fall(tokens, marked, claims):
    assert claimed(tokens, marked) == claims


def test_what_the_question_has_already_is_no_claim():
    assert claimed(["The", " office", " moves"], {"office": 5.0, "moves": 5.0}, frozenset({"office", "moves"})) == []


def test_comparisons_ignore_case_accents_and_possessives():
    assert normal("Röntgen's") == normal("ROENTGEN".replace("OE", "O")) == "rontgen"
    assert content_words(response("The", " King", " of", " Spain").words) == ("king", "spain")


def test_words_of_the_question_do_not_tell_whether_a_claim_is_said():
    """ "won the MVP award in 2014–15": an answer "the MVP award in 2018" repeats the question, and nothing of the claim."""
    old, asked = response("MVP", " award", " in", " 2014\u201315", " award"), frozenset({"mvp", "award"})
    claim = claims_of(old, [5.0, 5.0, 0.0, 5.0, 5.0], asked)[-1]
    assert claim.words == ("2014-15",) and claim_of(old, 0, 2, 1.0, asked).words == ("mvp", "award")
    fell = torch.full((5,), 2.0)
    assert verdict(claim, fell, 1, 3, response("MVP", " award", " in", " 2018").words).name == "lost"
    assert verdict(claim, fell, 1, 3, response("in", " 2014-15").words).name == "other words"


def of(log_p: list[dict[int, float]], d_vocab: int = 4) -> torch.Tensor:
    rows = torch.full((len(log_p), d_vocab), 0.0, dtype=torch.float64)
    for row, given in zip(rows, log_p, strict=True):
        for token, p in given.items():
            row[token] = math.log(p)
        rest = [i for i in range(d_vocab) if i not in given]
        row[rest] = math.log((1 - sum(given.values())) / len(rest))
    return rows


def test_the_firm_difference_is_the_first_that_moves_by_ln_4():
    tokens = torch.tensor([0, 1, 2])
    whole = of([{0: 0.5, 3: 0.4}, {1: 0.6, 3: 0.3}, {2: 0.9, 3: 0.05}])
    near = of([{0: 0.4, 3: 0.5}, {1: 0.6, 3: 0.3}, {2: 0.1, 3: 0.8}])
    found = walk(whole, torch.stack([whole, near]), tokens)
    assert found.differs.tolist() == [0, 2] and found.firm.tolist() == [3, 2]
    assert found.falls[1, 2] == pytest.approx(math.log(9)) and not found.falls[0].any()
    odds = (0.5 / 0.4) / (0.4 / 0.5)
    assert odds < 4  # why the first difference is no firm one


def test_verdicts_on_a_claim():
    old = response("held", " in", " New", " York")
    claim = claims_of(old, [0.0, 0.0, 5.0, 5.0], frozenset())[0]
    fell, stayed = torch.tensor([0.0, 0.0, 1.0, 2.0]), torch.zeros(4)
    words = {
        text: response(*text).words for text in (("in", " new", " york"), ("in", " New", " Jersey"), ("in", " York"), ("x",))
    }
    assert verdict(claim, stayed, 0, None, None).name == "same words"
    assert verdict(claim, stayed, 1, None, None).name == "same but for near ties"
    assert verdict(claim, fell, 1, 2, words["in", " new", " york"]).name == "other words"
    partly = verdict(claim, fell, 1, 2, words["in", " New", " Jersey"])
    assert partly.name == "partly" and partly.kept == ("new",) and partly.fall == 3.0 > FIRM
    assert verdict(claim, fell, 1, 2, words["in", " York"]).name == "lost"  # a last word alone is not the claim
    assert verdict(claim, fell, 1, 2, words["x",]).name == "lost"
    assert verdict(claim, stayed, 1, 2, words["x",]).name == "lost"  # its own first token is firmly another
    assert verdict(claim, stayed, 1, 0, words["x",]).name == "not reached"  # the text goes another way before it
    assert verdict(claim, stayed, 1, 0, None).name == "not lost" and verdict(claim, fell, 1, 2, None).name == "unknown"


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
