"""Explanations of the models that know stories, and their statements run again by plain forward passes.

Where a prompt is read: exchanges by another way, and shares over cases by hand.
"""

import contextlib
import dataclasses
import json
import math
from html import unescape
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from chat_templates import chat_model
from kvlens.analyses.bias.exchange import Exchange, HeadExchange, in_one_space, shifts
from precision import LAW, relative_error
from small_models import SOFTMAX, model_of, row_of
from tiny_text_model import tiny_text_model

import kvlens
from kvlens import KVLensError, convert_prompt, counterfactuals, logits_after
from kvlens.analyses import reading_layers
from kvlens.cli.printed import print_explanation
from kvlens.explanation import explanation_view, heading, paragraphs, runs, steps
from kvlens.explanation.claims import Claim
from kvlens.explanation.exchanges import _LayerRanges
from kvlens.explanation.presentation import outcome, switched_in_words
from kvlens.explanation.reading import reading_shares, reading_stability, wilson
from kvlens.explanation.runs import Runs
from kvlens.explanation.steps import Steps
from kvlens.explanation.view import _says
from kvlens.texts import Response

STORY = "Mira keeps a goat. Pavel has a parrot. At night Kaya feeds a donkey."
TWICE = "Kaya feeds a donkey. Pavel has a parrot. At night Kaya feeds a donkey."
QUESTION = " Which animal does Kaya keep? Kaya keeps a"


@pytest.fixture(scope="module", params=["facts-gpt2", "facts-linear", "facts-hybrid"])
def model(request):
    return kvlens.load(request.param)


one_model = pytest.mark.parametrize("model", ["facts-gpt2"], indirect=True)


@pytest.fixture(scope="module")
def found(model):
    return kvlens.explain(model, STORY, QUESTION, depth="heads")


def log_p(model, found, tokens, kept):
    """Of the response's tokens behind a prompt of which some tokens are gone, in one pass."""
    before = torch.cat([tokens, found.response_tokens[:-1]])[None]
    mask = torch.cat([kept, torch.ones(len(found.response_tokens) - 1, dtype=torch.bool)])[None]
    n = len(found.response_tokens)
    with torch.no_grad():
        logits = model.logits_on(before[:, -n:], n, before=before[:, :-n], kept=mask[:, :-n])[0]
    return logits.double().log_softmax(dim=-1).gather(-1, found.response_tokens[:, None])[:, 0]


def test_the_stating_sentence_is_the_cause(found):
    assert found.claim == "donkey" and found.cause == (2,) and found.response.startswith("donkey")
    assert found.units["verdict"].tolist()[2] == "lost" and found.units["is_cause"].tolist() == [False, False, True]
    assert found.rows("units", "only")["verdict"].isin(["same words", "same but for near ties", "other words"]).all()
    assert "falls without" not in str(found) and "'donkey' is lost" in str(found)


@pytest.mark.one_in(3)
def test_what_is_said_without_a_unit_is_what_the_model_generates(model, found):
    asked = model.to_tokens(QUESTION, prepend_bos=False)
    for row in found.units.itertuples():
        with model.kv_bias(kvlens.convert_prompt(model, STORY, without=[(row.start, row.stop)])):
            said = model.generate(asked, max_new_tokens=8, do_sample=False, verbose=False, return_type="tokens")[0]
        assert model.tokenizer.decode(said[asked.shape[1] :]).strip().startswith(row.says)
    assert len(set(found.units["says"])) == 2 and found.units["says"][0] == found.response


def test_statements_on_units_are_passes_without_them(model, found):
    tokens = torch.cat([model.to_tokens(STORY)[0], model.to_tokens(QUESTION, prepend_bos=False)[0]])
    everything = torch.ones(len(tokens), dtype=torch.bool)
    whole = log_p(model, found, tokens, everything)
    for row in found.rows("units", "each", "none").query("gap == 'kept'").itertuples():
        kept = everything.clone()
        for unit in map(int, row.parts.split("+")):
            kept[found.units["start"][unit] : found.units["stop"][unit]] = False
        claim = found.claims.iloc[row.claim]
        fall = (whole - log_p(model, found, tokens, kept))[claim.start : claim.stop].sum()
        assert float(fall) == pytest.approx(row.nats, abs=1e-3)
        assert row.p_after == pytest.approx(row.p_before * math.exp(-row.nats), rel=1e-6)


@pytest.mark.one_in(3)
def test_gaps_that_are_not_read_change_nothing_that_is_found(model, found, monkeypatch):
    """Larger models skip what is gone from a prompt; the prompt that layers are exchanged with needs its keys all the same."""
    monkeypatch.setattr("kvlens.conversion.recomputed._worth", lambda model, device: 1)
    again = kvlens.explain(model, STORY, QUESTION, depth="heads")
    numbers = ["nats", "p_before", "p_after"]
    pd.testing.assert_frame_equal(again.statements.drop(columns=numbers), found.statements.drop(columns=numbers))
    np.testing.assert_allclose(again.statements[numbers], found.statements[numbers], atol=1e-3)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SOFTMAX)
