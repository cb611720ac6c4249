"""What a model is made of beside attention: norms, MLPs, and its two ends.

Norms are LayerNorm and RMS norm, with weights or with those folded into the next layer; MLPs are dense, gated, or mixtures of
experts; the ends lead from tokens to the residual stream, and from there to logits.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear, rms_norm
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import SUPPORTED_ACTIVATIONS, get_offset_position_ids
from transformer_lens.utilities.activation_functions import XIELU

from kvlens.base.config import HookedTransformerConfig

FULL = (torch.float32, torch.float64)
"""In narrower dtypes a norm is computed in float32."""


def is_hooked(*modules: nn.Module) -> bool:
    """Whether anything is hooked directly to one of ``modules``."""
    for m in modules:  # noqa: SIM110  (each pass asks thousands of times)
        if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks:
            return True
    return False


class Norm(nn.Module):
    """x / sqrt(mean(x^2) + eps), times w plus b where it has them; a LayerNorm takes the mean of x away first.

    Args:
        cfg: for ``eps``, ``dtype`` and the default length.
        kind: "LN" (w and b), "LNPre" (neither), "RMS" (w) or "RMSPre".
        length: of the vectors; None for ``d_model``.
    """

    def __init__(self, cfg: HookedTransformerConfig, kind: str, length: int | None = None):
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
        """Normalized over the last axis; ``hook_scale`` shows what x is divided by, ``hook_normalized`` the quotient.

        Where neither is hooked it is torch's own, equal up to rounding.
        """
        is_plain = x.dtype in FULL and self.cfg.dtype in FULL and not torch.is_autocast_enabled(x.device.type)
        if is_plain and not is_hooked(self.hook_scale, self.hook_normalized):
            weight = getattr(self, "w", None)
            if not self.centers:
                return rms_norm(x, x.shape[-1:], weight, self.eps)
            return layer_norm(x, x.shape[-1:], weight, getattr(self, "b", None), self.eps)
        x = x if self.cfg.dtype in FULL else x.float()
        if self.centers:
            x = x - x.mean(dim=-1, keepdim=True)
        scale = self.hook_scale((x.pow(2).mean(dim=-1, keepdim=True) + self.eps).sqrt())
        x = self.hook_normalized(x / scale).to(self.cfg.dtype)
        if self.kind == "LN":
            return x * self.w + self.b
        return x * self.w if self.kind == "RMS" else x


def final_norm(cfg: HookedTransformerConfig) -> Norm:
    """The norm before the unembedding: of the layers' kind, or RMS if ``final_rms``."""
    kind = str(cfg.normalization_type)
    return Norm(cfg, kind.replace("LN", "RMS") if cfg.final_rms else kind)


GPT_OSS = "GptOssForCausalLM"
GPT_OSS_SLOPE, GPT_OSS_LIMIT = 1.702, 7.0
"""GPT-OSS: g sigmoid(1.702 g) (u + 1), with g at most 7 and u between -7 and 7."""


def activation_of(cfg: HookedTransformerConfig) -> Callable[[Tensor], Tensor]:
    """The activation function of a configuration; xIELU has parameters of its own."""
    return XIELU() if cfg.act_fn == "xielu" else SUPPORTED_ACTIVATIONS[cfg.act_fn]


class _Dense(nn.Module):
    """What the two dense MLPs share: the activation, and the norm behind it (SoLU)."""

    hook_mid: HookPoint
    ln: Norm

    def __init__(self, cfg: HookedTransformerConfig):
        super().__init__()
        self.cfg, self.d_mlp = cfg, cfg.d_mlp or 4 * cfg.d_model
        self.act_fn = activation_of(cfg)
        self.normed = cfg.is_layer_norm_activation()
        if self.normed:
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

    def __init__(self, cfg: HookedTransformerConfig):
        super().__init__(cfg)
        self.W_in, self.b_in = self.weight(cfg.d_model, self.d_mlp), self.bias(self.d_mlp)
        self.W_out, self.b_out = self.weight(self.d_mlp, cfg.d_model), self.bias(cfg.d_model)
        self.hook_pre = HookPoint()
        self.hook_post = HookPoint()

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """[batch, pos, d_model]."""
        features = self.act_fn(self.hook_pre(affine(x, self.W_in, self.b_in)))
        if self.normed:
            features = self.ln(self.hook_mid(features))
        return affine(self.hook_post(features), self.W_out, self.b_out)


class GatedMLP(_Dense):
    """(act(x W_gate) * (x W_in) + b_in) W_out + b_out; with a norm behind the activation, ln(act(x W_gate)) W_out + b_out."""

    def __init__(self, cfg: HookedTransformerConfig):
        super().__init__(cfg)
        self.W_in, self.W_out = self.weight(cfg.d_model, self.d_mlp), self.weight(self.d_mlp, cfg.d_model)
        self.W_gate = self.weight(cfg.d_model, self.d_mlp)
        self.b_in, self.b_out = self.bias(self.d_mlp), self.bias(cfg.d_model)
        self.hook_pre = HookPoint()
        self.hook_pre_linear = HookPoint()
        self.hook_post = HookPoint()

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """[batch, pos, d_model]."""
        features = self.act_fn(self.hook_pre(linear(x, self.W_gate.T)))
        if self.normed:
            features = self.ln(self.hook_mid(features))
        else:
            features = torch.addcmul(self.b_in, features, self.hook_pre_linear(linear(x, self.W_in.T)))
        return linear(self.hook_post(features), self.W_out.T, self.b_out)


