"""Verdicts, sets, statements and flows against slow forms: a second verdict, exhaustion over all sets, hooked passes."""

import copy
import functools
import itertools

import pandas as pd
import pytest
import torch
import transformers as tf
from analysis_models import VARIANTS, random_model, tokens
from bridge_models import some_tokens
from kvlens.analyses.attribution import by_head
from kvlens.analyses.attribution.answers import Question
from kvlens.analyses.attribution.by_head import HeadExchange
from kvlens.analyses.attribution.by_position import PositionExchange
from kvlens.analyses.attribution.cost import CAP, expected_cost
from kvlens.analyses.attribution.explain import SHIFT_STATE, Explained, explain
from kvlens.analyses.attribution.flow import answer_flow, parts_drawn
from kvlens.analyses.attribution.order import first_order, head_orders
from kvlens.analyses.attribution.search import ONE_BY_ONE, Asked, Runs, sets_of
from kvlens.analyses.attribution.terms import Terms
from kvlens.analyses.attribution.verdicts import Outcomes
from second_opinion import HookedPasses, TransformersPasses, again, second_verdict
from tiny_hf import tiny_hf_model

from kvlens import HookedKVTransformer, KVShiftConfig, KVTransformerBridge, convert_prompt
from kvlens.report.example import example_for
from kvlens.zoo import source_of

PROMPT, TEXT = tokens(13, 1), tokens(4, 2)
SPANS = [(0, 3), (3, 5), (5, 9), (9, 13)]
MODELS = {
    "linear": {},
    "linear grouped": dict(n_heads=6, d_model=36, n_key_value_heads=2, kv_shift=KVShiftConfig(window=2, queries=True)),
    "softmax": dict(attention="softmax", kv_shift=None),
    "softmax shift": dict(attention="softmax", kv_shift=KVShiftConfig(window=2, queries=True)),
}
ROUNDING = 1e-9
"""float64, log-probabilities of size 10 behind two layers whose weights are five times as large as usual."""
CLOSE = 1e-4
"""float32: log-probabilities of some tens, whose roundings add up to less through two or three layers."""


@pytest.mark.parametrize(("answer", "rival"), [(None, None), (None, 7), (4, None), ("first two", None)])
def test_verdicts_are_those_of_the_definition(answer, rival):
    """On logits that move at random, so that all verdicts occur."""
    generator = torch.Generator().manual_seed(0)
    seen: dict[str, int] = {}
    for _ in range(400):
        n = 2 if answer == "first two" else 1
        whole = (1.5 * torch.randn(n, 9, generator=generator, dtype=torch.float64)).log_softmax(dim=-1)
        now = (whole + torch.randn(5, n, 9, generator=generator, dtype=torch.float64)).log_softmax(dim=-1)
        words = whole.argmax(dim=-1) if answer in (None, "first two") else torch.tensor([answer])
        if rival in words.tolist():
            continue
        outcomes = _outcomes_on(whole, words, rival)
        for outcome, row in zip(outcomes.under(lambda text, n_last, now=now: now), now, strict=True):
            verdict = outcomes.verdict(outcome)
            assert verdict.at_bound or verdict.name == second_verdict(whole, row, words.tolist(), rival)
            seen[verdict.name] = seen.get(verdict.name, 0) + 1
    assert set(seen) >= {"lost", "kept"} and len(seen) >= 3


@functools.cache
def one_layer():
    return random_model(n_layers=1)


def _outcomes_on(whole, words, rival):
    question = Question.of(one_layer(), PROMPT, TEXT, words, rival)
    outcomes = Outcomes(question)
    outcomes.__dict__["_whole_log_p"] = whole
    return outcomes


def test_within_a_thousandth_of_a_nat_a_verdict_is_at_the_bound():
    whole = torch.tensor([[0.6, 0.3, 0.1]], dtype=torch.float64).log()
    for share, at_bound, name in ((0.3 + 1e-4, True, "changed"), (0.3 - 1e-4, True, "lost"), (0.25, False, "lost")):
        now = torch.tensor([[[share, 0.9 - share, 0.1]]], dtype=torch.float64).log()
        outcomes = _outcomes_on(whole, torch.tensor([0]), None)
        found = outcomes.verdict(outcomes.under(lambda text, n, now=now: now)[0])
        assert (found.name, found.at_bound) == (name, at_bound)


def exchanges(model, span=SPANS[1]):
    question = Question.of(model, PROMPT, TEXT)
    return Outcomes(question), HeadExchange(
        question, convert_prompt(model, PROMPT), convert_prompt(model, question.rows([[span]]))
    )