def test_a_beginning_of_a_prompt_leaves_the_whole_ones_keys_without_the_last(name):
    """In all models but those with a shift, whose last rows are others; these read the beginning."""
    model, prompt = model_of("softmax", name), torch.arange(12) % 7
    whole, beginning = convert_prompt(model, prompt), convert_prompt(model, prompt[:8]).tensors()
    cut = runs.without_last(whole, 4).tensors()
    assert {key: x.shape for key, x in cut.items()} == {key: x.shape for key, x in beginning.items()}
    error = max(relative_error(cut[key].double(), x.double()) for key, x in beginning.items() if x.numel())
    assert error > 0.1 if shifts(whole) else error < LAW


@one_model
def test_what_heads_is_what_the_question_asks_for(model):
    """By a pass for each claim right behind the question; not by what falls most."""
    question = QUESTION.replace("Kaya", "Pavel")
    found = kvlens.explain(model, STORY, question, answer=" parrot. Kaya keeps a donkey", depth="units")
    tokens = torch.cat([model.to_tokens(STORY)[0], model.to_tokens(question, prepend_bos=False)[0]])
    for row in found.claims.itertuples():
        claim = SimpleNamespace(response_tokens=found.response_tokens[row.start : row.stop])
        assert row.asked == pytest.approx(float(log_p(model, claim, tokens, torch.ones(len(tokens)).bool()).mean()), abs=1e-3)
    assert found.claim == "parrot" == found.claims["text"][found.claims["asked"].idxmax()]
    assert found.claims["text"][found.claims["nats"].idxmax()] == "donkey"
    assert kvlens.explain(model, STORY, QUESTION, depth="units").claims["asked"].isna().all()  # there is only one
    assert found.cost["step"].tolist() == ["answer", "units", "head", "sets"] and found.n_tokens == found.cost["tokens"].sum()


@one_model
def test_words_that_are_said_without_any_part_may_head_and_are_said_to_be(model, monkeypatch):
    """Not those that only follow from the words before them."""
    named = {}

    def scores(explaining, candidates):
        named["candidates"] = [claim.text for claim in candidates]
        return [9.0 * (claim.text in ("Mira", "Kaya")) for claim in candidates]

    monkeypatch.setattr(heading, "asked_for", scores)
    monkeypatch.setattr(steps.Steps, "_question_words", lambda explaining: ())
    found = kvlens.explain(model, STORY, QUESTION, answer=" donkey. Mira. Kaya", depth="units")
    assert found.without.startswith("Kaya") and named["candidates"] == ["donkey", "Kaya"]
    assert found.claim == "Kaya" and found.claims["text"].tolist() == ["donkey", "Kaya"] and found.cause == ()
    assert found.rows("units", "none")["verdict"].tolist() == ["other words"]
    assert "removed, the model says" in str(found) and "'Kaya' is still said" in str(found)
    assert found.words.loc[found.words["text"] == "Kaya", "account"].tolist() == ["memory"]
    monkeypatch.setattr(steps.Steps, "prompt_words", ())  # then a sentence's first capital is no sign of a name, but at its end
    answers = (" donkey. Mira. Kaya", " donkey. Mira. Kaya a")
    assert [kvlens.explain(model, STORY, QUESTION, answer=x, depth="units").claim for x in answers] == ["Kaya", "donkey"]


@pytest.mark.one_in(3)
def test_texts_are_generated_in_three_batches(model, found, monkeypatch):
    """The answer; what is said without units; what is said with layers exchanged. With the same statements as in more."""
    batches, greedy = [], runs.greedy

    def counted(model, biases, *args):
        batches.append(biases.batch_size)
        return greedy(model, biases, *args)

    monkeypatch.setattr(runs, "greedy", counted)
    again = kvlens.explain(model, STORY, QUESTION, depth="layers")
    alone = again.rows("layers", "breaking")["parts"].str.contains("+", regex=False)
    assert batches[0] == 1 and len(batches) == 3 + int(alone.any())
    first = len(batches)
    monkeypatch.setattr(runs.Runs, "_rows_at_once", lambda self: 1)  # room for two texts
    again = kvlens.explain(model, STORY, QUESTION, depth="layers")
    assert (
        len(batches) > 2 * first
        and max(batches[first:]) <= 2
        and again.statements["says"].fillna("").tolist()
        == (found.statements.query("about not in ('heads', 'groups')")["says"].fillna("").tolist())
    )


@pytest.mark.parametrize("name", ["docs-gpt2", "induction-plain-2l"])
def test_guessed_texts_are_those_of_one_token_a_pass(name, monkeypatch):
    """In rows that begin with as many given tokens as they like, and end where they like; in fewer passes."""
    model = kvlens.load(name, dtype="float64")
    once = torch.randint(5, model.cfg.d_vocab, (4, 12), generator=torch.Generator().manual_seed(0))
    biases = kvlens.KVBias.batch([convert_prompt(model, torch.cat([row, row[:n]])) for n, row in enumerate(once, start=1)])
    first = once[range(4), range(1, 5), None]
    forced, n_forced = once[:, 5:], torch.tensor([0, 6, 2, 1])
    texts, passes = [], []
    for ahead in (True, False):
        monkeypatch.setattr(runs, "asks_for_positions_alone", lambda model, ahead=ahead: ahead)
        read: list[int] = []
        stops = lambda text: len(text) % 11 == 10 and text[-1] % 2 == 0  # noqa: E731
        texts.append(runs.greedy(model, biases, first, forced, n_forced, 30, stops, read.append, once.tolist()))
        passes.append(len(read))
    assert texts[0] == texts[1] and len({*map(len, texts[0])}) > 1
    assert passes[0] < 0.7 * passes[1]


