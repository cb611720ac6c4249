"""Heads over cases: retrieval scores from patterns by hand, exchanges against those of single cases, made-up lists."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from kvlens.analyses.heads.retrieval import agreement_of_halves, bootstrapped

from kvlens import HookedKVTransformer, KVLensError
from kvlens.analyses import reading_heads, reading_layers, retrieval_heads

DOCUMENT = "Mira keeps a goat. Kaya feeds a donkey. Olga has a hen."


def question(who):
    return f" Which animal does {who} keep? {who} keeps a"


CASES = [(DOCUMENT, question("Kaya"), " donkey"), (DOCUMENT, question("Olga"), " hen."), (DOCUMENT, question("Mira"), " goat")]


@pytest.fixture(scope="module")
def model():
    return HookedKVTransformer.from_zoo("facts-gpt2").double()


@torch.no_grad()
def by_hand(model, document, asked, answer, span):
    """[head]: the share of the copied tokens that get a head's strongest attention, and that by chance, token by token."""
    tokens, needle = torch.cat([document, asked, answer]).tolist(), document[slice(*span)].tolist()
    _, cache = model.run_with_cache(torch.tensor([tokens]))
    copied = [i for i, token in enumerate(answer.tolist()) if token in needle]
    scores, null = [], []
    for layer in range(model.cfg.n_layers):
        for head in range(model.cfg.n_heads):
            hits, chance = 0, 0.0
            for i in copied:
                place = int(cache["pattern", layer][0, head, len(document) + len(asked) + i - 1].argmax())
                hits += span[0] <= place < span[1] and tokens[place] == int(answer[i])
                chance += (place < len(document)) * needle.count(int(answer[i])) / len(document)
            scores.append(hits / len(copied))
            null.append(chance / len(copied))
    return scores, null


def test_retrieval_scores_by_hand():
    """Heads that were trained to find what followed a token's last occurrence; the last case says nothing that was there."""
    model, cases = HookedKVTransformer.from_zoo("induction-plain-2l").double(), []
    for seed in range(4):
        document = torch.randperm(60, generator=torch.Generator().manual_seed(seed))[:40]
        at = 5 + 7 * seed
        cases.append((document, document[at - 2 : at], torch.cat([document[at : at + 2], document[:1]]), [(at - 2, at + 2)]))
    cases.append((document, document[:3], document[3:4], [(8, 12)]))
    expected = np.array([by_hand(model, *case[:3], case[3][0]) for case in cases[:-1]])
    found = retrieval_heads(model, cases)
    np.testing.assert_allclose(found[["score", "null"]].T, expected.mean(axis=0), rtol=1e-12)
    assert found["score"].max() > 0.5 > 5 * found["null"].max() and (found["cases"] == 4).all()
    assert (found["score_low"] <= found["score"]).all() and (found["score"] <= found["score_high"]).all()


def test_the_needle_is_the_sentences_that_hold_the_answer(model):
    needles = (["Kaya feeds a donkey."], ["Olga has a hen."], ["Mira keeps a goat."])
    given = [(*case, needle) for case, needle in zip(CASES, needles, strict=True)]
    pd.testing.assert_frame_equal(retrieval_heads(model, CASES), retrieval_heads(model, given))


def test_a_case_without_a_copied_token_is_left_out(model):
    alone, both = (retrieval_heads(model, cases) for cases in (CASES[:1], [CASES[0], (*CASES[1], "Mira keeps")]))
    pd.testing.assert_frame_equal(alone, both)
    assert alone[["score_low", "score_high", "stability"]].isna().all(axis=None)
    none = retrieval_heads(model, [(*CASES[0], "Mira keeps")])
    assert none["score"].isna().all() and (none["cases"] == 0).all()


def test_reading_heads_are_those_of_single_cases_beside_another_sentence(model):
    """Without a question between them the document's last token is read with the answer, as reading_layers reads it."""
    whole = [(f"{DOCUMENT}{asked}", None, answer, f"{needle}.") for (_, asked, answer), needle in zip(
        CASES, ("Kaya feeds a donkey", "Olga has a hen", "Mira keeps a goat"), strict=True)]  # fmt: skip
    found = reading_heads(model, whole)
    each = [
        reading_layers(model, document, answer=answer, without=[needle]).query("part == 'head'")["fall"].to_numpy()
        for document, _, answer, needle in whole
    ]
    np.testing.assert_allclose(found["score"], np.mean(each, axis=0), rtol=1e-9, atol=1e-12)
    apart = reading_heads(model, CASES)
    assert apart["score"].max() > 1 and apart["null"].abs().max() < 0.5 * apart["score"].max()
    assert -1 <= apart["stability"][0] <= 1 and len(set(apart["stability"])) == 1
    assert reading_heads(model, [(CASES[0][2].strip() + ".", *CASES[0][1:])])["null"].isna().all()  # no other sentence


def test_stability_and_intervals_of_made_up_cases():
    values = np.tile(np.arange(5.0), (6, 1))
    assert agreement_of_halves(values, 0) == pytest.approx(1)
    assert np.allclose(bootstrapped(values, 0), values[0])
    opposite = np.stack([np.arange(5.0), -np.arange(5.0)])
    assert agreement_of_halves(opposite, 0) == pytest.approx(-1)
    assert math.isnan(agreement_of_halves(values[:1], 0)) and math.isnan(agreement_of_halves(np.zeros((4, 5)), 0))
    noise = np.random.default_rng(0).normal(size=(20, 400))
    assert abs(agreement_of_halves(noise, 1)) < 0.15  # 200 splits of 400 heads, standard error of one 0.05
    low, high = bootstrapped(noise, 2)
    assert 0.8 < np.mean((low < 0) & (high > 0)) < 0.99


@pytest.mark.parametrize("table", [retrieval_heads, reading_heads])
@pytest.mark.parametrize(
    ("cases", "told"),
    [
        ("Kaya", "cases must be a list"),
        ([CASES[0], (DOCUMENT[:18], question("Kaya"), " donkey")], "case 1: no sentence of the document holds .*'donkey'"),
        ([(*CASES[0], "a zebra")], "zebra"),
    ],
)
def test_cases_that_are_none_are_refused(model, table, cases, told):
    with pytest.raises(KVLensError, match=told):
        table(model, cases)


def test_a_needle_that_is_read_with_the_answer_is_refused(model):
    with pytest.raises(KVLensError, match="last token is read with the answer"):
        reading_heads(model, [(f"{question('Kaya')} donkey", None, " donkey", "donkey")])
