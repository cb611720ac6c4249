"""Lightning attention (MiniMax-01, 2501.08313) and retention: linear attention with one decay per head and no normalizer.

    S_t = a S_{t-1} + k_t v_t^T        z_t = S_t^T q_t        T_t = a I

The forms are those of :mod:`kvlens.ops.linear_attention` with phi the identity; what is carried is a power of a:
kbar_j = a^{M-1-j} k_j, qbar_i = a^{i+1} q_i, P = a^M, A_ij = a^{i-j} q_i.k_j, over real tokens.
"""

from kvlens.checks import doors
from kvlens.ops.lightning.carried import carried_keys, carried_queries, effective_attention, state_map
from kvlens.ops.lightning.forms import LightningOutput, chunked_lightning, naive_lightning, recurrent_lightning

__all__ = [
    "LightningOutput",
    "carried_keys",
    "carried_queries",
    "chunked_lightning",
    "effective_attention",
    "naive_lightning",
    "recurrent_lightning",
    "state_map",
]

doors(__name__)
