"""KVSA's toy models of induction: their blocks (sec. 3.2: "the same architecture as Llama"), and their steps (app. G)."""

from collections.abc import Mapping
from typing import Any

LLAMA_BLOCKS: dict[str, Any] = dict(act_fn="silu", gated_mlp=True, normalization_type="RMS", positional_embedding_type="rotary")
"""Fields of a configuration: RMSNorm before each part, rotary positions, a gated MLP with SiLU."""


def steps_in_words(settings: Mapping[str, Any]) -> str:
    """How steps differ from the paper's."""
    return (
        f"A step takes {settings['training']['batch_size']} sequences, at the rate of {settings['rates']} that suits the model "
        "best on other seeds; the paper's takes 4,096, at 2e-4 after 1,000 steps of warm-up (app. G)."
    )
