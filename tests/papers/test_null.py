"""Every verdict of every experiment, on runs that differ by nothing but noise, and on runs with a known difference.

The null: labels are given to runs of one model. A verdict may come in at most one of twenty cases. The power: 80 % of cases,
for the difference that is shown with each verdict, in spreads (standard deviations over seeds) of single runs. And the side:
every claim holds for a large difference of the claimed sign, and fails for one of the other sign.

All draws go through an experiment's own `compare` at once, as runs of many seeds; the significance test is then applied to six
(or as many as the experiment takes) at a time.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from unittest import mock

import numpy as np
import pandas as pd
import pytest

from kvlens.papers import EXPERIMENTS
from kvlens.papers.dual import bert_variants, dual_heads, dual_layer, dual_variants, random_features
from kvlens.papers.harness import significance
from kvlens.papers.harness.learned import Cell, train_cells
from kvlens.papers.harness.significance import LEVEL, share_above, sides
from kvlens.papers.iclca import compaction, gpt2_text, softmax_conversion, stored_bias, trainable_bias, weights_to_prompt
from kvlens.papers.kvsa import (
    arithmetic,
    hops,
    induction_depth,
    induction_heads,
    induction_width,
    learning_rate,
    ngram,
    scaling,
    variants,
)
from kvlens.papers.lecture.function_classes import Measured
from kvlens.tasks import make_task

N_DRAWS = 1000
MOST = 0.05  # no allowance: at a level of 2 %, 1,000 draws that see 5 % are five standard errors off
LEAST = 0.8
MIDDLE, SPREAD = 0.5, 0.02

SKEWED = "one in ten fails"
NOISE: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal": lambda g, n: g.normal(MIDDLE, SPREAD, n),
    "learned or not": lambda g, n: np.where(g.random(n) < 0.5, 0.98, 0.3) + g.normal(0, 1e-3, n),
    SKEWED: lambda g, n: np.where(g.random(n) < 0.1, 0.3, 0.98) + g.normal(0, 5e-3, n),
}


@dataclass
class Runs:
    """Noise by the thousand: `runs(lead)` gives one value a run, ``lead`` times the known difference above the others."""

    noise: str
    difference: float
    n_seeds: int
    generator: np.random.Generator
    n_draws: int = N_DRAWS

    def __call__(self, lead: float = 0.0) -> np.ndarray:
        return NOISE[self.noise](self.generator, self.n_draws * self.n_seeds) + SPREAD * self.difference * lead

    def table(self, values: np.ndarray, **columns: object) -> pd.DataFrame:
        return pd.DataFrame({"seed": np.arange(len(values)), "accuracy": values, **columns})


@dataclass(frozen=True)
class Case:
    """An experiment's comparisons of made-up runs.

    Attributes:
        experiment: its name.
        compare: runs -> comparisons.
        difference: what the power is measured at, in spreads of single runs.
        verdicts: which of the tests' results have that difference, by number; None for all.
        n_seeds: that the experiment takes.
        against: of these, the claims that the known difference speaks against.
        exact: comparisons with a verdict that is not the significance test's: identities that hold to rounding.
        paired: whether all claims are about differences of runs, which scatter symmetrically for any distribution; where
            single runs are compared with a bound, the noise itself must be symmetric.
    """

    experiment: str
    compare: Callable[[Runs], Iterable]
    difference: float = 3.0
    verdicts: tuple[int, ...] | None = None
    n_seeds: int = 6
    against: tuple[int, ...] = ()
    exact: int = 0
    paired: bool = True


def pair(runs: Runs) -> dict[str, np.ndarray]:
    return {"plain": runs(), "KV shift": runs(lead=1)}


def stacked(tables: Iterable[pd.DataFrame]) -> pd.DataFrame:
    return pd.concat(tables, ignore_index=True)


def hops_runs(runs):
    return hops.compare(
        stacked(runs.table(v, model=m, n_layers=2, k=k, chance=0.25) for m, v in pair(runs).items() for k in (1, 2)), {}
    )


def ngram_runs(runs):
    by_step = ((m, v, step) for m, v in pair(runs).items() for step in (10, 20))
    rows = stacked(runs.table(v, model=m, size="s", chance=0.01, step=s, split="heldout") for m, v, s in by_step)
    return ngram.compare(rows, {})


def arithmetic_runs(runs):
    fixed = dict(row="r", stands_for="Tr12-Te15", max_ops=3, test_ops=4, chance=0.01)
    return arithmetic.compare(
        stacked(runs.table(v, model=m, n_ops=n, **fixed) for m, v in pair(runs).items() for n in (3, 4)), {}
    )


def width_runs(runs):
    values = {induction_width.SHIFT_1: runs(), induction_width.PLAIN_2: runs(lead=1)}
    values |= {label: runs(lead=-1) for label in induction_width.PLACES}
    rows = stacked(runs.table(v, model=m, d_model=8) for m, v in values.items())
    return [*induction_width.compare(rows.assign(steps=rows["accuracy"]), 10**6), *induction_width.compare_places(rows)]


def depth_runs(runs):
    """Steps to the goal, and accuracies at the end that scatter around it (the three claims with a bound)."""
    leads = {induction_depth.SHIFT_1: 0.75, induction_depth.PLAIN_2: 0.75, induction_depth.PLAIN_1: -0.75}
    ends = {model: runs(lead=lead) for model, lead in leads.items()}
    ends = {m: v - MEANS[runs.noise] + induction_depth.LEARNED for m, v in ends.items()}
    few, deep = (dict(compared=name, law="first repeat") for name in induction_depth.COMPARED)
    curves = stacked(runs.table(v, model=m, step=10, split="heldout", **few) for m, v in ends.items())
    fast = ((induction_depth.SHIFT_1, 1.0, few), (induction_depth.PLAIN_2, 0.0, few), (induction_depth.PLAIN_1, 0.0, few),
            (induction_depth.PLAIN_2, 0.0, deep), (induction_depth.PLAIN_4, -1.0, deep))  # fmt: skip
    steps = stacked(
        runs.table(runs(lead), model=m, **own).assign(steps=lambda t: 500 - 100 * t["accuracy"]) for m, lead, own in fast
    )
    return induction_depth.compare(curves, steps, 10_000, None, None)


def head_runs(runs):
    """Two heads a model: scores of the one that starts near (0, 1) and of the other; then of one and of an idle one."""

    def heads(label, near, other):
        by_start = ((near, 1.0), (other, 0.0))
        return stacked(runs.table(v, model=label, alpha_1=0.0, beta_1=b).assign(score=v) for v, b in by_start)

    one, two, plain = induction_heads.MODELS
    yield induction_heads.compare_starts(heads(one, runs(lead=1), runs()))
    for label in (one, two):
        models = ((label, runs(lead=1)), (plain, runs()))
        yield induction_heads.compare_gaps(stacked(heads(m, v, 0 * v) for m, v in models), label)


def compare_rates(runs):
    return [*learning_rate.compare(runs, None), *learning_rate.compare_stability(runs, None)]


def rate_runs(runs):
    return compare_rates(
        stacked(runs.table(v, model=m, learning_rate=1e-2, counted=-v, diverged=False) for m, v in pair(runs).items())
    )


def diverging_runs(runs):
    """A run diverges where its noise is below the middle of the two models."""
    bar = MIDDLE + SPREAD * runs.difference / 2
    rates = ((m, rate) for m in ("plain", "KV shift") for rate in (1e-3, 1e-2))
    values = {key: runs(lead=key[0] == "KV shift") for key in rates}
    return compare_rates(
        stacked(
            runs.table(v, model=m, learning_rate=rate, counted=4.0, diverged=(v < bar) & (rate > 1e-3))
            for (m, rate), v in values.items()
        )
    )


def scaling_runs(runs):
    """The gain at each of two sizes, and each kind's fall with size."""
    leads = {("plain", "b"): 1, ("KV shift", "b"): 2, ("plain", "a"): 0, ("KV shift", "a"): 1}  # in any order
    return compare_scaling(runs, leads)


