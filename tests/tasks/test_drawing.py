"""The previous occurrence of each token, against a loop, and draws of distinct numbers."""

import torch
from task_checks import seeded

from kvlens.tasks.drawing import draw_distinct, previous_occurrence


def test_previous_occurrence_equals_the_loop():
    tokens = torch.randint(6, (5, 31), generator=seeded(0))
    expected = [
        [max((j for j in range(i) if row[j] == row[i]), default=-1) for i in range(len(row))] for row in tokens.tolist()
    ]
    assert previous_occurrence(tokens).tolist() == expected
    assert previous_occurrence(torch.tensor([[3, 1, 3, 3, 1]])).tolist() == [[-1, -1, 0, 2, 1]]


def test_distinct_draws_are_distinct_and_every_number_occurs_at_every_position():
    rows = draw_distinct(4, 2000, 3, seeded(0))
    assert all(len(set(row)) == 3 for row in rows.tolist())
    counts = torch.stack([(rows == number).sum(dim=0) for number in range(4)])
    assert (counts - 500).abs().max() < 5 * (2000 * 0.25 * 0.75) ** 0.5  # five standard deviations of a binomial count
