"""What the heads of a layer get, and what they give back: the contract of linear and softmax attention."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class NewTokens(NamedTuple):
    """The new tokens of one forward pass as a layer's heads get them: projected, normed and shifted, not yet rotated.

    Attributes:
        q: [batch, pos, head, d_head].
        k, v: [batch, pos, kv_head, d_head].
        mask: True at real tokens among them; None where all are.
        attention_mask: as TransformerLens hands it over: 1 at real tokens, those of the decode cache in front; or None.
        counted: the mask whose tokens take positions (:mod:`kvlens.components.positions`): ``attention_mask``, or None.
        score_bias: what is added to softmax scores (TransformerLens' additive mask, T5's position bias), or None.
    """

    q: Float[Tensor, "batch pos head d_head"]
    k: Float[Tensor, "batch pos kv_head d_head"]
    v: Float[Tensor, "batch pos kv_head d_head"]
    mask: Bool[Tensor, "batch pos"] | None
    attention_mask: Int[Tensor, "batch offset_pos"] | None
    counted: Int[Tensor, "batch offset_pos"] | None
    score_bias: Float[Tensor, "#batch #head #pos key_pos"] | None


class HeadOutputs(NamedTuple):
    """What the heads make of new tokens, before the output projection.

    Attributes:
        z_context: the text's part of z, already divided by the whole normalizer.
        z_bias: the KV bias's part, likewise; None without a bias, and where softmax read its virtual keys as further keys
            of the text: ``z_context`` is then the whole z.
        own_share: p_ii, each token's own share of z, where a variant of attention asks for it.
    """

    z_context: Float[Tensor, "batch pos head d_head"]
    z_bias: Float[Tensor, "batch pos head d_head"] | None = None
    own_share: Float[Tensor, "batch pos head"] | None = None


class Heads:
    """The heads of one layer between q, k, v and z, for one forward pass; a kind of attention is one such class.

    Args:
        attn: the layer's attention module, which has the parameters and the hook points.
        tokens: what the heads get.
        entry: of the decode cache: what came before ``tokens``; None at the start of a text.
    """

    def __init__(self, attn: Any, tokens: NewTokens, entry: Any):
        self.attn, self.cfg, self.tokens, self.entry = attn, attn.cfg, tokens, entry

    @classmethod
    def add_parameters(cls, attn: Any, cfg: Any) -> None:
        """Give a layer's attention what this kind needs and TransformerLens does not have; once, when the model is built."""

    @classmethod
    def init_parameters(cls, attn: Any, generator: torch.Generator | None) -> None:
        """Set the initial values of those parameters."""

    def outputs(self) -> HeadOutputs:
        """z of the context and of the bias; ``entry`` is brought up to date. Called once."""
        raise NotImplementedError


def real_tokens(attention_mask: Tensor | None, pos: int, device: torch.device) -> Tensor | None:
    """The mask of the ``pos`` newest tokens, True at real ones; None where there is no padding at all."""
    if attention_mask is None:
        return None
    mask = attention_mask[:, -pos:].bool().to(device)
    return None if bool(mask.all()) else mask
