"""phi for softmax attention: features whose product with stored weights replaces a prompt's exp(q.k) (ICLCA sec. 5 and 6.4).

First how a model scores a key, and the naive forms: one query, one key at a time. Then the fast ones:

- **virtual keys**: phi_r(q) = exp(score of q and the virtual key c_r);
- **random** (FAVOR+, Choromanski et al. 2021; ICLCA sec. 6.4): E[phi(q).phi(k)] = exp(q.k / scale) for w_r ~ N(0, I), with a
  variance that grows like exp(|q + k|^2 / scale) / m;
- **learned** (:mod:`kvlens.conversion.features`): phi_r(x) = exp(w_r.x + a_r), w and a trained;
- **elu + 1** (Katharopoulos et al. 2020): phi(x) = elu(x') + 1, not an exponential, with x' = x / sqrt(scale);
- **taylor**: the exponential's polynomial to second order, phi(q).phi(k) = 1 + s + s^2 / 2, s = q.k / scale.
"""

import math
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.checks import doors
from kvlens.ops.feature_maps import taylor
from kvlens.ops.softmax_attention import ScaledFeatures, by_kv_head


class ScoreRule(NamedTuple):
    """How a softmax model turns a query, a key and the distance between them into a log-score.

    s = cap tanh(q.k / (scale cap)) - slope_h distance, and minus infinity where distance >= window.

    Attributes:
        scale: what q.k is divided by (``attn_scale``, 1 if the model does not scale).
        soft_cap: None or 0 for no cap.
        slopes: ALiBi's slopes, one per query head, positive; None without ALiBi.
        window: for a local layer, the number of tokens seen, including the query's own; None for a global layer.
    """

    scale: float
    soft_cap: float | None = None
    slopes: Float[Tensor, " head"] | None = None
    window: int | None = None

    @property
    def needs_distance(self) -> bool:
        """Whether the distance between query and key changes the score."""
        return self.slopes is not None or self.window is not None


# The references, in plain exponentials of float64. They overflow where scores are large.


def naive_score(q: Float[Tensor, " d"], key: Float[Tensor, " d"], rule: ScoreRule, head: int, apart: int) -> float:
    """The log-score of one query of head ``head`` and one key that lies ``apart`` tokens before it."""
    score = float(q @ key) / rule.scale
    if rule.soft_cap:
        score = rule.soft_cap * math.tanh(score / rule.soft_cap)
    if rule.slopes is not None:
        score -= float(rule.slopes[head]) * apart
    return -math.inf if rule.window is not None and apart >= rule.window else score


def naive_virtual_key_features(
    q: Float[Tensor, "batch pos head d_head"],
    keys: Float[Tensor, "#batch kv_head r d_head"],
    rule: ScoreRule,
    distance: Int[Tensor, "#batch kv_head r"],
    positions: Int[Tensor, "#batch pos"],
) -> Float[Tensor, "batch pos head r"]:
    """phi_r(q) = exp(score of q and c_r)."""
    batch, pos, heads, _ = q.shape
    n_kv, r = keys.shape[1:3]
    phi = q.new_zeros(batch, pos, heads, r)
    for b in range(batch):
        for i in range(pos):
            for h in range(heads):
                g, kb = h // (heads // n_kv), b % keys.shape[0]
                for j in range(r):
                    apart = int(positions[b % positions.shape[0], i]) + int(distance[b % distance.shape[0], g, j])
                    phi[b, i, h, j] = math.exp(naive_score(q[b, i, h], keys[kb, g, j], rule, h, apart))
    return phi


def naive_random_features(x: Float[Tensor, " d"], projection: Float[Tensor, "m d"], scale: float) -> Float[Tensor, " m"]:
    """exp(w.x' - |x'|^2 / 2) / sqrt(m) of one vector."""
    scaled = x / math.sqrt(scale)
    return torch.stack([torch.exp(w @ scaled - scaled @ scaled / 2) for w in projection]) / math.sqrt(len(projection))


# Virtual keys: phi_r(q) = exp(score of q and the virtual key c_r). With the prompt's own keys and values and weight 1 they
# reproduce softmax attention exactly; with fewer keys and fitted weights they approximate it. The score is the model's own,
# including soft-cap, ALiBi and window, for which each stored key has a distance from the start of the text.


def virtual_key_scores(
    q: Float[Tensor, "batch pos head d_head"],
    keys: Float[Tensor, "#batch kv_head r d_head"],
    rule: ScoreRule,
    distance: Int[Tensor, "#batch kv_head r"] | None = None,
    positions: Int[Tensor, "#batch pos"] | None = None,
) -> Float[Tensor, "batch pos head r"]:
    """The log-score of every query and virtual key; a query head reads the keys of its key-value head.

    Args:
        q: queries as the model scores them, after RoPE.
        keys: virtual keys, after RoPE.
        rule: the model's scoring.
        distance: from the key to the first token of the text, at least 1; needed with ALiBi or a window.
        positions: of the queries within the text, from 0; needed with ALiBi or a window.
    """
    scores = grouped_key_scores(q, keys, rule, distance, positions)
    return rearrange(scores, "b g (p s) r -> b p (g s) r", p=q.shape[1])


