"""What training refuses before it starts, and its words."""

import functools
import math

import pytest
from tiny_runs import run, tiny_model, tiny_task

from kvlens.tasks import make_task
from kvlens.training import build_model, find_recipe, score_heldout

pytestmark = pytest.mark.unhooked  # the messages are kvlens' own

SETTINGS = [
    ("steps must be at least 1", dict(steps=0)),
    ("unknown setting 'stepz'; did you mean 'steps'?; there are steps, batch_size", dict(stepz=5)),
    ("batch_size must be a whole number of at least 1, got 1.5", dict(batch_size=1.5)),
    ("batch_size must be from 1 to", dict(batch_size=10**15)),
    ("eval_sequences must be from 1 to", dict(eval_sequences=10**15)),
    ("precision", dict(precision="float31")),
    ("stop_at_accuracy", dict(stop_at_accuracy=1.5)),
    ("betas", dict(betas=(0.9, 1.0))),
    ("betas must be a pair, got (1,)", dict(betas=(1,))),
    ("learning_rate must be above 0, got -1.0", dict(learning_rate=-1.0)),
    ("learning_rate must be above 0, got 0", dict(learning_rate=0)),
    ("learning_rate must be", dict(learning_rate=math.inf)),
    ("learning_rate must be a number above 0, got nan", dict(learning_rate=math.nan)),
    ("max_minutes must be above 0", dict(max_minutes=0)),
    ("schedule must be one of cosine, constant, got 'cosin'; did you mean 'cosine'?", dict(schedule="cosin")),
    ("warmup_fraction must be", dict(warmup_fraction=-0.1)),
    ("warmup_fraction must be", dict(warmup_fraction=1.0)),
    ("final_fraction must be", dict(final_fraction=2)),
    ("final_fraction must be", dict(final_fraction=-0.1)),
    ("max_grad_norm must be", dict(max_grad_norm=0)),
    ("eval_every must be at least 1, got 0", dict(eval_every=0)),
    ("eval_sequences must be at least 1, got 0", dict(eval_sequences=0)),
    ("stop_at_accuracy must be", dict(stop_at_accuracy=0)),
    ("patience must be", dict(patience=0)),
    ("log_every must be at least 1, got 0", dict(log_every=0)),
    ("checkpoint_every must be at least 1, got 0", dict(checkpoint_every=0)),
    ("watch must be part of a parameter's name, got 'nothing'", dict(watch="nothing")),
    ("seed must be at least 0, got -1", dict(seed=-1)),
    ("seed must be from 0 to 2**63 - 1", dict(seed=2**63)),
    ("weight_decay", dict(weight_decay=-1)),
    *(("train: folder: expected a path", dict(folder=x)) for x in ("a\0", "")),
    ("train: folder: ", dict(folder="x" * 300)),
    ("give folder or runs, not both", dict(folder="a", runs="b")),
]


def regression(dimensions=3):
    return make_task("regression", functions="linear", dimensions=dimensions, n_points=4)


def build(settings=None, **options):
    return build_model(tiny_task(), {} if settings is None else settings, **options)


REFUSED = [
    *((words, functools.partial(run, **settings)) for words, settings in SETTINGS),
    # a model and a task that do not fit
    ("uses 13 token ids", lambda: run(tiny_model(d_vocab=11))),
    ("the model has 11", lambda: run(tiny_model(d_vocab=11))),
    ("9 positions, but the model has only n_ctx=5", lambda: run(tiny_model(n_ctx=5))),
    ("needs a HookedKVRegressor", lambda: run(task=regression())),
    ("numbers per position", lambda: run(build_model(regression(5), {"n_layers": 1}, device="cpu"), regression())),
    # what is built and scored
    (
        "no recipe or task is called 'inducton'; did you mean 'induction'?",
        lambda: find_recipe("inducton"),
    ),
    ("build_model: settings must be a dict, got 3", lambda: build(3)),
    ("unknown field 'n_layer'; did you mean 'n_layers'?", lambda: build({"n_layer": 1})),
    ("n_layers must be a whole number, got 'x'", lambda: build({"n_layers": "x"})),
    *((f"device: '{device}' cannot be used here", lambda device=device: build(device=device)) for device in ("meta", "cudda")),
    ("device must be a string or None, got []", lambda: build(device=[])),
    ("n_sequences must be at least 1, got 0", lambda: score_heldout(tiny_model(), tiny_task(), 0)),
]


@pytest.mark.parametrize(("words", "call"), REFUSED, ids=[words for words, _ in REFUSED])
def test_is_refused(words, call, refuses):
    refuses(words, call)
