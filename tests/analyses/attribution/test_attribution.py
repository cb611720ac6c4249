"""Effects of units, heads and positions: each is held against a model that is intervened on by other means.
ContextCite: its lasso by the conditions of an optimum, its fit beside the authors' package where it is installed."""

import importlib.util
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pytest
import torch
from analysis_models import VARIANTS, tokens
from chat_templates import chat_model
from kvlens.analyses.attribution.answers import Question
from kvlens.analyses.attribution.methods import (
    ContextCite,
    InteractionFit,
    LeaveOneOut,
    chosen_subsets,
    fitted,
    in_sum,
    lasso,
    logit_of,
    over_pairs,
    subset_scores,
)
from kvlens.analyses.attribution.prompt import Null, enough_for, holm, p_values
from kvlens.analyses.attribution.terms import factors, hidden_from_text
from kvlens.analyses.declaration import Record
from small_models import sharp
from stacked_tensors import with_stacked
from torch.nn.functional import logsigmoid

from kvlens import Chat, HookedKVTransformer, KVLensError, carry_bias, convert_prompt, logits_after
from kvlens.analyses import attribution_by_head, attribution_by_position, prompt_attribution
from kvlens.chat import prompt_units
from kvlens.components import hidden_tokens_keep_positions
from kvlens.components.attention import shifted_heads
from kvlens.ops.kv_shift import coefficients_from_parameter, naive_kv_shift
from kvlens.units import Unit

MODELS = [*VARIANTS, "softmax, shifted", "softmax, rotary, grouped", "softmax, learned"]
PROMPT, TEXT = tokens(13, 1), tokens(4, 2)
SPANS = [(0, 3), (3, 5), (5, 9), (9, 13)]
TOLERANCE = 1e-9
"""float64, log-probabilities of size 10 behind two layers whose weights are five times as large as usual."""
FUNCTIONS = (prompt_attribution, attribution_by_head, attribution_by_position)


ALWAYS = ("rope after", "gqa decay", "softmax, rotary, grouped")


@pytest.fixture(scope="module", params=[*ALWAYS, *(pytest.param(n, marks=pytest.mark.slow) for n in MODELS if n not in ALWAYS)])
def model(request) -> HookedKVTransformer:
    return sharp(request.param)


def log_p(model, bias, token: int, text=TEXT) -> float:
    with model.kv_bias(bias):
        return float(model(text[None], attention_mask=torch.ones_like(text[None]))[0, -1].log_softmax(dim=-1)[token])


def test_behind_a_chat_the_answer_may_begin_at_once():
    """Its last token, which begins the answer, is the text then; words of the question are no unit."""
    model, chat = (
        chat_model(),
        Chat.ask("where is the cat", {"notes.txt": "the cat sat on the mat. the mat is red."}, "be brief"),
    )
    read, asked = chat.tokens(model), dict(answer="the mat")
    found = prompt_attribution(model, chat, **asked)
    assert found["name"].tolist() == ["system, sentence 1", "notes.txt, sentence 1", "notes.txt, sentence 2"]
    spans = list(zip(found["start"], found["stop"], strict=True))
    given = prompt_attribution(model, read[:-1], read[-1:], by=spans, **asked)
    assert torch.equal(*(torch.tensor(table["total_effect"].to_numpy()) for table in (found, given)))
    in_batch = prompt_attribution.analysis.run(model, Record("1", chat, None, asked))
    pd.testing.assert_frame_equal(in_batch, found)
    for function in FUNCTIONS:
        with pytest.raises(KVLensError, match="text: expected what follows the prompt"):
            function(model, "the cat sat", **asked)


class Tables(NamedTuple):
    units: pd.DataFrame
    heads: pd.DataFrame
    positions: pd.DataFrame


@pytest.fixture(scope="module")
def tables(model) -> Tables:
    """What the units of `SPANS` do for token 3, whose probability the prompt moves in every model."""
    given = dict(by=SPANS, answer=3)
    units, heads = (function(model, PROMPT, TEXT, **given) for function in FUNCTIONS[:2])
    return Tables(units, heads, attribution_by_position(model, PROMPT, TEXT, **given, each_layer=True))


