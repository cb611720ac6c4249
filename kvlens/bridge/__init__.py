"""A KV bias on models as Transformers runs them: :class:`KVTransformerBridge`, a TransformerLens ``TransformerBridge``.

Hook points on every ``blocks.{layer}.attn``, in addition to the bridge's own, which keep their meaning. They fire under a bias
alone, at every pass, generation included.

| hook point | shape | what |
|---|---|---|
| ``hook_b_kv``, ``hook_b_d`` | [batch or 1, head, d_phi(, d_head)] | the bias as read, a row per query head |
| ``hook_normalizer`` | [batch, pos, head] | the logarithm of the softmax normalizer, bias and attention sink included |
| ``hook_z_context``, ``hook_z_bias`` | [batch, pos, head, d_head] | the two summands of ``hook_z`` |

Recurrent layers have those of :mod:`kvlens.mixers` under the same path. They fire with and without a bias wherever something is
hooked to one of them: the layer is then computed by its mixer, which rounds otherwise than Transformers' kernel. OLMo-Hybrid's
attention shows queries, keys and scores likewise (:mod:`kvlens.bridge.native`).

Under a bias ``hook_pattern`` is divided by the whole normalizer, so that its rows sum to less than 1, as in
:class:`kvlens.HookedKVTransformer`.
"""

from kvlens.bridge.bridge import KVTransformerBridge
from kvlens.bridge.memory import LayerMemory

__all__ = ["KVTransformerBridge", "LayerMemory"]
