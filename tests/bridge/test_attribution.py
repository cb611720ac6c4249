"""Causes on the bridge, held to interventions; test_front_ends.py holds them to those on HookedKVTransformer."""

from functools import partial

import pytest
import torch
from bridge_models import place_of, some_tokens
from kvlens.analyses.attribution.answers import Question
from kvlens.analyses.attribution.by_part import swaps
from kvlens.analyses.attribution.prompt import Null
from kvlens.analyses.attribution.terms import PositionExchange, Terms, hidden_from_text, state_terms
from kvlens.analyses.bias.exchange import ExchangedPart, HeadExchange, LayerExchange, exchangeable, in_one_space
from pandas.testing import assert_frame_equal
from precision import LAW, relative_error
from stacked_tensors import layers_with_state

from kvlens import convert_prompt, counterfactuals, explain
from kvlens.analyses import attribution_by_head, attribution_by_position, prompt_attribution
from kvlens.explanation.runs import Runs
from kvlens.model import heads_per_layer
from kvlens.texts import Response

pytestmark = pytest.mark.usefixtures("without_gradients", "short_answers")

PROMPT, TEXT = some_tokens(11), some_tokens(4, seed=1)
UNITS = [(0, 3), (3, 7), (7, 9)]


@pytest.fixture(scope="module", params=["qwen3_5", "olmo_hybrid", "falcon_h1", "gemma3", "gpt_oss"])
def family(request):
    return request.param


def test_explanations_are_those_of_the_hooked_model(both_of):
    """One of them reads texts token by token, and what is removed; the other guesses, and leaves it out: only costs differ."""
    found = [explain(model, PROMPT, TEXT, by=UNITS, depth="heads") for model in both_of("gpt2")]
    for name, table in found[0].tables().items():
        if name != "cost":
            assert_frame_equal(table, found[1].tables()[name], rtol=0, atol=LAW)
    assert sorted(each.cost["passes"].sum() for each in found) == [9, 12] and found[0].n_tokens != found[1].n_tokens
    assert found[0].cause == found[1].cause and found[0].response == found[1].response


@pytest.mark.one_in(2)
def test_recurrent_layers_are_explained_too(model):
    """All layers exchanged are the prompt without the cause, and none is the whole prompt, states and convolutions included."""
    units, question = (positions_of_spans(spans, len(PROMPT) + len(TEXT) - 1) for spans in (UNITS, [(len(PROMPT), -1)]))
    runs = Runs(model, torch.cat([PROMPT, TEXT[:-1]]), TEXT[-1:], question[0])
    runs.begin(Response.of(model, PROMPT, some_tokens(3, seed=5)), units)
    donor, every = runs.donor([1]), range(model.cfg.n_layers)
    all_of_them, none = runs.exchanged(LayerExchange(runs.bias, donor), [every, []])
    (without,) = runs.without([[1]])
    assert (all_of_them.falls - without.falls).abs().max() < 1e-4 and none.falls.abs().max() < 1e-4
    assert without.falls.abs().max() > 1e-3


@pytest.mark.one_in(2)
def test_all_positions_exchanged_are_the_prompt_without_the_cause(model):
    """And none is the whole prompt: keys, values, states and convolutions."""
    gone = positions_of_spans(UNITS[1:2], len(PROMPT))
    other = counterfactuals(model, PROMPT, gone)
    exchange = PositionExchange(Terms.of_prompt(model, PROMPT), other)
    every = torch.ones(len(exchange.parts), dtype=torch.bool)
    donor, own = convert_prompt(model, other).select_prompt(0), convert_prompt(model, PROMPT)
    mixed = exchange.biases(torch.stack([every, ~every]))
    read = [logits_under(model, bias) for bias in (mixed, donor.repeat(1), own.repeat(1))]
    assert relative_error(read[0][:1], read[1]) < LAW and relative_error(read[0][1:], read[2]) < LAW
    assert relative_error(read[1], read[2]) > 1e-3


def logits_under(model, bias):
    with model.kv_bias(bias):
        return model.logits_on(TEXT.expand(bias.batch_size, -1), len(TEXT))


def positions_of_spans(spans, n):
    own = torch.zeros(len(spans), n, dtype=torch.bool)
    for row, (start, stop) in enumerate(spans):
        own[row, start:stop] = True
    return own


def log_p(model, tokens, answer):
    return model(tokens[None])[0, -1].double().log_softmax(dim=-1)[answer]


@pytest.mark.one_in(2)
def test_a_unit_that_moves_up_is_a_unit_that_was_never_written(model):
    answer = 5
    table = prompt_attribution(model, PROMPT, TEXT, by=UNITS, answer=answer, positions="closed")
    whole = log_p(model, torch.cat([PROMPT, TEXT]), answer)
    for (start, stop), effect in zip(UNITS, table["total_effect"], strict=True):
        without = torch.cat([PROMPT[:start], PROMPT[stop:], TEXT])
        assert abs(float(whole - log_p(model, without, answer)) - effect) < LAW
    assert table["total_effect"].abs().max() > 0.05


