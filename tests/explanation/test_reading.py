"""Where a prompt is read: exchanges by another way, and shares over cases by hand."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from kvlens.analyses.bias.exchange import HeadExchange, in_one_space
from precision import LAW, relative_error
from small_models import row_of
from tiny_text_model import tiny_text_model

import kvlens
from kvlens import KVLensError, convert_prompt, counterfactuals, logits_after
from kvlens.analyses import reading_layers, reading_shares, reading_stability
from kvlens.explanation.reading import wilson

PROMPT = "The widget is purple.\nThe gadget is green."
TEXT, ANSWER, FACT = " Return the", " widget", "The widget is purple."


ROWS = {"softmax, rotary, grouped": {}, "gqa": dict(kv_shift=None), "softmax, shifted": {}, "rope after": {}}


@pytest.fixture(params=ROWS)
def model(request):
    return tiny_text_model(row_of(request.param), dtype=torch.float64, **ROWS[request.param])


def both_prompts(model):
    tokens = model.to_tokens(PROMPT)[0]
    gone = torch.zeros(len(tokens) - 1, dtype=torch.bool)
    (unit,) = kvlens.chat.prompt_units(model, tokens, [FACT])
    gone[unit.start : unit.stop] = True
    return tokens, counterfactuals(model, tokens[:-1], gone[None])


def answer_log_p(model, tokens, read):
    """log p of the answer, behind the prompt's last token and the text; ``read(text, n)`` gives logits."""
    text, answer = (model.to_tokens(x, prepend_bos=False)[0] for x in (TEXT, ANSWER))
    logits = read(torch.cat([tokens[-1:], text, answer[:-1]]), len(answer))
    return logits.log_softmax(dim=-1).gather(-1, answer.expand(len(logits), -1)[..., None]).sum(dim=(1, 2))


def under(model, biases):
    def read(text, n):
        with model.kv_bias(biases):
            return model.logits_on(text.expand(biases.batch_size, -1), n)

    return read


@pytest.fixture
def table(model):
    return reading_layers(model, PROMPT, TEXT, answer=ANSWER, without=[FACT])


def test_all_layers_exchanged_are_the_prompt_without_the_fact(model, table):
    tokens, other = both_prompts(model)
    whole = counterfactuals(model, tokens[:-1], [[]])
    own, gone = (answer_log_p(model, tokens, lambda t, n, p=p: logits_after(model, p, t, n)) for p in (whole, other))
    assert abs(float(own - gone)) > 1e-3
    assert abs(table["fall"][0] - float(own - gone)) < LAW * abs(float(own))


def test_heads_are_mixtures_of_two_biases_and_a_layers_heads_together_are_the_layer(model, table):
    tokens, other = both_prompts(model)
    own, donor = convert_prompt(model, tokens[:-1]), convert_prompt(model, other).select_prompt(0)
    exchange = HeadExchange(*in_one_space(own, donor))
    n_heads = model.cfg.n_heads
    kv = model.cfg.n_key_value_heads or n_heads

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
        found = answer_log_p(model, tokens, under(model, exchange.biases(chosen)))
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
    model = kvlens.load("facts-gpt2")
    prompt = "Mira keeps a goat. Pavel has a parrot. At night Kaya feeds a donkey. Olga has a hen."
    question = " Which animal does Kaya keep? Kaya keeps a"
    found = reading_layers(model, prompt, question, answer=" donkey", without=["At night Kaya feeds a donkey."])
    null = reading_layers(model, prompt, question, answer=" donkey", without="Mira keeps a goat.", heads=False)
    assert found["lost"][0] and not null["lost"].any() and set(null["part"]) == {"all", "layer"}
    assert found.query("part == 'layer' and lost")["layer"].tolist() == [0]


def test_an_answer_at_once_and_a_last_token_that_is_read_with_the_text():
    model = tiny_text_model()
    tokens = model.to_tokens(PROMPT)[0]
    at_once = reading_layers(model, tokens, answer=ANSWER, without=[FACT])
    apart = reading_layers(model, tokens[:-1], tokens[-1:], answer=ANSWER, without=[FACT])
    pd.testing.assert_frame_equal(at_once[at_once["part"] == "all"], apart[apart["part"] == "all"], rtol=1e-4)
    with pytest.raises(KVLensError, match="last token is read with the text"):
        reading_layers(model, tokens, answer=ANSWER, without=[(3, len(tokens))])


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
