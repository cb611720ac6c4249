"""The update rules of mixers, in terms of :mod:`kvlens.ops`."""

from typing import Any

import torch
from torch import Tensor

from kvlens.mixers.protocol import MixerInputs, Read, RecurrentState, Rule
from kvlens.ops import delta_rule, lightning, selective_scan, ssd
from kvlens.ops.lightning import chunked_lightning, recurrent_lightning
from kvlens.ops.linear_attention import without_padding
from kvlens.ops.ssd import chunked_ssd, recurrent_ssd


class DeltaRule(Rule):
    """T_t = (I - b_t k_t k_t^T) Diag(a_t): the gated delta rule and Kimi delta attention (:mod:`kvlens.ops.delta_rule`).

    Args:
        chunk_size: of the chunked form; it changes speed, not the result.
    """

    def __init__(self, chunk_size: int = delta_rule.CHUNK_SIZE) -> None:
        self.chunk_size = chunk_size

    def run(self, inputs: MixerInputs, state: RecurrentState, mask: Tensor | None, with_map: bool) -> Read:
        arguments = (inputs.q, inputs.k, inputs.v, inputs.log_decay, _write(inputs), mask, state.context)
        decodes = inputs.v.shape[1] == 1
        if with_map:
            carried = delta_rule.recurrent_carried_delta_rule if decodes else delta_rule.carried_delta_rule
            return Read(*carried(*arguments, state.state_map))
        if decodes:
            z, final = delta_rule.recurrent_delta_rule(*arguments, output_final_state=True)
        else:
            z, final = delta_rule.chunked_delta_rule(*arguments, output_final_state=True, chunk_size=self.chunk_size)
        assert final is not None
        return Read(z, None, final, None)

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

    def run(self, inputs: MixerInputs, state: RecurrentState, mask: Tensor | None, with_map: bool) -> Read:
        form = recurrent_lightning if inputs.v.shape[1] == 1 else chunked_lightning
        context = None if state.context is None else state.context.to(inputs.v)
        z, final = form(inputs.q, inputs.k, inputs.v, inputs.log_decay, mask, context, output_final_state=True)
        assert final is not None
        if not with_map:
            return Read(z, None, final, None)
        return Read(z, *_carried(self.carried_queries(inputs, mask), final, self.state_map(inputs, mask), state))

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

    carries: Any = ssd
    """The module of what the recurrence carries."""

    def __init__(self, skip: Tensor) -> None:
        self.skip = skip

    def form(self, n_tokens: int) -> Any:
        """The form of the recurrence for that many tokens."""
        return recurrent_ssd if n_tokens == 1 else chunked_ssd

    def run(self, inputs: MixerInputs, state: RecurrentState, mask: Tensor | None, with_map: bool) -> Read:
        arguments = (inputs.q, inputs.k, inputs.v, inputs.log_decay, _write(inputs), mask, state.context)
        z, final = self.form(inputs.v.shape[1])(*arguments, output_final_state=True)
        assert final is not None
        z = z + self.skip.to(z)[:, None] * (inputs.v if mask is None else without_padding(inputs.v, mask))
        if not with_map:
            return Read(z, None, final, None)
        return Read(z, *_carried(self.carried_queries(inputs, mask), final, self.state_map(inputs, mask), state))

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

    def form(self, n_tokens: int) -> Any:
        return selective_scan.selective_scan


def _carried(carried_q: Tensor, final: Tensor, state_map: Tensor, state: RecurrentState) -> tuple[Tensor, Tensor, Tensor]:
    """qbar, the state and P since the bias, from those of this pass."""
    if state.state_map is None:
        return carried_q, final, state_map
    before = state.state_map.to(carried_q)
    return (carried_q.transpose(1, 2) @ before).transpose(1, 2), final, state_map @ before


def _write(inputs: MixerInputs) -> Tensor:
    assert inputs.write_strength is not None, "this rule has a write strength"
    return inputs.write_strength
