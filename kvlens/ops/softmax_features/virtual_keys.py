"""Virtual keys as features: phi_r(q) = exp(score of q and the virtual key c_r).

With the prompt's own keys and values and weight 1 they reproduce softmax attention exactly; with fewer keys and fitted weights
they approximate it. The score is the model's own, including soft-cap, ALiBi and window, for which each stored key has a
distance from the start of the text.
"""

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.ops.softmax_attention import ScaledFeatures
from kvlens.ops.softmax_attention.grouped import by_kv_head
from kvlens.ops.softmax_features.types import ScoreRule


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
    by_distance = rearrange(by_distance, "b (g s) p r -> b g p s r", s=group)
    return (scores.unflatten(2, (-1, group)) + by_distance).flatten(2, 3)


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