def grouped_key_scores(
    q: Float[Tensor, "batch pos head d_head"],
    keys: Float[Tensor, "#batch kv_head r d_head"],
    rule: ScoreRule,
    distance: Int[Tensor, "#batch kv_head r"] | None = None,
    positions: Int[Tensor, "#batch pos"] | None = None,
) -> Float[Tensor, "batch kv_head row r"]:
    """The same for each key-value head: the rows are the queries of its heads, position by position."""
    group = q.shape[2] // keys.shape[1]
    scores = by_kv_head(q, keys.mT).div_(rule.scale)
    if rule.soft_cap:
        scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
    if not rule.needs_distance:
        return scores
    assert distance is not None
    assert positions is not None
    by_distance = distance_scores(rule, distance, positions, q.shape[2]).to(scores)
    return scores + rearrange(by_distance, "b (g s) p r -> b g (p s) r", s=group)


def distance_scores(
    rule: ScoreRule, distance: Int[Tensor, "#batch kv_head r"], positions: Int[Tensor, "#batch pos"], n_heads: int
) -> Float[Tensor, "batch head pos r"]:
    """What the distance between a query and a virtual key adds to their score: ALiBi's term, minus infinity out of the window.

    ALiBi's term is rounded as in the base's table, in the dtype of the slopes. Arguments as in
    :func:`virtual_key_scores`.
    """
    apart = positions[:, None, :, None] + distance.repeat_interleave(n_heads // distance.shape[1], dim=1)[:, :, None]
    added = (
        torch.zeros((), device=apart.device).expand(apart.shape) if rule.slopes is None else -rule.slopes[:, None, None] * apart
    )
    return added if rule.window is None else torch.where(apart >= rule.window, -torch.inf, added)


def scaled_exp(
    log_features: Float[Tensor, "batch pos head r"], used: Bool[Tensor, "#batch #head r"] | None = None
) -> ScaledFeatures:
    """exp(log_features), divided by its largest used value per query. Unused features are 0 and do not affect the scale.

    If no feature is used or none is in the window, features are 0 and the log-scale is minus infinity.
    """
    if used is not None and not bool(used.all()):
        log_features = log_features.masked_fill(~used[:, None], -torch.inf)
    log_scale = log_features.detach().amax(dim=-1)
    shift = log_scale.masked_fill(log_scale == -torch.inf, 0.0)  # inf - inf would be NaN
    return ScaledFeatures((log_features - shift[..., None]).exp_(), log_scale)


# Positive features that do not depend on the prompt. They are returned as logarithms: the features of a real model's queries
# span hundreds of orders of magnitude.


def random_log_features(
    x: Float[Tensor, "batch pos head d_head"], projection: Float[Tensor, "kv_head m d_head"], scale: float
) -> Float[Tensor, "batch pos head m"]:
    """log phi(x) = w.x' - |x'|^2 / 2 - log(m) / 2 with x' = x / sqrt(scale), for queries and keys alike."""
    scaled = x / math.sqrt(scale)
    exponent = _project(scaled, projection) - scaled.square().sum(dim=-1, keepdim=True) / 2
    return exponent - math.log(projection.shape[1]) / 2


def learned_log_features(
    x: Float[Tensor, "batch pos head d_head"],
    weight: Float[Tensor, "kv_head m d_head"],
    offset: Float[Tensor, "kv_head m"],
) -> Float[Tensor, "batch pos head m"]:
    """log phi(x) = w.x + a."""
    return _project(x, weight) + offset.repeat_interleave(x.shape[2] // offset.shape[0], dim=0)


def elu_log_features(x: Float[Tensor, "batch pos head d_head"], scale: float) -> Float[Tensor, "batch pos head d_head"]:
    """log(elu(x') + 1): x' below 0 and log(1 + x') above."""
    scaled = x / math.sqrt(scale)
    return torch.where(scaled < 0, scaled, scaled.clamp(min=0).log1p())


def _project(x: Tensor, weight: Tensor) -> Tensor:
    per_head = weight.to(x.dtype).repeat_interleave(x.shape[2] // weight.shape[0], dim=0)
    return torch.einsum("bphd,hmd->bphm", x, per_head)


def taylor_features(x: Float[Tensor, "batch pos head d_head"], scale: float) -> ScaledFeatures:
    """phi(x) = [1, x', vec(x' x'^T) / sqrt 2], x' = x / sqrt(scale), as features of norm 1 and a log-scale."""
    features = taylor(x, scale)
    size = x.detach().square().sum(dim=-1) / scale  # |phi|^2 = 1 + |x'|^2 + |x'|^4 / 2
    log_norm = torch.log(torch.hypot(torch.sqrt(1 + size), size / math.sqrt(2.0)))
    return ScaledFeatures(features * torch.exp(-log_norm)[..., None], log_norm)


doors(__name__)
