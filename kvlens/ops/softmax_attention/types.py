"""What the forms of softmax attention share: one set of arguments, one layout, one return.

    s_ij = q_i.k_j / scale + score_bias_ij         n_i = sum over the visible j of exp(s_ij)
    z_i  = sum over the visible j of exp(s_ij) v_j / n_i

Arguments of every form, in this order:

- ``q`` [batch, query, head, d_head], ``k`` and ``v`` [batch, key, kv_head, d_head]; ``head`` is a multiple of ``kv_head``
  (GQA: query head h reads key-value head h // (head / kv_head)). If there are fewer queries than keys, the queries are the
  last positions, and the earlier keys come from a decode cache;
- ``scale``: divides the scores (TransformerLens' ``attn_scale``);
- ``causal``: a query sees no later key. False for bidirectional attention;
- ``padding`` [batch, key]: True at real tokens, None where all are. No query sees a padded key;
- ``window``: a query sees itself and the ``window - 1`` keys before it; None for all of them;
- ``score_bias`` [batch or 1, head or 1, query, key]: added to the scores (ALiBi), or None;
- ``log_normalizer``: whether to return log n_i too.

A query that sees no key gets z = 0 and log n = -inf. The forms: ``naive`` (a loop over queries, the reference) and ``fused``
(torch's kernel, which stores no query x key tensor).
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class SoftmaxAttentionOutput(NamedTuple):
    """z, and log n if it was requested (in float32 or better)."""

    z: Float[Tensor, "batch query head d_head"]
    log_normalizer: Float[Tensor, "batch query head"] | None


class ScaledFeatures(NamedTuple):
    """phi(q) = features * exp(log_scale): a query's features in a form that does not overflow.

    The largest of ``features`` is about 1, so that sums over them are safe; scores of real models reach 100 and more.
    """

    features: Float[Tensor, "batch query head d_phi"]
    log_scale: Float[Tensor, "batch query head"]


class ScaledMass(NamedTuple):
    """A sum of exponentials, mass * exp(log_scale): at a score of 1,000, float32 holds the sum's logarithm only to 6e-5."""

    mass: Float[Tensor, "batch query head"]
    log_scale: Float[Tensor, "batch query head"]

    @classmethod
    def of_log(cls, log_sum: Float[Tensor, "batch query head"]) -> "ScaledMass":
        """The sum with this logarithm."""
        return cls(torch.ones_like(log_sum), log_sum)

    @classmethod
    def of_scores(
        cls, scores: Float[Tensor, "batch head query key"], sinks: Float[Tensor, " head"] | None = None
    ) -> "ScaledMass":
        """The sum over a query's keys, and over its head's attention sink, relative to its largest term."""
        top = scores.detach().amax(dim=-1)
        if sinks is not None:
            top = torch.maximum(top, sinks.detach()[:, None].to(top))
        shift = top.masked_fill(top == -torch.inf, 0.0)  # inf - inf would be NaN
        # a term below e^-80 of the largest changes no digit; left at a mask's size it would take exp ten times as long
        mass = (scores - shift[..., None]).clamp(min=-80).exp().sum(dim=-1)
        if sinks is not None:
            mass = mass + (sinks[:, None].to(mass) - shift).exp()
        return cls(mass.transpose(1, 2), top.transpose(1, 2))


class JoinedBias(NamedTuple):
    """The two summands of z, and log n including the bias."""

    z_context: Float[Tensor, "batch query head d_head"]
    z_bias: Float[Tensor, "batch query head d_head"]
    log_normalizer: Float[Tensor, "batch query head"]

    def below_zero(self) -> Bool[Tensor, "batch query head"]:
        """Where weights of both signs made the normalizer negative: it has no logarithm, and the summands are finite."""
        return self.log_normalizer.isnan() & ~self.z_bias[..., 0].isnan()
