"""What training, its tasks, corpora and tokenizers refuse, and their words."""

import functools
import math
import sys
from types import ModuleType

import pytest
import torch
from task_checks import SMALL_TASKS, seeded
from tiny_runs import run, tiny_model, tiny_task

from kvlens.corpus import TokenWindows, train_bpe_tokenizer
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


TASKS = [
    ("induction", dict(length=7), "repeated blocks need a length of at least 8, got 7"),
    ("induction", dict(length=2, law="first_repeat"), "length must be at least 3, got 2"),
    ("induction", dict(length=64.0), "length must be a whole number of at least 3, got 64.0"),
    ("induction", dict(vocab_size=1), "vocab_size must be at least 4, got 1"),
    ("induction", dict(vocab_size=True), "vocab_size must be a whole number of at least 4, got True"),
    ("induction", dict(vocab_size=31, length=64), "up to length // 2 = 32 distinct tokens, but vocab_size is 31"),
    ("induction", dict(vocab_size=40, length=64, law="both"), "from up to length = 64 distinct tokens, but vocab_size is 40"),
    ("induction", dict(law="first"), "law must be one of repeated_block, first_repeat, both, got 'first'; did you mean"),
    ("induction", dict(lenght=3), "no setting 'lenght'; did you mean 'length'?"),
    ("bigrams", dict(n_letters=53), "there are 52 letters"),
    ("bigrams", dict(n_letters=6, n_triggers=5), "of 6 letters at least 2 must not be triggers"),
    ("bigrams", dict(trigger_rate=0.0), "trigger_rate must be at least 0.01, got 0.0"),
    ("bigrams", dict(trigger_rate="often"), "trigger_rate must be a number from 0.01 to 1.0, got 'often'"),
    ("ngrams", dict(order=1), "order must be at least 2"),
    ("ngrams", dict(order=2**70), "order must be from 2 to 2**63 - 1"),
    ("ngrams", dict(order=6, vocab_size=64), "entries, at most 16777216; got vocab_size=64, order=6"),
    ("ngrams", dict(order=5, vocab_size=3, length=3), "length must be at least order - 1 = 4, got 3"),
    ("ngrams", dict(restart_rate=1.0), "restart_rate must be from 0.0 to 0.9"),
    ("ngrams", dict(table_seed=-1), "table_seed must be at least 0, got -1"),
    ("ngrams", dict(table_seed=2**70), "table_seed must be from 0 to 2**63 - 1"),
    ("hops", dict(k=0), "k must be at least 1"),
    ("hops", dict(k=6, length=7), "6 hops need a length of at least 8, got 7"),
    ("hops", dict(vocabsize=5), "task 'hops' has no setting 'vocabsize'; did you mean 'vocab_size'?"),
    ("arithmetic", dict(modulus=9), "modulus must be an odd prime of at most 97, got 9"),
    ("arithmetic", dict(modulus=101), "modulus must be an odd prime of at most 97, got 101"),
    ("arithmetic", dict(max_ops=2, test_ops=6, n_names=5), "6 operations need as many names"),
    ("arithmetic", dict(n_names=53), "of the 52 letters, got n_names=53"),
    ("arithmetic", dict(scored_part="answers"), "must be one of solution, answer, got 'answers'; did you mean 'answer'"),
    ("regression", dict(functions="liner"), "got 'liner'; did you mean 'linear'"),
    ("regression", dict(heldout_shift="orthants"), "got 'orthants'; did you mean 'orthant'"),
    ("regression", dict(noise=-1.0), "noise must be at least 0.0, got -1.0"),
    ("regression", dict(functions="sparse_linear", dimensions=3), "uses 3 of more coordinates, got dimensions=3"),
    ("bigrams", dict(n_triggers=0), "n_triggers must be at least 1, got 0"),
    ("bigrams", dict(law="marcov"), "law must be one of blocks, markov, got 'marcov'; did you mean 'markov'?"),
    ("hops", dict(length=1), "length must be at least 3, got 1"),
    ("regression", dict(n_points=1), "n_points must be at least 2, got 1"),
    ("text", dict(vocab_size=3), "vocab_size must be at least 259, got 3"),
    ("text", dict(length=1), "length must be at least 2, got 1"),
    ("facts", dict(min_facts=5, max_facts=4), "min_facts <= max_facts <= 18, got min_facts=5, max_facts=4"),
    ("facts", dict(max_facts=19, length=900), "min_facts <= max_facts <= 18"),
    ("facts", dict(max_facts=12, length=110), "a story of 12 facts and one question need a length of 111, got 110"),
    ("facts", dict(max_facts=7, length=100, update_share=0.1), "7 facts and up to 7 updates and one question need a length of"),
    ("facts", dict(min_facts=0), "min_facts must be at least 1, got 0"),
    ("facts", dict(whole_share=1.5), "whole_share must be from 0 to 1, got 1.5"),
    ("facts", dict(hops=3), "hops"),
    ("facts", dict(hops=2, update_share=0.1, length=300), "hops"),
    ("facts", dict(hops=2, min_facts=1), "hops"),
    ("facts", dict(notes=True), "notes"),
]


