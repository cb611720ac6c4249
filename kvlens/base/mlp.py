"""MLPs: dense, gated, and mixtures of experts."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import SUPPORTED_ACTIVATIONS
from transformer_lens.utilities.activation_functions import XIELU

from kvlens.base.norm import Norm

GPT_OSS = "GptOssForCausalLM"
GPT_OSS_SLOPE, GPT_OSS_LIMIT = 1.702, 7.0
"""GPT-OSS: g sigmoid(1.702 g) (u + 1), with g at most 7 and u between -7 and 7."""


def activation_of(cfg: Any) -> Any:
    """The activation function of a configuration; xIELU has parameters of its own."""
    return XIELU() if cfg.act_fn == "xielu" else SUPPORTED_ACTIVATIONS[cfg.act_fn]


class _Dense(nn.Module):
    """What the two dense MLPs share: the activation, and the norm behind it (SoLU)."""

    hook_mid: HookPoint
    ln: Norm

    def __init__(self, cfg: Any):
        super().__init__()
        self.cfg, self.d_mlp = cfg, cfg.d_mlp
        self.act_fn = activation_of(cfg)
        if cfg.is_layer_norm_activation():
            self.hook_mid = HookPoint()
            self.ln = Norm(cfg, "LN", cfg.d_mlp) if cfg.normalization_type == "LN" else Norm(cfg, "LNPre")

    def weight(self, *shape: int) -> nn.Parameter:
        """A matrix to be filled by ``init_weights`` or from a checkpoint."""
        return nn.Parameter(torch.empty(*shape, dtype=self.cfg.dtype))

    def bias(self, length: int) -> nn.Parameter:
        """Zeros."""
        return nn.Parameter(torch.zeros(length, dtype=self.cfg.dtype))


class MLP(_Dense):
    """act(x W_in + b_in) W_out + b_out."""

    def __init__(self, cfg: Any):
        super().__init__(cfg)
        self.W_in, self.b_in = self.weight(cfg.d_model, cfg.d_mlp), self.bias(cfg.d_mlp)
        self.W_out, self.b_out = self.weight(cfg.d_mlp, cfg.d_model), self.bias(cfg.d_model)
        self.hook_pre = HookPoint()
        self.hook_post = HookPoint()

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """[batch, pos, d_model]."""
        features = self.act_fn(self.hook_pre(affine(x, self.W_in, self.b_in)))
        if self.cfg.is_layer_norm_activation():
            features = self.ln(self.hook_mid(features))
        return affine(self.hook_post(features), self.W_out, self.b_out)


class GatedMLP(_Dense):
    """(act(x W_gate) * (x W_in) + b_in) W_out + b_out; with a norm behind the activation, ln(act(x W_gate)) W_out + b_out."""

    def __init__(self, cfg: Any):
        super().__init__(cfg)
        self.W_in, self.W_out = self.weight(cfg.d_model, cfg.d_mlp), self.weight(cfg.d_mlp, cfg.d_model)
        self.W_gate = self.weight(cfg.d_model, cfg.d_mlp)
        self.b_in, self.b_out = self.bias(cfg.d_mlp), self.bias(cfg.d_model)
        self.hook_pre = HookPoint()
        self.hook_pre_linear = HookPoint()
        self.hook_post = HookPoint()

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """[batch, pos, d_model]."""
        features = self.act_fn(self.hook_pre(linear(x, self.W_gate.T)))
        if self.cfg.is_layer_norm_activation():
            features = self.ln(self.hook_mid(features))
        else:
            features = features * self.hook_pre_linear(linear(x, self.W_in.T)) + self.b_in
        return linear(self.hook_post(features), self.W_out.T, self.b_out)


class Expert(nn.Module):
    """One expert: act(x W_gate) * (x W_in), then W_out; GPT-OSS has biases, limits and an activation of its own."""

    W_in: nn.Linear
    W_out: nn.Linear
    W_gate: nn.Linear

    def __init__(self, cfg: Any):
        super().__init__()
        self.cfg, self.gpt_oss = cfg, cfg.original_architecture == GPT_OSS
        for name in ("W_gate", "W_in", "W_out") if self.gpt_oss else ("W_in", "W_out", "W_gate"):
            sizes = (cfg.d_mlp, cfg.d_model) if name == "W_out" else (cfg.d_model, cfg.d_mlp)
            setattr(self, name, nn.Linear(*sizes, bias=self.gpt_oss, dtype=cfg.dtype))
        self.hook_gate = HookPoint()
        self.hook_pre = HookPoint()
        self.hook_post = HookPoint()
        self.act_fn = activation_of(cfg)

    def forward(self, x: Float[Tensor, "token d_model"]) -> Float[Tensor, "token d_model"]:
        """[token, d_model]."""
        gate, up = self.hook_gate(self.W_gate(x)), self.hook_pre(self.W_in(x))
        if self.gpt_oss:
            gate, up = gate.clamp(max=GPT_OSS_LIMIT), up.clamp(min=-GPT_OSS_LIMIT, max=GPT_OSS_LIMIT)
            return self.W_out(self.hook_post((up + 1) * (gate * torch.sigmoid(gate * GPT_OSS_SLOPE))))
        return self.W_out(self.hook_post(self.act_fn(gate) * up))


class MoE(nn.Module):
    """Each token is the weighted sum of the experts with the largest logits x W_gate.

    The weights are the softmax over all experts (its largest, made to sum to 1 if ``norm_topk_prob``); in GPT-OSS over the
    chosen ones.
    """

    def __init__(self, cfg: Any):
        super().__init__()
        self.cfg, self.gpt_oss = cfg, cfg.original_architecture == GPT_OSS
        self.experts = nn.ModuleList(Expert(cfg) for _ in range(cfg.num_experts))
        self.W_gate = nn.Linear(cfg.d_model, cfg.num_experts, bias=self.gpt_oss, dtype=cfg.dtype)
        self.hook_expert_weights = HookPoint()
        self.hook_expert_indices = HookPoint()

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """[batch, pos, d_model]."""
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self._routed(self.W_gate(tokens))
        chosen = self.hook_expert_indices(chosen)
        weights = weights.to(x.dtype)
        result = torch.zeros_like(tokens)
        where = nn.functional.one_hot(chosen, num_classes=self.cfg.num_experts).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            rank, token = torch.where(where[number])
            if self.gpt_oss and not len(token):
                continue  # its hook points do not fire for an expert without tokens; those of the others do
            share = weights[token, number, None] if self.gpt_oss else weights[token, rank, None]
            result.index_add_(0, token, (expert(tokens[token]) * share).to(x.dtype))
        return result.view_as(x)

    def _routed(self, logits: Float[Tensor, "token expert"]) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the chosen experts: [token, chosen] each; GPT-OSS' weights are [token, expert]."""
        n = self.cfg.experts_per_token
        if self.gpt_oss:
            top, chosen = logits.topk(n, dim=-1)
            weights = torch.zeros_like(logits, dtype=torch.float32)
            weights.scatter_(1, chosen, top.softmax(dim=-1, dtype=torch.float32))
            return self.hook_expert_weights(weights), chosen
        weights = self.hook_expert_weights(logits.softmax(dim=1, dtype=torch.float32))
        weights, chosen = weights.topk(n, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True) if self.cfg.norm_topk_prob else weights, chosen


def build_mlp(cfg: Any) -> nn.Module:
    """The MLP of a layer."""
    if cfg.num_experts:
        return MoE(cfg)
    return GatedMLP(cfg) if cfg.gated_mlp else MLP(cfg)


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x W + b, with the bias in the same call."""
    return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[1])
