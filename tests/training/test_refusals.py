"""What training, its tasks, corpora and tokenizers refuse, since it would train something else in silence."""

import functools
import math

import pytest
import torch
from task_checks import SMALL_TASKS, seeded
from tiny_runs import run, tiny_model, tiny_task

from kvlens.corpus import TokenWindows, train_bpe_tokenizer
from kvlens.tasks import make_task
from kvlens.training import build_model, find_recipe, score_heldout

pytestmark = pytest.mark.unhooked  # the messages are kvlens' own

SETTINGS = [
    *({name: 0} for name in ("steps", "learning_rate", "max_minutes", "max_grad_norm", "eval_every", "log_every")),
    dict(stepz=5),
    *(dict(batch_size=x) for x in (1.5, 10**15)),
    *(dict(learning_rate=x) for x in (-1.0, math.inf, math.nan)),
    *(dict(betas=x) for x in ((0.9, 1.0), (1,))),
    dict(precision="float31"),
    dict(schedule="cosin"),
    *(dict(warmup_fraction=x) for x in (-0.1, 1.0)),
    dict(final_fraction=2),
    *(dict(stop_at_accuracy=x) for x in (0, 1.5)),
    dict(watch="nothing"),
    *(dict(seed=x) for x in (-1, 2**63)),
    dict(weight_decay=-1),
    dict(folder=""),
    dict(folder="a", runs="b"),
]
TASKS = [
    *(("induction", x) for x in (dict(length=64.0), dict(vocab_size=1), dict(vocab_size=True))),
    *(("induction", x) for x in (dict(vocab_size=31, length=64), dict(vocab_size=40, length=64, law="both"))),
    *(("induction", x) for x in (dict(law="first"), dict(lenght=3))),
    *(("bigrams", x) for x in (dict(n_letters=53), dict(n_letters=6, n_triggers=5), dict(trigger_rate=0.0))),
    *(("ngrams", x) for x in (dict(order=1), dict(order=6, vocab_size=64))),
    *(("ngrams", x) for x in (dict(restart_rate=1.0), dict(table_seed=-1))),
    *(("hops", x) for x in (dict(k=0), dict(vocabsize=5), dict(length=1))),
    *(("arithmetic", x) for x in (dict(modulus=9), dict(modulus=101), dict(max_ops=2, test_ops=6, n_names=5))),
    *(("arithmetic", x) for x in (dict(n_names=53), dict(scored_part="answers"))),
    *(("regression", x) for x in (dict(functions="liner"), dict(noise=-1.0), dict(n_points=1))),
    ("regression", dict(functions="sparse_linear", dimensions=3)),
    *(("text", x) for x in (dict(vocab_size=3), dict(length=1))),
    *(("facts", x) for x in (dict(min_facts=5, max_facts=4), dict(max_facts=19, length=900), dict(max_facts=12, length=110))),
    *(("facts", x) for x in (dict(whole_share=1.5), dict(hops=3), dict(hops=2, min_facts=1), dict(notes=True))),
]


def regression(dimensions=3):
    return make_task("regression", functions="linear", dimensions=dimensions, n_points=4)


def built(settings=None, **options):
    return build_model(tiny_task(), {} if settings is None else settings, **options)


def task(name):
    return make_task(name, **SMALL_TASKS[name])


def prompted(*given):
    return make_task("bigrams", n_letters=17, length=41).sample_with_prompt(2, *given)


def windows():
    return TokenWindows(torch.arange(5), 0)


def sample(batch, length):
    return windows().sample(batch, length, torch.Generator())


REFUSED = [
    *(functools.partial(run, **settings) for settings in SETTINGS),
    *(functools.partial(make_task, name, **settings) for name, settings in TASKS),
    # a model and a task that do not fit
    lambda: run(tiny_model(d_vocab=11)),
    lambda: run(tiny_model(n_ctx=5)),
    lambda: run(task=regression()),
    lambda: run(build_model(regression(5), {"n_layers": 1}, device="cpu"), regression()),
    # what is built, scored and drawn
    lambda: find_recipe("inducton"),
    lambda: built({"n_layer": 1}),
    lambda: built(device="meta"),
    lambda: score_heldout(tiny_model(), tiny_task(), 0),
    lambda: make_task("inducton"),
    *(lambda n=name: task(n).sample(0, seeded(0)) for name in SMALL_TASKS),
    *(lambda n=name: task(n).sample(1, seeded(0), "held_out") for name in SMALL_TASKS),
    lambda: task("induction").sample(10**15, seeded(0)),
    lambda: task("induction").heldout(2, -1),
    lambda: make_task("hops", k=3, vocab_size=10**9, length=5).sample(1, seeded(0)),
    *(lambda n=n: prompted(seeded(0), n) for n in (1, 41)),
    # corpora, tokenizers, windows
    *(lambda n=n: train_bpe_tokenizer(["a"], n) for n in (10**12, 258)),
    lambda: train_bpe_tokenizer("text"),
    *(lambda given=given: sample(*given) for given in ((0, 4), (1, 7), (2, 1))),
    lambda: windows().consecutive(1),
]


@pytest.mark.parametrize("call", REFUSED)
def test_is_refused(call, refuses):
    refuses("", call)