def growing_gain_runs(runs):
    return compare_scaling(runs, {("plain", "b"): 0, ("KV shift", "b"): 1, ("plain", "a"): 0, ("KV shift", "a"): 0})


def compare_scaling(runs, leads):
    n = {"a": 100, "b": 1000}
    losses = {key: 50 - runs(lead) for key, lead in leads.items()}
    finals = stacked(
        runs.table(v, model=m, size=size, non_embedding=n[size], heldout_loss=v) for (m, size), v in losses.items()
    )
    steps = {"a": 100, "b": 200}  # the same losses once more as those of one size at two steps
    course = stacked(
        runs.table(v, model=m, size="a", non_embedding=9, step=steps[at], split="heldout", loss=v)
        for (m, at), v in losses.items()
    )
    return [*scaling.compare(finals, {}), *scaling.compare_sizes(finals, {}), scaling.compare_course(course, {})]


def variants_runs(runs):
    losses = {m: -runs(lead=m == variants.FREE) for m in variants.VARIANTS}
    return variants.compare(stacked(runs.table(v, model=m, heldout_loss=v) for m, v in losses.items()), {})


def bias_runs(runs):
    values = {trainable_bias.WITHOUT: runs(), trainable_bias.WITH: runs(lead=1)}
    return trainable_bias.compare(stacked(runs.table(v, model=m, mean_loss=-v) for m, v in values.items()))


