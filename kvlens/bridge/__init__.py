"""KV biases for models run by Transformers: :class:`KVTransformerBridge`, a TransformerLens ``TransformerBridge``.

Hook points on every ``blocks.{layer}.attn``, in addition to the bridge's own, which keep their meaning. They fire only with a
bias, at every pass, including generation.

| hook point | shape | content |
|---|---|---|
| ``hook_b_kv``, ``hook_b_d`` | [batch or 1, head, key(, d_head)] | values and weights as read, a row per query head |
| ``hook_b_keys`` | [batch or 1, head, key, d_key] | the keys; these three are the whole bias: patch all of them |
| ``hook_normalizer`` | [batch, pos, head] | the logarithm of the softmax normalizer, bias and attention sink included |
| ``hook_z_context``, ``hook_z_bias`` | [batch, pos, head, d_head] | the two summands of ``hook_z`` |
| ``hook_pattern`` (the bridge's), with a bias | [batch, head, pos, key] | the text's columns alone: see below |

Recurrent layers have those of :mod:`kvlens.mixers` under the same path. They fire with and without a bias if something is
hooked to one of them: the layer is then computed by its mixer, which rounds differently from Transformers' kernel.
The attention of OLMo-Hybrid, Kimi Linear, Nemotron-H and Jamba exposes queries, keys and scores in the same way
(:mod:`kvlens.bridge.native`). A fused projection with rotary positions has ``hook_rot_q`` and ``hook_rot_k``, with or without
a bias.

Which families it runs, and what each can do: :mod:`kvlens.bridge.table`. In Nemotron-H, whose blocks call every layer
``mixer``, the hook points that kvlens adds are named as here, under ``attn``.

With a bias, ``hook_pattern`` has the text's columns alone and is divided by the normalizer of text *and* bias, as in
:class:`kvlens.HookedKVTransformer`: after a long prompt a row may sum to 0.002. What it lacks to 1 is the share of the bias
(and of an attention sink). The whole rows, with a column per prompt token, are ``hook_pattern`` in a pass over prompt and text
without a bias.
"""

from kvlens.bridge.bridge import KVTransformerBridge
from kvlens.bridge.parts import measured
from kvlens.bridge.recurrent import LayerMemory, read_memory

__all__ = ["KVTransformerBridge", "LayerMemory", "measured", "read_memory"]
