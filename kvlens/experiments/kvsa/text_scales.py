"""The texts on which `variants`, `learning-rate` and `scaling` train, by scale, and the training of the paper's order.

``pretraining-text`` is a folder of ``.txt`` files that the user brings.
"""

from typing import Any

TINY_TEXT: dict[str, Any] = dict(corpus="topics", vocab_size=300, length=24)
SMALL_TEXT: dict[str, Any] = dict(corpus="docs", vocab_size=1024, length=128)
PAPER_TEXT: dict[str, Any] = dict(corpus="pretraining-text", vocab_size=32000, length=2048)
PAPER_TRAINING: dict[str, Any] = dict(
    steps=20_000, batch_size=256, weight_decay=0.1, eval_every=500, eval_sequences=256, precision="bfloat16"
)