def total_effects(table) -> list[float]:
    """Of every unit."""
    column = "total_effect" if "total_effect" in table else "whole"
    return table[table["unit"] >= 0].groupby("unit")[column].first().tolist()


@pytest.mark.one_in(3)
def test_total_effects_are_those_of_the_converted_prompts_in_every_table(model, tables):
    whole = log_p(model, convert_prompt(model, PROMPT), 3)
    expected = [whole - log_p(model, convert_prompt(model, PROMPT, without=[span]), 3) for span in SPANS]
    for table in tables:
        assert total_effects(table) == pytest.approx(expected, abs=TOLERANCE)
    nothing = log_p(model, convert_prompt(model, PROMPT, without=[(0, 13)]), 3)
    shares = [effect / (whole - nothing) for effect in expected]
    assert tables.units["total_share"].tolist() == pytest.approx(shares, abs=TOLERANCE / abs(whole - nothing))
    assert tables.units["p_value"].isna().all()
    assert not tables.units["significant"].any()


def test_a_knockout_hides_the_unit_from_the_text_alone(model, tables):
    """Against a pass over prompt and text in which the text's queries get the scores, or terms, of the positions that carry the
    unit taken away, and the text's own keys, values and queries are shifted without the unit's."""
    shift = model.cfg.kv_shift
    window = shift.window if shift is not None else 0
    together = torch.cat([PROMPT, TEXT])[None]
    whole = float(model(together)[0, -1].log_softmax(dim=-1)[3])
    for effect, (start, end) in zip(tables.units["knockout_effect"], SPANS, strict=True):
        stop = min(end + window, 13)

        def hide(scores, hook, start=start, stop=stop):
            scores[:, :, 13:, start:stop] = -torch.inf if model.cfg.attention == "softmax" else 0.0
            return scores

        hooks = [(f"blocks.{layer}.attn.hook_attn_scores", hide) for layer in range(2)]
        if model.cfg.attention == "linear" and model.cfg.normalizer == "kernel":
            hooks += kernel_normalizers(model, start, stop)
        if shift is not None:
            hooks += text_shifted_without(model, start, end)
        hidden = float(model.run_with_hooks(together, fwd_hooks=hooks)[0, -1].log_softmax(dim=-1)[3])
        assert effect == pytest.approx(whole - hidden, abs=TOLERANCE)


def text_shifted_without(model, start, end):
    """Hooks under which the text's shifted keys, values and queries hold nothing of the prompt's positions start .. end - 1."""
    raw = {}

    def keep(x, hook):
        raw[hook.name] = x

    def shifted(x, hook):
        name = hook.name.removesuffix("_shifted")
        attn = model.blocks[int(name.split(".")[1])].attn
        parameter = getattr(attn, f"{name[-1]}_shift_coef")
        without = raw[name].clone()
        without[:, start:end] = 0.0
        coef = coefficients_from_parameter(parameter, model.cfg.kv_shift.parametrization)
        x[:, 13:] = naive_kv_shift(without, coef)[0][:, 13:]
        return x

    names = [f"blocks.{layer}.attn.hook_{x}" for layer in range(2) for x in shifted_heads(model.cfg)]
    return [*((name, keep) for name in names), *((name + "_shifted", shifted) for name in names)]


def kernel_normalizers(model, start, stop):
    """n_i without some keys' part: phi(q_i).phi(k_j) unrotated, which are the normalizer's own terms."""
    held = {}

    def keep(x, hook):
        held[hook.name] = x

    def less(n, hook):
        group = model.cfg.n_heads // model.cfg.n_kv_heads
        stem = hook.name.removesuffix("hook_normalizer")
        phi_q, phi_k = held[stem + "hook_phi_q"], held[stem + "hook_phi_k"].repeat_interleave(group, dim=2)
        n[:, 13:] -= torch.einsum("bqhf,bkhf->bqh", phi_q[:, 13:], phi_k[:, start:stop])
        return n

    names = ("hook_phi_q", "hook_phi_k")
    looks = [(f"blocks.{layer}.attn.{name}", keep) for layer in range(2) for name in names]
    return [*looks, *((f"blocks.{layer}.attn.hook_normalizer", less) for layer in range(2))]