@pytest.mark.parametrize("name", MODELS)
def test_the_order_is_the_exact_change_of_z_times_the_gradient(name):
    """Against one part at a time, by finite differences of the score along dz, with dz from a pass in which every layer's input
    is that of the unchanged pass."""
    model = random_model(**MODELS[name])
    outcomes, exchange = exchanges(model)
    products = first_order(outcomes, exchange, at_other=False)
    answer, mask = int(outcomes.question.answer), torch.ones_like(TEXT[None])

    def run(bias, hooks, see=()):
        """log p(answer), and what passes some hook points."""
        seen = {}
        looks = [(name, lambda x, hook: seen.update({hook.name: x.clone()})) for name in see]
        with model.kv_bias(bias), torch.no_grad():
            logits = model.run_with_hooks(TEXT[None], attention_mask=mask, fwd_hooks=[*hooks, *looks])
        return float(logits[0, -1].log_softmax(-1)[answer]), seen

    names = [f"blocks.{layer}.hook_resid_pre" for layer in range(2)]
    of_z = [f"blocks.{layer}.attn.hook_z" for layer in range(2)]
    _, own = run(exchange.own, [], [*names, *of_z])
    held = [(name, lambda x, hook: own[hook.name]) for name in names]
    step = 1e-5
    for index in range(0, len(exchange.parts), 3):
        one = torch.zeros(1, len(exchange.parts), dtype=torch.bool)
        one[0, index] = True
        _, changed = run(exchange.biases(one), held, of_z)
        z = of_z[exchange.parts[index].layer]
        move = step * (changed[z] - own[z])
        up, down = (run(exchange.own, [(z, lambda x, hook, by=by: x + by)])[0] for by in (move, -move))
        # second-order central differences: the error is step^2 times a third derivative, and rounding 1e-15 / step
        assert float(products[index]) == pytest.approx(-(up - down) / (2 * step), rel=1e-5, abs=1e-8)


def exhausted(runs, keeping) -> int | None:
    """The size of a smallest set, by running all of them."""
    every = frozenset(range(runs.n_parts))
    for size in range(runs.n_parts + 1):
        sets = [every - set(parts) if keeping else set(parts) for parts in itertools.combinations(every, size)]
        runs.of(sets)
        if any(runs.verdict(each).name == ("kept" if keeping else "lost") for each in sets):
            return size
    return None


def test_sets_are_as_small_as_any():
    """Eight heads of random models, whose answers rest on several heads: against all 256 sets, and none near is stronger."""
    sizes, weaker = [], 0
    for seed in range(12):
        model = random_model(n_heads=4, attention="softmax" if seed % 2 else "linear", kv_shift=None, seed=seed)
        for span in SPANS:
            outcomes, exchange = exchanges(model, span)
            n = len(exchange.parts)
            everything = Runs(outcomes, n, exchange.read, 10_000)
            if everything.outcomes.verdict(everything.of([range(n)])[0]).name != "lost":
                continue
            for keeping, order in zip((False, True), head_orders(outcomes, exchange), strict=True):
                runs = Runs(outcomes, n, exchange.read, 120)
                found, _ = sets_of(runs, order, keeping=keeping)
                expected = exhausted(everything, keeping)
                assert runs.left >= 0 and (not found) == (expected is None)
                if found:
                    sizes.append((len(found[0].parts), expected))
                    assert not found[0].smallest or len(found[0].parts) == expected
                    assert all(not set(a.parts) & set(b.parts) for a, b in itertools.combinations(found, 2))
                    named, asked = set(found[0].parts), Asked(everything, keeping, frozenset(range(n)))
                    near = [(named | {new}) - {old} for old in named for new in set(range(n)) - named]
                    _, *of_near = asked.holds([named, *near])
                    holding = [each for each, holds in zip(near, of_near, strict=True) if holds]
                    weaker += len(holding)
                    assert all(asked.effect(each) <= asked.effect(named) + CLOSE for each in holding)
    assert len(sizes) >= 20 and any(size > 1 for size, _ in sizes) and weaker
    assert sum(size == expected for size, expected in sizes) >= 0.98 * len(sizes)


def test_no_set_that_was_run_is_smaller_than_the_first_that_is_named():
    """Wherever the cap ends the search; single parts were run before, half of the time."""
    for seed, keeping in itertools.product(range(6), (False, True)):
        outcomes, exchange = exchanges(random_model(attention="softmax", kv_shift=None, seed=seed), SPANS[seed % 4])
        n = len(exchange.parts)
        for most in (3, 9, 17, 40):
            runs, every = Runs(outcomes, n, exchange.read, 2 * n), set(range(n))
            if outcomes.verdict(runs.of([every])[0]).name != "lost":
                continue
            if seed % 2 == 0:
                runs.of([every - {part} if keeping else {part} for part in range(n)])
            runs.left = most
            found, _ = sets_of(runs, range(n), keeping=keeping)
            holding = [each for each in runs.found if runs.verdict(each).name == ("kept" if keeping else "lost")]
            smallest = min((size for each in holding if (size := n - len(each) if keeping else len(each))), default=n)
            assert len(found[0].parts) == smallest if found else smallest > ONE_BY_ONE


