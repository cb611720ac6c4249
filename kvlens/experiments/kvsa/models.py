"""The models of KVSA's experiments: with and without KV shift, and the blocks of its toy models of induction."""

from collections.abc import Mapping
from typing import Any

from kvlens.experiments.shared import curves

PLAIN, SHIFTED = "plain", "KV shift"
MODELS: dict[str, dict[str, Any]] = {PLAIN: dict(kv_shift=False), SHIFTED: dict(kv_shift=True)}
"""Label -> fields of the model's config."""
COLORS = {PLAIN: curves.PLAIN, SHIFTED: curves.SHIFTED}

LLAMA_BLOCKS: dict[str, Any] = dict(act_fn="silu", gated_mlp=True, normalization_type="RMS", positional_embedding_type="rotary")
"""Fields of a config (sec. 3.2: "the same architecture as Llama"): RMSNorm, rotary positions, a gated MLP with SiLU."""


def steps_in_words(settings: Mapping[str, Any]) -> str:
    """How steps differ from the paper's (app. G)."""
    return (
        f"A step takes {settings['training']['batch_size']} sequences, at the rate of {settings['rates']} that is best for the "
        "model on other seeds; the paper's takes 4,096, at 2e-4 after 1,000 steps of warm-up (app. G)."
    )
