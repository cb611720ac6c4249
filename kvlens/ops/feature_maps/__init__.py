"""phi: the map that turns a softmax score exp(q.k) into a product phi(q).phi(k), so that a sum of keys can be stored."""

from kvlens.checks import doors
from kvlens.ops.feature_maps.maps import (
    elu_plus_one,
    hedgehog,
    random_features,
    relu,
    taylor,
)
from kvlens.ops.feature_maps.projections import draw_projections

__all__ = [
    "draw_projections",
    "elu_plus_one",
    "hedgehog",
    "random_features",
    "relu",
    "taylor",
]

doors(__name__)
