"""The feature map as a module: it holds what a map needs, and calls :mod:`kvlens.ops.feature_maps`."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvlens.ops import feature_maps as maps


class FeatureMap(nn.Module):
    """phi of one layer, the same function for queries and keys.

    ``random`` holds fixed projections (a buffer, saved with the model), ``hedgehog`` a learned W; both one per key-value
    head, shared by the query heads that read it.
    """

    projection: Tensor

    def __init__(self, cfg: Any, attn_scale: float):
        super().__init__()
        # not `name`: TransformerLens sets that attribute on every module
        self.kind, self.attn_scale, self.cfg = cfg.feature_map, float(attn_scale), cfg
        if self.kind == "random":
            self.register_buffer("projection", torch.zeros(cfg.n_kv_heads, cfg.d_phi, cfg.d_head))
        if self.kind == "hedgehog":
            self.hedgehog_weight = nn.Parameter(torch.zeros(cfg.n_kv_heads, cfg.d_head, cfg.d_head, dtype=cfg.dtype))

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None) -> None:
        """Draw the random projections; set Hedgehog's W to the identity."""
        cfg = self.cfg
        if self.kind == "random":
            drawn = maps.draw_projections(cfg.n_kv_heads, cfg.d_phi, cfg.d_head, cfg.random_feature_kind, generator)
            self.projection.copy_(drawn)
        if self.kind == "hedgehog":
            self.hedgehog_weight.copy_(torch.eye(cfg.d_head))

    def forward(self, x: Float[Tensor, "batch pos head d_head"]) -> Float[Tensor, "batch pos head d_phi"]:
        """phi(x), for queries or keys."""
        if self.kind == "random":
            return maps.random_features(x, self._per_head(self.projection, x), self.attn_scale)
        if self.kind == "hedgehog":
            return maps.hedgehog(x, self._per_head(self.hedgehog_weight, x))
        if self.kind == "taylor":
            return maps.taylor(x, self.attn_scale)
        return {"identity": maps.identity, "elu_plus_one": maps.elu_plus_one, "relu": maps.relu}[self.kind](x)

    @staticmethod
    def _per_head(weight: Tensor, x: Tensor) -> Tensor:
        return weight.repeat_interleave(x.shape[2] // weight.shape[0], dim=0)
