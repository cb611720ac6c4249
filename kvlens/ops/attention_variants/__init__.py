"""The attentions that DUAL sec. 4 and app. D derive from representation learning, as changes to an attention at hand.

| variant | what changes | equation |
|---|---|---|
| regularised | less of a token's own value: z_i - alpha v_i, or of its own share: z_i - alpha p_ii v_i | 13; app. D.1 |
| augmented | keys and values go through MLPs of their own | 14; app. D.2 |
| negative | the k tokens that a query (or a label) scores lowest are taken off | 15, 34; remark in sec. 5 |
| ridge | the regularised least-squares W instead of one step | 33 |

``naive`` holds the slow form of each, one line an equation.
"""

from kvlens.ops.attention_variants.augmented import augment
from kvlens.ops.attention_variants.naive import naive_negative, naive_regularised, naive_ridge
from kvlens.ops.attention_variants.negative import Negatives, lowest_scored, mean_of_negatives
from kvlens.ops.attention_variants.ridge import RidgeState, ridge_attention, ridge_state, ridge_step, ridge_steps

__all__ = [
    "Negatives",
    "RidgeState",
    "augment",
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