def dual_variants_runs(runs):
    ratios = stacked(
        runs.table(v, task=t, model=m, half=v, end=v, apart=v, course=v)
        for (t, m), claim in dual_variants.CLAIMS.items()
        for v in [runs(lead=1) - runs() + claim.bound]
    )
    ends = {dual_variants.PLAIN: runs(), dual_variants.UNSTABLE: runs(lead=1)}
    rises = stacked(runs.table(v, model=m, rise=v) for m, v in ends.items())
    return [*dual_variants.compare(ratios, {}), *dual_variants.compare_rises(rises)]


def bert_runs(runs):
    plain = {bert_variants.PLAIN: runs()}
    values = plain | {m: runs(lead=1 if is_better else -1) for m, (_, is_better) in bert_variants.CLAIMS.items()}
    return bert_variants.compare(stacked(runs.table(v, model=m, matthews=v, epoch=1) for m, v in values.items()))


def features_runs(runs):
    few, many = 8, 32
    log_mse = {
        (kind, m): -runs(lead=place + (m == many)) for place, kind in enumerate(random_features.KINDS) for m in (few, many)
    }
    return random_features.compare(
        stacked(runs.table(v, kind=k, n_features=m, mse=np.exp(v), what="output") for (k, m), v in log_mse.items())
    )


def layer_runs(runs):
    """Dimensions lost: half of one by wide MLPs, a quarter of twelve by narrow ones."""
    lost = {96: 0.5 - runs(lead=1), 6: 3 + runs(lead=1)}
    center = {96: MEANS[runs.noise], 6: -MEANS[runs.noise]}
    return dual_layer.compare(
        stacked(runs.table(v, d_mlp=w, rank_bound=12 - v - center[w], largest_error=0.0) for w, v in lost.items()), 12
    )


def conversion_runs(runs):
    """Every way of the experiment, each better than the one that it is held against; errors around 2."""
    s = softmax_conversion
    settings = dict(continuations=[9, 10], random=[4], keys=[2], polish_steps=1, polished_budgets=["logits"])
    settings |= dict(distil_steps=1, distil_texts=10)
    rank = {
        (s.DROPPED, 0, 0): 0, (s.IID, 4, 9): 1, (s.ORTHOGONAL, 4, 9): 1, (s.TOP, 2, 9): 1, (s.WINDOW, 2, 0): 1,
        (s.EQUAL, 2, 9): 2, (s.LOGITS, 2, 9): 3, (s.LOGITS, 2, 10): 4, (s.POLISHED, 2, 10): 5,
        **{(method, 0, 10): 2 for method in s.DISTILLED.values()},
    }  # fmt: skip
    contexts = stacked(
        runs.table(v, context=np.arange(len(v)), relative_error=v, kl=v, **dict(zip(s.SIZE, key, strict=True)))
        for key, lead in rank.items()
        for v in [np.exp(2 - runs(lead))]
    )
    starts = stacked(
        runs.table(v, context=np.arange(len(v)), method=name, steps_share=1 - v)
        for name in s.FROM.values()
        for v in [runs(lead=1) - runs()]
    )
    whole = [*s.compare(contexts, settings), *s.compare_with_distillation(contexts, settings)]
    return [*whole, *s.compare_starts(starts, settings)]


