"""The one loop of gradient steps: what Adam does is known by hand, and so is which rows a step reads."""

import math

import pytest
import torch

from kvlens.conversion.softmax.descent import descend


def steps_of(loss_on, free, **changes):
    how = dict(n_rows=5, rows_per_step=3, steps=4, learning_rate=0.1, generator=torch.Generator().manual_seed(2))
    return [loss.item() for loss in descend([free], loss_on, **{**how, **changes})]


def test_a_constant_slope_moves_by_the_rate_which_falls_along_a_cosine():
    """Adam under a constant gradient moves by the learning rate each step: 0.1 (1 + cos(pi t / steps)) / 2 at step t."""
    at = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    losses = steps_of(lambda rows: 2 * at, at)
    rates = [0.05 * (1 + math.cos(math.pi * t / 4)) for t in range(4)]
    places = [1.0 - sum(rates[:t]) for t in range(5)]
    # Adam's epsilon of 1e-8 beside a gradient of 2: a share of 5e-9 of each rate
    assert losses == pytest.approx([2 * place for place in places[:4]], abs=1e-8)
    assert abs(at.item() - places[4]) < 1e-8


def test_rows_are_drawn_without_replacement_and_again_each_step():
    at, read = torch.zeros(5, requires_grad=True), []

    def loss_on(rows):
        read.append(rows.tolist())
        return at[rows].sum()

    steps_of(loss_on, at)
    again = torch.Generator().manual_seed(2)
    assert read == [torch.randperm(5, generator=again)[:3].tolist() for _ in range(4)]
    assert all(len(set(rows)) == 3 for rows in read) and read[0] != read[1]
    read.clear()
    steps_of(loss_on, at, rows_per_step=9)
    assert all(sorted(rows) == [0, 1, 2, 3, 4] for rows in read)
