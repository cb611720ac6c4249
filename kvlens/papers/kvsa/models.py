"""What KVSA's experiments train: models with and without KV shift, the blocks of its toy models, and texts and their settings.

Below them are the paper's own models and settings (table 6), which no experiment here has the machines for, and on the paper's
page (:mod:`kvlens.papers.kvsa`) the options that set those that do not depend on size.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from kvlens.papers.harness import plots
from kvlens.papers.harness.learned import Goal
from kvlens.papers.harness.run import Settings
from kvlens.tasks.text import TextTask

PLAIN, SHIFTED = "plain", "KV shift"
MODELS: dict[str, dict[str, object]] = {PLAIN: dict(kv_shift=False), SHIFTED: dict(kv_shift=True)}
"""Label -> fields of the model's config."""
MODEL_COLORS = {PLAIN: plots.PLAIN_COLOR, SHIFTED: plots.SHIFTED_COLOR}

LLAMA_BLOCKS: dict[str, object] = dict(
    act_fn="silu", gated_mlp=True, normalization_type="RMS", positional_embedding_type="rotary"
)
"""Fields of a config (sec. 3.2: "the same architecture as Llama"): RMSNorm, rotary positions, a gated MLP with SiLU."""

TINY_TEXT: dict[str, object] = dict(corpus="topics", vocab_size=300, length=24)
SMALL_TEXT: dict[str, object] = dict(corpus="docs", vocab_size=300, length=64)
SMALL_MODEL: dict[str, object] = dict(n_layers=2, d_model=64, d_head=16)
SMALL_TRAINING: dict[str, object] = dict(steps=2400, batch_size=8, eval_every=200, eval_sequences=256)
SMALL_RATES = [5e-3, 1e-2]
SMALL_SEEDS = [11, 12, 13, 14, 15, 16]
MORE_SEEDS = [17, 18, 19, 20, 21, 22]
"""At the small scale the experiments on text share their runs: equal task, model, training, rates and seeds."""
TEXT_TASK = (TINY_TEXT, SMALL_TEXT)
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


def text_goal(text: Settings) -> Goal:
    """What there is to learn from a text (fields of a task) beyond the frequencies of its tokens."""
    task = TextTask(**text)
    return Goal(frequency_loss(task.windows["train"].tokens, task.windows["heldout"].tokens, task.d_input), share=SHARE)


def tokens_seen(settings: Settings) -> str:
    """The number of tokens of one training run, from an experiment's settings."""
    return f"{settings['training']['steps'] * settings['training']['batch_size'] * settings['task']['length']:,}"


def steps_in_words(settings: Settings) -> str:
    """How steps differ from the paper's (app. G)."""
    return (
        f"A step takes {settings['training']['batch_size']} sequences, at the rate of {settings['rates']} that is best for the "
        "model on other seeds; the paper's takes 4,096, at 2e-4 after 1,000 steps of warm-up (app. G)."
    )


# --- the paper's own models ---


@dataclass(frozen=True)
class PrintedSize:
    """A column of table 6, in its order; heads have 128 dimensions. ``batch_size`` is GPUs times sequences for each."""

    d_model: int
    n_layers: int
    n_kv_heads: int
    d_mlp: int
    n_tokens: float
    d_vocab: int
    n_ctx: int
    batch_size: int
    learning_rate: float
    warmup_steps: int

    def model(self) -> dict[str, object]:
        """Fields of the model's config; ``kv_shift`` is added to them (`MODELS`)."""
        size = dict(n_layers=self.n_layers, d_model=self.d_model, d_head=128, n_heads=self.d_model // 128, d_mlp=self.d_mlp)
        keys = dict(n_key_value_heads=self.n_kv_heads) if self.n_kv_heads < self.d_model // 128 else {}
        return dict(**size, **keys, n_ctx=self.n_ctx, d_vocab=self.d_vocab, rotary_base=100_000, **LLAMA_BLOCKS)

    def training(self) -> dict[str, object]:
        """Fields of :class:`kvlens.training.TrainSettings`."""
        steps = round(self.n_tokens / (self.batch_size * self.n_ctx))
        rate = dict(learning_rate=self.learning_rate, warmup_fraction=self.warmup_steps / steps)
        return dict(steps=steps, batch_size=self.batch_size, **rate, **PRINTED_TRAINING)


PRINTED_TRAINING: dict[str, object] = dict(schedule="constant", betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=math.inf)
"""What is the same at every size (sec. 4.1, table 6); the paper mentions no clipping."""

PRINTED_SIZES = {
    "1.5B": PrintedSize(2048, 28, 16, 5504, 10e9, 36_000, 2048, 64 * 8, 2e-4, 1000),
    "2.9B": PrintedSize(2560, 32, 4, 8704, 500e9, 48_000, 4096, 512 * 8, 8e-4, 600),
    "6.7B": PrintedSize(4096, 32, 32, 11_008, 10e9, 36_000, 2048, 64 * 8, 2e-4, 1000),
    "13B": PrintedSize(5120, 40, 40, 13_824, 10e9, 36_000, 2048, 128 * 8, 2e-4, 1000),
    "19B": PrintedSize(6144, 48, 4, 16_384, 200e9, 48_000, 12_288, 240, 2e-4, 3000),
}
"""Table 6 by the paper's name of the size."""
