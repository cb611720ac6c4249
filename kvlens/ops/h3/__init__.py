"""H3 (Fu et al. 2023, arXiv 2212.14052), whose initial states hold a prompt as a KV bias does (ICLCA sec. 7).

    kbar_t = sum_{s<K} c_s o k_{t-s}                                      the shift SSM, which remembers the last K - 1 keys
    X_t = A X_{t-1} + B kbar_t v_t^T                                      the diagonal SSM, m states of each entry of k v^T
    z_t = (sum_m C_m X_tm + D kbar_t v_t^T)^T q_t

A, B, C and D have one number per head and state (D: per head). The prompt is the pair of the last keys and X:

    z_i = sum_{j<=i} A_ij v_j + sum_m C_m A_m^{i+1} X_m^T q_i        A_ij = (sum_m C_m A_m^{i-j} B_m + D [i = j]) q_i.kbar_j

A is real here; the paper's may be complex. No class of Transformers or TransformerLens has this layer, and no public checkpoint
is in such a form, so it is an op with its laws, not a mixer of the bridge.
"""

from kvlens.checks import doors
from kvlens.ops.h3.recurrence import DiagonalSSM, H3Output, H3State, effective_attention, h3_attention, read_state

__all__ = ["DiagonalSSM", "H3Output", "H3State", "effective_attention", "h3_attention", "read_state"]

doors(__name__)