def regression(dimensions=3):
    return make_task("regression", functions="linear", dimensions=dimensions, n_points=4)


def build(settings=None, **options):
    return build_model(tiny_task(), {} if settings is None else settings, **options)


def task(name):
    return make_task(name, **SMALL_TASKS[name])


def prompted(*given):
    return make_task("bigrams", n_letters=17, length=41).sample_with_prompt(2, *given)


TOKENS = (torch.zeros(0), torch.tensor([math.nan]), torch.tensor([-1]))


def windows():
    return TokenWindows(torch.arange(5), 0)


def sample(batch, length):
    return windows().sample(batch, length, torch.Generator())


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
    # tasks
    ("unknown task 'inducton'; did you mean 'induction'?; there are induction, bigrams", lambda: make_task("inducton")),
    *(
        (f"task '{name}': batch_size must be at least 1, got 0", lambda n=name: task(n).sample(0, seeded(0)))
        for name in SMALL_TASKS
    ),
    *(
        (
            "split must be one of train, heldout, got 'held_out'; did you mean 'heldout'?",
            lambda n=n: task(n).sample(1, seeded(0), "held_out"),
        )
        for n in SMALL_TASKS
    ),
    ("batch_size must be a whole number from 1 to", lambda: task("induction").sample(1.5, seeded(0))),
    ("batch_size must be from 1 to", lambda: task("induction").sample(10**15, seeded(0))),
    ("generator must be a Generator, got None", lambda: task("induction").sample(2, None)),
    ("seed must be at least 0, got -1", lambda: task("induction").heldout(2, -1)),
    ("seed must be from 0 to 2**63 - 1", lambda: task("induction").heldout(2, 2**70)),
    (
        "100 batches in a row held no position to score; ",
        lambda: make_task("hops", k=3, vocab_size=10**9, length=5).sample(1, seeded(0)),
    ),
    # text and tokens
    *(
        ("expected token ids [pos], whole numbers from 0 to", lambda x=x, n=n: task(n).tokens_as_text(x))
        for n in ("arithmetic", "bigrams")
        for x in TOKENS
    ),
    ("expected tokens [pos]; got tokens []", lambda: task("bigrams").tokens_as_text(torch.tensor(3))),
    # a prompt that leaves nothing on one side
    *((f"prompt_length must be from 2 to length - 1 = 40, got {n}", lambda n=n: prompted(seeded(0), n)) for n in (1, 41)),
    # corpora, tokenizers, windows
    ("at most", lambda: train_bpe_tokenizer(["a"], 10**12)),
    ("at least 259", lambda: train_bpe_tokenizer(["a"], 258)),
    ("texts must be a list of strings, got 'text'", lambda: train_bpe_tokenizer("text")),
    ("of strings", lambda: train_bpe_tokenizer([3], 300)),
    ("texts is empty; there is nothing to learn merges from", lambda: train_bpe_tokenizer([])),
    ("batch must be at least 1, got 0", lambda: sample(0, 4)),
    ("length must be from 2 to 6 (the text has 5 tokens), got 7", lambda: sample(1, 7)),
    ("length must be from 2 to 6 (the text has 5 tokens), got 1", lambda: sample(2, 1)),
    ("length must be from 2 to 6 (the text has 5 tokens), got 1", lambda: windows().consecutive(1)),
    ("max_windows must be at least 1, got 0", lambda: windows().consecutive(2, max_windows=0)),
]


@pytest.mark.parametrize(("words", "call"), REFUSED, ids=[words for words, _ in REFUSED])
def test_is_refused(words, call, refuses):
    refuses(words, call)


@pytest.mark.parametrize(("name", "settings", "words"), TASKS, ids=[words for *_, words in TASKS])
def test_a_setting_is_refused(name, settings, words, refuses):
    refuses(words, lambda: make_task(name, **settings))
    refuses(f"task '{name}'", lambda: make_task(name, **settings))


@pytest.mark.parametrize("name", SMALL_TASKS)
def test_no_setting_takes_a_value_of_another_kind(name, refuses):
    for setting in task(name).settings():
        refuses(
            f"task '{name}': {setting}", lambda setting=setting: make_task(name, **{**SMALL_TASKS[name], setting: object()})
        )


POSTPONED = """
from __future__ import annotations
from dataclasses import dataclass
from kvlens.tasks.induction import InductionTask

@dataclass(frozen=True)
class Own(InductionTask):
    times: int = 3
"""


def test_a_setting_is_checked_where_annotations_are_postponed(refuses, monkeypatch):
    monkeypatch.setitem(sys.modules, "of_a_user", module := ModuleType("of_a_user"))
    exec(POSTPONED, vars(module))
    assert module.Own(times=4).times == 4
    refuses("times must be a whole number, got 'x'", lambda: module.Own(times="x"))
