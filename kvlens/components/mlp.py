"""The base's MLPs with the fastest dense product, without copying weights or storing activations that are not hooked."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens._tl import SUPPORTED_ACTIVATIONS
from kvlens.base import MLP, GatedMLP
from kvlens.components.fast_path import on_fast_path
from kvlens.components.hooks import is_hooked
from kvlens.ops.affine import Activation, affine

FUSED: dict[Callable[..., Tensor], Activation] = {
    SUPPORTED_ACTIVATIONS["gelu"]: "gelu",
    SUPPORTED_ACTIVATIONS["gelu_new"]: "gelu_tanh",
    SUPPORTED_ACTIVATIONS["gelu_pytorch_tanh"]: "gelu_tanh",
    SUPPORTED_ACTIVATIONS["relu"]: "relu",
    SUPPORTED_ACTIVATIONS["silu"]: "silu",
}
"""Activation functions that can be fused into a product."""


class KVMLP(MLP):
    """act(x W_in + b_in) W_out + b_out; without gradients and hooks the pre-activations are never stored."""

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """As ``kvlens.base.MLP.forward``."""
        if not on_fast_path(self.cfg) or self.cfg.is_layer_norm_activation():
            return super().forward(x)
        fused = FUSED.get(self.act_fn)
        if fused is None or torch.is_grad_enabled() or is_hooked(self.hook_pre):
            features = self.act_fn(self.hook_pre(affine(x, self.W_in, self.b_in)))
        else:
            features = affine(x, self.W_in, self.b_in, fused)
        return affine(self.hook_post(features), self.W_out, self.b_out)


class KVGatedMLP(GatedMLP):
    """(act(x W_gate) * (x W_in) + b_in) W_out + b_out."""

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """As ``kvlens.base.GatedMLP.forward``."""
        if not on_fast_path(self.cfg) or self.cfg.is_layer_norm_activation():
            return super().forward(x)
        x = x.to(self.W_gate.device)
        gate = self.hook_pre(affine(x, self.W_gate))
        features = self.act_fn(gate) * self.hook_pre_linear(affine(x, self.W_in)) + self.b_in
        return affine(self.hook_post(features), self.W_out, self.b_out)