def compaction_runs(runs):
    """kvlens' method better than all others, which are equally good; errors around 2."""
    c = compaction
    contexts = stacked(
        runs.table(v, context=np.arange(len(v)), relative_error=v, kl=v, method=method, prompt_tokens=9, keys_per_head=keys)
        for method, keys in [*((name, 2) for name in c.METHODS), ("thought vectors", 0)]
        for v in [np.exp(2 - runs(float(method == c.OURS)))]
    )
    return c.compare(contexts)


def gpt2_runs(runs):
    rank = {gpt2_text.WITHOUT: 0, gpt2_text.EVERY: 0, gpt2_text.RANDOM: 1, gpt2_text.LANDMARK: 2, gpt2_text.EXACT: 3}
    return gpt2_text.compare(
        stacked(
            runs.table(
                v, pair=np.arange(len(v)), way=way, relative_error=3 - v, relative_error_centered=3 - v, next_token_agrees=v
            )
            for way, lead in rank.items()
            for v in [runs(lead)]
        )
    )


def imitation_runs(runs):
    """What is left of a change, around all of it; of two ways, around each other."""
    w = weights_to_prompt
    leads = {w.PROMPT: 1, w.GIVEN: 1, w.FREE: 2, w.NULL: 1, w.TUNED: 1}
    return w.compare(
        stacked(
            runs.table(v, part="mlp", way=way, keys_per_head=1, left=1 - v).assign(change=np.arange(len(v)))
            for way, lead in leads.items()
            for v in [runs(lead) - MEANS[runs.noise]]
        )
    )


MEANS = {name: float(draw(np.random.default_rng(0), 10**6).mean()) for name, draw in NOISE.items()}

IMPROVEMENTS = tuple(number for number, claim in enumerate(dual_variants.CLAIMS.values()) if claim.better)
"""The known difference of `dual_variants_runs` makes every variant worse."""


def share_runs(runs):
    """Shares behind the first token alone and behind a prompt, around the half that they are compared with."""
    by_length = {n: runs(lead) - MEANS[runs.noise] + stored_bias.HALF for n, lead in ((1, 0), (256, 1))}
    rows = stacked(runs.table(v, length=n, layer=0).assign(share=v) for n, v in by_length.items())
    return stored_bias.compare_shares(rows.rename(columns={"seed": "prompt"}))


def edit_runs(runs):
    """Log-odds of four ways that differ by nothing else; of the other facts, reading again and the edit do the same."""
    leads = {"stored": 0, "rewritten": 0, "edited": 1, "another sentence": -1}
    rows = [runs.table(v, way=way, changed=True).assign(log_odds=v) for way, lead in leads.items() for v in [runs(lead)]]
    others = runs()
    rows += [runs.table(others, way=way, changed=False).assign(log_odds=others) for way in leads]
    return stored_bias.compare_edits(stacked(rows).rename(columns={"seed": "prompt"}))


