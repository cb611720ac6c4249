"""DUAL th. 3.2 against the error that it bounds, which can be computed where all possible tokens are a finite list; the bound
with negative samples, which is kvlens' own; and over demonstrations, where each row is the head's own bound."""

import itertools
import math

import numpy as np
import pytest
import torch
from ops_cases import normal

from kvlens import HookedKVTransformer
from kvlens.analyses import dual_bound
from kvlens.dual import DualModel
from kvlens.ops.dual import feature_kernel
from kvlens.ops.dual_layers import bound_terms, log_effective_trace, log_trace

N_TOKENS, D_PHI, D_OUT, NORM, DELTA, DRAWS = 500, 6, 4, 1.0, 0.05, 200


def excess(G, found):
    """Loss of the best W for ``found`` less the best possible one, for G, with |W|_F <= NORM.

    The loss -mean v.W phi is linear in W: its minimum over the ball is -NORM |G| at NORM G / |G|, G = mean v phi^T.
    """
    return NORM * (G.norm() - (found * G).sum(dim=(-2, -1)) / found.norm(dim=(-2, -1)))


def mean_of_products(v, phi):
    return torch.einsum("...no,...nf->...of", v, phi) / v.shape[-2]


def test_the_measured_error_is_below_the_bound_and_falls():
    phi, v = normal(N_TOKENS, D_PHI, seed=0).exp(), normal(N_TOKENS, D_OUT, seed=1) + 0.5
    rho = max(float(v.norm(dim=-1).max()), NORM * float(phi.norm(dim=-1).max()))
    generator, means, shares = torch.Generator().manual_seed(2), [], []
    for n in (10, 40, 160):
        chosen = torch.randint(N_TOKENS, (DRAWS, n), generator=generator)
        measured = excess(mean_of_products(v, phi), mean_of_products(v[chosen], phi[chosen]))
        traces = log_trace(feature_kernel(phi[chosen], phi[chosen]))
        logs = (torch.full_like(traces, math.log(x)) for x in (NORM, rho))
        bound = bound_terms(*logs, traces, n, D_OUT, DELTA).log_bound.exp()
        assert (measured >= 0).all()
        shares.append(float((measured / bound).max()))
        means.append(float(measured.mean()))
    assert max(shares) < 1  # without any constant
    powers = [math.log(a / b) / math.log(4) for a, b in itertools.pairwise(means)]
    assert all(0.7 < power < 1.3 for power in powers), (means, shares)  # as 1 / N; the bound falls as its root


def test_more_negatives_of_each_label_lower_the_measured_error():
    """App. C.2: the labels v_i - mean_j v_n(i, j) with K independent negatives, of which all tokens give G = cov(v, phi)."""
    phi, v = normal(N_TOKENS, D_PHI, seed=0).exp(), normal(N_TOKENS, D_OUT, seed=1) + 0.5
    phi[:, :D_OUT] += v.square()  # labels and inputs that belong together: without them cov(v, phi) is noise
    G, generator, means = mean_of_products(v - v.mean(dim=0), phi), torch.Generator().manual_seed(2), []
    chosen = torch.randint(N_TOKENS, (DRAWS, 160), generator=generator)
    for n_negative in (1, 4, 64):
        negatives = torch.randint(N_TOKENS, (DRAWS, 160, n_negative), generator=generator)
        labels = v[chosen] - v[negatives].mean(dim=-2)
        means.append(float(excess(G, mean_of_products(labels, phi[chosen])).mean()))
    assert means[0] > 1.2 * means[1] and means[1] > 1.04 * means[2], means  # 0.58, 0.43, 0.39; standard errors of 0.013


STORY = "The drum stands in the cellar. Pavel has a parrot. At night Kaya feeds a donkey."
QUESTION = " Which animal does Pavel keep? Pavel keeps a"


@pytest.fixture(scope="module")
def of_a_story():
    model = HookedKVTransformer.from_zoo("facts-linear", dtype=torch.float64)
    return DualModel.from_head(model, model.to_tokens(STORY + QUESTION)[0], 1, 0).step()


def test_without_negatives_their_weight_changes_nothing(of_a_story):
    for ours, plain in zip(of_a_story.bound(n_negative=0, beta=0.5), of_a_story.bound(), strict=True):
        assert torch.equal(ours, plain)


def test_the_first_negative_raises_the_bound_and_more_lower_it(of_a_story):
    """The numbers of the op's docstring; the paper's bound falls from the first on."""
    found = {n: float(of_a_story.bound(n_negative=n, beta=0.5).log_bound) for n in (0, 1, 2, 4, 8, 16)}
    rounded = {n: f"{found[n]:.2f}" for n in (0, 1, 16)}
    assert all(x in log_effective_trace.__doc__ for x in rounded.values())
    assert found[1] > found[0] and sorted(list(found.values())[1:], reverse=True) == list(found.values())[1:]
    assert found[16] > found[0]


@pytest.fixture(scope="module")
def induction():
    return HookedKVTransformer.from_zoo("induction-plain-2l", dtype=torch.float64)


TOKENS = torch.arange(3, 19)


def test_rows_are_the_models_own_bounds(induction):
    table = dual_bound(induction, TOKENS, layer=1, head=2, n_steps=4, delta=0.1)
    assert table["n_demonstrations"].tolist() == [1, 6, 10, 15]
    for row in table.itertuples():
        dual = DualModel.from_head(induction, TOKENS, 1, 2, -1, n_demonstrations=row.n_demonstrations)
        dual.step()
        assert row.log_bound == pytest.approx(float(dual.bound(0.1).log_bound), rel=1e-12)
    whole = np.logaddexp(table["log_complexity"], table["log_confidence"])
    assert table["log_bound"].to_numpy() == pytest.approx(whole.to_numpy(), rel=1e-12)
    complexity = table["log_norm"] + table["log_rho"] + table["log_trace"] / 2 + np.log(induction.cfg.d_head) / 2
    complexity -= np.log(table["n_demonstrations"])
    assert table["log_complexity"].to_numpy() == pytest.approx(complexity.to_numpy(), rel=1e-10)


def test_negative_samples_change_the_trace_and_the_second_term(induction):
    settings = dict(layer=0, head=3, n_steps=3, delta=0.1)
    plain = dual_bound(induction, TOKENS, **settings)
    table = dual_bound(induction, TOKENS, **settings, n_negative=2, beta=0.5)
    assert plain[["n_negative", "beta"]].eq(0).all(axis=None) and table["d_output"].eq(induction.cfg.d_head).all()
    last = DualModel.from_head(induction, TOKENS, 0, 3, -1)
    last.step()
    assert table["log_trace"].iloc[-1] == pytest.approx(float(last.bound(0.1, n_negative=2, beta=0.5).log_trace), rel=1e-12)
    same = table["n_demonstrations"].isin(plain["n_demonstrations"])
    merged = table[same].merge(plain, on="n_demonstrations", suffixes=("", "_plain"))
    assert len(merged) and (merged["log_trace"] != merged["log_trace_plain"]).all()
    grown = merged["log_confidence"] - merged["log_confidence_plain"]
    assert grown.to_numpy() == pytest.approx(np.log(1.5), rel=1e-9)


def test_a_smaller_delta_widens_the_second_term_alone(induction):
    wide, narrow = (dual_bound(induction, TOKENS, n_steps=3, delta=delta) for delta in (0.01, 0.2))
    assert (wide["log_confidence"] > narrow["log_confidence"]).all()
    assert (wide["log_complexity"] == narrow["log_complexity"]).all()