def test_a_search_ends_at_its_cap_and_says_so():
    outcomes, exchange = exchanges(random_model(kv_shift=None))
    runs = Runs(outcomes, len(exchange.parts), exchange.read, 0)
    assert sets_of(runs, range(len(exchange.parts)), keeping=False) == ([], False)


@pytest.mark.parametrize(("name", "spans"), [*zip(MODELS, [SPANS, [(2, 9)]] * 2, strict=True)])
def test_an_explanation_reads_no_more_than_its_cap(name, spans):
    model = random_model(**MODELS[name])
    found = explain(model, PROMPT, TEXT, by=spans)
    assert found.n_passes <= len(spans) + 2 + CAP
    expected = expected_cost(model, PROMPT, TEXT, by=spans)
    assert expected.tokens == (len(spans) + 2 + CAP) * 17 and expected.seconds > 0


def test_all_single_parts_that_were_run_and_lose_the_answer_are_breaking_sets(monkeypatch):
    """Also where the cap leaves no room to run all of them."""
    n_run, n_named = set(), 0
    for cap, seed in itertools.product((12, 24, CAP), range(3)):
        monkeypatch.setattr("kvlens.analyses.attribution.explain.CAP", cap)
        found = explain(random_model(attention="softmax", kv_shift=None, seed=seed), PROMPT, TEXT, by=SPANS)
        if not found.cause:
            continue
        n_run.add(int(found.heads["p_exchanged"].notna().sum()))
        for about in ("heads", "positions"):
            parts = getattr(found, about)
            lost = parts[parts["verdict_exchanged"] == "lost"].sort_values("p_exchanged")["code"].tolist()
            assert [each for each in found.sets(about, "breaking") if len(each) == 1] == [[code] for code in lost]
            n_named += len(lost)
    assert n_named and max(n_run) == len(found.heads) > min(n_run)


@pytest.mark.parametrize("name", ["facts-linear", "facts-gpt2"])
def test_a_fact_that_stands_twice_is_a_breaking_pair(name):
    model = HookedKVTransformer.from_zoo(name)
    story = "Kaya feeds a donkey. The drum stands in the cellar. Kaya feeds a donkey. Pavel has a parrot."
    found = explain(model, story, " Which animal does Kaya keep? Kaya keeps a")
    assert found.answer == "donkey" and found.sets("units", "breaking")[0] == ["0", "2"] and found.cause == (0, 2)
    assert {row.verdict for row in found.statements.query("role == 'each'").itertuples()} == {"kept"}


@pytest.mark.parametrize("name", ["facts-linear", "facts-gpt2", "facts-hops-linear", "facts-hops-gpt2"])
def test_statements_hold_when_they_are_run_again_over_prompt_and_text(name):
    """All of them, by masks and keys and values that are written over; without a bias."""
    model, example = HookedKVTransformer.from_zoo(name), example_for(name)
    prompt, text = model.to_tokens(example.prompt)[0], model.to_tokens(example.text, prepend_bos=False)[0]
    found = explain(model, prompt, text)
    spans = [*zip(found.units["start"], found.units["stop"], strict=True)]
    _hold(found, HookedPasses(model, prompt, text, spans))


def sharp(family):
    """Random weights that are large enough for something to be lost."""
    plain = tiny_hf_model(family)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.mul_(4 if "proj" in name or "lm_head" in name else 1)
    return plain, KVTransformerBridge.boot_transformers(copy.deepcopy(plain))


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen3_5", "bamba"])
def test_exchanges_are_those_of_transformers_own_model(family):
    """Of random sets of heads, states and convolutions, and of random positions, in Transformers' attention and recurrences."""
    plain, model = sharp(family)
    prompt, text, span, generator = some_tokens(18, seed=0), some_tokens(5, seed=1), (4, 9), torch.Generator().manual_seed(0)
    question, passes = Question.of(model, prompt, text), TransformersPasses(plain, prompt, text, [span])
    bias, deleted = convert_prompt(model, prompt), question.rows([[span]])
    of_heads = HeadExchange(question, bias, convert_prompt(model, deleted))
    of_positions = PositionExchange(question, Terms.of_prompt(model, prompt), deleted)
    places = [SHIFT_STATE if part < 0 else str(part) for part in of_positions.parts]
    changes = []
    for exchange, codes in ((of_heads, [part.code for part in of_heads.parts]), (of_positions, places)):
        chosen = torch.rand(8, len(codes), generator=generator) < 0.3
        found = exchange.read(chosen)(text, 1)[:, 0].log_softmax(-1)
        for row, now in zip(chosen, found, strict=True):
            named = [code for code, change in zip(codes, row.tolist(), strict=True) if change]
            sets = (named, []) if exchange is of_heads else ([], named)
            again = passes.exchanged([0], *sets).log_softmax(-1)
            torch.testing.assert_close(now.double().exp(), again.exp(), atol=CLOSE, rtol=0)
            changes.append(float((now - found[0]).exp().sub(1).abs().max()))
    assert sum(change > 0.05 for change in changes) > len(changes) / 2


