"""What M tokens do to the state before them (ICLCA eq. 19 and 23).

    A' = R_{-M} (gamma^M A + A_written)        D' = D + D_written

A decays once per token and, where RoPE follows the feature map, is then expressed from an origin M tokens later. ``A_written``
and ``D_written`` are what the tokens themselves added, in the old coordinates; without them, A' and D' are what becomes of a
bias across the tokens. The third thing that a text carries over, the shift state, is the second output of
:func:`kvlens.ops.kv_shift.kv_shift`.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.errors import KVLensError
from kvlens.ops.linear_attention.state import rebase_state
from kvlens.ops.linear_attention.types import LinearAttentionState


def carry_state(
    before: LinearAttentionState | None,
    n_tokens: int | Int[Tensor, " batch"],
    written: LinearAttentionState | None = None,
    decay: Float[Tensor, " head"] | None = None,
    rotation: tuple[Float[Tensor, "#batch rotary_dim"], Float[Tensor, "#batch rotary_dim"]] | None = None,
    adjacent_pairs: bool = False,
) -> LinearAttentionState:
    """The state after ``n_tokens`` tokens, from the one before them.

    Args:
        before: A and D before the tokens, one per query head (a KV bias); None for zeros, which needs ``written``.
        n_tokens: M, one number or one per row.
        written: what the tokens added, one per query head; None if they added nothing.
        decay: gamma per query head; None for 1.
        rotation: (cos, sin) of position M; None without RoPE. D is never rotated: it holds unrotated features.
        adjacent_pairs: as in :func:`kvlens.ops.rotary.rotate`.

    Returns:
        A' and D'; ``k_sum`` is None where neither state has one (normalizer "none").
    """
    terms = [] if before is None else [_decayed(before, n_tokens, decay)]
    terms += [] if written is None else [written]
    if not terms:
        raise KVLensError("carry_state: give the state before the tokens, what they wrote, or both")
    kv = sum((term.kv for term in terms[1:]), terms[0].kv)
    sums = [term.k_sum for term in terms if term.k_sum is not None]
    if rotation is not None:
        cos, sin = (row[:, None] for row in rotation)
        kv = rebase_state(kv, cos, sin, adjacent_pairs)
    return LinearAttentionState(kv, sum(sums[1:], sums[0]) if sums else None)


def _decayed(state: LinearAttentionState, n_tokens: int | Tensor, decay: Tensor | None) -> LinearAttentionState:
    if decay is None:
        return state
    steps = torch.as_tensor(n_tokens, device=state.kv.device).reshape(-1, 1).to(state.kv)
    return state._replace(kv=state.kv * (decay.to(state.kv) ** steps)[..., None, None])