CASES = [
    Case("induction-depth", depth_runs, difference=4.0, paired=False),
    Case("induction-width", width_runs),
    Case("induction-heads", head_runs),
    Case("ngram", ngram_runs, against=(1,)),
    Case("hops", hops_runs),
    Case("arithmetic", arithmetic_runs),
    Case("variants", variants_runs),
    Case("learning-rate", rate_runs, verdicts=(0,)),
    Case("learning-rate", diverging_runs, difference=6.0, verdicts=(2,)),
    Case("scaling", scaling_runs, verdicts=(0, 1, 2, 3)),
    Case("scaling", growing_gain_runs, difference=4.5, verdicts=(4, 5)),
    Case("trainable-bias", bias_runs),
    Case("softmax-conversion", conversion_runs, n_seeds=8),
    Case("compaction", compaction_runs, n_seeds=8),
    Case("gpt2-text", gpt2_runs, n_seeds=12, exact=1),
    Case("stored-bias", share_runs, n_seeds=12, paired=False),
    Case("stored-bias", edit_runs, n_seeds=12, verdicts=(0, 1, 2), paired=False),
    Case("weights-to-prompt", imitation_runs, against=(3,), paired=False),
    Case("dual-variants", dual_variants_runs, n_seeds=8, against=IMPROVEMENTS),
    Case("bert-variants", bert_runs),
    Case("random-features", features_runs, n_seeds=20),
    Case("dual-layer", layer_runs, n_seeds=8, exact=1, paired=False),
]


@cache
def verdicts_on(case: Case, noise: str, difference: float) -> tuple[list, np.ndarray]:
    """The test's results, [verdict, draw], 1 above, -1 below, 0 neither; and the comparisons they belong to."""
    with mock.patch.object(significance, "above", return_value=None):
        runs = Runs(noise, difference, case.n_seeds, np.random.default_rng(7))
        found = [comparison for comparison in case.compare(runs) if comparison.tested]
    by_values = [one.evidence for one in found if one.evidence.rule == "values"]
    draws = [np.reshape(evidence.figures, (N_DRAWS, -1)) - evidence.bound for evidence in by_values]
    return found, np.stack([sides(draw) for draw in draws])


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("case", "noise"),
    [(case, noise) for case in CASES for noise in NOISE if case.paired or noise != SKEWED],
    ids=lambda value: value.compare.__name__ if isinstance(value, Case) else value,
)
def test_runs_of_one_model_are_called_different_in_at_most_one_of_twenty_cases(case, noise):
    _, answers = verdicts_on(case, noise, 0.0)
    assert ((answers != 0).mean(axis=1) <= MOST).all()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.compare.__name__)
def test_the_known_difference_is_significant_in_four_of_five_cases_and_almost_never_reversed(case):
    _, answers = verdicts_on(case, "normal", case.difference)
    for number in range(len(answers)) if case.verdicts is None else case.verdicts:
        right, wrong = sorted([(answers[number] == 1).mean(), (answers[number] == -1).mean()], reverse=True)
        assert right >= LEAST and wrong <= 0.001


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.compare.__name__)
@pytest.mark.parametrize("sign", [1, -1])
def test_every_claim_holds_for_a_large_difference_and_fails_for_its_reverse(case, sign):
    """On as many runs as the experiment takes, by its own comparisons: 10 spreads are 17 standard errors of six pairs."""
    runs = Runs("normal", sign * 10 * case.difference / 3, case.n_seeds, np.random.default_rng(8), n_draws=1)
    found = [comparison.holds for comparison in case.compare(runs) if comparison.sample is not None]
    for number in range(len(found)) if case.verdicts is None else case.verdicts:
        assert found[number] is ((sign > 0) is not (number in case.against)), number


def test_every_verdict_of_every_experiment_has_its_null():
    """By case, by shares, or by a separate test below; or it is an identity, which holds up to rounding or does not."""
    by_shares = {"conversion-accuracy"}
    own = {"function-classes", "dual-heads", "coefficients"}
    identities = {
        "induction-exact",
        "landscape",
        "conversion-error",
        "direct-conversion",
        "dual-equivalence",
        "gradient-descent",
    }
    assert {case.experiment for case in CASES} | by_shares | own | identities == set(EXPERIMENTS)
    seen: dict[str, set[int]] = {case.experiment: set() for case in CASES}
    for case in CASES:
        found, answers = verdicts_on(case, "normal", 0.0)
        assert len(found) - case.exact == len(answers)  # no verdict is given without the significance test
        seen[case.experiment] |= set(range(len(answers)) if case.verdicts is None else case.verdicts)
    assert seen["learning-rate"] == {0, 2}  # number 1 is number 0 at another rate
    assert all(numbers == set(range(len(numbers))) for name, numbers in seen.items() if name != "learning-rate")