@torch.no_grad()
def test_statements_on_a_trained_hybrid_hold_in_transformers_own_model():
    model, example = KVTransformerBridge.from_zoo("facts-hybrid"), example_for("facts-hybrid")
    plain = tf.AutoModelForCausalLM.from_pretrained(source_of("facts-hybrid"), dtype=torch.float32)
    prompt, text = model.to_tokens(example.prompt)[0], model.to_tokens(example.text, prepend_bos=False)[0]
    found = explain(model, prompt, text)
    assert found.cause
    _hold(found, TransformersPasses(plain, prompt, text, [*zip(found.units["start"], found.units["stop"], strict=True)]))


def _hold(found, passes):
    with torch.no_grad():
        whole = passes.without([]).log_softmax(dim=-1)[None]
        for row in found.statements.itertuples():
            now = again(passes, row, len(found.units)).log_softmax(dim=-1)[None]
            (answer,) = found.answer_tokens
            assert row.p_after == pytest.approx(float(now[0, answer].exp()), abs=CLOSE), row
            assert row.at_bound or row.verdict == second_verdict(whole, now, [answer]), row


ANSWER, RIVAL = 5, 7
OF_FLOWS = {name: MODELS[name] for name in ("linear", "softmax shift")} | {"linear, no shift": VARIANTS["rope before"]}


def drawn(heads, positions, cause=(1,)) -> Explained:
    """An explanation whose sets are these heads and positions."""
    sets = {"heads": heads, "positions": positions}
    statements = [{"about": about, "role": "breaking", "parts": "+".join(codes)} for about, codes in sets.items()]
    units = pd.DataFrame(SPANS, columns=["start", "stop"]).assign(unit_text="")
    tables = [pd.DataFrame(statements), units, *(pd.DataFrame({"code": sorted(codes)}) for codes in sets.values())]
    p = (0.5, None, 0.5)
    return Explained("5", "7", p, p, *tables, None, cause, frozenset(), (ANSWER,), (RIVAL,))


@pytest.mark.parametrize("name", OF_FLOWS)
def test_every_row_of_a_flow_is_what_a_hooked_pass_over_prompt_and_text_says(name, monkeypatch):
    """Position 4 is one of the removed unit's."""
    monkeypatch.setattr(by_head, "NUMBERS_PER_PASS", 1)  # four rows at once
    model = random_model(**OF_FLOWS[name])
    shifts = model.cfg.kv_shift is not None
    found = drawn(("0.1", "1.s0") if shifts else ("0.1", "1.2"), ("4", SHIFT_STATE if shifts else "9"))
    table = answer_flow(model, PROMPT, TEXT, found)
    assert len(table) == 2**4 + 1 + 2 + 2 + 2 * 4  # switches; all; each head alone, each position alone; edges
    assert not table.duplicated(["heads", "positions", "inside", "others"]).any()
    passes = HookedPasses(model, PROMPT, TEXT, SPANS)
    before = passes.without([]).log_softmax(dim=-1)[[ANSWER, RIVAL]]
    for row in table.itertuples():
        heads, positions = (codes.split("+") if codes else [] for codes in (row.heads, row.positions))
        read = passes.exchanged(found.cause, heads, positions, inside=row.inside, others=row.others)
        said = read.log_softmax(dim=-1)[[ANSWER, RIVAL]]
        assert row.effect == pytest.approx(float(before[0] - said[0]), abs=ROUNDING), row
        assert row.p_answer == pytest.approx(float(said[0].exp()), abs=ROUNDING)
        assert row.p_rival == pytest.approx(float(said[1].exp()), abs=ROUNDING)
        first = int(read.argmax())
        assert pd.isna(row.says) == (first == ANSWER)
        if first != ANSWER:
            assert row.p_says == pytest.approx(float(read.softmax(dim=-1)[first]), abs=ROUNDING)
    assert table["effect"].abs().max() > 0.01


def test_where_nothing_is_lost_no_flow_is_measured():
    assert len(answer_flow(random_model(), PROMPT, TEXT, drawn(("0.1",), ("4",), cause=()))) == 0


def test_the_parts_drawn_are_those_of_the_sets_and_not_too_many():
    every = tuple(f"{layer}.{head}" for layer in (1, 0) for head in range(4))
    heads, positions = parts_drawn(drawn(every, ("4", "7")))
    assert len(heads) + len(positions) == 7 and positions == ["4", "7"] and heads == sorted(heads)
