"""What KVSA's experiments train: models with and without KV shift, the blocks of its toy models, and texts and their settings.

The paper's settings are on its page (:mod:`kvlens.papers.kvsa`), with the options that set those that do not depend on size.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvlens.papers.harness import plots
from kvlens.papers.harness.learned import Goal
from kvlens.tasks.text import TextTask

PLAIN, SHIFTED = "plain", "KV shift"
MODELS: dict[str, dict[str, Any]] = {PLAIN: dict(kv_shift=False), SHIFTED: dict(kv_shift=True)}
"""Label -> fields of the model's config."""
COLORS = {PLAIN: plots.PLAIN, SHIFTED: plots.SHIFTED}

LLAMA_BLOCKS: dict[str, Any] = dict(act_fn="silu", gated_mlp=True, normalization_type="RMS", positional_embedding_type="rotary")
"""Fields of a config (sec. 3.2: "the same architecture as Llama"): RMSNorm, rotary positions, a gated MLP with SiLU."""

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


def text_goal(text: Mapping[str, Any]) -> Goal:
    """What there is to learn from a text (fields of a task) beyond the frequencies of its tokens."""
    task = TextTask(**text)
    return Goal(frequency_loss(task.windows["train"].tokens, task.windows["heldout"].tokens, task.d_input), share=SHARE)


def tokens_seen(settings: Mapping[str, Any]) -> str:
    """The number of tokens of one training run, from an experiment's settings."""
    return f"{settings['training']['steps'] * settings['training']['batch_size'] * settings['task']['length']:,}"


def steps_in_words(settings: Mapping[str, Any]) -> str:
    """How steps differ from the paper's (app. G)."""
    return (
        f"A step takes {settings['training']['batch_size']} sequences, at the rate of {settings['rates']} that is best for the "
        "model on other seeds; the paper's takes 4,096, at 2e-4 after 1,000 steps of warm-up (app. G)."
    )
