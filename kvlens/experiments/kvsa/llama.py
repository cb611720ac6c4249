"""The blocks of KVSA's toy models (sec. 3.2: "the same architecture as Llama")."""

from typing import Any

LLAMA_BLOCKS: dict[str, Any] = dict(act_fn="silu", gated_mlp=True, normalization_type="RMS", positional_embedding_type="rotary")
"""Fields of a configuration: RMSNorm before each part, rotary positions, a gated MLP with SiLU."""
