"""The texts on which `variants`, `learning-rate` and `scaling` train, by scale, and how.

The paper's settings are on its page (:mod:`kvlens.papers.kvsa`), with the options that set those that do not depend on size.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvlens.experiments.shared.learned import Goal
from kvlens.tasks.text import TextTask

TINY_TEXT: dict[str, Any] = dict(corpus="topics", vocab_size=300, length=24)
SMALL_TEXT: dict[str, Any] = dict(corpus="docs", vocab_size=300, length=64)
SMALL_MODEL: dict[str, Any] = dict(n_layers=2, d_model=64, d_head=16)
SMALL_TRAINING: dict[str, Any] = dict(steps=2400, batch_size=8, eval_every=200, eval_sequences=256)
SMALL_RATES = [5e-3, 1e-2]
SMALL_SEEDS = [11, 12, 13, 14, 15, 16]
MORE_SEEDS = [17, 18, 19, 20, 21, 22]
"""At the small scale the experiments on text share their runs: equal task, model, training, rates and seeds."""
TEXT = (TINY_TEXT, SMALL_TEXT)
MODEL = (dict(n_layers=1, d_model=16, d_head=8, attn_only=True), SMALL_MODEL)
TRAINING = (dict(steps=2, batch_size=4, eval_every=1, eval_sequences=4), SMALL_TRAINING)
RATES, SEEDS = ([1e-2], SMALL_RATES), ([0, 1], SMALL_SEEDS)
SHARE = 0.2
"""The share of the loss of the token frequencies, in nats, that a model must have removed to count as having learned; the loss
of a perfect model is not known for text."""


def frequency_loss(train: Int[Tensor, " train"], heldout: Int[Tensor, " heldout"], n_tokens: int) -> float:
    """Mean -log p over ``heldout`` in nats, p being the tokens' share in ``train`` with one added to each count."""
    counts = torch.bincount(train, minlength=n_tokens).double() + 1
    return float(-(counts / counts.sum()).log()[heldout].mean())


def text_goal(task: TextTask) -> Goal:
    """What there is to learn from a text beyond the frequencies of its tokens."""
    windows = task.windows
    return Goal(frequency_loss(windows["train"].tokens, windows["heldout"].tokens, task.d_input), share=SHARE)


def tokens_seen(settings: Mapping[str, Any]) -> int:
    """Tokens of one training run, from an experiment's settings."""
    return int(settings["training"]["steps"] * settings["training"]["batch_size"] * settings["task"]["length"])