def test_texts_of_several_questions_under_one_bias_are_those_of_its_copies():
    """Read in one batch, of which rows are left out as they end."""
    model = kvlens.load("docs-gpt2", dtype="float64")
    bias = convert_prompt(model, torch.arange(5, 30))
    forced, n_forced = torch.arange(40, 64).view(4, 6), torch.tensor([6, 0, 2, 1])
    stops = lambda text: len(text) > 7 and text[-1] % 3 == 0  # noqa: E731
    one, copies = (
        runs.greedy(model, biases, torch.tensor([3]), forced, n_forced, 30, stops) for biases in (bias, bias.repeat(4))
    )
    assert one == copies and len({*map(len, one)}) > 1


@one_model
def test_what_is_removed_is_not_read(model):
    """370 tokens where it is hidden instead, and where only what is gone from all rows of a pass is left out."""
    more = " Pavel keeps a goat. Mira has a parrot. Pavel feeds a parrot. Mira feeds a goat. Pavel has a goat."
    found = kvlens.explain(model, STORY + more, QUESTION, depth="units")
    assert found.cause == (2,) and found.n_tokens <= 250


@one_model
def test_sets_of_units_are_removed_with_single_ones(model, monkeypatch):
    """Where no unit alone may lose a claim, texts without sets are generated with the others; the order takes no prompts."""
    batches, greedy, tokens = [], runs.greedy, []
    monkeypatch.setattr(runs, "greedy", lambda *args: batches.append(args[1].batch_size) or greedy(*args))
    counted = runs.Runs.count
    monkeypatch.setattr(runs.Runs, "count", lambda self, n: tokens.append((self._step, n)) or counted(self, n))
    found = kvlens.explain(model, TWICE, QUESTION, depth="units")
    assert found.cause == (0, 2) and len(batches) == 2  # the answer, and everything else
    n, n_response = len(found.tokens), len(found.response_tokens)
    assert sum(n for step, n in tokens if step == "sets") <= 2 * n + n + 6 * n_response + 4 * runs.MOST_MORE_TOKENS


def test_all_layers_exchanged_are_the_prompt_without_the_cause(model, found):
    """The law of the exchange, at both of its ends."""
    tokens = torch.cat([model.to_tokens(STORY)[0], model.to_tokens(QUESTION, prepend_bos=False)[0]])
    own = convert_prompt(model, tokens[:-1])
    start, stop = found.units["start"][2], found.units["stop"][2]
    other = convert_prompt(model, tokens[:-1], without=[(int(start), int(stop))])
    sets = torch.tensor([[True] * model.cfg.n_layers, [False] * model.cfg.n_layers])
    text = torch.cat([tokens[-1:], found.response_tokens[:-1]])
    read = []
    for bias in (own.exchange_layers(other, sets), other.repeat(1), own.repeat(1)):
        with torch.no_grad(), model.kv_bias(bias):
            read.append(model.logits_on(text.expand(bias.batch_size, -1), len(text)))
    mixed, without, whole = read
    assert (mixed[:1] - without).norm() < 1e-5 * without.norm() and (mixed[1:] - whole).norm() < 1e-5 * whole.norm()


def test_every_sentence_names_rows_that_say_what_it_says(found):
    for paragraph in paragraphs(found):
        for sentence in paragraph:
            rows = found.statements.loc[list(sentence.rows)]
            assert len(rows)
            for verdict in ("lost", "still said"):
                if f"'donkey' is {verdict}" in sentence.text:
                    assert (rows["verdict"].isin(["lost"]) == (verdict == "lost")).any()


# --- further runs of the same explanation ----------------------------------------------------------------------------


@pytest.fixture
def explaining(model):
    made = Steps.reading(model, STORY, QUESTION)
    made.explained()
    return made


@pytest.mark.one_in(3)
@pytest.mark.parametrize("units", [[0, 2], [0, 1, 2]], ids=str)
def test_what_is_said_without_units_that_are_switched_off(model, explaining, units):
    """Statements of the same runs; with their gap closed the model answers as it does to the shortened prompt."""
    found = explaining.without(units)
    rows = found.rows("units", "switched")
    assert rows["parts"].tolist() == ["+".join(map(str, units))] * 2 and rows["gap"].tolist() == ["kept", "closed"]
    prompt, text = model.to_tokens(STORY)[0], model.to_tokens(QUESTION, prepend_bos=False)[0]
    tokens, kept = torch.cat([prompt, text]), torch.ones(len(prompt) + len(text), dtype=torch.bool)
    for unit in units:
        kept[found.units["start"][unit] : found.units["stop"][unit]] = False
    falls = log_p(model, found, tokens, torch.ones_like(kept)) - log_p(model, found, tokens, kept)
    claim = found.claims.iloc[found.about]
    assert float(falls[claim.start : claim.stop].sum()) == pytest.approx(rows["nats"].iloc[0], abs=1e-3)
    (shorter,) = runs.responses(model, [tokens[kept]], steps.MOST_TOKENS, runs.ENDS)
    assert rows["says"].iloc[1] == model.tokenizer.decode(shorter).strip()
    assert len(explaining.without(reversed(units)).statements) == len(found.statements)  # it was asked before


