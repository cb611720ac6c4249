"""``function-classes``: the judges are right where the answer is known, the measurements are laws, and claims can fail."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlens.errors import KVLensError
from kvlens.experiments import function_classes
from kvlens.experiments._regression_baselines import least_squares, nearest_neighbours, ridge
from kvlens.tasks import RegressionTask

EPS = torch.finfo(torch.float64).eps
PROMPTS, POINTS, D = 3, 13, 5
METHODS = [least_squares, lambda x, y: ridge(x, y, 0.7), lambda x, y: nearest_neighbours(x, y, 3)]


def prompts(seed=0, noise=0.0):
    """Points, the linear function's value at each, and the answers of the examples."""
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(PROMPTS, n, D, generator=generator, dtype=torch.float64) for n in (POINTS, 1))
    values = (x * w).sum(-1)
    return x, values, values[:, :-1] + noise * torch.randn(PROMPTS, POINTS - 1, generator=generator, dtype=torch.float64)


# --- the judges ---


def test_least_squares_is_exact_for_a_linear_function_from_d_examples_on():
    x, values, y = prompts()
    error = (least_squares(x, y) - values).abs()
    # |w| is below 5; the condition number of the smallest system, d examples, multiplies the rounding of d-term sums
    condition = torch.linalg.cond(x[:, :D]).max().item()
    assert error[:, D:].max() <= 10 * D * condition * 5 * EPS
    assert (error[:, :D].amax(0) > 0.1).all()


def test_least_squares_agrees_with_one_system_after_the_other():
    x, _, y = prompts(noise=0.5)
    got = least_squares(x, y)
    assert (got[:, 0] == 0).all()
    for prompt in range(PROMPTS):
        for n in range(1, POINTS):
            w = np.linalg.lstsq(x[prompt, :n].numpy(), y[prompt, :n].numpy(), rcond=None)[0]  # minimum-norm, by SVD
            condition = torch.linalg.cond(x[prompt, :n]).item()
            assert float(got[prompt, n]) == pytest.approx(float(x[prompt, n].numpy() @ w), abs=1e3 * condition**2 * EPS)


def test_least_squares_of_one_example_lies_along_it():
    """By a pencil: from f(3, 4) = 10 the shortest w is (1.2, 1.6); it says 2.8 at (1, 1) and 0 across."""
    x = torch.tensor([[[3.0, 4.0], [1.0, 1.0]], [[3.0, 4.0], [-4.0, 3.0]]], dtype=torch.float64)
    got = least_squares(x, torch.tensor([[10.0], [10.0]], dtype=torch.float64))
    assert got.flatten().tolist() == pytest.approx([0, 2.8, 0, 0], abs=1e-14)


def test_ridge_by_a_pencil():
    """d = 1, examples f(1) = 1 and f(2) = 5, penalty 5: w = 11 / (1 + 4 + 5), and 1 / (1 + 5) after the first alone."""
    x = torch.tensor([[[1.0], [2.0], [10.0]]], dtype=torch.float64)
    got = ridge(x, torch.tensor([[1.0, 5.0]], dtype=torch.float64), penalty=5.0)
    assert got[0].tolist() == pytest.approx([0, 2 / 6, 11], abs=1e-14)


def test_ridge_goes_to_least_squares_in_proportion_to_the_penalty():
    x, _, y = prompts(noise=0.3)
    distance = [(ridge(x, y, penalty) - least_squares(x, y)).abs().max().item() for penalty in (1e-4, 1e-6, 1e-8)]
    # w moves by penalty * (X X^T)^-1 w to first order; the higher orders are below the penalty times the condition number
    assert distance[0] / distance[1] == pytest.approx(100, rel=0.05)
    assert distance[2] < 1e-3 * distance[0]


def test_ridge_with_the_noise_it_expects_beats_least_squares():
    generator = torch.Generator().manual_seed(1)
    task = RegressionTask(dimensions=4, n_points=7, noise=0.5)
    batch = task.sample(4000, generator)
    x, y = (part.double() for part in task.points_and_values(batch.inputs))
    values = batch.targets[:, 0::2].double()
    best, *others = ((ridge(x, y, p) - values).square().mean().item() for p in (4 * 0.25, 0.2, 5.0))
    assert all(best < other for other in others)
    assert best < (least_squares(x, y) - values).square().mean()


def test_the_nearest_neighbour_of_an_example_is_itself():
    x, _, y = prompts(noise=0.3)
    again = torch.randint(POINTS - 1, (PROMPTS, 1), generator=torch.Generator().manual_seed(2))
    x[:, -1:] = x.gather(1, again[..., None].expand(-1, -1, D))
    assert torch.equal(nearest_neighbours(x, y, 1)[:, -1:], y.gather(1, again))


def test_nearest_neighbours_by_a_pencil():
    """On a line at 0, 10, 1, then 2: the nearest of 2 is 1, the two nearest 1 and 0; with few examples all count."""
    x = torch.tensor([[[0.0], [10.0], [1.0], [2.0]]], dtype=torch.float64)
    y = torch.tensor([[3.0, 5.0, 8.0]], dtype=torch.float64)
    assert nearest_neighbours(x, y, 1)[0].tolist() == [0, 3, 3, 8]
    assert nearest_neighbours(x, y, 2)[0].tolist() == [0, 3, 4, 5.5]
    assert nearest_neighbours(x, y, 9)[0].tolist() == pytest.approx([0, 3, 4, 16 / 3], abs=1e-14)


@pytest.mark.parametrize("method", METHODS, ids=["least squares", "ridge", "neighbours"])
@given(scale=st.floats(0.01, 100), n=st.integers(2, POINTS), seed=st.integers(0, 100))
@settings(max_examples=20, deadline=None)
def test_every_judge_is_causal_and_linear_in_the_answers(method, scale, n, seed):
    x, _, y = prompts(seed, noise=0.4)
    whole = method(x, y)
    # 5e4: the pseudo-inverse of a square system of random points has a condition number that reaches thousands
    near = dict(rtol=5e4 * D * EPS, atol=5e4 * D * EPS)
    torch.testing.assert_close(method(x[:, :n], y[:, : n - 1]), whole[:, :n], **near)
    torch.testing.assert_close(method(x, scale * y), scale * whole, **{**near, "atol": 5e4 * D * EPS * scale})


def test_bad_settings_of_the_judges_are_refused():
    x, _, y = prompts()
    with pytest.raises(KVLensError, match="penalty must be positive, got 0"):
        ridge(x, y, 0)
    with pytest.raises(KVLensError, match="k must be at least 1, got 0"):
        nearest_neighbours(x, y, 0)
