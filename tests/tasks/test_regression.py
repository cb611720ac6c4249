"""Regression: the layout, least squares as the reference, and the differences of held-out sequences."""

import pytest
import torch
from task_checks import seeded

from kvlens.tasks import RegressionTask


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
