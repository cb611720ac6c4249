"""ContextCite: its lasso by the conditions of an optimum, and its fit beside the authors' package where it is installed."""

import importlib.util
from pathlib import Path

import pytest
import torch
from analysis_models import random_model, tokens
from kvlens.analyses.attribution.answers import Question
from kvlens.analyses.attribution.methods import ContextCite, lasso, logit_of, subset_scores

from kvlens.units import Unit

PROMPT, TEXT, ANSWER = tokens(15, 1), tokens(4, 2), tokens(3, 3)
SPANS = [(first, first + 3) for first in range(0, 15, 3)]


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
@pytest.mark.parametrize("answer", [ANSWER[:1], ANSWER], ids=["one token", "three tokens"])
def test_the_fit_is_that_of_the_authors_package(answer, penalty):
    solver = package_solver(penalty)
    model = random_model(attention="softmax", kv_shift=None)
    question = Question.of(model, PROMPT, TEXT, answer)
    units = [Unit("", "", *span) for span in SPANS]
    found = ContextCite(n_subsets=24, penalty=penalty).explain(question, units)
    kept = torch.rand(24, len(units), generator=torch.Generator().manual_seed(0)) < 0.5
    logits = logit_of(subset_scores(question, units, kept))
    weight, bias = (torch.as_tensor(x).double() for x in solver.fit(kept.numpy(), logits.numpy(), len(answer)))
    every = torch.tensor([[n >> u & 1 for u in range(len(units))] for n in range(2 ** len(units))], dtype=torch.bool)
    ours, theirs = logit_of(found.predict(every)), bias + every.double() @ weight
    # scikit-learn ends where a sweep moves no weight by more than 1e-4 of the largest; one leaves less than 0.9 of the error
    assert (ours - theirs).abs().max() < 1e-3 * weight.abs().max()
    assert (weight.abs() > 0.1).sum() > 1