def test_a_prompt_that_continues_another_keeps_what_was_held(model):
    """Hidden as a whole, with its shift state, of which rows stay that a prompt of one token has not pushed out."""
    first, prompt = convert_prompt(model, tokens(6, 7)), PROMPT[:1]
    with model.kv_bias(first):
        emptied = next(hidden_from_text(model, prompt, torch.ones(1, 1, dtype=torch.bool))).select_prompt(0)
    rows = {}
    for x in "kvq":
        old = first.stacked(f"last_{x}")
        rows[f"last_{x}"] = torch.cat([old, old.new_zeros(old.shape[0], 1, *old.shape[2:])], dim=1)[:, 1:]
    alone = with_stacked(carry_bias(model, first, 1), **rows)
    assert log_p(model, emptied, 3) == pytest.approx(log_p(model, alone, 3), abs=TOLERANCE)


def test_heads_add_up_to_the_whole_and_the_interaction(model, tables):
    heads = tables.heads
    n_parts = model.cfg.n_layers * (model.cfg.n_heads + (model.cfg.n_kv_heads if model.cfg.kv_shift is not None else 0))
    assert len(heads) == (1 + len(SPANS)) * n_parts
    sums = heads.groupby("unit")["swap"].transform("sum")
    pd.testing.assert_series_equal(heads["sum_over_heads"], sums, check_names=False, rtol=0, atol=TOLERANCE)
    assert (heads["sum_over_heads"] + heads["interaction"] - heads["whole"]).abs().max() < TOLERANCE


def test_positions_are_those_of_the_prompt_and_what_precedes_the_unit_has_no_effect(model, tables):
    table, shifts = tables.positions, model.cfg.kv_shift is not None
    assert len(table) == len(SPANS) * (13 + shifts) * 3
    of_unit = table[(table["unit"] == 1) & (table["layer"] == -1)]
    assert of_unit.loc[of_unit["in_unit"], "prompt_position"].tolist() == [3, 4]
    window = 0 if not shifts else model.cfg.kv_shift.window
    assert of_unit.loc[of_unit["in_shift_window"], "prompt_position"].tolist() == list(range(5, 5 + window))
    before = of_unit[of_unit["prompt_position"].between(0, 2)]
    assert before["swap"].abs().max() < TOLERANCE  # what precedes the unit is the same in both prompts


def test_positions_exchanged_in_the_last_layer_are_patched_again_by_hooks(model):
    """The text alone reads the last layer, so one pass over prompt and text shows it: in the pass with the unit one position's
    keys and values from the pass without it (swap), or the other way round (converse)."""
    start, stop = span = (5, 9)
    table = attribution_by_position(model, PROMPT, TEXT, by=[span], answer=5, each_layer=True)
    found = table[(table["layer"] == 1) & (table["part"] == "position")].set_index("prompt_position")
    together = torch.cat([PROMPT, TEXT])[None]
    kept = torch.ones_like(together)
    kept[:, start:stop] = 0
    shift = model.cfg.kv_shift
    shifted = () if shift is None else [x for x, shifts in (("k", shift.keys), ("v", shift.values)) if shifts]
    names = [f"blocks.1.attn.hook_{x}" + ("_shifted" if x in shifted else "") for x in "kv"]

    def read(mask, hooks=()):
        seen = {}
        looks = [(name, lambda x, hook: seen.update({hook.name: x.clone()})) for name in names]
        with hidden_tokens_keep_positions(True):
            logits = model.run_with_hooks(together, attention_mask=mask, fwd_hooks=[*looks, *hooks])
        return float(logits[0, -1].log_softmax(dim=-1)[5]), seen

    def patches(position, others):
        def patch(x, hook):
            x[:, position] = others[hook.name][:, position]
            return x

        return [(name, patch) for name in names]

    (whole, own), (without, others) = read(torch.ones_like(kept)), read(kept)
    for position in (*range(start), *range(stop, 13)):
        swapped = read(torch.ones_like(kept), patches(position, others))[0]
        alone = read(kept, patches(position, own))[0]
        assert found["swap"][position] == pytest.approx(whole - swapped, abs=TOLERANCE)
        assert found["converse"][position] == pytest.approx(whole - alone, abs=TOLERANCE)
    assert found["whole"].tolist() == pytest.approx([whole - without] * 13, abs=TOLERANCE)


