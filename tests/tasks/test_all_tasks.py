"""Properties of every task: shapes, settings, batches determined by the generator alone, and clear errors."""

import json

import pytest
import torch
from task_checks import SMALL_TASKS, seeded

from kvlens.errors import KVLensError
from kvlens.tasks import SPLITS, TASKS, make_task, task_names

EACH_TASK = pytest.mark.parametrize("name", SMALL_TASKS)


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_every_task_is_found_by_its_name():
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


@EACH_TASK
def test_equal_generator_states_give_equal_batches_and_others_do_not(name):
    task = make_task(name, **SMALL_TASKS[name])
    generator = seeded(1)
    task.sample(2, generator)
    state = generator.get_state()
    once = task.sample(4, generator)
    generator.set_state(state)
    torch.manual_seed(99)  # the global generator has no effect
    assert same(task.sample(4, generator), once)
    assert not same(task.sample(4, generator), once)


@EACH_TASK
def test_heldout_sequences_are_the_same_for_the_same_seed_and_none_is_trained_on(name):
    task = make_task(name, **SMALL_TASKS[name])
    heldout = task.heldout(5, seed=2)
    assert same(heldout, task.heldout(5, seed=2))
    assert not same(heldout, task.heldout(5, seed=3))
    assert not same(heldout, task.sample(5, seeded(2)))


@EACH_TASK
def test_the_global_generator_is_left_alone(name):
    before = torch.get_rng_state()
    make_task(name, **SMALL_TASKS[name]).sample(2, seeded(0))
    assert torch.equal(torch.get_rng_state(), before)


@EACH_TASK
def test_settings_make_the_task_again_by_way_of_json(name):
    task = make_task(name, **SMALL_TASKS[name])
    again = make_task(name, **json.loads(json.dumps(task.settings())))
    assert again == task
    assert same(again.heldout(2), task.heldout(2))


def test_an_unknown_task_proposes_the_nearest():
    with pytest.raises(KVLensError, match=r"unknown task 'inducton'; did you mean 'induction'\?; there are induction, bigrams"):
        make_task("inducton")


def test_an_unknown_setting_proposes_the_nearest():
    with pytest.raises(KVLensError, match=r"task 'hops' has no setting 'vocabsize'; did you mean 'vocab_size'\?"):
        make_task("hops", vocabsize=5)


@EACH_TASK
def test_a_request_that_cannot_be_served_is_refused(name):
    task = make_task(name, **SMALL_TASKS[name])
    with pytest.raises(KVLensError, match=rf"task '{name}': batch_size must be at least 1, got 0"):
        task.sample(0, seeded(0))
    with pytest.raises(KVLensError, match=r"split must be one of train, heldout, got 'held_out'; did you mean 'heldout'\?"):
        task.sample(1, seeded(0), "held_out")


@pytest.mark.unhooked
@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("induction", dict(length=7), "length must be at least 8, got 7"),
        ("induction", dict(length=64.0), "length must be a whole number of at least 8, got 64.0"),
        ("induction", dict(vocab_size=True), "vocab_size must be a whole number of at least 4, got True"),
        ("induction", dict(vocab_size=31, length=64), "up to length // 2 = 32 distinct tokens, but vocab_size is 31"),
        (
            "induction",
            dict(vocab_size=40, length=64, law="both"),
            "draws from up to length = 64 distinct tokens, but vocab_size is 40",
        ),
        (
            "induction",
            dict(law="first"),
            "law must be one of repeated_block, first_repeat, both, got 'first'; did you mean 'first_repeat'",
        ),
        ("bigrams", dict(n_letters=53), "there are 52 letters"),
        ("bigrams", dict(n_letters=6, n_triggers=5), "of 6 letters at least 2 must not be triggers"),
        ("bigrams", dict(trigger_rate=0.0), "trigger_rate must be at least 0.01, got 0.0"),
        ("bigrams", dict(trigger_rate="often"), "trigger_rate must be a number from 0.01 to 1.0, got 'often'"),
        ("ngrams", dict(order=1), "order must be at least 2"),
        ("ngrams", dict(order=6, vocab_size=64), "entries, at most 16777216; got vocab_size=64, order=6"),
        ("ngrams", dict(order=5, vocab_size=3, length=3), "length must be at least order - 1 = 4, got 3"),
        ("ngrams", dict(restart_rate=1.0), "restart_rate must be from 0.0 to 0.9"),
        ("hops", dict(k=0), "k must be at least 1"),
        ("hops", dict(k=6, length=7), "6 hops need a length of at least 8, got 7"),
        ("arithmetic", dict(modulus=9), "modulus must be an odd prime of at most 97, got 9"),
        ("arithmetic", dict(modulus=101), "modulus must be an odd prime of at most 97, got 101"),
        ("arithmetic", dict(max_ops=2, test_ops=6, n_names=5), "6 operations need as many names"),
        ("arithmetic", dict(n_names=53), "of the 52 letters, got n_names=53"),
        ("arithmetic", dict(scored_part="answers"), "must be one of solution, answer, got 'answers'; did you mean 'answer'"),
        ("regression", dict(functions="liner"), "got 'liner'; did you mean 'linear'"),
        ("regression", dict(heldout_shift="orthants"), "got 'orthants'; did you mean 'orthant'"),
        ("regression", dict(noise=-1.0), "noise must be at least 0.0, got -1.0"),
        ("regression", dict(functions="sparse_linear", dimensions=3), "uses 3 of more coordinates, got dimensions=3"),
    ],
)
def test_a_bad_setting_is_refused(name, settings, message):
    with pytest.raises(KVLensError) as error:
        make_task(name, **settings)
    assert f"task '{name}'" in str(error.value)
    assert message in str(error.value)


def test_settings_that_leave_nothing_to_score_are_refused_when_drawn_from():
    with pytest.raises(KVLensError, match=r"100 batches in a row held no position to score; .*make them longer"):
        make_task("hops", k=3, vocab_size=10**9, length=5).sample(1, seeded(0))
