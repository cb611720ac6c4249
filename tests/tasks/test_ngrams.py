"""Bigrams and n-grams: what is scored is what the prompt, or the table of a seed, says."""

import pytest
import torch
from task_checks import assert_frequency, seeded

from kvlens.tasks import BigramTask, NgramTask

TASK = BigramTask(n_letters=17, n_triggers=3, length=41, trigger_rate=0.3)
CHAIN = BigramTask(n_letters=11, n_triggers=3, length=41, law="markov")
BOTH_LAWS = pytest.mark.parametrize("task", [TASK, CHAIN], ids=["blocks", "markov"])


@BOTH_LAWS
def test_every_committed_trigger_and_nothing_else_is_scored_with_its_follower_which_is_no_trigger(task):
    inputs, targets, scored = task.sample(40, seeded(0))
    assert not ((inputs < 3) & (targets < 3)).any()
    for row, target, is_scored in zip(inputs.tolist(), targets.tolist(), scored.tolist(), strict=True):
        follower: dict[int, int] = {}
        for i, letter in enumerate(row):
            assert is_scored[i] == (letter in follower)
            if letter < task.n_triggers:
                assert target[i] == follower.setdefault(letter, target[i])


def test_followers_and_the_other_letters_are_drawn_without_preference():
    inputs, targets, _ = TASK.sample(4000, seeded(2))
    is_first_use = (inputs == 1) & ((inputs == 1).cumsum(dim=1) == 1)
    followers = targets[is_first_use]
    assert_frequency(followers[:, None] == torch.arange(3, 17), 1 / 14)
    first_letter = inputs[:, 0][inputs[:, 0] >= 3]
    assert_frequency(first_letter[:, None] == torch.arange(3, 17), 1 / 14)


def test_triggers_come_as_often_as_the_rate_says():
    inputs = TASK.sample(4000, seeded(3)).inputs
    chance = TASK.trigger_rate  # of a trigger at position i; none can follow one
    for i in range(TASK.length):
        assert_frequency((inputs[:, i : i + 1] < 3), chance)
        assert_frequency((inputs[:, i : i + 1] == torch.arange(3)), chance / 3)
        chance = TASK.trigger_rate * (1 - chance)
    assert chance == pytest.approx(TASK.trigger_rate / (1 + TASK.trigger_rate))


@BOTH_LAWS
def test_with_a_prompt_only_what_the_prompt_has_shown_is_scored(task):
    n_prompt = 19
    inputs, targets, scored = task.sample_with_prompt(50, seeded(4), n_prompt)
    for row, target, is_scored in zip(inputs.tolist(), targets.tolist(), scored.tolist(), strict=True):
        prompt = row[:n_prompt]
        shown = {letter: prompt[i + 1] for i, letter in enumerate(prompt[:-1]) if letter < task.n_triggers}
        for i, letter in enumerate(row):
            assert is_scored[i] == (i >= n_prompt and letter in shown)
            if is_scored[i]:
                assert target[i] == shown[letter]


def test_a_trigger_cut_off_from_its_follower_is_not_settled():
    task = BigramTask(n_letters=4, n_triggers=1, length=9, trigger_rate=1.0)  # a x a x a x ...
    assert task.sample_with_prompt(1, seeded(0), 3).scored.tolist() == [[False] * 4 + [True, False] * 2 + [True]]
    letters = torch.tensor([[2, 0, 3, 0, 3]])
    assert task._settled_by_prompt(letters, 2).tolist() == [[False] * 5]
    assert task._settled_by_prompt(letters, 3).tolist() == [[False, False, False, True, False]]


def test_letters_are_a_to_z_then_capitals():
    task = BigramTask()
    assert task.tokens_as_text(torch.tensor([0, 25, 26, 51])) == "azAZ"


def test_in_a_chain_what_follows_no_trigger_is_uniform_over_the_whole_alphabet():
    inputs, targets, _ = CHAIN.sample(8000, seeded(1))
    letters = torch.arange(CHAIN.n_letters)
    assert_frequency(inputs[:, :1] == letters, 1 / 11)
    first = (inputs[:, 0] >= CHAIN.n_triggers).nonzero().squeeze(1)
    assert_frequency(targets[first, :1] == letters, 1 / 11)
    triggers = (inputs[:, 0] < CHAIN.n_triggers).nonzero().squeeze(1)
    assert_frequency(targets[triggers, :1] == letters[CHAIN.n_triggers :], 1 / 8)


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