@pytest.fixture
def prompts_read(monkeypatch):
    """A list of all counterfactual prompts that are read: their tokens, -1 for those that are left out."""
    seen = []

    def counted(model, prompts, *given, **options):
        seen.extend(torch.where(prompts.kept, prompts.tokens, -1).tolist())
        return logits_after(model, prompts, *given, **options)

    monkeypatch.setattr("kvlens.analyses.attribution.answers.logits_after", counted)
    return seen


@pytest.mark.parametrize("method", ["leave_one_out", "interactions", "contextcite"])
def test_the_whole_prompt_is_read_once(method, prompts_read):
    prompt_attribution(sharp(), PROMPT, TEXT, by="token", answer=5, method=method)
    assert prompts_read.count(PROMPT.tolist()) == 1


def test_no_prompt_is_read_twice_for_the_null(prompts_read):
    """The prompt, the prompt without each unit, the baseline, and the prompt with each unrelated unit."""
    model, null = sharp(), Null(20, [tokens(11, seed) for seed in range(20, 30)])
    table = prompt_attribution(model, PROMPT, TEXT, by=SPANS, answer=5, null=null)
    assert len(set(map(tuple, prompts_read))) == len(prompts_read) == 1 + len(SPANS) + 1 + 20
    question, units = Question.of(model, PROMPT, TEXT, 5), prompt_units(model, PROMPT, SPANS)
    expected = p_values(torch.tensor(table["total_effect"].to_numpy()), null.effects(question, units))
    assert table["p_value"].tolist() == pytest.approx(expected.tolist())


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_the_prompt_is_converted_once_for_all_knockouts(attention, monkeypatch):
    model, read = sharp(attention=attention), []
    monkeypatch.setattr(
        "kvlens.analyses.attribution.terms.convert_prompt",
        lambda *args, **kwargs: read.append(args) or convert_prompt(*args, **kwargs),
    )
    units = torch.eye(13, dtype=torch.bool)
    at_once = torch.cat([each.stacked("b_d") for each in hidden_from_text(model, PROMPT, units)], dim=1)
    monkeypatch.setattr("kvlens.analyses.attribution.terms.NUMBERS_PER_PASS", 1)
    one_by_one = torch.cat([each.stacked("b_d") for each in hidden_from_text(model, PROMPT, units)], dim=1)
    torch.testing.assert_close(one_by_one, at_once, rtol=1e-12, atol=1e-12)
    assert len(read) == 2
    bias = convert_prompt(model, PROMPT)
    given = torch.cat([each.stacked("b_d") for each in hidden_from_text(model, PROMPT, units, bias)], dim=1)
    torch.testing.assert_close(given, at_once, rtol=1e-12, atol=1e-12)
    assert len(read) == 2 + (attention == "linear")  # of a softmax model the keys of the bias that is given are taken


def test_positions_of_a_long_prompt_are_exchanged_from_two_readings(monkeypatch):
    """One of the prompt and one of the counterfactual prompt, however many positions and layers there are."""
    read = []
    monkeypatch.setattr("kvlens.analyses.attribution.terms.factors", lambda *args: read.append(args) or factors(*args))
    table = attribution_by_position(sharp(kv_shift=None), tokens(70, 1), TEXT, by=[(3, 6)], answer=5, each_layer=True)
    assert len(table) == 70 * 3 and len(read) == 2