@one_model
def test_each_sentence_on_what_is_switched_off_names_rows_that_say_so(explaining):
    for units in ([2], [0], [1, 2]):
        found = explaining.without(units)
        first, then, *claims = switched_in_words(found, units)
        (kept,), (closed,) = first.rows, then.rows
        said = [found.statements.loc[row] for row in (kept, closed)]
        assert [(row.role, row.gap) for row in said] == [("switched", "kept"), ("switched", "closed")]
        for sentence, row in zip((first, then), said, strict=True):
            words = "answers as before" if row.verdict.startswith("same") else row.says
            assert words in sentence.text or ("the same is said" in sentence.text and str(row.says) == str(said[0].says))
        assert len(claims) == len(found.claims) and all(found.statements.verdict[c.rows[0]] in c.text for c in claims)


@one_model
def test_another_claim_heads_it_with_its_own_layers(model):
    """As if it had been asked for from the start; the layers of the first stay."""
    answer = " donkey. Mira keeps a goat"
    explaining = Steps.reading(model, STORY, QUESTION, depth="layers")
    found = explaining.explained(answer=model.to_tokens(answer, prepend_bos=False)[0])
    assert found.claims["text"].tolist()[0] == "donkey" and len(found.claims) > 1
    for number in range(len(found.claims)):
        again = explaining.about(number)
        alone = kvlens.explain(model, STORY, QUESTION, answer=answer, about=found.claims["text"][number], depth="layers")
        assert again.about == alone.about == number and again.cause == alone.cause
        ours, theirs = (
            [(r.role, r.parts, r.verdict) for r in each.rows("layers", "each", "breaking", "keeping").itertuples()]
            for each in (again, alone)
        )
        assert ours == theirs
    assert len(explaining.about(0).statements) == len(again.statements)


class Stop(Exception):
    pass


@one_model
@pytest.mark.parametrize("n_told", [0, 3])
def test_a_run_that_is_stopped_leaves_everything_as_it_was(model, explaining, n_told):
    before, weights = explaining.found(), [parameter.clone() for parameter in model.parameters()]
    for run in (lambda: explaining.without([0, 2]), lambda: explaining.about(explaining.heading)):
        told = iter(range(n_told))

        def stop(what, done, told=told):
            if next(told, None) is None:
                raise Stop

        explaining.work.tell = stop
        with pytest.raises(Stop):
            run()
        assert model.attached_kv_bias is None and explaining.found().statements.equals(before.statements)
    explaining.work.tell = lambda what, done: None
    undisturbed = Steps.reading(model, STORY, QUESTION)
    undisturbed.explained()
    for one in (explaining, undisturbed):
        one.without([0, 2])
    pd.testing.assert_frame_equal(explaining.about(0).statements, undisturbed.about(0).statements)
    assert all(map(torch.equal, weights, model.parameters()))


@pytest.mark.one_in(3)
def test_beginnings_of_the_prompt_are_kept(model, explaining):
    explaining.without([1])
    first = explaining.found().cost.set_index("step")["tokens"]["switched"]
    explaining.without([1, 2])
    second = explaining.found().cost.set_index("step")["tokens"]["switched"] - first
    alone = Steps.reading(model, STORY, QUESTION)
    alone.explained()
    alone.runs._prefixes.clear()
    alone.without([1, 2])
    start = int(explaining.found().units["start"][1])
    assert second == alone.found().cost.set_index("step")["tokens"]["switched"] - start > 0


@one_model
def test_units_and_claims_that_are_not_there_are_refused(explaining):
    for units in ([], [3], [-1, 0]):
        with pytest.raises(KVLensError, match="units: expected some of 0 to 2, got"):
            explaining.without(units)
    with pytest.raises(KVLensError, match="claim: expected one of 0 to 0, got 7"):
        explaining.about(7)


def searched(is_lost, n_layers=8, says=lambda layers: "x"):
    """A search by ranges of layers for what a claim rests on, where which sets lose it is known: the statements by role, and of
    which sets the text was asked for."""
    claim, rows, texts = Claim("x", 0, 1, ("x",), 1.0), [], {}

    def exchanged(exchange, sets, wants_text):
        """A claim that falls by more layers by more, with a text wherever one is wanted."""
        lost = [(is_lost(set(layers)), layers) for layers in map(list, sets)]
        outcomes = [runs.Outcome(torch.tensor([2.0 + len(x) if gone else 0.1]), 1, 0 if gone else None) for gone, x in lost]
        wanted = [wants_text(now) and now.firm is not None for now in outcomes]
        texts.update((tuple(layers), None) for is_wanted, (_, layers) in zip(wanted, lost, strict=True) if is_wanted)
        of_sets = zip(outcomes, wanted, lost, strict=True)
        return [dataclasses.replace(now, text=says(layers) if wanted else None) for now, wanted, (_, layers) in of_sets]

    def add(number, now, kind, role, parts, others, removed):
        rows.append((role, tuple(parts), others, now.text))

    explaining = SimpleNamespace(
        claims=[claim],
        runs=SimpleNamespace(exchanged=exchanged, texts_together=contextlib.nullcontext),
        fall=lambda claim, now: float(now.falls[0]),
        lost=lambda number, now: now.text == "x",
        said=lambda number, now: now.firm is None,
        add=add,
    )
    _LayerRanges(explaining, 0, "layers", Exchange(), {layer: [layer] for layer in range(n_layers)}, (0,)).find()
    return {
        role: [parts for name, parts, *_ in rows if name == role]
        for role in ("each", "together", "only", "breaking", "keeping")
    } | {"texts": [*texts]}


