"""Attention as one step of gradient descent on a representation-learning loss (DUAL th. 3.1, 3.2, B.1, B.2).

- ``naive``: one head, one query, in loops: the reference for everything below;
- ``steps``: W as an explicit matrix, for finite features; ``one_query``: the same through the kernel, exact softmax included;
- ``all_queries``: losses, outputs and cosines for every query of a text at once;
- ``kernel``, ``landmarks``: the kernel kappa in logarithms, and finite features that approximate it;
- ``layers``: the MLP after a head, and stacked attention layers; ``bound``: the generalization bound.
"""

from kvlens.checks import doors
from kvlens.ops.dual.all_queries import log_loss_drops, mean_cosines, step_outputs
from kvlens.ops.dual.bound import BoundTerms, bound_terms, log_effective_trace, log_trace
from kvlens.ops.dual.kernel import LogKernel, feature_kernel, kernel_values, softmax_kernel
from kvlens.ops.dual.landmarks import landmark_features, random_log_features
from kvlens.ops.dual.layers import (
    AttentionWeights,
    FoldedMLP,
    dual_of_prefix_lm,
    fold_mlp,
    prefix_lm_attention,
    rank_bound,
    through_layers,
)
from kvlens.ops.dual.naive import NaiveDual, naive_dual
from kvlens.ops.dual.one_query import PairSums, cosine, losses, pair_sums, predictions_at_demonstrations
from kvlens.ops.dual.steps import dual_loss, loss_gradient, loss_of_predictions, mean_outer, predict, weight_after

__all__ = [
    "AttentionWeights",
    "BoundTerms",
    "FoldedMLP",
    "LogKernel",
    "NaiveDual",
    "PairSums",
    "bound_terms",
    "cosine",
    "dual_loss",
    "dual_of_prefix_lm",
    "feature_kernel",
    "fold_mlp",
    "kernel_values",
    "landmark_features",
    "log_effective_trace",
    "log_loss_drops",
    "log_trace",
    "loss_gradient",
    "loss_of_predictions",
    "losses",
    "mean_cosines",
    "mean_outer",
    "naive_dual",
    "pair_sums",
    "predict",
    "predictions_at_demonstrations",
    "prefix_lm_attention",
    "random_log_features",
    "rank_bound",
    "softmax_kernel",
    "step_outputs",
    "through_layers",
    "weight_after",
]

doors(__name__)