def test_answers_of_several_tokens_add_up_and_a_rival_is_taken_away(model):
    """Against one token after another, each behind those before it."""
    spans = SPANS[1:3]
    biases = [convert_prompt(model, PROMPT, **without) for without in ({}, *({"without": [span]} for span in spans))]

    def expected(words) -> torch.Tensor:
        read = [[log_p(model, bias, word, torch.cat([TEXT, words[:i]])) for i, word in enumerate(words)] for bias in biases]
        whole, *without = torch.tensor(read, dtype=torch.float64).sum(dim=1)
        return whole - torch.stack(without)

    for answer, rival, functions in (
        (torch.tensor([5, 2]), None, FUNCTIONS[:1]),
        (torch.tensor([5, 2]), torch.tensor([7, 1, 3]), FUNCTIONS),
    ):
        effects = (expected(answer) - (0 if rival is None else expected(rival))).tolist()
        for function in functions:
            found = total_effects(function(model, PROMPT, TEXT, by=spans, answer=answer, rival=rival))
            assert found == pytest.approx(effects, abs=TOLERANCE)


@pytest.mark.one_in(3)
def test_a_prompt_behind_an_attached_bias_is_the_end_of_a_longer_prompt(model):
    first, by = tokens(6, 7), SPANS[1::2]
    longer, spans = torch.cat([first, PROMPT]), [(start + 6, stop + 6) for start, stop in by]
    for function in FUNCTIONS:
        with model.kv_bias(convert_prompt(model, first)):
            mine = function(model, PROMPT, TEXT, by=by, answer=5).query("unit >= 0")
        theirs = function(model, longer, TEXT, by=spans, answer=5).query("unit >= 0")
        if "prompt_position" in theirs:
            theirs = theirs[(theirs["part"] == "shift_state") | (theirs["prompt_position"] >= 6)]
        for column in {"total_effect", "knockout_effect", "swap", "converse", "whole"} & set(mine):
            assert mine[column].tolist() == pytest.approx(theirs[column].tolist(), abs=TOLERANCE)


def test_closed_positions_are_the_shorter_prompts():
    model = sharp(kv_shift=None)
    table = prompt_attribution(model, PROMPT, TEXT, by=SPANS, answer=5, positions="closed")
    whole = log_p(model, convert_prompt(model, PROMPT), 5)
    expected = [
        whole - log_p(model, convert_prompt(model, torch.cat([PROMPT[:start], PROMPT[stop:]])), 5) for start, stop in SPANS
    ]
    assert table["total_effect"].tolist() == pytest.approx(expected, abs=TOLERANCE)


def test_two_units_either_of_which_is_enough_are_found_together():
    """Leaving one out shows nothing of them."""

    def either(rows):
        return 6.0 * (rows[:, 3] | rows[:, 11]).double()

    n_units, found = 20, []
    for seed in range(8):
        kept = chosen_subsets(24, n_units, seed)
        gone = torch.eye(n_units, dtype=torch.bool)
        pairs = torch.stack([~(gone[u] | gone[v]) for u in range(n_units) for v in range(u)])
        lowest = pairs[int(fitted(kept, either(kept)[:, None])(pairs).argmin())]
        found.append(bool(~lowest[3] & ~lowest[11]))
    assert sum(found) >= 6


