"""n-grams: every scored target is in the table, and the table belongs to its seed."""

import pytest
import torch
from task_checks import assert_frequency, seeded

from kvlens.tasks import NgramTask


@pytest.mark.parametrize("order", [2, 3, 4])
def test_scored_targets_are_what_the_table_says(order):
    task = NgramTask(order=order, vocab_size=5, length=29, table_seed=3, restart_rate=0.2)
    table = task.table().view(*[5] * (order - 1)).tolist()
    inputs, targets, scored = task.sample(7, seeded(0))
    assert not scored[:, : order - 2].any()
    for b, i in scored.nonzero().tolist():
        entry = table
        for token in inputs[b, i - order + 2 : i + 1].tolist():
            entry = entry[token]
        assert targets[b, i] == entry


def test_as_much_is_scored_as_restarts_leave_and_restarts_are_uniform():
    task = NgramTask(order=3, vocab_size=6, length=11, restart_rate=0.25)
    _, targets, scored = task.sample(3000, seeded(1))
    assert_frequency(scored[:, 1:], 0.75)
    assert_frequency(targets[~scored][:, None] == torch.arange(6), 1 / 6)
    without = NgramTask(order=3, vocab_size=6, length=5, restart_rate=0.0).sample(2, seeded(0))
    assert without.scored.tolist() == [[False, True, True, True, True]] * 2


def test_the_table_belongs_to_its_seed():
    assert torch.equal(NgramTask(table_seed=1).table(), NgramTask(table_seed=1, length=9).table())
    assert not torch.equal(NgramTask(table_seed=1).table(), NgramTask(table_seed=2).table())
