"""The inputs and outputs of a layer's heads: the common interface of linear and softmax attention."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class NewTokens(NamedTuple):
    """The new tokens of one forward pass as passed to a layer's heads: projected, normalized and shifted, not yet rotated.

    Attributes:
        q: [batch, pos, head, d_head].
        k, v: [batch, pos, kv_head, d_head].
        mask: True at real tokens among them; None where all are.
        attention_mask: the base's mask, 1 at real tokens, starting with those of the decode cache; or None.
        counted: the mask of tokens that take up positions (:mod:`kvlens.components.positions`): ``attention_mask``, or None.
        score_bias: added to softmax scores (the base's ``additive_attention_mask``), or None.
    """

    q: Float[Tensor, "batch pos head d_head"]
    k: Float[Tensor, "batch pos kv_head d_head"]
    v: Float[Tensor, "batch pos kv_head d_head"]
    mask: Bool[Tensor, "batch pos"] | None
    attention_mask: Int[Tensor, "batch offset_pos"] | None
    counted: Int[Tensor, "batch offset_pos"] | None
    score_bias: Float[Tensor, "#batch #head #pos key_pos"] | None


class HeadOutputs(NamedTuple):
    """The output of the heads for new tokens, before the output projection.

    Attributes:
        z_context: the text's part of z, already divided by the whole normalizer.
        z_bias: the KV bias's part, likewise; None without a bias, or if softmax read its virtual keys as additional keys
            of the text, in which case ``z_context`` is the whole z.
        own_share: p_ii, each token's own share of z, if a variant of attention needs it.
    """

    z_context: Float[Tensor, "batch pos head d_head"]
    z_bias: Float[Tensor, "batch pos head d_head"] | None = None
    own_share: Float[Tensor, "batch pos head"] | None = None


class Heads:
    """The computation from q, k, v to z in one layer and one forward pass; each kind of attention is a subclass.

    Args:
        attn: the layer's attention module, which has the parameters and the hook points.
        tokens: the new tokens.
        entry: the layer's entry of the decode cache, for what came before ``tokens``; None at the start of a text.
    """

    def __init__(self, attn: Any, tokens: NewTokens, entry: Any):
        self.attn, self.cfg, self.tokens, self.entry = attn, attn.cfg, tokens, entry

    @classmethod
    def add_parameters(cls, attn: Any, cfg: Any) -> None:
        """Add the parameters that this kind needs and TransformerLens lacks. Called once, when the model is built."""

    @classmethod
    def init_parameters(cls, attn: Any, generator: torch.Generator | None) -> None:
        """Initialize those parameters."""

    def outputs(self) -> HeadOutputs:
        """z of the context and of the bias; updates ``entry``. Called once."""
        raise NotImplementedError


def real_tokens(attention_mask: Tensor | None, pos: int, device: torch.device) -> Tensor | None:
    """The mask of the ``pos`` newest tokens, True at real ones; None if there is no padding."""
    if attention_mask is None:
        return None
    mask = attention_mask[:, -pos:].bool().to(device)
    return None if bool(mask.all()) else mask