class Expert(nn.Module):
    """One expert: act(x W_gate) * (x W_in), then W_out; GPT-OSS has biases, limits and an activation of its own."""

    W_in: nn.Linear
    W_out: nn.Linear
    W_gate: nn.Linear

    def __init__(self, cfg: HookedTransformerConfig):
        super().__init__()
        self.cfg, self.gpt_oss = cfg, cfg.original_architecture == GPT_OSS
        for name in ("W_gate", "W_in", "W_out") if self.gpt_oss else ("W_in", "W_out", "W_gate"):
            d_mlp = cfg.d_mlp or 4 * cfg.d_model
            d_in, d_out = (d_mlp, cfg.d_model) if name == "W_out" else (cfg.d_model, d_mlp)
            setattr(self, name, nn.Linear(d_in, d_out, bias=self.gpt_oss, dtype=cfg.dtype))
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

    def __init__(self, cfg: HookedTransformerConfig):
        super().__init__()
        self.cfg, self.gpt_oss = cfg, cfg.original_architecture == GPT_OSS
        self.n_experts, self.n_chosen = cfg.num_experts or 1, cfg.experts_per_token or 1
        self.experts = nn.ModuleList(Expert(cfg) for _ in range(self.n_experts))
        self.W_gate = nn.Linear(cfg.d_model, self.n_experts, bias=self.gpt_oss, dtype=cfg.dtype)
        self.hook_expert_weights = HookPoint()
        self.hook_expert_indices = HookPoint()

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """[batch, pos, d_model]."""
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self._routed(self.W_gate(tokens))
        chosen = self.hook_expert_indices(chosen)
        weights = weights.to(x.dtype)
        result = torch.zeros_like(tokens)
        where = nn.functional.one_hot(chosen, num_classes=self.n_experts).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            rank, token = torch.where(where[number])
            if self.gpt_oss and not len(token):
                continue  # its hook points do not fire for an expert without tokens; those of the others do
            share = weights[token, number, None] if self.gpt_oss else weights[token, rank, None]
            result.index_add_(0, token, (expert(tokens[token]) * share).to(x.dtype))
        return result.view_as(x)

    def _routed(self, logits: Float[Tensor, "token expert"]) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the chosen experts: [token, chosen] each; GPT-OSS' weights are [token, expert]."""
        n = self.n_chosen
        if self.gpt_oss:
            top, chosen = logits.topk(n, dim=-1)
            weights = torch.zeros_like(logits, dtype=torch.float32)
            weights.scatter_(1, chosen, top.softmax(dim=-1, dtype=torch.float32))
            return self.hook_expert_weights(weights), chosen
        weights = self.hook_expert_weights(logits.softmax(dim=1, dtype=torch.float32))
        weights, chosen = weights.topk(n, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True) if self.cfg.norm_topk_prob else weights, chosen


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x W + b, with the bias in the same call."""
    return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[1])


class Embed(nn.Module):
    """A row of W_E for each token, normalized if ``post_embedding_ln``."""

    def __init__(self, cfg: HookedTransformerConfig):
        super().__init__()
        self.cfg = cfg
        self.W_E = nn.Parameter(torch.empty(cfg.d_vocab, cfg.d_model, dtype=cfg.dtype))
        if cfg.post_embedding_ln:
            self.ln = Norm(cfg, "LN")

    def forward(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        """[batch, pos, d_model]."""
        embedded = self.W_E[tokens, :]
        return self.ln(embedded) if self.cfg.post_embedding_ln else embedded


class PosEmbed(nn.Module):
    """A row of W_pos for each position. With ALiBi it exists but is not used, and is 0."""

    def __init__(self, cfg: HookedTransformerConfig):
        super().__init__()
        self.cfg = cfg
        new = torch.zeros if cfg.positional_embedding_type == "alibi" else torch.empty
        self.W_pos = nn.Parameter(new(cfg.n_ctx, cfg.d_model, dtype=cfg.dtype))

    def forward(
        self,
        tokens: Shaped[Tensor, "batch pos"],
        past_kv_pos_offset: int = 0,
        attention_mask: Int[Tensor, "batch offset_pos"] | None = None,
    ) -> Float[Tensor, "batch new_pos d_model"]:
        """Rows of the new positions, after ``past_kv_pos_offset`` earlier ones.

        With a mask (of earlier and new tokens), positions count the tokens that it shows; the others get zeros.
        """
        batch, pos = tokens.shape[0], tokens.shape[-1]
        if attention_mask is None:
            rows = self.W_pos[past_kv_pos_offset : past_kv_pos_offset + pos]
            return rows.expand(batch, -1, -1).clone()
        rows = self.W_pos[get_offset_position_ids(past_kv_pos_offset, attention_mask)]
        hidden = ~attention_mask[:, past_kv_pos_offset : past_kv_pos_offset + pos, None].bool()
        return torch.where(hidden, 0, rows)


class Unembed(nn.Module):
    """x W_U + b_U."""

    def __init__(self, cfg: HookedTransformerConfig):
        super().__init__()
        self.cfg = cfg
        self.W_U = nn.Parameter(torch.empty(cfg.d_model, cfg.d_vocab_out, dtype=cfg.dtype))
        self.b_U = nn.Parameter(torch.zeros(cfg.d_vocab_out, dtype=cfg.dtype))
        self.hook_in = HookPoint()
        self.hook_out = HookPoint()

    def forward(self, residual: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_vocab_out"]:
        """Logits, before any soft cap."""
        return self.hook_out(nn.functional.linear(self.hook_in(residual), self.W_U.T, self.b_U))
