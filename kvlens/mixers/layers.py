"""The recurrent layers of Transformers' models: what each computes before and after the recurrence, and for which modules."""

from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers.activations import ACT2FN

from kvlens.errors import KVLensError
from kvlens.mixers.mixer import DeltaRule, Lightning, Mixer, MixerInputs, RecurrentState, Rwkv, Selective, StateSpace
from kvlens.ops.linear_attention import without_padding
from kvlens.ops.short_convolution import short_convolution

NORM_EPS = 1e-6
"""Added to the squared norm of a key or query, as in flash-linear-attention's kernels and Transformers' torch forms."""


class Projected(NamedTuple):
    """A layer's projections of the residual stream.

    Attributes:
        mixed: queries, keys and values concatenated, before the convolution.
        log_decay: log a_t, at most 0; per channel in KDA.
        write_strength: b_t.
        gate: gate of the norm's output, before its activation.
    """

    mixed: Float[Tensor, "batch pos channel"]
    log_decay: Float[Tensor, "batch pos head *d_k"]
    write_strength: Float[Tensor, "batch pos head"]
    gate: Float[Tensor, "batch pos head d_v"]


class DeltaMixer(Mixer):
    """The (gated) delta rule: projections, a short convolution, normalized keys, a gated norm.

    A subclass defines its projections (:meth:`project`), and names its norm and output projection.
    """

    rule = DeltaRule()
    norm_name = "norm"
    output_name = "out_proj"

    def __init__(self, module: Any, layer: int) -> None:
        super().__init__(module, layer)
        self.n_key_heads, self.n_heads, self.d_k, self.d_v = self.sizes(module)
        self.conv_rows, self.conv_channels = module.conv_kernel_size - 1, module.conv_dim

    def sizes(self, module: Any) -> tuple[int, int, int, int]:
        """The numbers of key heads and heads, d_k and d_v."""
        return module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim

    @abstractmethod
    def project(self, module: Any, hidden_states: Float[Tensor, "batch pos d_model"]) -> Projected:
        """The layer's own projections."""

    def inputs(self, hidden_states: Tensor, conv: Tensor | None, mask: Tensor | None) -> MixerInputs:
        module = self.module
        projected = self.project(module, hidden_states)
        mixed, rows = convolved(module.conv1d, projected.mixed, mask, conv)
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        mixed = ACT2FN[module.activation](mixed).to(wide)
        keys, values = self.n_key_heads * self.d_k, self.n_heads * self.d_v
        q, k, v = mixed.split([keys, keys, values], dim=-1)
        q, k = (_normalized(x.unflatten(-1, (self.n_key_heads, self.d_k))) for x in (q, k))
        return MixerInputs(
            q * self.d_k**-0.5,
            k,
            v.unflatten(-1, (self.n_heads, self.d_v)),
            projected.log_decay.to(wide),
            projected.write_strength.to(wide),
            projected.gate,
            rows,
        )

    def finish(self, z: Tensor, gate: Tensor) -> Tensor:
        module = self.module
        normed = getattr(module, self.norm_name)(z.reshape(-1, self.d_v), gate.reshape(-1, self.d_v))
        output: Tensor = getattr(module, self.output_name)(normed.reshape(*z.shape[:2], -1).to(gate.dtype))
        return output