def test_layers_are_halved_where_the_claim_is_lost():
    found = searched(lambda layers: 5 in layers)
    assert found["together"] == [(0, 1, 2, 3), (4, 5, 6, 7), (4, 5), (6, 7)] and found["each"] == [(4,), (5,)]
    assert found["breaking"] == found["keeping"] == [(5,)]
    found = searched(lambda layers: {5, 6} <= layers)
    assert found["breaking"] == [(4, 5, 6, 7)] and found["together"] == [(0, 1, 2, 3), (4, 5, 6, 7), (4, 5), (6, 7)]
    assert found["only"] == found["keeping"] == [(4, 5, 6, 7)] and found["each"] == []
    found = searched(lambda layers: bool({1, 6} & layers))
    assert (
        found["breaking"] == [(1,), (6,)] and found["keeping"] == [(1, 6)] and len(found["together"]) + len(found["each"]) == 10
    )


def test_texts_are_generated_for_the_smallest_ranges_that_may_lose_the_claim():
    """And where these still say it, for all those that they are parts of."""
    assert searched(lambda layers: 5 in layers)["texts"] == [(5,)]
    assert searched(lambda layers: bool({1, 6} & layers))["texts"] == [(1,), (6,)]
    found = searched(lambda layers: 5 in layers, says=lambda layers: "y" if layers == [5] else "x")
    assert found["texts"] == [(5,), (4, 5), (4, 5, 6, 7)] and found["breaking"] == [(4, 5)]


def test_layers_of_both_halves_are_found_together():
    """Neither half loses the claim: what it does not take is given back, quarters first."""
    found = searched(lambda layers: {1, 6} <= layers)
    assert found["breaking"] == [(1, 6)] and found["together"][:3] == [(0, 1, 2, 3), (4, 5, 6, 7), (2, 3, 4, 5, 6, 7)]
    assert found["keeping"] == [(1, 6)]
    found = searched(lambda layers: len(layers) > 7)  # all of them
    assert found["breaking"] == found["keeping"] == [] and len(found["together"]) == 2 + 4 + 8


@pytest.mark.one_in(3)
def test_ranges_are_exchanged_as_single_layers_are(model):
    """On two layers the halves are the layers; the same runs give the same statements."""
    singles, ranges = (kvlens.explain(model, STORY, QUESTION, depth=depth) for depth in ("layers", "ranges"))
    columns = ["parts", "verdict", "nats"]
    each, by_range = (found.rows("layers", "each")[columns].reset_index(drop=True) for found in (singles, ranges))
    pd.testing.assert_frame_equal(each, by_range)
    assert set(ranges.rows("layers", "breaking")["parts"]) <= {"0", "1"} or not len(ranges.rows("layers", "breaking"))


def test_layers_and_heads_are_tried_one_by_one(model, found):
    assert found.n_layers == model.cfg.n_layers == len(found.rows("layers", "each"))
    heads = found.rows("heads", "each")
    lost = [row.parts for row in found.rows("layers", "breaking").itertuples()]
    assert {parts.split(".")[0] for parts in heads["parts"]} == {part for parts in lost for part in parts.split("+")}


@one_model
def test_a_fact_that_stands_twice_gives_the_pair(model):
    found = kvlens.explain(model, TWICE, QUESTION)
    assert found.cause == (0, 2) and "None of the parts loses it alone." in str(found)


@one_model
def test_what_does_not_depend_on_the_prompt_is_said_so(model):
    found = kvlens.explain(model, "Mira keeps a goat. Pavel has a parrot.", " Pavel has a parrot. Pavel has a")
    assert found.cause == () and found.n_layers == 0
    assert "No part" in str(found)
    if found.is_whole:  # the word at which it falls most need not be one that the answer is about
        falls = found.effects[found.effects["unit"] == found.units["effect"].idxmax()]
        assert f"most of all at {falls['text'][falls['effect'].idxmax()]!r}" in " ".join(str(found).split())


@one_model
def test_about_answer_and_budget(model):
    given = kvlens.explain(model, STORY, QUESTION, answer=" parrot", depth="units")
    assert given.response == "parrot" and not given.rows("layers", "each").size
    with pytest.raises(KVLensError, match=r"about: the response has no 'donkeys'; did you mean 'donkey'"):
        kvlens.explain(model, STORY, QUESTION, about="donkeys", depth="units")
    with pytest.raises(KVLensError, match="budget: removing each of the 3 units once reads up to"):
        kvlens.explain(model, STORY, QUESTION, budget=10)
    with pytest.raises(KVLensError, match="text: the prompt's last token belongs to a unit"):
        kvlens.explain(model, STORY)


