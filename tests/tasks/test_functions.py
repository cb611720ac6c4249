"""Function classes: variance 1, and the defining property of each.

A function is decided by the generator's state and the shape of the points, so calling twice with the same seed evaluates
the same function at other points.
"""

import math

import pytest
import torch
from task_checks import seeded

from kvlens.tasks.functions import (
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
