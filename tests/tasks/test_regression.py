"""In-context regression and its classes of functions, which have mean 0 and variance 1."""

import math

import pytest
import torch
from task_checks import seeded

from kvlens.tasks import RegressionTask
from kvlens.tasks.regression import (
    FUNCTION_CLASSES,
    decision_tree,
    exponential,
    linear,
    sparse_linear,
    trigonometric,
    two_layer_relu,
)

BATCH, POINTS, DIM = 5, 11, 7
TOLERANCE = 1e-5  # float32: sums of at most 100 terms of order 1, 100 * 1.2e-7


def points(seed: int, batch: int = BATCH, n_points: int = POINTS, dim: int = DIM) -> torch.Tensor:
    return torch.randn(batch, n_points, dim, generator=seeded(seed))


@pytest.mark.parametrize("name", FUNCTION_CLASSES)
@pytest.mark.parametrize("dim", [4, 13])
def test_values_have_mean_0_and_variance_1_over_functions_and_points(name, dim):
    n = 30_000
    values = FUNCTION_CLASSES[name](points(0, n, 1, dim), seeded(1)).squeeze(1).double()
    assert abs(values.mean().item()) < 5 / math.sqrt(n)
    deviation_of_square = (values.pow(4).mean() - 1).sqrt().item()
    assert abs(values.square().mean().item() - 1) < 5 * deviation_of_square / math.sqrt(n)


@pytest.mark.parametrize("name", FUNCTION_CLASSES)
def test_rows_have_functions_of_their_own(name):
    x = points(0, n_points=400)[:1].expand(BATCH, -1, -1)
    values = FUNCTION_CLASSES[name](x, seeded(2))
    assert not any(torch.equal(values[0], values[row]) for row in range(1, BATCH))


def test_linear_adds():
    x, y = points(1), points(2)
    expected = 2 * linear(x, seeded(3)) - linear(y, seeded(3))
    torch.testing.assert_close(linear(2 * x - y, seeded(3)), expected, rtol=0, atol=TOLERANCE)


def test_sparse_linear_reads_three_coordinates():
    axes = torch.eye(DIM).expand(200, -1, -1)
    weights = sparse_linear(axes, seeded(3))
    assert ((weights != 0).sum(dim=1) == 3).all()
    assert ((weights != 0).sum(dim=0) > 0).all()
    x = points(1, 200)
    expected = torch.einsum("bpd,bd->bp", x, weights)
    # The function at the unit vectors is its weight vector; DIM points there, POINTS here, and the draws do not depend on it.
    torch.testing.assert_close(sparse_linear(x, seeded(3)), expected, rtol=0, atol=TOLERANCE)


def test_trigonometric_is_a_sine_along_a_line():
    """f(x + h) + f(x - h) = 2 cos(w.h) f(x), with one factor for all x."""
    x, h = points(1), points(2, n_points=1)
    both_sides = trigonometric(x + h, seeded(3)) + trigonometric(x - h, seeded(3))
    f = trigonometric(x, seeded(3))
    factor = (both_sides * f).sum(dim=1, keepdim=True) / f.square().sum(dim=1, keepdim=True)
    torch.testing.assert_close(both_sides, factor * f, rtol=0, atol=TOLERANCE)
    assert f.abs().max() <= math.sqrt(2)


def test_exponential_has_a_linear_logarithm_with_a_direction_of_length_1():
    mean = math.exp(1 / 8)
    deviation = math.sqrt((math.exp(1 / 4) - 1) * math.exp(1 / 4))
    direction = 2 * (exponential(torch.eye(DIM).expand(BATCH, -1, -1), seeded(3)) * deviation + mean).log()
    torch.testing.assert_close(direction.norm(dim=1), torch.ones(BATCH), rtol=0, atol=TOLERANCE)
    x = points(1)
    expected = (torch.exp(torch.einsum("bpd,bd->bp", x, direction) / 2) - mean) / deviation
    torch.testing.assert_close(exponential(x, seeded(3)), expected, rtol=10 * TOLERANCE, atol=10 * TOLERANCE)


def test_a_tree_of_depth_4_has_16_leaves_and_reads_signs():
    x = points(1, n_points=2000)
    values = decision_tree(x, seeded(3))
    assert all(8 < len(row.unique()) <= 16 for row in values)
    assert torch.equal(decision_tree(x.sign(), seeded(3)), values)


def test_a_tree_of_one_coordinate_has_two_leaves():
    values = decision_tree(points(1, dim=1, n_points=50), seeded(3))
    assert [len(row.unique()) for row in values] == [2] * BATCH