def convolved(convolution: Any, x: Tensor, mask: Tensor | None, rows: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """x through a module's short convolution, after the ``rows`` before the first token; and the rows for the next pass."""
    weight = convolution.weight.squeeze(1)
    return short_convolution(x, weight, convolution.bias, mask, rows, output_final_state=True)


def softplus_decay(module: Any, a: Float[Tensor, "batch pos head"]) -> Float[Tensor, "batch pos head"]:
    """log a_t = -e^{A_log} softplus(a + dt_bias), in float32 or better: half precision would make it -inf."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return -module.A_log.to(wide).exp() * torch.nn.functional.softplus(a.to(wide) + module.dt_bias.to(wide))


def _normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


class Qwen3NextMixer(DeltaMixer):
    """Queries, keys, values and gate come from one projection, interleaved by key head.

    Source: Gated Delta Networks (Yang et al. 2412.06464); Transformers' ``Qwen3NextGatedDeltaNet``.
    """

    serves = ("Qwen3NextGatedDeltaNet",)

    def project(self, module: Any, hidden_states: Tensor) -> Projected:
        ordered = module.fix_query_key_value_ordering(module.in_proj_qkvz(hidden_states), module.in_proj_ba(hidden_states))
        q, k, v, gate, b, a = ordered
        mixed = torch.cat([x.flatten(2) for x in (q, k, v)], dim=-1)
        return Projected(mixed, softplus_decay(module, a), b.sigmoid(), gate)


class Qwen35Mixer(DeltaMixer):
    """Qwen3-Next's with separate projections, dense and with experts; Transformers' ``Qwen3_5GatedDeltaNet``."""

    serves = ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")

    def project(self, module: Any, hidden_states: Tensor) -> Projected:
        gate = module.in_proj_z(hidden_states).unflatten(-1, (self.n_heads, self.d_v))
        log_decay = softplus_decay(module, module.in_proj_a(hidden_states))
        return Projected(module.in_proj_qkv(hidden_states), log_decay, module.in_proj_b(hidden_states).sigmoid(), gate)


class OlmoHybridMixer(DeltaMixer):
    """Separate projections, and a write strength of up to 2; Transformers' ``OlmoHybridGatedDeltaNet``."""

    serves = ("OlmoHybridGatedDeltaNet",)
    norm_name = "o_norm"
    output_name = "o_proj"

    def project(self, module: Any, hidden_states: Tensor) -> Projected:
        mixed = torch.cat([part(hidden_states) for part in (module.q_proj, module.k_proj, module.v_proj)], dim=-1)
        write = module.b_proj(hidden_states).sigmoid() * (2.0 if module.allow_neg_eigval else 1.0)
        gate = module.g_proj(hidden_states).unflatten(-1, (self.n_heads, self.d_v))
        return Projected(mixed, softplus_decay(module, module.a_proj(hidden_states)), write, gate)


class KimiMixer(DeltaMixer):
    """Kimi delta attention: a decay per key channel, from a low-rank gate.

    Source: Kimi Linear (2510.26692), sec. 3; Transformers' ``KimiLinearDeltaAttention``.
    """

    serves = ("KimiLinearDeltaAttention",)
    norm_name = "o_norm"
    output_name = "o_proj"

    def sizes(self, module: Any) -> tuple[int, int, int, int]:
        return module.num_heads, module.num_heads, module.head_dim, module.head_dim

    def project(self, module: Any, hidden_states: Tensor) -> Projected:
        mixed = torch.cat([part(hidden_states) for part in (module.q_proj, module.k_proj, module.v_proj)], dim=-1)
        gate = module.g_b_proj(module.g_a_proj(hidden_states)).unflatten(-1, (self.n_heads, self.d_v))
        return Projected(mixed, module.forget_gate(hidden_states), module.b_proj(hidden_states).sigmoid(), gate)


class MiniMaxMixer(Mixer):
    """Lightning attention: linear attention with a fixed decay by head and layer, a norm across heads, and a gate.

    q, k, v after SiLU; no rotary positions, no normalizer, no convolution.

    Source: MiniMax-01 (2501.08313), sec. 2.2; Transformers' ``MiniMaxLightningAttention``.
    """

    serves = ("MiniMaxLightningAttention",)
    rule = Lightning()

    def __init__(self, module: Any, layer: int) -> None:
        super().__init__(module, layer)
        self.n_heads = self.n_key_heads = module.num_attention_heads
        self.d_k = self.d_v = module.head_dim

    def as_module_returns(self, output: Tensor) -> tuple[Tensor, None]:
        return output, None

    def is_in_cache(self, cache: Any) -> bool:
        index, held = getattr(self.module, "layer_idx", self.layer), getattr(cache, "linear_cache", ())
        return index < len(held) and isinstance(held[index], Tensor)

    def inputs(self, hidden_states: Tensor, conv: Tensor | None, mask: Tensor | None) -> MixerInputs:
        module = self.module
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        qkv = module.act_fn(module.qkv_proj(hidden_states)).unflatten(-1, (self.n_heads, 3 * self.d_k)).to(wide)
        q, k, v = qkv.split(self.d_k, dim=-1)
        log_decay = -module.slope_rate.flatten().to(wide)
        return MixerInputs(q, k, v, log_decay, None, module.output_gate(hidden_states).sigmoid(), None)

    def finish(self, z: Tensor, gate: Tensor) -> Tensor:
        module = self.module
        output: Tensor = module.out_proj((gate * module.norm(z.flatten(2))).to(gate.dtype))
        return output


class Mamba1Mixer(Mixer):
    """The selective scan. Each channel is a head with a single value: k is B and q is C, which all of them share, v is the
    channel's x, and the write strength its dt. D x_t is read at its own token alone and belongs to the context.

    Source: Mamba (2312.00752), named as a further case of the conversion in ICLCA sec. 7; Transformers' ``MambaMixer``, and the
    same layer in Falcon-Mamba and Jamba, which also normalize dt, B and C.
    """

    serves = ("MambaMixer", "FalconMambaMixer", "JambaMambaMixer")
    n_key_heads = d_v = 1

    def __init__(self, module: Any, layer: int) -> None:
        super().__init__(module, layer)
        self.n_heads, self.d_k = module.intermediate_size, module.ssm_state_size
        self.conv_rows, self.conv_channels = module.conv_kernel_size - 1, module.intermediate_size

    @property
    def rule(self) -> Selective:  # type: ignore[override]
        """The recurrence with this layer's D."""
        module = self.module
        return Selective(module.D)

    def inputs(self, hidden_states: Tensor, conv: Tensor | None, mask: Tensor | None) -> MixerInputs:
        module = self.module
        x = hidden_states if mask is None else without_padding(hidden_states, mask)
        mixed, gate = module.in_proj(x).chunk(2, dim=-1)
        mixed, rows = convolved(module.conv1d, mixed, mask, conv)
        v = module.act(mixed)
        v = v if mask is None else without_padding(v, mask)
        parts = module.x_proj(v).split([module.time_step_rank, self.d_k, self.d_k], dim=-1)
        norms = (getattr(module, f"{name}_layernorm", None) for name in ("dt", "b", "c"))  # Mamba itself has none
        dt, k, q = (part if norm is None else norm(part) for part, norm in zip(parts, norms, strict=True))
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        projected = torch.nn.functional.linear(dt, module.dt_proj.weight).to(wide)
        write = torch.nn.functional.softplus(projected + module.dt_proj.bias.to(wide))
        log_decay = -module.A_log.to(wide).exp() * write[..., None]
        k, q, v = k.to(wide)[:, :, None], q.to(wide)[:, :, None], v.to(wide)[..., None]
        return MixerInputs(q, k, v, log_decay, write, gate, rows)

    def finish(self, z: Tensor, gate: Tensor) -> Tensor:
        module = self.module
        output: Tensor = module.out_proj((z.squeeze(-1) * torch.nn.functional.silu(gate.to(z))).to(gate.dtype))
        return output


class Mamba2Mixer(Mixer):
    """The state-space recurrence. k is B, q is C (each of a group of heads), v is x, and the write strength is dt. D x_t is
    read at its own token alone and belongs to the context. Transformers stores the state transposed, [head, d_v, d_k].

    Source: Mamba-2 (2405.21060); Transformers' ``Mamba2Mixer``, and the same layer in Bamba, Granite 4, Nemotron-H and
    Falcon-H1, which also scales the projections.
    """

    serves = ("Mamba2Mixer", "BambaMixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer", "FalconH1Mixer")

    def __init__(self, module: Any, layer: int) -> None:
        super().__init__(module, layer)
        self.n_heads, self.n_key_heads = module.num_heads, module.n_groups
        self.d_k, self.d_v = module.ssm_state_size, module.head_dim
        self.conv_rows, self.conv_channels = module.conv_kernel_size - 1, module.conv_dim

    @property
    def rule(self) -> StateSpace:  # type: ignore[override]
        """The recurrence with this layer's D."""
        module = self.module
        return StateSpace(module.D)

    def inputs(self, hidden_states: Tensor, conv: Tensor | None, mask: Tensor | None) -> MixerInputs:
        module = self.module
        x = hidden_states if mask is None else without_padding(hidden_states, mask)
        projected = module.in_proj(x * getattr(module, "ssm_in_multiplier", 1.0))
        if hasattr(module, "mup_vector"):
            projected = projected * module.mup_vector
        gate, mixed, dt = projected.split([module.intermediate_size, self.conv_channels, self.n_heads], dim=-1)
        mixed, rows = convolved(module.conv1d, mixed, mask, conv)
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        mixed = module.act(mixed).to(wide)
        keys = self.n_key_heads * self.d_k
        v, k, q = mixed.split([module.intermediate_size, keys, keys], dim=-1)
        k, q = (part.unflatten(-1, (self.n_key_heads, self.d_k)) for part in (k, q))
        write = torch.nn.functional.softplus(dt.to(wide) + module.dt_bias.to(wide)).clamp(*module.time_step_limit)
        log_decay = -module.A_log.to(wide).exp() * write
        return MixerInputs(q, k, v.unflatten(-1, (self.n_heads, self.d_v)), log_decay, write, gate, rows)

    def finish(self, z: Tensor, gate: Tensor) -> Tensor:
        module = self.module
        z = z.flatten(2)
        normed = module.norm(z, gate) if getattr(module, "mamba_rms_norm", True) else z * module.act(gate)  # not in Falcon-H1
        output: Tensor = module.out_proj(normed.to(gate.dtype))
        return output


class RwkvMixer(Mixer):
    """RWKV-5 and 6: k and v, with a bonus for those of a query's own token, which belongs to the context; a decay per key
    channel, the same for all tokens in RWKV-5. What it projects is mixed with the row before, as by a convolution of two.

    Source: Eagle and Finch (2404.05892); :class:`kvlens.pretrained.rwkv.RwkvTimeMixing`.
    """

    serves = ("RwkvTimeMixing",)
    output_name = "output"
    replaces_module = True

    def __init__(self, module: Any, layer: int) -> None:
        super().__init__(module, layer)
        self.n_heads = self.n_key_heads = module.n_heads
        self.d_k, self.d_v = module.d_k, module.d_v
        self.conv_rows, self.conv_channels = 1, module.output.out_features

    @property
    def rule(self) -> Rwkv:  # type: ignore[override]
        """The recurrence with this layer's bonus."""
        module = self.module
        return Rwkv(module.bonus)

    def inputs(self, hidden_states: Tensor, conv: Tensor | None, mask: Tensor | None) -> MixerInputs:
        before, rows = row_before(hidden_states, mask, conv)
        q, k, v, log_decay, gate = self.module.project(hidden_states, before)
        return MixerInputs(q, k, v, log_decay, None, gate, rows)

    def finish(self, z: Tensor, gate: Tensor) -> Tensor:
        output: Tensor = self.module.finish(z, gate)
        return output


def row_before(x: Tensor, mask: Tensor | None, rows: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The row of the real token before each, of which ``rows`` has the first; and that for the next pass."""
    previous = x.new_tensor([1.0, 0.0]).expand(x.shape[-1], 2)
    return short_convolution(x, previous, None, mask, rows, output_final_state=True)


class Lfm2Mixer(Mixer):
    """A short convolution is the layer: y_t = W_out (c_t * sum_s w_s b_{t-s} x_{t-s}), with b, c, x from the residual stream.

    It has no heads: ``hook_conv_state`` is the only hook point that fires.

    Source: LFM2 (2511.23404); Transformers' ``Lfm2ShortConv``.
    """

    serves = ("Lfm2ShortConv",)
    n_heads = n_key_heads = 0
    d_k = d_v = 1

    def __init__(self, module: Any, layer: int) -> None:
        super().__init__(module, layer)
        self.conv_rows, self.conv_channels = module.conv_kernel_size - 1, module.conv.in_channels

    def forward(
        self,
        hidden_states: Float[Tensor, "batch pos d_model"],
        state: RecurrentState | None = None,
        mask: Bool[Tensor, "#batch pos"] | None = None,
    ) -> tuple[Float[Tensor, "batch pos d_model"], RecurrentState]:
        """See :class:`Mixer`."""
        module = self.module
        state = RecurrentState() if state is None else state
        conv = hidden_states.new_zeros(1, self.conv_rows, self.conv_channels) if state.conv is None else state.conv
        hidden = hidden_states if mask is None else without_padding(hidden_states, mask)
        b, c, x = module.in_proj(hidden).chunk(3, dim=-1)
        mixed, rows = convolved(module.conv, b * x, mask, self.hook_conv_state(conv))
        none = hidden_states.new_zeros(len(hidden_states), 0, self.d_k, self.d_v)
        return module.out_proj(c * mixed), RecurrentState(state.b_kv, none, None, rows)

    def inputs(self, hidden_states: Tensor, conv: Tensor | None, mask: Tensor | None) -> MixerInputs:
        raise NotImplementedError("a short convolution has no recurrence")

    def finish(self, z: Tensor, gate: Tensor) -> Tensor:
        raise NotImplementedError("a short convolution has no recurrence")


MIXERS: tuple[type[Mixer], ...] = (
    Qwen3NextMixer,
    Qwen35Mixer,
    OlmoHybridMixer,
    KimiMixer,
    MiniMaxMixer,
    Mamba1Mixer,
    Mamba2Mixer,
    RwkvMixer,
    Lfm2Mixer,
)


def has_mixer(module: nn.Module) -> bool:
    """Whether there is a mixer for a Transformers module."""
    return _mixer_class(module) is not None


def mixer_for(module: nn.Module, layer: int) -> Mixer:
    """The mixer over ``module``, which is layer ``layer`` of its model.

    Raises:
        KVLensError: there is no mixer for modules of this class.
    """
    found = _mixer_class(module)
    if found is None:
        served = ", ".join(name for mixer in MIXERS for name in mixer.serves)
        raise KVLensError(
            f"layer {layer}: expected a recurrent layer that kvlens computes itself ({served}), got {type(module).__name__}"
        )
    return found(module, layer)


def _mixer_class(module: nn.Module) -> type[Mixer] | None:
    names = {parent.__name__ for parent in type(module).__mro__}
    return next((mixer for mixer in MIXERS if names & set(mixer.serves)), None)
