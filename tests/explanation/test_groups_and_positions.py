"""Documents before sentences, and positions exchanged in groups."""

import math
from types import SimpleNamespace

import pytest
import torch
from kvlens.analyses.attribution.terms import PositionExchange, Terms
from precision import LAW, float64, relative_error

import kvlens
from kvlens import convert_prompt, counterfactuals
from kvlens.explanation import explanation_view, steps
from kvlens.explanation.by_unit import UnitGroup, UnitSearch, groups_of
from kvlens.explanation.exchanges import places_of, position_groups
from kvlens.explanation.presentation import _data
from kvlens.explanation.runs import ExplanationProgress
from kvlens.units import Layout, Passage, cut, layout_of_tokens

QUESTION = " Which animal does Kaya keep? Kaya keeps a"
ONCE = "Mira keeps a goat. Pavel has a parrot. At night Kaya feeds a donkey. Olga has a hen."
TWICE = (
    "Kaya feeds a donkey. Pavel has a parrot. Mira keeps a goat. At night Kaya feeds a donkey. Olga has a hen. Pavel has a cat."
)


@pytest.fixture(scope="module")
def model():
    return kvlens.load("facts-gpt2")


@pytest.fixture
def in_pairs(monkeypatch):
    """Two sentences are a document, however few there are."""

    def pairs(model, layout, units):
        return [UnitGroup(f"document {i // 2}", frozenset(range(i, min(i + 2, len(units))))) for i in range(0, len(units), 2)]

    monkeypatch.setattr(steps, "groups_of", pairs)


def test_a_unit_is_removed_by_itself_only_where_its_document_matters(model, in_pairs):
    found = kvlens.explain(model, ONCE, QUESTION, depth="units")
    assert found.cause == (2,) and found.units["alone"].tolist() == [False, False, True, True]
    assert found.units["group"].tolist() == ["document 0"] * 2 + ["document 1"] * 2
    assert all(math.isnan(effect) for effect in found.units["effect"][:2])
    assert found.effects.query("unit < 2")["effect"].isna().all() and found.effects.query("unit > 1")["effect"].notna().all()
    groups = found.rows("units", "group")
    assert groups["parts"].tolist() == ["0+1", "2+3"] and groups["verdict"].tolist() == ["same words", "lost"]
    assert set(found.rows("units", "each")["parts"]) == {"2", "3"}
    assert "The 2 parts of document 0 were not removed one by one" in str(found)
    (of_the_claim,) = _data(found)["claims"]
    assert ["was not removed by itself" in row["says"] for row in of_the_claim] == [True, True, False, False]


def test_a_fact_that_stands_in_two_documents_gives_the_pair(model, in_pairs):
    """Neither document changes anything by itself."""
    found = kvlens.explain(model, TWICE, QUESTION, depth="units")
    groups = found.rows("units", "group")
    assert groups["verdict"].isin(["same words", "same but for near ties"]).all() and (groups["nats"] < 0.3).all()
    assert found.cause == (0, 3) and "None of the parts loses it alone." in str(found)
    assert found.units["alone"].tolist() == [True] * 4 + [False] * 2


def test_a_budget_may_have_no_room_for_the_units_of_a_document(model, in_pairs):
    n = len(model.to_tokens(ONCE)[0]) + len(model.to_tokens(QUESTION, prepend_bos=False)[0])
    found = kvlens.explain(model, ONCE, QUESTION, depth="units", budget=4 * n)
    assert found.left_out == ("units inside documents or paragraphs", "sets of units") and not found.units["alone"].any()
    assert found.units["verdict"].tolist() == ["same words"] * 2 + ["lost"] * 2 and found.cause == ()
    text = str(found)
    assert (
        "The 2 parts of document 0 were not removed one by one" in text and "Without all of document 1, the model says" in text
    )
    assert "No part that was removed by itself" not in text  # none was


def layout_of(model, text, pieces):
    layout = layout_of_tokens(model, model.to_tokens(text)[0])
    starts = [text.index(piece) for piece in pieces]
    named = [
        Passage(f"{i}.txt", start, start + len(piece)) for i, (start, piece) in enumerate(zip(starts, pieces, strict=True))
    ]
    return Layout(layout.text, layout.tokens, layout.spans, named, [])


def test_documents_come_first_only_where_that_takes_fewer_runs(model):
    sentences = [
        f"{name} has a {animal}." for name in ("Mira", "Pavel", "Kaya", "Olga") for animal in ("goat", "hen", "cat", "dog")
    ]
    pieces = [" ".join(sentences[i : i + 4]) for i in range(0, 16, 4)]
    layout = layout_of(model, " ".join(pieces), pieces)
    groups = groups_of(model, layout, cut(model, layout, "sentence"))
    assert [group.name for group in groups] == ["0.txt", "1.txt", "2.txt", "3.txt"]
    assert [sorted(group.members) for group in groups] == [[*range(i, i + 4)] for i in range(0, 16, 4)]
    few = layout_of(model, " ".join(pieces[:3]), pieces[:3])
    assert groups_of(model, few, cut(model, few, "sentence")) == []  # 12 units
    single = layout_of(model, " ".join(pieces), [" ".join(pieces)])
    assert groups_of(model, single, cut(model, single, "sentence")) == []  # one document


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
    work.count(30)
    work.count(500)
    work.begin("two", 300)
    work.count(130)
    assert [what for what, _ in told] == ["one"] * 3 + ["two"] * 2
    assert [done for _, done in told] == pytest.approx([0.0, 0.12375, 0.2475, 0.2475, 0.61875])


def test_what_is_known_is_said_at_once(model):
    lines, told = [], []
    found = kvlens.explain(model, ONCE, QUESTION, on_found=lines.append, on_progress=lambda what, done: told.append(done))
    assert lines[0] == f'The model answers: "{found.response}"' and len(lines) == 2 + len(found.units)
    assert any(line.startswith("Without sentence 3, these words fall by so many nats: 'donkey' (") for line in lines)
    assert told == sorted(told) and told[-1] == 1.0 and len(told) > 10


def test_units_are_removed_together_from_those_that_cost_most_and_hold_the_claim_alone():
    """Of four: the fact stands in the second and in the fourth, so that neither costs anything alone."""

    def fall(claim, gone):
        return 2.0 * ({1, 3} <= gone) + 0.5 * (0 in gone)

    runs = SimpleNamespace(without=lambda sets: [frozenset(each) for each in sets])  # what is said is what was taken away
    search = UnitSearch(SimpleNamespace(units=range(4), runs=runs, claims=[None], fall=fall), [])
    assert search._by_strength(0, search.first) == [1, 3, 0, 2]
