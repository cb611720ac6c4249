"""Induction: answers are unambiguous, and no shortcut gives them. k hops: against the definition, read literally. Bigrams and
n-grams: what is scored is what the prompt, or the table of a seed, says.
"""

import itertools

import pytest
import torch
from task_checks import assert_frequency, seeded

from kvlens.tasks import BigramTask, HopsTask, InductionTask, NgramTask

TASK = InductionTask(vocab_size=61, length=47)


def answer_by_loop(tokens: list[int]) -> int | None:
    """The token that followed the previous occurrence of the last token."""
    for j in range(len(tokens) - 2, -1, -1):
        if tokens[j] == tokens[-1]:
            return tokens[j + 1]
    return None


def test_exactly_what_an_earlier_occurrence_determines_is_scored_and_right_and_never_ambiguous():
    inputs, targets, scored = TASK.sample(13, seeded(0))
    for row, target, is_scored in zip(inputs.tolist(), targets.tolist(), scored.tolist(), strict=True):
        answers = [answer_by_loop(row[: i + 1]) for i in range(len(row))]
        assert [answer is not None for answer in answers] == is_scored
        assert [a for a in answers if a is not None] == [t for t, s in zip(target, is_scored, strict=True) if s]
        assert len(set(zip(row, target, strict=True))) == len(set(row))


def test_every_period_is_drawn_equally_often():
    scored = TASK.sample(6000, seeded(3)).scored
    period = TASK.length - scored.sum(dim=1)
    periods = torch.arange(TASK.min_period, TASK.max_period + 1)
    assert set(period.tolist()) == set(periods.tolist()) and TASK.max_period <= TASK.length / 2  # half or more are scored
    assert_frequency(period[:, None] == periods, 1 / len(periods))


def test_a_fixed_distance_is_right_for_the_periods_that_divide_it_and_those_are_few():
    inputs, targets, scored = TASK.sample(40, seeded(5))
    period = TASK.length - scored.sum(dim=1, keepdim=True)
    for distance in range(TASK.length):
        guess = inputs.roll(distance, dims=1)[:, distance:]
        is_right = guess == targets[:, distance:]
        is_scored = scored[:, distance:]
        assert torch.equal(is_right & is_scored, is_scored & ((distance + 1) % period == 0))
        assert sum((distance + 1) % p == 0 for p in range(TASK.min_period, TASK.max_period + 1)) <= 3


def test_tokens_follow_each_other_without_preference():
    inputs = InductionTask(vocab_size=8, length=8).sample(8000, seeded(6)).inputs
    first_pair = inputs[:, 0] * 8 + inputs[:, 1]
    different = torch.tensor([a * 8 + b for a in range(8) for b in range(8) if a != b])
    has_three = (inputs[:, 0] != inputs[:, 2]).nonzero().squeeze(1)  # period 3 or 4: first_pair is no repetition
    assert_frequency(first_pair[has_three, None] == different, 1 / 56)


# --- KVSA's own law ---

FIRST = InductionTask(vocab_size=61, length=23, law="first_repeat")


def test_the_scored_position_is_the_first_repeat_and_its_answer_the_token_that_followed():
    inputs, targets, scored = FIRST.sample(200, seeded(0))
    for row, target, is_scored in zip(inputs.tolist(), targets.tolist(), scored.tolist(), strict=True):
        answers = [answer_by_loop(row[: i + 1]) for i in range(len(row))]
        first = next(i for i, answer in enumerate(answers) if answer is not None)
        assert [i for i, is_true in enumerate(is_scored) if is_true] == [first]
        assert target[first] == answers[first]
        assert all(a != b for a, b in itertools.pairwise(row))  # no token twice in a row


def test_the_first_repeat_stands_where_the_birthday_problem_puts_it():
    """Token j (from 0) repeats none of the j - 1 before its predecessor with chance 1 - (j - 1) / (n - 1)."""
    n = FIRST.length
    place = FIRST.sample(20_000, seeded(1)).scored.long().argmax(dim=1)
    still_new, expected = 1.0, []
    for j in range(n):
        repeats = max(0, j - 1) / (n - 1)
        expected.append(still_new * repeats)
        still_new *= 1 - repeats
    for j, chance in enumerate(expected):
        assert_frequency(place[:, None] == j, chance / (1 - still_new))


def test_after_the_first_repeat_every_repeated_token_is_followed_by_its_last_follower():
    for row in FIRST.sample(100, seeded(2)).inputs.tolist():
        following, i = {}, 0
        while i < len(row):
            brings = following.get(row[i])
            if i > 0:
                following[row[i - 1]] = row[i]
            if brings is not None and i + 1 < len(row):
                assert row[i + 1] == brings
                following[row[i]] = brings
                i += 1
            i += 1


def test_both_distributions_are_equally_frequent_and_unchanged():
    task = InductionTask(vocab_size=61, length=23, law="both")
    scored = task.sample(4000, seeded(3)).scored.sum(dim=1)
    assert_frequency(scored[:, None] == 1, 0.5)
    assert int(scored[scored > 1].min()) >= 12


def test_the_shortest_first_repeat_is_a_b_a():
    inputs, targets, scored = InductionTask(vocab_size=5, length=3, law="first_repeat").sample(200, seeded(4))
    assert torch.equal(inputs[:, 0], inputs[:, 2]) and torch.equal(targets[:, 2], inputs[:, 1])
    assert (inputs[:, 0] != inputs[:, 1]).all() and torch.equal(scored, torch.tensor([False, False, True]).expand(200, -1))


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


BIGRAMS = BigramTask(n_letters=17, n_triggers=3, length=41, trigger_rate=0.3)
CHAIN = BigramTask(n_letters=11, n_triggers=3, length=41, law="markov")
BOTH_LAWS = pytest.mark.parametrize("task", [BIGRAMS, CHAIN], ids=["blocks", "markov"])


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
    inputs, targets, _ = BIGRAMS.sample(4000, seeded(2))
    is_first_use = (inputs == 1) & ((inputs == 1).cumsum(dim=1) == 1)
    followers = targets[is_first_use]
    assert_frequency(followers[:, None] == torch.arange(3, 17), 1 / 14)
    first_letter = inputs[:, 0][inputs[:, 0] >= 3]
    assert_frequency(first_letter[:, None] == torch.arange(3, 17), 1 / 14)


def test_triggers_come_as_often_as_the_rate_says():
    inputs = BIGRAMS.sample(4000, seeded(3)).inputs
    chance = BIGRAMS.trigger_rate  # of a trigger at position i; none can follow one
    for i in range(BIGRAMS.length):
        assert_frequency((inputs[:, i : i + 1] < 3), chance)
        assert_frequency((inputs[:, i : i + 1] == torch.arange(3)), chance / 3)
        chance = BIGRAMS.trigger_rate * (1 - chance)
    assert chance == pytest.approx(BIGRAMS.trigger_rate / (1 + BIGRAMS.trigger_rate))


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