def test_fits_recover_sums_and_pairs():
    generator = torch.Generator().manual_seed(0)
    kept = chosen_subsets(40, 8, 0)
    every = torch.tensor([[int(b) for b in f"{n:08b}"] for n in range(256)], dtype=torch.bool)
    weights = torch.randn(8, generator=generator, dtype=torch.float64)

    def additive(rows):
        return rows.double() @ weights

    def with_pairs(rows):
        return additive(rows) + 3.0 * (rows[:, 2] & rows[:, 5]).double()

    sums = fitted(kept, additive(kept)[:, None])(every)[:, 0]
    assert (sums - additive(every)).std() < 0.05 * additive(every).std()
    pairs = fitted(kept, with_pairs(kept)[:, None])(every)[:, 0]
    intercept, found = lasso(kept.double(), with_pairs(kept), 0.0)
    straight = intercept + every.double() @ found
    error = (pairs - with_pairs(every)).std()
    assert error < 0.15 * with_pairs(every).std()
    assert error < 0.5 * (straight - with_pairs(every)).std()
    intercept, found = lasso(kept.double(), additive(kept), 0.0)
    assert float(intercept) == pytest.approx(0.0, abs=1e-6)
    assert found.tolist() == pytest.approx(weights.tolist(), abs=1e-6)


def test_the_logit_of_a_probability_is_what_its_sigmoid_is_of():
    """Up to the rounding of the probability, which leaves less and less of a number near 1."""
    logits = torch.linspace(-30, 15, 46, dtype=torch.float64)
    torch.testing.assert_close(logit_of(logsigmoid(logits)), logits, rtol=1e-9, atol=1e-9)  # e^15 roundings of 1e-16 at most


def test_tokens_that_saturate_one_by_one_are_fitted_one_by_one():
    """Of the first token one unit is enough, of the second another; the sum of their log-probabilities is no sum over units."""
    kept = chosen_subsets(32, 12, 0)
    fresh = torch.rand(400, 12, generator=torch.Generator().manual_seed(1)) < 0.5

    def logits(rows):
        own = rows.double()
        return torch.stack([8 * own[:, 2] - 4 + own[:, 7], 9 * own[:, 5] - 2 + own[:, 8] - own[:, 9]], dim=1)

    def error(found, true):
        return (found - true).square().mean() ** 0.5 / true.std()

    true = logsigmoid(logits(fresh)).sum(dim=1)
    by_token = in_sum(fitted(kept, logits(kept)), logsigmoid)(fresh)
    at_once = in_sum(fitted(kept, logit_of(logsigmoid(logits(kept)).sum(dim=1))[:, None]), logsigmoid)(fresh)
    assert error(by_token, true) < 0.1
    assert error(by_token, true) < 0.5 * error(at_once, true)


def test_what_does_not_move_is_predicted_to_stay():
    kept = chosen_subsets(16, 6, 0)
    still = torch.full((16, 1), -2.0, dtype=torch.float64)
    moving = kept[:, :1].double()
    assert fitted(kept, still)(~kept).tolist() == [[-2.0]] * 16
    both = fitted(kept, torch.cat([still, moving], dim=1))(~kept)
    assert both[:, 0].tolist() == [-2.0] * 16
    torch.testing.assert_close(both[:, 1:], fitted(kept, moving)(~kept), rtol=1e-9, atol=1e-9)


def test_scores_of_tokens_add_up(model):
    question = Question.of(model, PROMPT, TEXT, torch.tensor([5, 2, 7]))
    prompts = question.rows([[], *([span] for span in SPANS)])
    by_token, whole = question.token_scores(prompts), question.scores(prompts)
    assert by_token.shape == (len(SPANS) + 1, 3)
    torch.testing.assert_close(by_token.sum(dim=1), whole, rtol=1e-11, atol=1e-11)


def test_the_kernel_of_pairs_is_the_sum_over_pairs():
    generator = torch.Generator().manual_seed(0)
    x, y = (2.0 * torch.randint(0, 2, (rows, 5), generator=generator).double() - 1 for rows in (3, 4))
    width = torch.rand(5, generator=generator, dtype=torch.float64)
    term = width * x[:, None] * y  # row, other, unit
    expected = sum(term[..., u] * term[..., v] for v in range(5) for u in range(v))
    torch.testing.assert_close(over_pairs((x * width) @ y.T, width), expected, rtol=1e-12, atol=1e-12)


