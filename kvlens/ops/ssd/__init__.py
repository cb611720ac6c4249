"""Structured state-space duality, the recurrence of Mamba-2 (Dao, Gu 2024, arXiv 2405.21060): one decay per token and head.

    S_t = a_t S_{t-1} + b_t k_t v_t^T        z_t = S_t^T q_t        T_t = a_t I

In Mamba-2's names k_t is B_t, q_t is C_t, v_t is x_t, b_t is dt_t and log a_t is dt_t A; its skip connection D x_t is not part
of the recurrence. Queries and keys of a group serve the group's heads. With G = cumsum(log a) over a sequence of M tokens:

    A_ij = e^{G_i - G_j} b_j q_i.k_j (j <= i)    kbar_j = e^{G_{M-1} - G_j} b_j k_j    qbar_i = e^{G_i} q_i    P = e^{G_{M-1}} I

Tensors are named as in :mod:`kvlens.ops.delta_rule`, whose T_t also removes what stood at the key.
"""

from kvlens.checks import doors
from kvlens.ops.ssd.carried import carried_keys, carried_queries, effective_attention, state_map
from kvlens.ops.ssd.forms import SSDOutput, chunked_ssd, naive_ssd, recurrent_ssd

__all__ = [
    "SSDOutput",
    "carried_keys",
    "carried_queries",
    "chunked_ssd",
    "effective_attention",
    "naive_ssd",
    "recurrent_ssd",
    "state_map",
]

doors(__name__)