@pytest.mark.one_in(2)
def test_the_parts_of_all_heads_are_the_whole_bias(model):
    units = prompt_attribution(model, PROMPT, TEXT, by=UNITS, answer=5)
    heads = attribution_by_head(model, PROMPT, TEXT, by=UNITS, answer=5)
    bias = convert_prompt(model, PROMPT)
    n_convolutions = len(layers_with_state(bias))
    per_unit = heads[heads["unit"] == 0]
    assert len(per_unit) == sum(bias.n_heads_of(layer) for layer in range(3)) + n_convolutions
    assert (per_unit["head"] == -1).sum() == n_convolutions
    whole = heads.groupby("unit")["whole"].first()
    for unit, effect in enumerate(units["total_effect"]):
        assert abs(whole[unit] - effect) < LAW
    positions = attribution_by_position(model, PROMPT, TEXT, by=UNITS[:1], answer=5)
    assert (positions["whole"] - units["total_effect"][0]).abs().max() < LAW


def test_a_part_of_a_layer_with_attention_and_state_is_exchanged_by_itself(bridge_of):
    """Query heads, then value heads, then the convolution's inputs, each against hooks that replace that part alone."""
    model = bridge_of("falcon_h1")
    bias, other = convert_prompt(model, PROMPT), convert_prompt(model, counterfactuals(model, PROMPT, [[UNITS[2]]]))
    own, donor = in_one_space(bias, other.select_prompt(0))
    question, layer = Question.of(model, PROMPT, TEXT, 5), 0
    _, swap, _ = swaps(question, [HeadExchange(own, donor)])
    fall = dict(zip(exchangeable(own), swap.tolist(), strict=True))
    given = {
        "attn.hook_b_kv": donor.stacked("b_kv")[layer, None],
        "attn.hook_b_d": donor.stacked("b_d")[layer, None],
        "mamba.hook_b_kv": donor.stacked("state")[layer, None],
        "mamba.hook_conv_state": donor.stacked("conv")[layer, None],
    }

    def score(*replaced):
        def replace(x, hook, name, head):
            x = x.clone()
            x[:, head] = given[name][:, head]
            return x

        hooks = [(f"blocks.{layer}.{name}", partial(replace, name=name, head=head)) for name, head in replaced]
        with model.kv_bias(own):
            return float(model.run_with_hooks(TEXT[None], fwd_hooks=hooks)[0, -1].double().log_softmax(dim=-1)[5])

    of_query = [[("attn.hook_b_kv", head), ("attn.hook_b_d", head)] for head in range(6)]
    of_state = [[("mamba.hook_b_kv", head)] for head in range(4)]
    parts = {ExchangedPart(layer, head): replaced for head, replaced in enumerate(of_query + of_state)}
    parts[ExchangedPart(layer, -1, "convolution")] = [("mamba.hook_conv_state", slice(None))]
    for part, replaced in parts.items():
        assert abs(fall[part] - (score() - score(*replaced))) < LAW
    for kind in ([*parts][:6], [*parts][6:10], [*parts][10:]):
        assert any(abs(fall[part]) > 1e-6 for part in kind)  # far above LAW


@pytest.mark.one_in(2)
def test_an_exchange_for_the_same_changes_nothing(model):
    question = Question.of(model, PROMPT, TEXT, 5)
    bias = convert_prompt(model, PROMPT)
    whole, swap, _ = swaps(question, [HeadExchange(*in_one_space(bias, bias))])
    assert abs(float(whole)) < LAW and float(swap.abs().max()) < LAW
    same = attribution_by_position(model, PROMPT, TEXT, by=UNITS[:1], answer=5, replace_by={UNITS[0]: PROMPT[:3]})
    assert same["swap"].abs().max() < LAW


@pytest.mark.parametrize("family", ["qwen3_5", "olmo_hybrid", "falcon_h1"])
def test_a_state_without_a_unit_is_that_of_a_prompt_whose_values_are_zero_there(family, bridge_of):
    model = bridge_of(family)
    bias = convert_prompt(model, PROMPT)
    gone = torch.zeros(1, len(PROMPT), dtype=torch.bool)
    gone[:, 8:10] = True

    def zero(v, hook):
        v[:, 8:10] = 0
        return v

    state, _ = place_of(model, 0, heads_per_layer(model)[0] - 1)
    zeroed = convert_prompt(model, PROMPT, fwd_hooks=[(f"{state}hook_v", zero)])  # layer 0: its inputs stay
    hidden = next(hidden_from_text(model, PROMPT, gone))
    assert relative_error(hidden.stacked("state")[0, 0], zeroed.stacked("state")[0]) < LAW
    n_hidden = (gone[0, -bias.stacked("conv").shape[1] :]).sum()
    changed = (hidden.stacked("conv")[:, 0] != bias.stacked("conv")).any(dim=-1)
    assert n_hidden == 2 and (changed.sum(dim=1) == n_hidden).all()  # rows of tokens 8 and 9 of 8, 9, 10
    assert relative_error(hidden.stacked("state")[0, 0], bias.stacked("state")[0]) > 1e-6  # the tokens matter


@pytest.mark.parametrize("family", ["qwen3_5", "olmo_hybrid", "falcon_h1"])
def test_terms_of_a_counterfactual_prompt_add_up_to_its_states(family, bridge_of):
    model = bridge_of(family)
    other = counterfactuals(model, PROMPT, [[(3, 7)]])
    states = convert_prompt(model, other).stacked("state")
    carried_keys, values = state_terms(model, other)
    assert relative_error(torch.einsum("lphk,lphv->lhkv", carried_keys, values)[:, None], states) < LAW
    assert not carried_keys[:, ~other.kept[0]].any()


@pytest.mark.one_in(2)
def test_a_null_of_text_that_the_model_writes(model):
    table = prompt_attribution(model, PROMPT, TEXT, by=UNITS, null=Null(19))
    assert table["p_value"].between(1 / 20, 1).all()
