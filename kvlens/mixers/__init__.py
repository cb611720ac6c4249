"""Recurrent layers of hybrid models, as hooked forward passes over the Transformers module's own submodules.

Each passes a :class:`RecurrentState` from pass to pass without changing it in place, so gradients flow through it, and hooks
fire both at prefill and at every decoded token.

| hook point | shape | content |
|---|---|---|
| ``hook_q``, ``hook_k`` | [batch, pos, key_head, d_k] | queries and keys as used in the recurrence: normalized and scaled |
| ``hook_v`` | [batch, pos, head, d_v] | values, after convolution and activation |
| ``hook_log_decay`` | [batch, pos, head(, d_k)] | log a_t, at most 0; per key channel in KDA and Mamba-1; [head] in lightning |
| ``hook_write_strength`` | [batch, pos, head] | b_t; does not fire where it is always 1 (lightning attention) |
| ``hook_b_kv`` | [batch or 1, head, d_k, d_v] | the KV bias as read, at every pass, if there is one |
| ``hook_z_context``, ``hook_z_bias`` | [batch, pos, head, d_v] | the two summands of ``hook_z`` if there is a bias |
| ``hook_z`` | [batch, pos, head, d_v] | the output of the recurrence, before the norm and the gate |
| ``hook_state`` | [batch, head, d_k, d_v] | what the context has written, after the last real token; used by the next pass |
| ``hook_conv_state`` | [batch or 1, rows, channel] | the convolution's inputs before the first token, as read |
| ``hook_pattern`` | [batch, head, pos, pos] | the exact effective attention; once hooked, z is computed from it |
"""

from kvlens.mixers.families import has_mixer, mixer_for
from kvlens.mixers.mixer import HOOKS, Mixer, MixerInputs, RecurrentState

__all__ = ["HOOKS", "Mixer", "MixerInputs", "RecurrentState", "has_mixer", "mixer_for"]