@one_model
def test_an_answer_that_would_go_on_is_marked_as_cut_off(model, found, monkeypatch, capsys):
    """In the text, the page, the terminal, JSON and what is told at once; one that ends by itself, or was given, is not."""
    assert found.cut_after is None and "cut off" not in f"{found}{explanation_view(found).body}"
    monkeypatch.setattr("kvlens.explanation.steps.MOST_TOKENS", 1)
    told = []
    cut = kvlens.explain(model, STORY, QUESTION, depth="units", on_found=told.append)
    assert len(cut.response_tokens) == cut.cut_after == json.loads(cut.to_json())["cut_after"] == 1
    print_explanation(cut)
    for text, answer in ((str(cut), cut.marked), (told[0], cut.response), (capsys.readouterr().out, cut.marked)):
        assert f'The model answers: "{answer}" (cut off after 1 tokens)' in text
    assert "<figcaption>The model answers (cut off after 1 tokens)</figcaption>" in explanation_view(cut).body
    assert kvlens.explain(model, STORY, QUESTION, answer=" parrot", depth="units").cut_after is None


@one_model
def test_what_is_always_there_is_said(model, found, capsys):
    """In the text, the page, the terminal and JSON; parts that are given leave the rest of the prompt."""
    line = f'Never removed: the text ("{QUESTION.strip()}") and the begin-of-text token (BOS).'
    print_explanation(found)
    terminal = " ".join(capsys.readouterr().out.split())
    assert f"\n\n{line}\n\n" in str(found) and line in terminal and line in unescape(explanation_view(found).body)
    assert json.loads(found.to_json())["always_there"] == list(found.always_there)
    given = kvlens.explain(model, STORY, QUESTION, by=["goat", "donkey"], depth="units")
    assert "Never removed: the rest of the prompt and the text (" in str(given)


def test_what_is_always_there_in_a_chat():
    model, asked = chat_model(), kvlens.Chat.ask("Return the widget?", {"a.txt": PROMPT})
    names = kvlens.explain(model, asked, depth="units").always_there
    assert names == ('the question ("Return the widget?")', "the document's name", "what the chat template writes")
    messages = [{"role": "system", "content": PROMPT}, {"role": "user", "content": f"Is {'the widget ' * 20}purple?"}]
    question, begun, template = kvlens.explain(model, messages, " green", depth="units").always_there
    assert question.startswith('the question ("Is the widget') and question.endswith('…")') and len(question) < 120
    assert begun == 'the beginning of the answer ("green")' and template == names[-1]


@one_model
def test_numbers_stand_whole_beside_the_longest_verdict(found, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    units = found.units.assign(unit_text="word " * 20, verdict="same but for near ties", effect=[-10.5, 0.0, 3.0])
    print_explanation(dataclasses.replace(found, units=units))
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("sentence ")]
    assert [line.split("…")[1].split(maxsplit=1)[0] for line in rows] == ["-10.50", "0.00", "3.00"]
    assert all(line.rstrip().endswith("same but for near ties") for line in rows)


def without_a_cause(verdicts):
    """An explanation whose units are said to have these verdicts, with the gap kept and closed, and no cause."""
    found = kvlens.explain(kvlens.load("facts-gpt2"), STORY, QUESTION, depth="units")
    row = found.rows("units", "each").iloc[0]
    rows = [
        {**row, "parts": parts, "role": role, "gap": gap, "verdict": verdict, "nats": 1.0}
        for parts, role, gap, verdict in verdicts
    ]
    statements = pd.concat([found.statements.query("role == 'none'"), pd.DataFrame(rows)], ignore_index=True)
    return dataclasses.replace(found, statements=statements, cause=())


EACH = [(str(unit), "each", "kept", "same words") for unit in range(3)]
ONE_WAY = [("0", "each", "kept", "lost"), ("0", "each", "closed", "same words"), *EACH[1:]]
TOGETHER = [
    *EACH,
    ("0+1", "together", "kept", "lost"),
    ("0+1", "each", "closed", "same words"),
    ("0+2", "together", "kept", "same words"),
]


@pytest.mark.parametrize(
    "verdicts", [EACH, ONE_WAY, TOGETHER], ids=["nothing is lost", "one part, one way", "two parts, one way"]
)
def test_no_sentence_denies_a_run_that_lost_the_claim(verdicts):
    """That no part loses it is said only where no run did; otherwise that none did both ways, and then which did."""
    found = without_a_cause(verdicts)
    first, *rest = [sentence for paragraph in paragraphs(found)[1:] for sentence in paragraph]
    is_lost = found.statements.loc[list(first.rows), "verdict"].eq("lost").any()
    assert first.text.startswith("No part") and is_lost == (verdicts is not EACH)
    assert (
        ("both with the gap left and with it closed" in first.text) == is_lost == ("only while the gap is left" in rest[0].text)
    )
    assert "set of up to five" in first.text or verdicts is not TOGETHER
    if is_lost:
        units = [int(part) for part in ("0+1" if verdicts is TOGETHER else "0").split("+")]
        assert rest[0].text.startswith(f"Without {' and '.join(found.units['name'][unit] for unit in units[:1])} (")
        assert found.statements.loc[list(rest[0].rows), "verdict"].tolist() == ["lost", "same words"]


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (0.894, 2.79e-4, "89.4 % to 0.0279 %"),
        (0.9999, 2e-5, "> 99.9 % to 0.002 %"),
        (0.975, 6.6e-7, "it falls by 14.2 nats"),
        (1e-12, 1e-30, "it falls by 41.4 nats"),
        (1e-12, 2e-12, "it rises by 0.7 nats; another word becomes likelier"),
        (0.9997, 0.9996, "it falls by 0.0 nats; another word becomes likelier"),
        (0.232, 0.237, "23.2 % to 23.7 %; another word becomes likelier"),
    ],
)
def test_what_becomes_of_a_probability_is_said_so_that_it_can_be_read(before, after, words):
    row = SimpleNamespace(
        p_before=before, p_after=after, nats=math.log(before / after), says="x", verdict="lost", kept_words=""
    )
    assert outcome("'a'", row) == f"the model says \"x\": 'a' is lost ({words})"
    assert _says("sentence 1", "'a'", row, False).endswith(f"'a': lost, {words}.")