def test_a_method_is_an_object_and_its_name_a_shorthand():
    model = sharp()
    by_name = prompt_attribution(model, PROMPT, TEXT, by=SPANS, answer=5, method="interactions")
    by_object = prompt_attribution(model, PROMPT, TEXT, by=SPANS, answer=5, method=InteractionFit(n_subsets=32))
    pd.testing.assert_frame_equal(by_name, by_object)
    loo = prompt_attribution(model, PROMPT, TEXT, by=SPANS, answer=5)
    closest = by_name["total_effect"].corr(loo["total_effect"])
    assert closest > 0.5


def test_unrelated_units_are_seldom_significant():
    model = sharp()
    others = [tokens(11, seed) for seed in range(20, 60)]
    question = Question.of(model, PROMPT, TEXT, 5)
    units = prompt_units(model, PROMPT, SPANS)
    null = Null(99, others, seed=0).effects(question, units)
    fresh = Null(200, others, seed=1).effects(question, units)
    found = (p_values(fresh, null) <= 0.05).float().mean()
    assert found <= 0.05 + 3 * (0.05 * 0.95 * (1 / 200 + 1 / 99)) ** 0.5  # three standard errors of both draws
    assert float(p_values(torch.tensor([0.0]), null)) == 1.0
    assert float(p_values(torch.tensor([2.0]), torch.tensor([1.0, -2.0, 3.0]))) == (1 + 2) / (1 + 3)  # one is as large


@pytest.mark.slow
def test_prompts_of_unrelated_units_seldom_have_a_significant_one():
    """Prompts of random tokens, and a null of random tokens: each set of three units is drawn as the null's are. Without the
    adjustment one in seven prompts has a unit with p <= 0.05."""
    model, n = sharp(n_layers=1, kv_shift=None), 100
    for name, parameter in model.named_parameters():
        if "W_" not in name:
            parameter.fill_(float(name.endswith(".w")))
    spans = [(0, 4), (4, 8), (8, 12)]
    any_adjusted = any_single = 0
    for seed in range(n):
        others = [tokens(4, 10_000 * (seed + 1) + i) for i in range(60)]
        question = Question.of(model, tokens(12, seed), TEXT, 5)
        units = prompt_units(model, question.prompt, spans)
        p = p_values(LeaveOneOut().explain(question, units).effects, Null(prompts=others, seed=seed).effects(question, units))
        any_adjusted += bool((holm(p) <= 0.05).any())
        any_single += bool((p <= 0.05).any())
    assert any_adjusted / n <= 0.05 + 2 * (0.05 * 0.95 / n) ** 0.5
    assert any_single / n > 0.08


def test_holms_adjustment():
    """By hand: 0.01 * 4, 0.02 * 3, 0.025 * 2 raised to the one before, 0.5 * 1."""
    p = torch.tensor([0.025, 0.01, 0.5, 0.02], dtype=torch.float64)
    assert holm(p).tolist() == pytest.approx([0.06, 0.04, 0.5, 0.06])
    assert holm(torch.tensor([0.4, 0.9])).tolist() == pytest.approx([0.8, 0.9])
    assert holm(torch.full((2,), float("nan"))).isnan().all()
    for n in (1, 3, 7, 50):
        assert n / (1 + enough_for(n)) <= 0.05 < n / (1 + enough_for(n) - 2)  # the smallest adjusted p-value


def test_units_of_text():
    model = HookedKVTransformer.from_zoo("facts-linear")
    prompt = model.to_tokens("The drum stands in the cellar. Pavel has a parrot.")[0]
    sentences = prompt_units(model, prompt, "sentence")
    assert [unit.text.strip() for unit in sentences] == ["The drum stands in the cellar.", "Pavel has a parrot."]
    assert [(unit.start, unit.stop) for unit in sentences] == [(1, 8), (8, 13)]
    words = prompt_units(model, prompt, "word")
    assert [unit.text.strip() for unit in words][:3] == ["The", "drum", "stands"]
    assert len(prompt_units(model, prompt, "token")) == len(prompt) - 1
    with pytest.raises(KVLensError, match="BOS"):
        prompt_units(model, prompt, [(0, 3)])
    with pytest.raises(KVLensError, match="nothing but BOS"):
        prompt_units(model, prompt[:1], "token")


