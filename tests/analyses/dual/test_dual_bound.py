"""The bound's course: each row is the head's own bound at that number of demonstrations, and its terms add up."""

import numpy as np
import pytest
import torch

from kvlens import HookedKVTransformer
from kvlens.analyses import dual_bound
from kvlens.dual import DualModel


@pytest.fixture(scope="module")
def model():
    return HookedKVTransformer.from_zoo("induction-plain-2l", dtype=torch.float64)


TOKENS = torch.arange(3, 19)


def test_rows_are_the_models_own_bounds(model):
    table = dual_bound(model, TOKENS, layer=1, head=2, n_steps=4, delta=0.1)
    assert table["n_demonstrations"].tolist() == [1, 6, 10, 15]
    for row in table.itertuples():
        dual = DualModel.from_head(model, TOKENS, 1, 2, -1, n_demonstrations=row.n_demonstrations)
        dual.step()
        assert row.log_bound == pytest.approx(float(dual.bound(0.1).log_bound), rel=1e-12)
    whole = np.logaddexp(table["log_complexity"], table["log_confidence"])
    assert table["log_bound"].to_numpy() == pytest.approx(whole.to_numpy(), rel=1e-12)
    complexity = table["log_norm"] + table["log_rho"] + table["log_trace"] / 2 + np.log(model.cfg.d_head) / 2
    complexity -= np.log(table["n_demonstrations"])
    assert table["log_complexity"].to_numpy() == pytest.approx(complexity.to_numpy(), rel=1e-10)


def test_negative_samples_change_the_trace_and_the_second_term(model):
    settings = dict(layer=0, head=3, n_steps=3, delta=0.1)
    plain = dual_bound(model, TOKENS, **settings)
    table = dual_bound(model, TOKENS, **settings, n_negative=2, beta=0.5)
    assert plain[["n_negative", "beta"]].eq(0).all(axis=None) and table["d_output"].eq(model.cfg.d_head).all()
    last = DualModel.from_head(model, TOKENS, 0, 3, -1)
    last.step()
    assert table["log_trace"].iloc[-1] == pytest.approx(float(last.bound(0.1, n_negative=2, beta=0.5).log_trace), rel=1e-12)
    same = table["n_demonstrations"].isin(plain["n_demonstrations"])
    merged = table[same].merge(plain, on="n_demonstrations", suffixes=("", "_plain"))
    assert len(merged) and (merged["log_trace"] != merged["log_trace_plain"]).all()
    grown = merged["log_confidence"] - merged["log_confidence_plain"]
    assert grown.to_numpy() == pytest.approx(np.log(1.5), rel=1e-9)


def test_a_smaller_delta_widens_the_second_term_alone(model):
    wide, narrow = (dual_bound(model, TOKENS, n_steps=3, delta=delta) for delta in (0.01, 0.2))
    assert (wide["log_confidence"] > narrow["log_confidence"]).all()
    assert (wide["log_complexity"] == narrow["log_complexity"]).all()
