"""The attention of a HookedKVTransformer's layer, as :mod:`kvlens.model.reading` reads it."""

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from kvlens.model.protocol import HeadMatrices
from kvlens.model.reading import Form, Part
from kvlens.ops.softmax_features import ScoreRule

POINTS = ("pattern", "z", "z_context", "z_bias")


class AttentionPart(Part):
    """A layer's attention.

    Args:
        block: the layer.
        layer: its number.
    """

    def __init__(self, block: Any, layer: int):
        self.layer, self.attn, self.component = layer, block.attn, block.hook_attn_out
        self.behind = block.norm_behind("ln1")

    @property
    def n_heads(self) -> int:
        """Query heads."""
        return self.attn.cfg.n_heads

    @property
    def output_bias(self) -> Tensor | None:
        """b_O."""
        return self.attn.b_O

    def attention_points(self) -> dict[str, tuple[nn.Module, Form]]:
        """See :meth:`kvlens.model.reading.Part.attention_points`."""
        clip = self.attn.cfg.clip_qkv
        values: tuple[nn.Module, Form] = self.attn.hook_v, None if clip is None else lambda v: v.clamp(min=-clip, max=clip)
        return {"v": values, **{name: (getattr(self.attn, f"hook_{name}"), None) for name in POINTS}}

    def score_rule(self) -> ScoreRule:
        """How softmax attention scores a key."""
        return self.attn.score_rule()

    @property
    def sinks(self) -> Float[Tensor, " head"] | None:
        """The log-scores of attention sinks; None without."""
        return self.attn.sinks.flatten() if self.attn.cfg.use_attention_sinks else None

    def output_weights(self) -> Float[Tensor, "head d_head d_model"]:
        """W_O of each head."""
        return self.attn.W_O

    def matrices(self) -> HeadMatrices:
        """The weights by query head."""
        return HeadMatrices(self.attn.W_Q, self.attn.W_K, self.attn.W_V, self.attn.W_O)
