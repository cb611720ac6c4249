"""The variants of attention that DUAL sec. 4 and app. D derive from representation learning, as changes to given attention.

| variant | what changes | equation |
|---|---|---|
| regularised | subtracts the token's own value, z_i - alpha v_i, or its own share, z_i - alpha p_ii v_i | 13; app. D.1 |
| augmented | keys and values each pass through an MLP | 14; app. D.2 |
| negative | the k tokens that a query (or a label) scores lowest are subtracted | 15, 34; remark in sec. 5 |
| ridge | the regularized least-squares W instead of one gradient step | 33 |

``naive`` holds the slow form of each, one line per equation.
"""

from kvlens.checks import doors
from kvlens.ops.attention_variants.augmented import augment
from kvlens.ops.attention_variants.naive import naive_negative, naive_regularised, naive_ridge
from kvlens.ops.attention_variants.negative import Negatives, lowest_scored, mean_of_negatives
from kvlens.ops.attention_variants.rank import full_rank_limit
from kvlens.ops.attention_variants.ridge import RidgeState, ridge_attention, ridge_state, ridge_step, ridge_steps

__all__ = [
    "Negatives",
    "RidgeState",
    "augment",
    "full_rank_limit",
    "lowest_scored",
    "mean_of_negatives",
    "naive_negative",
    "naive_regularised",
    "naive_ridge",
    "ridge_attention",
    "ridge_state",
    "ridge_step",
    "ridge_steps",
]

doors(__name__)
