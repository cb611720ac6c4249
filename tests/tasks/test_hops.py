"""k hops: against the definition, read literally."""

import pytest
import torch
from task_checks import assert_frequency, seeded

from kvlens.tasks import HopsTask


def find(tokens: list[int], k: int, i: int | None) -> int | None:
    """find^k(i) = find^1(find^{k-1}(i)), find^1(i) = max { j <= i : x_{j-1} = x_i }; None where there is none."""
    if k == 0 or i is None:
        return i
    i = find(tokens, k - 1, i)
    return None if i is None else max((j for j in range(1, i + 1) if tokens[j - 1] == tokens[i]), default=None)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_targets_are_the_definitions(k):
    inputs, targets, scored = HopsTask(k=k, vocab_size=4, length=37).sample(11, seeded(k))
    for b, row in enumerate(inputs.tolist()):
        found = [find(row, k, i) for i in range(len(row))]
        assert scored[b].tolist() == [f is not None for f in found]
        assert targets[b].tolist() == [0 if f is None else row[f] for f in found]


def test_two_hops_by_hand():
    #          A  B  C  A  C  B  A    the last A -> C (after the A before), that C -> A (after the C before)
    tokens = torch.tensor([[0, 1, 2, 0, 2, 1, 0]])
    assert HopsTask(k=1, vocab_size=3, length=7)._find(tokens, None).tolist() == [[-1, -1, -1, 1, 3, 2, 4]]
    assert HopsTask(k=2, vocab_size=3, length=7)._find(tokens, None).tolist() == [[-1, -1, -1, -1, 1, -1, 3]]


def test_mixed_texts_say_how_many_hops_lead_to_their_answers():
    task = HopsTask(k=5, vocab_size=4, length=37, mixed=True)
    inputs, targets, scored = task.sample(3000, seeded(2))
    assert (task.n_positions, task.d_input) == (38, 9) and inputs.shape == (3000, 38)
    assert_frequency(inputs[:, :1] == torch.arange(4, 9), 1 / 5)
    assert not scored[:, 0].any() and int(inputs[:, 1:].max()) == 3
    for (said, *row), target, is_scored in zip(inputs[:40].tolist(), targets.tolist(), scored.tolist(), strict=False):
        found = [find(row, said - 3, i) for i in range(len(row))]
        assert is_scored[1:] == [f is not None for f in found]
        assert target[1:] == [0 if f is None else row[f] for f in found]


def test_each_token_is_any_but_the_one_before():
    tokens = HopsTask(k=1, vocab_size=5, length=9).sample(5000, seeded(0)).inputs
    assert_frequency(tokens[:, :1] == torch.arange(5), 1 / 5)
    steps = (tokens[:, 1:] - tokens[:, :-1]) % 5
    assert (steps != 0).all()
    assert_frequency((steps[:, :, None] == torch.arange(1, 5)).flatten(1), 1 / 4)