@pytest.mark.one_in(3)
def test_a_page_and_json_hold_everything(found):
    data = json.loads(found.to_json())
    assert data["cause"] == [2] and len(data["statements"]) == len(found.statements)
    html = explanation_view(found).to_html()
    assert "donkey" in html and 'data-claim="0"' in html and "layer 0" in html
    assert "<html" in found._repr_html_() or "srcdoc" in found._repr_html_()


PROMPT = "The widget is purple.\nThe gadget is green."
TEXT, ANSWER, FACT = " Return the", " widget", "The widget is purple."


ROWS = {"softmax, rotary, grouped": {}, "gqa": dict(kv_shift=None), "softmax, shifted": {}, "rope after": {}}


@pytest.fixture(params=ROWS)
def tiny_model(request):
    return tiny_text_model(row_of(request.param), dtype=torch.float64, **ROWS[request.param])


def both_prompts(tiny_model):
    tokens = tiny_model.to_tokens(PROMPT)[0]
    gone = torch.zeros(len(tokens) - 1, dtype=torch.bool)
    (unit,) = kvlens.chat.prompt_units(tiny_model, tokens, [FACT])
    gone[unit.start : unit.stop] = True
    return tokens, counterfactuals(tiny_model, tokens[:-1], gone[None])


def answer_log_p(tiny_model, tokens, read):
    """log p of the answer, behind the prompt's last token and the text; ``read(text, n)`` gives logits."""
    text, answer = (tiny_model.to_tokens(x, prepend_bos=False)[0] for x in (TEXT, ANSWER))
    logits = read(torch.cat([tokens[-1:], text, answer[:-1]]), len(answer))
    return logits.log_softmax(dim=-1).gather(-1, answer.expand(len(logits), -1)[..., None]).sum(dim=(1, 2))


def under(tiny_model, biases):
    def read(text, n):
        with tiny_model.kv_bias(biases):
            return tiny_model.logits_on(text.expand(biases.batch_size, -1), n)

    return read


@pytest.mark.parametrize("gap", ["kept", "closed"])
def test_what_stands_in_front_of_a_gap_is_not_read_again_where_the_whole_prompt_has_its_keys(tiny_model, gap):
    tokens = tiny_model.to_tokens(PROMPT)[0]
    prompt, response = tokens[:-1], tiny_model.to_tokens(ANSWER + ANSWER, prepend_bos=False)[0]
    (unit,) = kvlens.chat.prompt_units(tiny_model, tokens, ["gadget is"])
    own = torch.zeros(1, len(prompt), dtype=torch.bool)
    own[:, unit.start : unit.stop] = True
    made = Runs(tiny_model, prompt, tokens[-1:], torch.zeros_like(own[0]))
    of_whole = made.begin(Response.of(tiny_model, tokens, response), own)
    n_before = made.n_tokens
    (now,) = made.without([[0]], gap, wants_text=lambda now: False)
    n_read = made.n_tokens - n_before - len(response)
    gone, text = counterfactuals(tiny_model, prompt, own, positions=gap), torch.cat([tokens[-1:], response[:-1]])
    logits = logits_after(tiny_model, gone, text, len(response))[0]
    assert relative_error(of_whole - now.falls, logits.log_softmax(dim=-1).gather(-1, response[:, None])[:, 0]) < LAW
    assert now.falls.abs().max() > 0.1
    is_plain = tiny_model.cfg.attention == "softmax" and tiny_model.cfg.kv_shift is None
    assert is_plain == (n_read == len(prompt) - unit.stop)


@pytest.fixture
def table(tiny_model):
    return reading_layers(tiny_model, PROMPT, TEXT, answer=ANSWER, without=[FACT])


def test_all_layers_exchanged_are_the_prompt_without_the_fact(tiny_model, table):
    tokens, other = both_prompts(tiny_model)
    whole = counterfactuals(tiny_model, tokens[:-1], [[]])
    own, gone = (answer_log_p(tiny_model, tokens, lambda t, n, p=p: logits_after(tiny_model, p, t, n)) for p in (whole, other))
    assert abs(float(own - gone)) > 1e-3
    assert abs(table["fall"][0] - float(own - gone)) < LAW * abs(float(own))


