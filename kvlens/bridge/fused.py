"""Rotary attention with one projection for queries, keys and values (GPT-NeoX, Phi-3), made to show what it rotates.

The bridge's component rotates queries and keys without a hook point behind it. Here it has ``hook_rot_q`` and ``hook_rot_k``,
[batch, head or kv_head, pos, d_head], as the components of other rotary models do.
"""

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.generalized_components import JointQKVPositionEmbeddingsAttentionBridge


class FusedRotaryAttention(JointQKVPositionEmbeddingsAttentionBridge):
    """TransformerLens' component with two more hook points."""

    hook_rot_q: HookPoint
    hook_rot_k: HookPoint

    def _apply_rotary_pos_emb(
        self, q: Float[Tensor, "batch head pos d_head"], k: Float[Tensor, "batch kv_head pos d_head"], cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        q, k = super()._apply_rotary_pos_emb(q, k, cos, sin)
        return self.hook_rot_q(q), self.hook_rot_k(k)


def show_rotated(component: nn.Module) -> None:
    """Change the class of a ``JointQKVPositionEmbeddingsAttentionBridge`` to :class:`FusedRotaryAttention`, in place."""
    if isinstance(component, FusedRotaryAttention):
        return
    held: Any = component
    held.hook_rot_q, held.hook_rot_k = HookPoint(), HookPoint()
    held.__class__ = FusedRotaryAttention
