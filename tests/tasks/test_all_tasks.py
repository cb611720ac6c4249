"""Properties of every task: shapes, settings, batches determined by the generator alone, and clear errors."""

import json

import pytest
import torch
from task_checks import SMALL_TASKS, seeded

from kvlens.cli import main
from kvlens.tasks import SPLITS, TASKS, make_task, task_names
from kvlens.tasks.task import draw_distinct, previous_occurrence

EACH_TASK = pytest.mark.parametrize("name", SMALL_TASKS)
NEXT_TOKEN = ("induction", "bigrams", "ngrams", "arithmetic")


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_every_task_is_found_by_its_name(capsys):
    main(["train", "--help"])  # which is read before torch is imported, and so lists them by hand
    assert f"or a task: {', '.join(TASKS)}." in " ".join(capsys.readouterr().out.split())
    assert {name: task.name for name, task in TASKS.items()} == {name: name for name in task_names()}
    assert set(SMALL_TASKS) | {"text"} == set(TASKS)


@EACH_TASK
@pytest.mark.parametrize("split", SPLITS)
def test_a_batch_has_the_promised_shapes(name, split):
    task = make_task(name, **SMALL_TASKS[name])
    inputs, targets, scored = task.sample(3, seeded(0), split)
    assert targets.shape == scored.shape == inputs.shape[:2] == (3, task.n_positions)
    assert scored.dtype == torch.bool and bool(scored.any())
    if task.predicts == "numbers":
        assert inputs.shape[2] == task.d_input
        assert inputs.dtype == targets.dtype == torch.float32
    else:
        assert inputs.dtype == targets.dtype == torch.int64
        assert int(inputs.min()) >= 0 and int(inputs.max()) < task.d_input
        assert int(targets.min()) >= 0 and int(targets.max()) < task.d_input
    if name in NEXT_TOKEN:
        assert torch.equal(targets[:, :-1], inputs[:, 1:])


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("induction", dict(vocab_size=9, length=8)),
        ("induction", dict(vocab_size=9, length=8, law="first_repeat")),
        ("bigrams", dict(law="markov")),
        ("ngrams", dict(order=4, vocab_size=3)),
        *(("hops", dict(k=k, mixed=mixed)) for k in (1, 2, 3) for mixed in (False, True)),
    ],
)
def test_a_guess_is_right_once_in_the_answers_that_the_last_token_allows(name, more):
    """Counted: the answers after each token."""
    task = make_task(name, **{**SMALL_TASKS[name], **more})
    inputs, targets, scored = task.sample(2000, seeded(0))
    found = {(token, answer) for token, answer in zip(inputs[scored].tolist(), targets[scored].tolist(), strict=True)}
    assert task.chance == len({token for token, _ in found}) / len(found)


@EACH_TASK
def test_the_generator_alone_decides_a_batch(name):
    task = make_task(name, **SMALL_TASKS[name])
    generator = seeded(1)
    task.sample(2, generator)
    state = generator.get_state()
    once = task.sample(4, generator)
    generator.set_state(state)
    torch.manual_seed(99)  # the global generator has no effect, and is left alone
    before = torch.get_rng_state()
    assert same(task.sample(4, generator), once)
    assert not same(task.sample(4, generator), once)
    assert torch.equal(torch.get_rng_state(), before)


@EACH_TASK
def test_heldout_sequences_are_the_same_for_the_same_seed_and_none_is_trained_on(name):
    task = make_task(name, **SMALL_TASKS[name])
    heldout = task.heldout(5, seed=2)
    assert same(heldout, task.heldout(5, seed=2))
    assert not same(heldout, task.heldout(5, seed=3))
    assert not same(heldout, task.sample(5, seeded(2)))


@EACH_TASK
def test_settings_make_the_task_again_by_way_of_json(name):
    task = make_task(name, **SMALL_TASKS[name])
    again = make_task(name, **json.loads(json.dumps(task.settings())))
    assert again == task
    assert same(again.heldout(2), task.heldout(2))


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