def test_heads_are_mixtures_of_two_biases_and_a_layers_heads_together_are_the_layer(tiny_model, table):
    tokens, other = both_prompts(tiny_model)
    own, donor = convert_prompt(tiny_model, tokens[:-1]), convert_prompt(tiny_model, other).select_prompt(0)
    exchange = HeadExchange(*in_one_space(own, donor))
    n_heads = tiny_model.cfg.n_heads
    kv = tiny_model.cfg.n_key_value_heads or n_heads

    def falls(sets):
        """Of sets of (layer, heads): all parts of these heads, shift states with the first head of their group."""
        chosen = torch.tensor(
            [
                [
                    part.layer == layer and (part.head in heads if part.kind == "head" else part.head * n_heads // kv in heads)
                    for part in exchange.parts
                ]
                for layer, heads in [(-1, []), *sets]
            ]
        )
        found = answer_log_p(tiny_model, tokens, under(tiny_model, exchange.biases(chosen)))
        return found[0] - found[1:]

    by_part = dict(iter(table.groupby("part")))
    layers = falls([(layer, range(n_heads)) for layer in range(2)])
    assert relative_error(torch.tensor(by_part["layer"]["fall"].to_numpy()), layers) < LAW
    heads = falls([(layer, [head]) for layer in range(2) for head in range(n_heads)])
    assert relative_error(torch.tensor(by_part["head"]["fall"].to_numpy()), heads) < LAW
    assert ("group" in by_part) == (kv < n_heads)
    if kv < n_heads:
        n = n_heads // kv
        groups = falls([(layer, range(n * i, n * i + n)) for layer in range(2) for i in range(kv)])
        assert relative_error(torch.tensor(by_part["group"]["fall"].to_numpy()), groups) < LAW


def test_a_model_that_reads_in_one_layer():
    """`facts-gpt2` was made to look up what a sentence states; nothing else in the prompt matters."""
    tiny_model = kvlens.load("facts-gpt2")
    prompt = "Mira keeps a goat. Pavel has a parrot. At night Kaya feeds a donkey. Olga has a hen."
    question = " Which animal does Kaya keep? Kaya keeps a"
    found = reading_layers(tiny_model, prompt, question, answer=" donkey", without=["At night Kaya feeds a donkey."])
    null = reading_layers(tiny_model, prompt, question, answer=" donkey", without="Mira keeps a goat.", heads=False)
    assert found["lost"][0] and not null["lost"].any() and set(null["part"]) == {"all", "layer"}
    assert found.query("part == 'layer' and lost")["layer"].tolist() == [0]


def test_an_answer_at_once_and_a_last_token_that_is_read_with_the_text():
    tiny_model = tiny_text_model()
    tokens = tiny_model.to_tokens(PROMPT)[0]
    at_once = reading_layers(tiny_model, tokens, answer=ANSWER, without=[FACT])
    apart = reading_layers(tiny_model, tokens[:-1], tokens[-1:], answer=ANSWER, without=[FACT])
    pd.testing.assert_frame_equal(at_once[at_once["part"] == "all"], apart[apart["part"] == "all"], rtol=1e-4)
    with pytest.raises(KVLensError, match="last token is read with the text"):
        reading_layers(tiny_model, tokens, answer=ANSWER, without=[(3, len(tokens))])
    for gone in ("A fact that is not there.", [(0, 99)], [PROMPT[:9], PROMPT[4:12]]):
        with pytest.raises(KVLensError, match=r"^without: "):
            reading_layers(tiny_model, PROMPT, TEXT, answer=ANSWER, without=gone)


def made_up(falls, losses):
    """A table of some cases, of all layers and two of them."""
    rows = [
        (str(i), part, layer, -1, float(each), is_lost)
        for i, (fall, lost) in enumerate(zip(falls, losses, strict=True))
        for part, layer, each, is_lost in zip(["all", "layer", "layer"], [-1, 0, 1], fall, lost, strict=True)
    ]
    return pd.DataFrame(rows, columns=["prompt_id", "part", "layer", "head", "fall", "lost"])


def test_shares_are_of_the_cases_that_are_lost_at_all():
    table = made_up([[3, 1, 2], [5, 1, 4], [0.1, 9, 9]], [[True, False, True], [True, False, False], [False, True, True]])
    shares = reading_shares(table).set_index("layer")
    assert (shares["cases"] == 2).all() and shares["lost"].tolist() == [1, 0, 0.5]
    assert shares["fall"].tolist() == [4, 1, 3] and shares.loc[0, ["fall_low", "fall_high"]].tolist() == [1, 1]
    assert shares.loc[1, ["fall_low", "fall_high"]].tolist() == [2, 4]
    z, low, high = 1.96, *wilson(np.array([0.5]), 2)
    for edge in (low[0], high[0]):  # where the share's distance from 0.5 is z standard errors at the edge
        assert math.isclose(abs(0.5 - edge), z * math.sqrt(edge * (1 - edge) / 2), rel_tol=1e-12)
    assert reading_stability(table, "layer") == pytest.approx(1)
    opposite = made_up([[3, 1, 2], [3, 2, 1]], [[True] * 3] * 2)
    assert reading_stability(opposite, "layer") == pytest.approx(-1)


def test_what_cannot_be_summed_up_is_refused():
    table = made_up([[3, 1, 2]], [[False, True, True]])
    with pytest.raises(KVLensError, match="lack the columns lost"):
        reading_shares(table.drop(columns="lost"))
    with pytest.raises(KVLensError, match="no case loses its answer"):
        reading_shares(table)
    with pytest.raises(KVLensError, match="at least two cases with rows of part 'head'"):
        reading_stability(made_up([[3, 1, 2]] * 3, [[True] * 3] * 3), "head")
