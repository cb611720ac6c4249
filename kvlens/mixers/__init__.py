"""Recurrent layers of hybrid models, as hooked forward passes over the Transformers module's own submodules.

Each passes a :class:`RecurrentState` from pass to pass without changing it in place, so gradients flow through it, and hooks
fire both at prefill and at every decoded token.

| hook point | shape | content |
|---|---|---|
| ``hook_q``, ``hook_k`` | [batch, pos, key_head, d_k] | queries and keys as used in the recurrence: normalized and scaled |
| ``hook_v`` | [batch, pos, head, d_v] | values, after convolution and activation |
| ``hook_log_decay`` | [batch, pos, head(, d_k)] | log a_t, at most 0; by key channel in KDA, Mamba-1, RWKV; [head] if fixed |
| ``hook_write_strength`` | [batch, pos, head] | b_t; does not fire where it is always 1 (lightning attention, RWKV) |
| ``hook_b_kv`` | [batch or 1, head, d_k, d_v] | the KV bias as read, at every pass, if there is one |
| ``hook_z_context``, ``hook_z_bias`` | [batch, pos, head, d_v] | the two summands of ``hook_z`` if there is a bias |
| ``hook_z`` | [batch, pos, head, d_v] | the output of the recurrence, before the norm and the gate |
| ``hook_state`` | [batch, head, d_k, d_v] | what the context has written, after the last real token; used by the next pass |
| ``hook_conv_state`` | [batch or 1, rows, channel] | the convolution's inputs before the first token, as read; a row in RWKV |
| ``hook_pattern`` | [batch, head, pos, pos] | the exact effective attention; once hooked, z is computed from it |

**A recurrent rule.** Its op comes first: the recurrence, and what it carries (`carried_queries`, `carried_keys`, `state_map`,
`effective_attention`), as in `kvlens/ops/lightning.py`. A `Rule` in `kvlens/mixers/mixer.py` calls these on a layer's inputs:

```python
import torch

from kvlens.mixers.mixer import Lightning, MixerInputs, RecurrentState


def averaged(inputs: MixerInputs) -> MixerInputs:
    return inputs._replace(k=inputs.k * (1 - inputs.log_decay.exp())[:, None])


class Average(Lightning):
    '''S_t = a S_{t-1} + (1 - a) k_t v_t^T: the state is a mean of what was written.'''

    def run(self, inputs, *state_mask_map):
        return super().run(averaged(inputs), *state_mask_map)

    def carried_keys(self, inputs, mask):
        return super().carried_keys(averaged(inputs), mask)

    def pattern(self, inputs, mask):
        return super().pattern(averaged(inputs), mask)
```

A layer that has it is a `Mixer` with this `rule` in `MIXERS` of `kvlens/mixers/layers.py`; a row in
`tests/model/tiny_hf.py` then compares it with Transformers. The laws of every rule, in `tests/mixers/test_mixers.py`: z is the
pattern times the values, and the state the carried keys times the values.

```python
def test_pattern_and_carried_keys():
    q, k, v = torch.randn(3, 2, 5, 4, 8, dtype=torch.float64)
    inputs, rule = MixerInputs(q, k, v, -torch.rand(4, dtype=torch.float64), None, None, None), Average()
    read = rule.run(inputs, RecurrentState(), None, False)
    assert (read.z - torch.einsum("bhij,bjhd->bihd", rule.pattern(inputs, None), v)).abs().max() < 1e-12
    assert (read.context - torch.einsum("bjhk,bjhd->bhkd", rule.carried_keys(inputs, None), v)).abs().max() < 1e-12
```
"""

from kvlens.mixers.layers import has_mixer, mixer_for
from kvlens.mixers.mixer import MIXER_HOOKS, Mixer, MixerInputs, RecurrentState

__all__ = ["MIXER_HOOKS", "Mixer", "MixerInputs", "RecurrentState", "has_mixer", "mixer_for"]
