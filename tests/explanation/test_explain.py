"""Explanations of the models that know stories, and their statements run again by plain forward passes."""

import json
import math

import pytest
import torch

import kvlens
from kvlens import KVLensError, convert_prompt
from kvlens.explanation import explanation_view, paragraphs, runs
from kvlens.report.printed import print_explanation

STORY = "Mira keeps a goat. Pavel has a parrot. At night Kaya feeds a donkey."
QUESTION = " Which animal does Kaya keep? Kaya keeps a"


@pytest.fixture(scope="module", params=["facts-gpt2", "facts-linear", "facts-hybrid"])
def model(request):
    return kvlens.load(request.param)


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


def test_statements_on_units_are_passes_without_them(model, found):
    tokens = torch.cat([model.to_tokens(STORY)[0], model.to_tokens(QUESTION, prepend_bos=False)[0]])
    everything = torch.ones(len(tokens), dtype=torch.bool)
    whole = log_p(model, found, tokens, everything)
    for row in found.rows("units", "each", "none").query("positions == 'kept'").itertuples():
        kept = everything.clone()
        for unit in map(int, row.parts.split("+")):
            kept[found.units["start"][unit] : found.units["stop"][unit]] = False
        claim = found.claims.iloc[row.claim]
        fall = (whole - log_p(model, found, tokens, kept))[claim.start : claim.stop].sum()
        assert float(fall) == pytest.approx(row.nats, abs=1e-3)
        assert row.p_after == pytest.approx(row.p_before * math.exp(-row.nats), rel=1e-6)


def test_texts_are_generated_in_three_batches(model, found, monkeypatch):
    """The answer; what is said without units; what is said with layers exchanged. With the same statements as in more."""
    batches, greedy = [], runs.greedy

    def counted(model, biases, *args):
        batches.append(biases.batch_size)
        return greedy(model, biases, *args)

    monkeypatch.setattr(runs, "greedy", counted)
    again = kvlens.explain(model, STORY, QUESTION)
    alone = again.rows("layers", "breaking")["parts"].str.contains("+", regex=False)
    assert batches[0] == 1 and len(batches) == 3 + int(alone.any())
    first = len(batches)
    monkeypatch.setattr(runs.Runs, "_rows_at_once", lambda self: 1)  # room for two texts
    again = kvlens.explain(model, STORY, QUESTION)
    assert (
        len(batches) > 2 * first
        and max(batches[first:]) <= 2
        and again.statements["says"].fillna("").tolist()
        == (found.statements.query("about not in ('heads', 'groups')")["says"].fillna("").tolist())
    )


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


def test_layers_and_heads_are_tried_one_by_one(model, found):
    assert found.n_layers == model.cfg.n_layers == len(found.rows("layers", "each"))
    heads = found.rows("heads", "each")
    lost = [row.parts for row in found.rows("layers", "breaking").itertuples()]
    assert {parts.split(".")[0] for parts in heads["parts"]} == {part for parts in lost for part in parts.split("+")}


def test_a_fact_that_stands_twice_gives_the_pair():
    model = kvlens.load("facts-gpt2")
    story = "Kaya feeds a donkey. Pavel has a parrot. At night Kaya feeds a donkey."
    found = kvlens.explain(model, story, QUESTION)
    assert found.cause == (0, 2) and "None of the parts loses it alone." in str(found)


def test_what_does_not_depend_on_the_prompt_is_said_so():
    model = kvlens.load("facts-gpt2")
    found = kvlens.explain(model, "Mira keeps a goat. Pavel has a parrot.", " Pavel has a parrot. Pavel has a")
    assert found.cause == () and found.n_layers == 0
    assert "No part" in str(found)


def test_about_answer_and_budget(model):
    given = kvlens.explain(model, STORY, QUESTION, answer=" parrot", depth="units")
    assert given.response == "parrot" and not given.rows("layers", "each").size
    with pytest.raises(KVLensError, match=r"about: the response has no 'donkeys'; did you mean 'donkey'"):
        kvlens.explain(model, STORY, QUESTION, about="donkeys", depth="units")
    with pytest.raises(KVLensError, match="budget: removing each of the 3 units once reads up to"):
        kvlens.explain(model, STORY, QUESTION, budget=10)
    with pytest.raises(KVLensError, match="text: the prompt's last token belongs to a unit"):
        kvlens.explain(model, STORY)


def test_an_answer_that_would_go_on_is_marked_as_cut_off(found, monkeypatch, capsys):
    """In the text, the page, the terminal, JSON and what is told at once; one that ends by itself, or was given, is not."""
    assert found.cut_after is None and "cut off" not in f"{found}{explanation_view(found).body}"
    monkeypatch.setattr("kvlens.explanation.steps.MOST_TOKENS", 1)
    model, told = kvlens.load("facts-gpt2"), []
    cut = kvlens.explain(model, STORY, QUESTION, depth="units", on_found=told.append)
    assert len(cut.response_tokens) == cut.cut_after == json.loads(cut.to_json())["cut_after"] == 1
    print_explanation(cut)
    for text in (str(cut), told[0], capsys.readouterr().out):
        assert text.startswith(f'The model answers: "{cut.response}" (cut off after 1 tokens)')
    assert "<figcaption>The model answers (cut off after 1 tokens)</figcaption>" in explanation_view(cut).body
    assert kvlens.explain(model, STORY, QUESTION, answer=" parrot", depth="units").cut_after is None


def test_a_page_and_json_hold_everything(found):
    data = json.loads(found.to_json())
    assert data["cause"] == [2] and len(data["statements"]) == len(found.statements)
    html = explanation_view(found).to_html()
    assert "donkey" in html and 'data-claim="0"' in html and "layer 0" in html
    assert "<html" in found._repr_html_() or "srcdoc" in found._repr_html_()