def test_a_relu_network_is_homogeneous_and_not_linear():
    x = points(1)
    f = two_layer_relu(x, seeded(3))
    torch.testing.assert_close(two_layer_relu(3 * x, seeded(3)), 3 * f, rtol=0, atol=3 * TOLERANCE)
    assert (two_layer_relu(-x, seeded(3)) + f).abs().max() > 0.1


def test_points_and_answers_alternate_and_points_are_scored():
    inputs, targets, scored = RegressionTask(dimensions=3, n_points=5).sample(2, seeded(0))
    assert inputs.shape == (2, 9, 4)
    assert (inputs[:, 0::2, 3] == 0).all() and (inputs[:, 1::2, :3] == 0).all()
    assert torch.equal(inputs[:, 1::2, 3], targets[:, 0:-1:2])  # without noise the answer shown is the target
    assert (targets[:, 1::2] == 0).all()
    assert scored.tolist() == [[True, False] * 4 + [True]] * 2


@pytest.mark.parametrize("functions", ["linear", "sparse_linear"])
def test_least_squares_on_the_examples_predicts_the_last_point(functions):
    task = RegressionTask(functions=functions, dimensions=5, n_points=20)
    batch = task.sample(7, seeded(1))
    x, y = task.points_and_values(batch.inputs)
    w = torch.linalg.lstsq(x[:, :-1].double(), y[..., None].double()).solution
    prediction = (x[:, -1:].double() @ w).flatten()
    # 5 terms of order 1 in float32, through a system whose condition number is below 10
    torch.testing.assert_close(prediction, batch.targets[:, -1].double(), rtol=0, atol=50 * torch.finfo(torch.float32).eps)


def test_noise_is_on_the_examples_and_not_on_the_targets():
    quiet = RegressionTask(dimensions=3, n_points=5).sample(4000, seeded(3))
    loud = RegressionTask(dimensions=3, n_points=5, noise=0.5).sample(4000, seeded(3))
    assert torch.equal(quiet.targets, loud.targets)
    noise = (loud.inputs - quiet.inputs)[:, 1::2, -1]
    # the deviation of 16,000 normal numbers is known to 0.5 / sqrt(32,000); five times that
    assert noise.std().item() == pytest.approx(0.5, abs=5 * 0.5 / 32_000**0.5)


def shifted(shift: str, split: str = "heldout", **settings):
    return RegressionTask(dimensions=4, n_points=9, heldout_shift=shift, **settings).sample(3000, seeded(4), split)


@pytest.mark.parametrize("shift", ["scaled_inputs", "skewed_inputs", "orthant", "noisy"])
def test_a_shift_changes_held_out_sequences_only(shift):
    plain = shifted("none")
    assert torch.equal(shifted(shift, "train").inputs, plain.inputs)
    assert not torch.equal(shifted(shift).inputs, plain.inputs)


def test_scaled_inputs_are_three_times_as_far_out():
    torch.testing.assert_close(shifted("scaled_inputs").inputs[:, 0::2], 3 * shifted("none").inputs[:, 0::2])


def test_skewed_inputs_keep_their_total_variance():
    variance = shifted("skewed_inputs").inputs[:, 0::2, :-1].flatten(0, 1).var(dim=0)
    expected = torch.tensor([1, 1 / 4, 1 / 9, 1 / 16])
    expected *= 4 / expected.sum()
    # a variance from 27,000 numbers has a relative deviation of sqrt(2 / 27,000); five times that
    torch.testing.assert_close(variance, expected, rtol=5 * (2 / 27_000) ** 0.5, atol=0)


def test_orthant_examples_share_their_signs_and_only_the_last_point_is_scored():
    batch = shifted("orthant")
    signs = batch.inputs[:, 0::2, :-1].sign()
    assert (signs[:, :-1] == signs[:, :1]).all()
    assert not (signs[:, -1] == signs[:, 0]).all()
    assert len(signs[:, 0].unique(dim=0)) == len(signs[:, -1].unique(dim=0)) == 16
    assert batch.scored.sum(dim=1).unique().tolist() == [1] and batch.scored[:, -1].all()


def test_noisy_examples_have_noise_of_deviation_1():
    noise = shifted("noisy").inputs[:, 1::2, -1] - shifted("none").inputs[:, 1::2, -1]
    assert noise.std().item() == pytest.approx(1, abs=5 / (2 * 24_000) ** 0.5)
