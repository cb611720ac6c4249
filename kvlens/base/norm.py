"""Norms: LayerNorm and RMS norm, with weights or with those folded into the next layer."""

from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

FULL = (torch.float32, torch.float64)
"""In narrower dtypes a norm is computed in float32."""


class Norm(nn.Module):
    """x / sqrt(mean(x^2) + eps), times w plus b where it has them; a LayerNorm takes the mean of x away first.

    Args:
        cfg: for ``eps``, ``dtype`` and the default length.
        kind: "LN" (w and b), "LNPre" (neither), "RMS" (w) or "RMSPre".
        length: of the vectors; None for ``d_model``.
    """

    def __init__(self, cfg: Any, kind: str, length: int | None = None):
        super().__init__()
        self.cfg, self.kind, self.eps = cfg, kind, cfg.eps
        self.centers = kind.startswith("LN")
        self.length = length or cfg.d_model
        if kind in ("LN", "RMS"):
            self.w = nn.Parameter(torch.ones(self.length, dtype=cfg.dtype))
        if kind == "LN":
            self.b = nn.Parameter(torch.zeros(self.length, dtype=cfg.dtype))
        self.hook_scale = HookPoint()
        self.hook_normalized = HookPoint()

    def forward(self, x: Tensor) -> Tensor:
        """Normalized over the last axis; ``hook_scale`` shows what x is divided by, ``hook_normalized`` the quotient."""
        x = x if self.cfg.dtype in FULL else x.float()
        if self.centers:
            x = x - x.mean(dim=-1, keepdim=True)
        scale = self.hook_scale((x.pow(2).mean(dim=-1, keepdim=True) + self.eps).sqrt())
        x = self.hook_normalized(x / scale).to(self.cfg.dtype)
        if self.kind == "LN":
            return x * self.w + self.b
        return x * self.w if self.kind == "RMS" else x


def final_norm(cfg: Any) -> Norm:
    """The norm before the unembedding: of the layers' kind, or RMS if ``final_rms``."""
    kind = cfg.normalization_type
    return Norm(cfg, kind.replace("LN", "RMS") if cfg.final_rms else kind)