SHARES = [
    (600, 0.999, 0.98),  # conversion-accuracy: right with the prompt
]


@pytest.mark.parametrize(("of", "bound", "known"), SHARES)
def test_shares_at_the_bound_and_at_a_known_distance_from_it(of, bound, known):
    """Exact: every count, with the chance of it."""
    counts = np.arange(of + 1)
    told = np.array([share_above(int(count), of, bound) is not None for count in counts])
    ways = np.array([math.comb(of, int(count)) for count in counts], dtype=float)
    at_rest, moved = (float((ways * p**counts * (1 - p) ** (of - counts))[told].sum()) for p in (bound, known))
    assert at_rest <= LEVEL
    assert moved >= LEAST


def test_runs_whose_heads_are_alike_by_chance_are_not_tested_as_if_heads_were_independent():
    """coefficients: in each of 12 runs the heads agree or not together, which a test of single heads calls a majority."""
    generator = np.random.default_rng(2)
    alike = (generator.random((N_DRAWS, 12, 1)) < 0.5) * np.ones(8)
    assert (sides(alike.mean(axis=2) - 0.5) != 0).mean() <= MOST
    of_heads = [share_above(int(run.sum()), run.size) is not None for run in alike]
    assert np.mean(of_heads) > 5 * MOST
    leaning = generator.binomial(8, 0.7, size=(N_DRAWS, 12)) / 8
    assert (sides(leaning - 0.5) == 1).mean() >= LEAST


def test_errors_with_a_margin_are_significant_at_four_standard_errors_and_not_at_their_bound():
    """function-classes: a margin of three standard errors."""
    noise = np.random.default_rng(3).normal(0, 0.01, N_DRAWS).tolist()
    at_rest, moved = ([Measured(0.05 + x + lead, 0.03).below(0.05) for x in noise] for lead in (0.0, 0.04))
    assert sum(verdict is not None for verdict in at_rest) <= 0.01 * N_DRAWS
    assert moved.count(False) >= LEAST * N_DRAWS and True not in moved


def test_heads_paired_at_random_are_not_correlated_and_those_of_one_order_are():
    """dual-heads: 16 heads; the known difference is a rank correlation of about 0.8."""
    first, second = np.random.default_rng(4).normal(size=(2, 200, 16))
    at_rest, moved = (
        [dual_heads.chance_of_pairing(a, lead * a + b) for a, b in zip(first, second, strict=True)] for lead in (0.0, 1.5)
    )
    assert np.mean(np.array(at_rest) <= dual_heads.LEVEL) <= MOST
    assert np.mean(np.array(moved) <= dual_heads.LEVEL) >= LEAST


def test_real_runs_of_one_model_under_two_names():
    """24 short trainings of one model, shared out at random to six seeds of "plain" and six of "KV shift"."""
    task = make_task("hops", k=1, vocab_size=3, length=10)
    model = dict(n_layers=1, d_model=8, d_head=4, attn_only=True)
    training = dict(batch_size=8, learning_rate=1e-2, steps=4, eval_every=4, eval_sequences=32)
    settings = dict(training=training, seeds=range(24))
    course = train_cells([Cell(task, {"m": model})], settings, lambda text: None)[0]
    accuracy = course.loc[course["split"] == "heldout", "accuracy"].to_numpy()
    assert len(set(accuracy)) > 6
    draws = np.random.default_rng(0).permuted(np.tile(accuracy, (N_DRAWS, 1)), axis=1)
    shared = {"plain": draws[:, :6].ravel(), "KV shift": draws[:, 6:12].ravel()}
    case = Case("hops", lambda runs: hops.compare(stacked(
        runs.table(v, model=m, n_layers=1, k=1, chance=1 / 3) for m, v in shared.items()
    ), {}))  # fmt: skip
    assert ((verdicts_on(case, "normal", 0.0)[1] != 0).mean(axis=1) <= MOST).all()
