"""phi for softmax attention: features whose product with stored weights replaces a prompt's exp(q.k)."""

from kvlens.checks import doors
from kvlens.ops.softmax_features.positive import elu_log_features, learned_log_features, random_log_features
from kvlens.ops.softmax_features.taylor import taylor_features
from kvlens.ops.softmax_features.types import ScoreRule
from kvlens.ops.softmax_features.virtual_keys import distance_scores, grouped_key_scores, scaled_exp, virtual_key_scores

__all__ = [
    "ScoreRule",
    "distance_scores",
    "elu_log_features",
    "grouped_key_scores",
    "learned_log_features",
    "random_log_features",
    "scaled_exp",
    "taylor_features",
    "virtual_key_scores",
]

doors(__name__)
