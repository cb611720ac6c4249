"""The interface of every recurrent mixer: one forward pass, one state, one set of hook points.

Each (value) head keeps a matrix S [d_k, d_v]. A token transforms it, writes to it, then reads it:

    S_t = T_t S_{t-1} + b_t k_t v_t^T        z_t = S_t^T q_t

so that a KV bias, the state before the first token, can be kept separate from what the context writes:

    z_i = z_i(context) + b_KV^T qbar_i       qbar_i = (T_i ... T_0)^T q_i

A mixer's rule (:class:`Rule`) defines T_t, in terms of :mod:`kvlens.ops`. The weights are those of the Transformers module,
which is called submodule by submodule; nothing is copied.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from kvlens.components import is_hooked
from kvlens.ops import delta_rule, lightning, rwkv, selective_scan, ssd
from kvlens.ops.lightning import chunked_lightning, recurrent_lightning
from kvlens.ops.linear_attention import without_padding
from kvlens.ops.ssd import chunked_ssd, recurrent_ssd


class RecurrentState(NamedTuple):
    """What a recurrent layer keeps between two passes. No pass changes it in place.

    Attributes:
        b_kv: the attached KV bias, the same at every pass; None without one.
        context: what the tokens since the bias have written, after decay and removal; None for zeros.
        state_map: P = T_{n-1} ... T_0 of the tokens since the bias, which maps the bias to what remains of it; None for the
            identity.
        conv: the inputs of the short convolution at the last real tokens, oldest first, before its bias and activation; zeros
            before the first token; None for zeros, or if a layer has no convolution.
    """

    b_kv: Float[Tensor, "#batch head d_k d_v"] | None = None
    context: Float[Tensor, "#batch head d_k d_v"] | None = None
    state_map: Float[Tensor, "#batch head d_k d_k"] | None = None
    conv: Float[Tensor, "#batch rows channel"] | None = None

    def total(self) -> Tensor | None:
        """S = P b_KV + what the context has written [batch or 1, head, d_k, d_v]: the KV bias of all tokens so far."""
        if self.b_kv is None:
            return self.context
        left = self.b_kv if self.state_map is None else self.state_map @ self.b_kv.to(self.state_map)
        return left if self.context is None else left + self.context


class MixerInputs(NamedTuple):
    """What a mixer computes from the residual stream before the recurrence, in float32 or better.

    Attributes:
        q: queries, normalized and scaled; ``key_head`` divides ``head``.
        k: keys, normalized if the model does so.
        v: values.
        log_decay: log a_t, at most 0: [batch, pos, head], with a last axis d_k in KDA, Mamba-1 and RWKV, [head] in
            lightning attention.
        write_strength: b_t; None if it is always 1.
        gate: gate of the output, whose shape depends on the layer; None of inputs without an output.
        conv: the next ``RecurrentState.conv``.
    """

    q: Float[Tensor, "batch pos key_head d_k"]
    k: Float[Tensor, "batch pos key_head d_k"]
    v: Float[Tensor, "batch pos head d_v"]
    log_decay: Tensor
    write_strength: Float[Tensor, "batch pos head"] | None
    gate: Tensor | None
    conv: Float[Tensor, "batch rows channel"] | None


class RuleOutputs(NamedTuple):
    """What a rule returns: z of the context, qbar if a bias is to be read, and the state after the tokens."""

    z: Float[Tensor, "batch pos head d_v"]
    carried_q: Float[Tensor, "batch pos head d_k"] | None
    context: Float[Tensor, "batch head d_k d_v"]
    state_map: Float[Tensor, "batch head d_k d_k"] | None


class Rule(ABC):
    """How a token updates the state, with the derived quantities that a mixer and its analyses need.

    ``mask`` [batch, pos] is True at real tokens; padded positions neither write, decay nor remove.
    """

    @abstractmethod
    def run(self, inputs: MixerInputs, state: RecurrentState, mask: Tensor | None, with_map: bool) -> RuleOutputs:
        """z of the context alone and the state after the last real token; with ``with_map`` also qbar and P."""

    @abstractmethod
    def carried_queries(self, inputs: MixerInputs, mask: Tensor | None) -> Float[Tensor, "batch pos head d_k"]:
        """qbar_i = (T_i ... T_0)^T q_i of this pass: what a query reads from the state before the first token."""

    @abstractmethod
    def carried_keys(self, inputs: MixerInputs, mask: Tensor | None) -> Float[Tensor, "batch pos head d_k"]:
        """kbar_j = (T_{M-1} ... T_{j+1}) b_j k_j of this pass; sum_j kbar_j v_j^T is what it writes."""

    @abstractmethod
    def state_map(self, inputs: MixerInputs, mask: Tensor | None) -> Float[Tensor, "batch head d_k d_k"]:
        """P = T_{M-1} ... T_0 of this pass, which maps the state before it to what remains of that state."""

    @abstractmethod
    def pattern(self, inputs: MixerInputs, mask: Tensor | None) -> Float[Tensor, "batch head pos pos"]:
        """The exact effective attention of this pass: z_i = sum_j A_ij v_j + (what is read from the state before it)."""


class DeltaRule(Rule):
    """T_t = (I - b_t k_t k_t^T) Diag(a_t): the gated delta rule and Kimi delta attention (:mod:`kvlens.ops.delta_rule`).

    Args:
        chunk_size: of the chunked form; it changes speed, not the result.
    """

    def __init__(self, chunk_size: int = delta_rule.CHUNK_SIZE) -> None:
        self.chunk_size = chunk_size

    def run(self, inputs: MixerInputs, state: RecurrentState, mask: Tensor | None, with_map: bool) -> RuleOutputs:
        arguments = (inputs.q, inputs.k, inputs.v, inputs.log_decay, _write(inputs), mask, state.context)
        decodes = inputs.v.shape[1] == 1
        if with_map:
            carried = delta_rule.recurrent_carried_delta_rule if decodes else delta_rule.carried_delta_rule
            return RuleOutputs(*carried(*arguments, state.state_map))
        if decodes:
            z, final = delta_rule.recurrent_delta_rule(*arguments, output_final_state=True)
        else:
            z, final = delta_rule.chunked_delta_rule(*arguments, output_final_state=True, chunk_size=self.chunk_size)
        assert final is not None
        return RuleOutputs(z, None, final, None)

    def carried_queries(self, inputs: MixerInputs, mask: Tensor | None) -> Tensor:
        return delta_rule.carried_queries(inputs.q, inputs.k, inputs.log_decay, _write(inputs), mask)

    def carried_keys(self, inputs: MixerInputs, mask: Tensor | None) -> Tensor:
        return delta_rule.carried_keys(inputs.k, inputs.log_decay, _write(inputs), mask)

    def state_map(self, inputs: MixerInputs, mask: Tensor | None) -> Tensor:
        return delta_rule.state_map(inputs.k, inputs.log_decay, _write(inputs), mask)

    def pattern(self, inputs: MixerInputs, mask: Tensor | None) -> Tensor:
        return delta_rule.effective_attention(inputs.q, inputs.k, inputs.log_decay, _write(inputs), mask)


class Lightning(Rule):
    """T_t = a I, with one a per head: lightning attention and retention (:mod:`kvlens.ops.lightning`)."""

    def run(self, inputs: MixerInputs, state: RecurrentState, mask: Tensor | None, with_map: bool) -> RuleOutputs:
        form = recurrent_lightning if inputs.v.shape[1] == 1 else chunked_lightning
        context = None if state.context is None else state.context.to(inputs.v)
        z, final = form(inputs.q, inputs.k, inputs.v, inputs.log_decay, mask, context, output_final_state=True)
        assert final is not None
        if not with_map:
            return RuleOutputs(z, None, final, None)
        return RuleOutputs(z, *_carried(self.carried_queries(inputs, mask), final, self.state_map(inputs, mask), state))

    def carried_queries(self, inputs: MixerInputs, mask: Tensor | None) -> Tensor:
        return lightning.carried_queries(inputs.q, inputs.log_decay, mask)

    def carried_keys(self, inputs: MixerInputs, mask: Tensor | None) -> Tensor:
        return lightning.carried_keys(inputs.k, inputs.log_decay, mask)

    def state_map(self, inputs: MixerInputs, mask: Tensor | None) -> Tensor:
        return lightning.state_map(inputs.k, inputs.log_decay, mask)

    def pattern(self, inputs: MixerInputs, mask: Tensor | None) -> Tensor:
        return lightning.effective_attention(inputs.q, inputs.k, inputs.log_decay, mask)


class StateSpace(Rule):
    """T_t = a_t I, with one a per token and head, and D v_t read at its own token (:mod:`kvlens.ops.ssd`).

    Args:
        skip: D, per head.
    """

    carries: ModuleType = ssd
    """The module of what the recurrence carries."""

    def __init__(self, skip: Tensor) -> None:
        self.skip = skip

    def form(self, n_tokens: int) -> Callable[..., tuple[Tensor, Tensor | None]]:
        """The form of the recurrence for that many tokens."""
        return recurrent_ssd if n_tokens == 1 else chunked_ssd

    def run(self, inputs: MixerInputs, state: RecurrentState, mask: Tensor | None, with_map: bool) -> RuleOutputs:
        arguments = (inputs.q, inputs.k, inputs.v, inputs.log_decay, _write(inputs), mask, state.context)
        z, final = self.form(inputs.v.shape[1])(*arguments, output_final_state=True)
        assert final is not None
        z = z + self.skip.to(z)[:, None] * (inputs.v if mask is None else without_padding(inputs.v, mask))
        if not with_map:
            return RuleOutputs(z, None, final, None)
        return RuleOutputs(z, *_carried(self.carried_queries(inputs, mask), final, self.state_map(inputs, mask), state))

    def carried_queries(self, inputs: MixerInputs, mask: Tensor | None) -> Tensor:
        carried: Tensor = self.carries.carried_queries(inputs.q, inputs.log_decay, mask)
        return carried

    def carried_keys(self, inputs: MixerInputs, mask: Tensor | None) -> Tensor:
        carried: Tensor = self.carries.carried_keys(inputs.k, inputs.log_decay, _write(inputs), mask)
        return carried

    def state_map(self, inputs: MixerInputs, mask: Tensor | None) -> Tensor:
        left: Tensor = self.carries.state_map(inputs.k, inputs.log_decay, mask)
        return left

    def pattern(self, inputs: MixerInputs, mask: Tensor | None) -> Tensor:
        pattern: Tensor = self.carries.effective_attention(inputs.q, inputs.k, inputs.log_decay, _write(inputs), mask)
        return pattern + torch.diag_embed(self.skip.to(pattern)[:, None].expand(-1, pattern.shape[-1]))


class Selective(StateSpace):
    """T_t = Diag(a_t), with one a per token, head and state; D as there (:mod:`kvlens.ops.selective_scan`)."""

    carries = selective_scan

    def form(self, n_tokens: int) -> Callable[..., tuple[Tensor, Tensor | None]]:
        return selective_scan.selective_scan


class Rwkv(Rule):
    """T_t = Diag(a_t), and a query that reads the state before its token writes, and its own k and v by a bonus
    (:mod:`kvlens.ops.rwkv`).

    Args:
        bonus: u, per head and key channel.
    """

    def __init__(self, bonus: Tensor) -> None:
        self.bonus = bonus

    def run(self, inputs: MixerInputs, state: RecurrentState, mask: Tensor | None, with_map: bool) -> RuleOutputs:
        form = rwkv.naive_rwkv if inputs.v.shape[1] == 1 else rwkv.chunked_rwkv
        arguments = (inputs.q, inputs.k, inputs.v, inputs.log_decay, self.bonus, mask, state.context)
        z, final = form(*arguments, output_final_state=True)
        assert final is not None
        if not with_map:
            return RuleOutputs(z, None, final, None)
        return RuleOutputs(z, *_carried(self.carried_queries(inputs, mask), final, self.state_map(inputs, mask), state))

    def carried_queries(self, inputs: MixerInputs, mask: Tensor | None) -> Tensor:
        return rwkv.carried_queries(inputs.q, inputs.log_decay, mask)

    def carried_keys(self, inputs: MixerInputs, mask: Tensor | None) -> Tensor:
        return rwkv.carried_keys(inputs.k, inputs.log_decay, mask)

    def state_map(self, inputs: MixerInputs, mask: Tensor | None) -> Tensor:
        return rwkv.state_map(inputs.k, inputs.log_decay, mask)

    def pattern(self, inputs: MixerInputs, mask: Tensor | None) -> Tensor:
        return rwkv.effective_attention(inputs.q, inputs.k, inputs.log_decay, self.bonus, mask)


def _carried(carried_q: Tensor, final: Tensor, state_map: Tensor, state: RecurrentState) -> tuple[Tensor, Tensor, Tensor]:
    """qbar, the state and P since the bias, from those of this pass."""
    if state.state_map is None:
        return carried_q, final, state_map
    before = state.state_map.to(carried_q)
    return (carried_q.transpose(1, 2) @ before).transpose(1, 2), final, state_map @ before


def _write(inputs: MixerInputs) -> Tensor:
    assert inputs.write_strength is not None, "this rule has a write strength"
    return inputs.write_strength


class Mixer(nn.Module, ABC):
    """The forward pass of one recurrent layer, over the submodules of its Transformers module.

    A subclass defines three things: the names of its modules in Transformers, what it computes before the recurrence
    (:meth:`inputs`), and how it processes z (:meth:`finish`).

    Attributes:
        serves: names of the Transformers classes whose forward pass it implements.
        rule: how a token updates the state.
        replaces_module: whether it computes every pass of the bridge: its module fills no cache.
        n_heads, d_k, d_v: sizes of the state, [head, d_k, d_v]; ``n_key_heads`` is the number of query and key heads, each
            shared by a group of heads.
        conv_rows, conv_channels: sizes of the convolution's state; both 0 if there is none.

    Source: Gated Delta Networks (Yang et al. 2412.06464), Kimi Linear (2510.26692), MiniMax-01
    (2501.08313).
    """

    serves: ClassVar[tuple[str, ...]] = ()
    rule: ClassVar[Rule]

    replaces_module: ClassVar[bool] = False
    n_heads: int
    n_key_heads: int
    d_k: int
    d_v: int
    conv_rows: int = 0
    conv_channels: int = 0

    hook_b_kv: HookPoint
    hook_conv_state: HookPoint
    hook_q: HookPoint
    hook_k: HookPoint
    hook_v: HookPoint
    hook_log_decay: HookPoint
    hook_write_strength: HookPoint
    hook_pattern: HookPoint
    hook_z_context: HookPoint
    hook_z_bias: HookPoint
    hook_z: HookPoint
    hook_state: HookPoint

    def __init__(self, module: nn.Module, layer: int) -> None:
        super().__init__()
        self._held = (module,)  # in a tuple, so that its weights do not become this module's parameters too
        self.layer = layer
        for name in MIXER_HOOKS:
            setattr(self, name, HookPoint())

    def as_module_returns(self, output: Float[Tensor, "batch pos d_model"]) -> Any:
        """The layer's output in the form in which the Transformers module returns it."""
        return output

    def is_in_cache(self, cache: Any) -> bool:
        """Whether a cache of Transformers, or None, holds a state that the module's own forward pass wrote."""
        index = getattr(self.module, "layer_idx", self.layer)
        return hasattr(cache, "has_previous_state") and bool(cache.has_previous_state(index))

    @property
    def module(self) -> Any:
        """The Transformers module whose weights are used."""
        return self._held[0]

    @abstractmethod
    def inputs(
        self, hidden_states: Float[Tensor, "batch pos d_model"], conv: Tensor | None, mask: Tensor | None
    ) -> MixerInputs:
        """Everything before the recurrence; ``conv`` holds the convolution's rows before the first token."""

    @abstractmethod
    def finish(self, z: Float[Tensor, "batch pos head d_v"], gate: Tensor) -> Float[Tensor, "batch pos d_model"]:
        """The norm and the gate, in the dtype of z: float32 or better; then the output projection in the module's dtype.

        z may be beyond the range of half precision, and what the norm makes of it is not.
        """

    def is_hooked(self) -> bool:
        """Whether any of the hook points has a hook."""
        return is_hooked(*(getattr(self, name) for name in MIXER_HOOKS))

    def forward(
        self,
        hidden_states: Float[Tensor, "batch pos d_model"],
        state: RecurrentState | None = None,
        mask: Bool[Tensor, "#batch pos"] | None = None,
    ) -> tuple[Float[Tensor, "batch pos d_model"], RecurrentState]:
        """One pass over any number of tokens.

        Args:
            hidden_states: the layer's normalized input.
            state: state after earlier tokens; ``RecurrentState(b_kv=..., conv=...)`` starts from a KV bias; None for no state.
            mask: True at real tokens; None if there is no padding.

        Returns:
            The layer's output, and the state after the last real token of each row.

        Raises:
            KVLensError: the state does not have this layer's sizes.
        """
        state = RecurrentState() if state is None else state
        conv = state.conv
        if self.conv_rows:
            if conv is None:
                conv = hidden_states.new_zeros(1, self.conv_rows, self.conv_channels)
            conv = self.hook_conv_state(conv)
        inputs = self._hooked_inputs(self.inputs(hidden_states, conv, mask))
        read = self.rule.run(inputs, state, mask, with_map=state.b_kv is not None)
        z = read.z
        if is_hooked(self.hook_pattern):
            z = self._read_by_pattern(inputs, state, mask)
        if state.b_kv is not None:
            assert read.carried_q is not None
            b_kv = self.hook_b_kv(state.b_kv.to(z))
            z_bias = (read.carried_q.transpose(1, 2) @ b_kv).transpose(1, 2)
            z = self.hook_z_context(z) + self.hook_z_bias(z_bias)
        z = self.hook_z(z)
        after = RecurrentState(state.b_kv, self.hook_state(read.context), read.state_map, inputs.conv)
        assert inputs.gate is not None
        return self.finish(z, inputs.gate), after

    def _hooked_inputs(self, inputs: MixerInputs) -> MixerInputs:
        write = inputs.write_strength
        return inputs._replace(
            q=self.hook_q(inputs.q),
            k=self.hook_k(inputs.k),
            v=self.hook_v(inputs.v),
            log_decay=self.hook_log_decay(inputs.log_decay),
            write_strength=None if write is None else self.hook_write_strength(write),
        )

    def _read_by_pattern(self, inputs: MixerInputs, state: RecurrentState, mask: Tensor | None) -> Tensor:
        """z of the context as the pattern times the values, so that patching the pattern changes the output."""
        v = inputs.v if mask is None else without_padding(inputs.v, mask)
        z = torch.einsum("bhij,bjhd->bihd", self.hook_pattern(self.rule.pattern(inputs, mask)), v)
        if state.context is None:
            return z
        return z + torch.einsum("bihk,bhkd->bihd", self.rule.carried_queries(inputs, mask), state.context.to(z))


MIXER_HOOKS = tuple(name for name in Mixer.__annotations__ if name.startswith("hook_"))
"""The hook points of every mixer, not in firing order."""
