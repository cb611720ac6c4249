"""The selective scan of Mamba-1 (Gu, Dao 2023, arXiv 2312.00752): a decay of its own for each token, channel and state.

    S_t = a_t o S_{t-1} + b_t k_t v_t        z_t = S_t . q_t        T_t = Diag(a_t)

A channel is a head here, whose value is a single number. In Mamba's names k_t is B_t and q_t is C_t, which all channels share,
v_t is the channel's x_t, b_t is its dt_t, and log a_t is dt_t A, with one A per channel and state; its skip connection D x_t is
not part of the recurrence. With G = cumsum(log a) over a sequence of M tokens, one line for each state n where it has an index:

    A_ij = sum_n q_in e^{G_in - G_jn} b_j k_jn (j <= i)    kbar_j = e^{G_{M-1} - G_j} o b_j k_j
    qbar_i = e^{G_i} o q_i                                  P = Diag(e^{G_{M-1}})

Tensors are named as in :mod:`kvlens.ops.ssd`, whose decay is the same for all states of a head.
"""

from kvlens.checks import doors
from kvlens.ops.selective_scan.scan import carried_keys, carried_queries, effective_attention, selective_scan, state_map

__all__ = ["carried_keys", "carried_queries", "effective_attention", "selective_scan", "state_map"]

doors(__name__)