@pytest.mark.parametrize("name", ["facts-linear", "facts-gpt2"])
def test_the_sentence_that_states_the_fact_is_named(name):
    model = HookedKVTransformer.from_zoo(name)
    story = "The drum stands in the cellar. Pavel has a parrot. At night Kaya feeds a donkey."
    table = prompt_attribution(model, story, "Which animal does Pavel keep? Pavel keeps a", answer="parrot", null=Null(40))
    assert table["total_effect"].idxmax() == 1
    assert table["significant"].tolist() == [False, True, False]
    assert table["total_effect"][1] > 3


CITED, BEHIND_CITED, CITED_ANSWER = tokens(15, 1), tokens(4, 2), tokens(3, 3)
CITED_SPANS = [(first, first + 3) for first in range(0, 15, 3)]


@pytest.mark.parametrize(("penalty", "n_weights"), [(0.0, 6), (0.4, 2)])
def test_the_lasso_is_at_its_optimum(penalty, n_weights):
    """The gradient of |y - b - a w|^2 / (2 n) is 0 for b, -penalty sign(w) where w is not 0, and at most penalty elsewhere."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(40, 7, generator=generator) < 0.5).double()
    x[:, 4] = 1.0  # never changes
    y = 5 + 3 * x[:, 0] - x[:, 2] + 0.3 * torch.randn(40, generator=generator, dtype=torch.float64)
    intercept, weights = lasso(x, y, penalty)
    scale = x.std(dim=0, correction=0)
    a = (x - x.mean(dim=0)) / scale.where(scale > 0, 1.0)
    left = y - intercept - x @ weights
    gradient, on = -(a.T @ left) / 40, weights != 0
    assert abs(float(left.mean())) < 1e-11 and not on[4]
    assert (gradient[on] + penalty * weights[on].sign()).abs().max() < 1e-8  # the descent ends where weights move by 1e-9
    assert (gradient[~on].abs() <= penalty + 1e-8).all()
    assert int(on.sum()) == n_weights


def package_solver(penalty):
    """The package's solver from its own file: importing the package downloads data."""
    pytest.importorskip("sklearn", reason="the package's solver needs scikit-learn: pip install context-cite")
    package = importlib.util.find_spec("context_cite")
    if package is None:
        pytest.skip("the authors' package is not installed: pip install context-cite")
    path = Path(package.submodule_search_locations[0]) / "solver.py"
    spec = importlib.util.spec_from_file_location("context_cite_solver", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.LassoRegression(lasso_alpha=penalty)


@pytest.mark.parametrize("penalty", [ContextCite.penalty, 0.1])
@pytest.mark.parametrize("answer", [CITED_ANSWER[:1], CITED_ANSWER], ids=["one token", "three tokens"])
def test_the_fit_is_that_of_the_authors_package(answer, penalty):
    solver = package_solver(penalty)
    model = sharp(attention="softmax", kv_shift=None)
    question = Question.of(model, CITED, BEHIND_CITED, answer)
    units = [Unit("", "", *span) for span in CITED_SPANS]
    found = ContextCite(n_subsets=24, penalty=penalty).explain(question, units)
    kept = torch.rand(24, len(units), generator=torch.Generator().manual_seed(0)) < 0.5
    logits = logit_of(subset_scores(question, units, kept))
    weight, bias = (torch.as_tensor(x).double() for x in solver.fit(kept.numpy(), logits.numpy(), len(answer)))
    every = torch.tensor([[n >> u & 1 for u in range(len(units))] for n in range(2 ** len(units))], dtype=torch.bool)
    ours, theirs = logit_of(found.predict(every)), bias + every.double() @ weight
    # scikit-learn ends where a sweep moves no weight by more than 1e-4 of the largest; one leaves less than 0.9 of the error
    assert (ours - theirs).abs().max() < 1e-3 * weight.abs().max()
    assert (weight.abs() > 0.1).sum() > 1
