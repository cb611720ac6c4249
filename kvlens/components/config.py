"""The fields of a configuration that kvlens adds for its attention; :class:`kvlens.HookedKVTransformerConfig` checks them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from kvlens.base import HookedTransformerConfig
from kvlens.checks import Within, checked
from kvlens.components.attention_variant import AttentionVariantConfig
from kvlens.errors import KVLensError
from kvlens.ops.linear_attention import retnet_decay


@checked
@dataclass(frozen=True)
class KVShiftConfig:
    """Which projections are mixed with their predecessors, over which window, and how (KVSA eq. 4-6, sec. 4.6-4.7, app. J).

    Args:
        window: number of predecessors; 1 in the paper's main text.
        keys, values, queries: which projections are shifted.
        parametrization: ``free``, ``gate`` (softmax over the window's logits) or ``clamp`` (to [0, 1] in the forward pass).
        init: ``uniform`` (KVSA) or ``identity`` (1, 0, ...), for a shift grafted onto a trained model.
    """

    window: Annotated[int, Within(1, 2**16)] = 1
    keys: bool = True
    values: bool = True
    queries: bool = False
    parametrization: Literal["free", "gate", "clamp"] = "free"
    init: Literal["uniform", "identity"] = "uniform"

    def __post_init__(self):
        if self.parametrization == "gate" and self.init == "identity":
            raise KVLensError(
                "KVShiftConfig: a gate (softmax) cannot be exactly (1, 0, ...); use parametrization='free' or 'clamp' "
                "with init='identity', or init='uniform' with the gate"
            )


@dataclass
class _Given(HookedTransformerConfig):
    """The fields as passed by the user: a dict for a configuration, a name for a dtype."""

    dtype: torch.dtype | str = torch.float32  # type: ignore[assignment]
    attention: str = "softmax"
    feature_map: str = "elu_plus_one"
    normalizer: str = "kernel"
    rotary_placement: str | None = None
    decay: str | Sequence[float] | None = None
    n_random_features: int | None = None
    random_feature_kind: Literal["orthogonal", "iid"] = "orthogonal"
    linear_attention_form: str = "auto"
    accumulation_dtype: str = "float32"
    kv_shift: KVShiftConfig | Mapping[str, object] | bool | None = None
    trainable_kv_bias: bool = False
    attention_variant: AttentionVariantConfig | Mapping[str, object] | None = None
    seed: int | None = None
    alibi_slopes: Sequence[float] | None = None
    attn_types: Sequence[str] | None = None  # type: ignore[assignment]
    value_biases_folded: bool = False


class AttentionConfig(_Given):
    """The base's configuration with the fields of attention in kvlens, once they are checked."""

    dtype: torch.dtype
    kv_shift: KVShiftConfig | None
    attention_variant: AttentionVariantConfig | None

    @property
    def n_kv_heads(self) -> int:
        """The number of key-value heads: ``n_key_value_heads`` with GQA, otherwise ``n_heads``."""
        return self.n_heads if self.n_key_value_heads is None else self.n_key_value_heads

    @property
    def rotates_after(self) -> bool:
        """Whether RoPE follows the feature map: a converted prompt is then rebased to position 0."""
        return self.attention == "linear" and self.rotary_placement == "after"

    def decay_per_head(self) -> torch.Tensor | None:
        """gamma [head] in float64, or None for 1."""
        if self.decay is None:
            return None
        if isinstance(self.decay, str):
            return retnet_decay(self.n_heads)
        return torch.tensor(list(self.decay), dtype=torch.float64)
