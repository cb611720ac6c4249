"""Words, claims and verdicts, by hand. Units that are removed together, and positions exchanged in groups."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from kvlens.analyses.attribution.terms import PositionExchange, Terms
from precision import LAW, float64, relative_error

import kvlens
from kvlens import KVLensError, convert_prompt, counterfactuals
from kvlens.explanation import by_unit, explanation_view, runs
from kvlens.explanation.by_unit import UnitSearch
from kvlens.explanation.claims import FIRM, claim_of, claims_of, content_words, normal, verdict, walk
from kvlens.explanation.exchanges import places_of, position_groups
from kvlens.explanation.from_memory import StatedFact, context_or_memory, origin_of
from kvlens.explanation.presentation import _no_cause, _some_units
from kvlens.explanation.runs import PASS, ExplanationProgress
from kvlens.explanation.view import _data
from kvlens.texts import WORD, Response, Word, _words
from kvlens.units import layout_of_tokens


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


def test_a_chinese_character_is_a_word_with_all_tokens_that_have_its_bytes():
    """As SmolLM2 reads them, in bytes, and as Qwen does, several in a token."""
    of_bytes = ["<0xE4><0xBC>", "会", "<0xE8>", "议", "在", "成<0xE9>", "都", "。"]
    assert [word[:3] for word in _words(of_bytes)] == [
        ("会", 0, 2), ("议", 2, 4), ("在", 4, 5), ("成都", 5, 7), ("。", 7, 8),
    ]  # fmt: skip
    assert [word[:3] for word in _words(["会议", "在", "成都"])] == [("会议", 0, 1), ("在", 1, 2), ("成都", 2, 3)]


def test_an_answer_of_white_space_alone_is_explained_by_its_signs():
    found = kvlens.explain(kvlens.load("docs-linear"), "Colours: red, green.", " x = 1\n")
    assert found.response == "⏎" and list(found.claims["text"]) == ["⏎"]
    assert set(found.statements["verdict"]) == {"same words"}


@pytest.mark.parametrize(
    ("tokens", "marked", "claims"),
    [
        (["The", " meeting", " was", " held", " in", " Rotterdam", "."], {"Rotterdam": 8.0}, ["Rotterdam"]),
        (["On", " July", " 4", ",", " 17", "76", "."], {"4": 5.0}, ["July 4, 1776"]),
        (["Paris", ",", " Rome", "."], {"Paris": 5.0, "Rome": 5.0}, ["Paris", "Rome"]),
        (["the", " Bank", " of", " England", " said"], {"England": 5.0}, ["Bank of England"]),
        (["red", " big", " apple"], {"red": 5.0, "apple": 5.0}, ["red big apple"]),
        (["red", " very", " big", " old", " apple"], {"red": 5.0, "apple": 5.0}, ["red", "apple"]),
        (["by", " Mr", ".", " Hansen", "."], {"Hansen": 5.0}, ["Mr. Hansen"]),
        (["by", " C", ".", " S", ".", " Lewis"], {"C": 5.0, "Lewis": 5.0}, ["C. S. Lewis"]),
        (["room", " 7", ".", " Anna"], {"7": 5.0, "Anna": 5.0}, ["7", "Anna"]),
        (["vitamin", " C", ".", " It", " heals"], {"C": 5.0, "heals": 5.0}, ["C", "heals"]),
        (["It", " is", " in", " the", " house"], {"is": 5.0, "the": 5.0}, []),
        (["One", ".", " Two"], {"One": 5.0, "Two": 5.0}, ["One", "Two"]),
        (["falls", " little"], {"falls": 1.9}, []),
        (["Sure", ",", " Madrid"], {"Sure": 5.0, "Madrid": 5.0}, ["Madrid"]),
        (["Das", " Fest", " ist", " im", " Garten", "."], {"Das": 3.0, "ist": 5.0, "im": 5.0, "Garten": 5.0}, ["Garten"]),
        (["Er", " wohnt", " in", " der", " Villa", " und", " kocht"], {"der": 5.0, "und": 5.0, "kocht": 5.0}, ["kocht"]),
        (["The", " war", " was", " lost", " by", " the", " man"], {"war": 5.0, "man": 5.0}, ["war", "man"]),
        (["会", "议", "在", "成", "都", "举", "行", "。"], {"在": 5.0, "成": 5.0, "都": 5.0}, ["成都"]),
        (["会议", "将在", "成都", "举行"], {"将在": 5.0}, []),
        (["red", "\n", "Oak"], {"red": 5.0, "Oak": 5.0}, ["red", "Oak"]),
        (["1", ".", " Red", " Oak", "\n", "2", ".", " Elm", "\n", "3", "."], {"Oak": 5.0, "2": 5.0, "3": 5.0}, ["Red Oak"]),
        (["12", ".", " No", " more"], {"12": 5.0}, ["12"]),
    ],
)
def test_claims_are_the_words_that_fall(tokens, marked, claims):
    assert claimed(tokens, marked) == claims


def test_what_the_question_has_already_is_no_claim():
    assert claimed(["The", " office", " moves"], {"office": 5.0, "moves": 5.0}, frozenset({"office", "moves"})) == []


def test_chinese_words_of_a_claim_are_found_in_other_tokens():
    found = response("会", "议", "在", "成都", "举行")
    claim = claim_of(found, 3, 5, 9.0, frozenset({"举行"}))
    assert claim.words == ("成都",)
    for said, name in ((["在", "成", "都", "。"], "other words"), (["成", "了", "都"], "lost"), (["北京", "举行"], "lost")):
        assert verdict(claim, torch.full((5,), 9.0), 1, 3, response(*said).words).name == name


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
        (replace(LYON, sentence="The capital is Lyon."), "sentence: expected '{}'"),
        (replace(LYON, object="France"), "question: it has 'France' already"),
        (replace(LYON, other="lyon"), "other: expected another object"),
    ],
)
def test_refusals(model, fact, message):
    with pytest.raises(KVLensError, match=message):
        context_or_memory(model, [fact])
    with pytest.raises(KVLensError, match="at least one"):
        context_or_memory(model, [])


ONCE = "Mira keeps a goat. Pavel has a parrot. At night Kaya feeds a donkey. Olga has a hen."
TWICE = (
    "Kaya feeds a donkey. Pavel has a parrot. Mira keeps a goat. At night Kaya feeds a donkey. Olga has a hen. Pavel has a cat."
)


@pytest.fixture
def screened(monkeypatch):
    """Units are screened, however few there are, and two are removed together."""
    monkeypatch.setattr(by_unit, "MANY", 0)
    monkeypatch.setattr(by_unit, "FEWEST", 2)


def test_units_that_change_nothing_are_removed_together(model, screened):
    """The run that says so lacks all of them, and is the one that the page names."""
    found = kvlens.explain(model, ONCE, QUESTION, depth="units")
    assert found.cause == (2,) and found.units["alone"].tolist() == [False, False, True, True]
    assert found.units["group"].tolist() == ["0+1", "0+1", "", ""]
    assert found.units["effect"].isna().tolist() == [True, True, False, False]
    assert found.effects.query("unit < 2")["effect"].isna().all() and found.effects.query("unit > 1")["effect"].notna().all()
    (group,) = found.rows("units", "group").to_dict("records")
    assert group["parts"] == "0+1" and group["verdict"] in ("same words", "same but for near ties")
    assert set(found.rows("units", "each")["parts"]) == {"2", "3"}
    assert "Removed together: sentences 1 and 2. Without these, the model answers as before" in str(found)
    (of_the_claim,) = _data(found)["claims"]
    assert ["was not removed by itself" in row["says"] for row in of_the_claim] == [True, True, False, False]
    assert [bool(row["label"]) for row in of_the_claim] == [False, False, True, True]
    assert explanation_view(found).body.count("Those without a number were not removed by themselves") == 1


@pytest.mark.parametrize(
    ("removed", "said"),
    [
        ((("each", "0", 0.5), ("each", "1", 0.2)), "It falls most without a, by 0.5 nats: the model answers as before."),
        (
            (("group", "1+2", 0.9), ("each", "0", 0.5)),
            "Of the parts that were removed alone it falls most without a, by 0.5 nats:",
        ),
        ((("group", "0+1+2", 0.9),), ""),
    ],
)
def test_what_falls_most_is_said_of_what_was_compared(removed, said):
    """A part of a group may fall by more than one that was removed by itself."""
    rows = pd.DataFrame(removed, columns=["role", "parts", "nats"]).assign(verdict="same words", gap="kept")
    units = pd.DataFrame({"name": [*"abc"], "unit_text": [*"abc"], "verdict": "same words"})
    given = dict(units=units, named="'x'", is_whole=False, cause=())
    found = SimpleNamespace(rows=lambda about, *roles: rows[rows["role"].isin(roles)], **given)
    first, *more = (sentence.text for sentence in _no_cause(found))
    assert first == "No part loses 'x'." and " ".join(more).startswith(said) and bool(more) == bool(said)


def test_a_group_that_changes_something_is_divided(model, screened, monkeypatch):
    """The screen misses the unit that matters: halves of what it takes for nothing are removed, down to that unit."""
    monkeypatch.setattr(runs.Runs, "hidden", lambda self, sets: [self._walked(self.bias.repeat(1))[0] for _ in sets])
    found = kvlens.explain(model, ONCE, QUESTION, depth="units")
    assert found.cause == (2,) and found.units["alone"].tolist() == [False, False, True, True]
    assert found.units["group"].tolist() == ["0+1", "0+1", "", ""]


def test_a_fact_that_stands_twice_is_found_where_neither_sentence_changes_anything(model, screened):
    found = kvlens.explain(model, TWICE, QUESTION, depth="units")
    groups = found.rows("units", "group")
    assert groups["verdict"].isin(["same words", "same but for near ties"]).all() and (groups["nats"] < 0.3).all()
    assert found.cause == (0, 3) and "None of the parts loses it alone." in str(found)
    assert found.units["alone"][[0, 3]].all() and not found.units["alone"].all()


def test_a_budget_may_have_no_room_for_single_units(model, screened):
    n = len(model.to_tokens(ONCE)[0]) + len(model.to_tokens(QUESTION, prepend_bos=False)[0])
    found = kvlens.explain(model, ONCE, QUESTION, depth="units", budget=3 * n)
    left_out = ("the weakest parts one by one", "sets of units", "words without a source")
    assert found.left_out == left_out and not found.units["alone"].any()
    assert found.units["verdict"][2] == "unknown" and found.cause == ()
    assert "Not removed, as the budget had no room for it: sentences 3 and 4." in str(found)
    (of_the_claim,) = _data(found)["claims"]
    assert of_the_claim[2]["says"] == "sentence 3 was not removed: the budget had no room for it."


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([f"system, paragraph {i}" for i in range(1, 21)], "paragraphs 1 to 20 of system"),
        (["paragraph 1", "paragraph 2", "paragraph 4"], "paragraphs 1, 2 and 4"),
        (["a.txt, paragraph 3", "b.txt, paragraph 3"], "paragraph 3 of a.txt and paragraph 3 of b.txt"),
        (["document 1", "document 2", "document 3", "system"], "documents 1 to 3 and system"),
        ([f"{i}.txt" for i in range(20)], "0.txt, 1.txt, 2.txt, 3.txt, 4.txt, 5.txt and 14 others"),
    ],
)
def test_many_documents_and_paragraphs_are_named_together(names, said):
    assert _some_units(names) == said


def test_groups_of_positions():
    """One row per kind of position, in a prompt of two documents, a question and marks."""
    places = [None, *[("a.txt", 1)] * 4, None, *[("b.txt", 9)] * 2, None, *[("question", -1)] * 2, *[("behind", -1)] * 2]
    own = torch.tensor([i == 2 for i in range(len(places) - 1)])
    assert position_groups(own, places) == {
        "cause": [2], "document": [3, 4], "between": [5, 6, 7, 8], "question": [9, 10], "end": [11],
    }  # fmt: skip


def test_behind_a_raw_prompt_stands_the_question(model):
    layout = layout_of_tokens(model, model.to_tokens(ONCE)[0])
    places = places_of(layout, len(layout.tokens) + 3)
    assert places[-3:] == [("question", -1)] * 3 and set(places[1:-3]) == {("", 0)}


@pytest.mark.parametrize("name", ["facts-gpt2", "facts-linear"])
def test_all_positions_exchanged_are_the_prompt_without_the_cause(name):
    """And none is the whole prompt."""
    with float64(), torch.no_grad():
        model = kvlens.load(name, dtype=torch.float64)
        prompt, text = model.to_tokens(ONCE)[0], model.to_tokens(QUESTION, prepend_bos=False)[0]
        gone = torch.zeros(1, len(prompt), dtype=torch.bool)
        gone[0, 11:17] = True
        other = counterfactuals(model, prompt, gone)
        exchange = PositionExchange(Terms.of_prompt(model, prompt), other)
        every = torch.ones(len(exchange.parts), dtype=torch.bool)
        mixed = exchange.biases(torch.stack([every, ~every]))
        donor, own = convert_prompt(model, other).select_prompt(0), convert_prompt(model, prompt)
        read = []
        for bias in (mixed, donor.repeat(1), own.repeat(1)):
            with model.kv_bias(bias):
                read.append(model.logits_on(text.expand(bias.batch_size, -1), len(text)))
    assert relative_error(read[0][:1], read[1]) < LAW and relative_error(read[0][1:], read[2]) < LAW
    assert relative_error(read[1], read[2]) > 1e-3


def test_positions_have_statements_sentences_and_a_table(model):
    found = kvlens.explain(model, ONCE, QUESTION, depth="positions")
    each = found.rows("positions", "each")
    assert each["parts"].tolist() == ["cause", "document", "question"] and (each["removed"] == "2").all()
    assert found.positions["group"].drop_duplicates().tolist() == each["parts"].tolist()
    start = int(found.units["start"][2])
    assert found.positions["position"].tolist() == [*range(start, start + len(found.positions))]
    breaking = found.rows("positions", "breaking")
    assert (
        len(breaking)
        and "When the rest of its document or message is read from the prompt without that part" in str(found)
        and "positions" in found.to_json()
    )
    assert "<table" in explanation_view(found).to_html()


def test_progress_grows_from_step_to_step():
    told = []
    work = ExplanationProgress(lambda what, done: told.append((what, done)))
    work.begin("one", 100, 300)
    work.count(50 - PASS)
    work.count(500)
    work.begin("two", 300)
    work.count(150 - PASS)
    assert [what for what, _ in told] == ["one"] * 3 + ["two"] * 2
    assert [done for _, done in told] == pytest.approx([0.0, 0.12375, 0.2475, 0.2475, 0.61875])


def test_what_is_known_is_said_at_once(model):
    lines, told = [], []
    found = kvlens.explain(model, ONCE, QUESTION, on_found=lines.append, on_progress=lambda what, done: told.append(done))
    assert lines[0] == f'The model answers: "{found.response}"' and len(lines) == 2 + len(found.units)
    assert any(line.startswith("Without sentence 3, these words fall by so many nats: 'donkey' (") for line in lines)
    assert told == sorted(told) and told[-1] == 1.0 and len(told) > 10


def test_units_are_removed_together_from_those_that_cost_most_and_hold_the_claim_alone(monkeypatch):
    """Of four: the fact stands in the second and in the fourth, so that neither costs anything alone."""

    def fall(gone):
        return 2.0 * ({1, 3} <= gone) + 0.5 * (0 in gone)

    # what is said, or becomes of the response, is what was taken away
    took = lambda sets, **named: [frozenset(each) for each in sets]  # noqa: E731
    monkeypatch.setattr(UnitSearch, "fall", lambda self, number, gone: fall(gone))
    search = UnitSearch(SimpleNamespace(units=range(4), runs=SimpleNamespace(without=took, hidden=took)))
    assert search._order(0) == [1, 3, 0, 2]
    assert search._sets(0) == [(1, 3), (0, 1, 3), (0, 1, 2, 3)]
    monkeypatch.setattr(by_unit, "MOST_ORDERED", 3)  # of more units those that are strongest when units are hidden
    assert search._order(0) == [1, 3, 0]
