"""The role that the KV shift gives to a head: which token it matches, and which one it reads.

A head that attends from i to s compares its query with k^_s = sum_a alpha_a k_{s-a} and reads v^_s = sum_b beta_b v_{s-b}.
With the largest alpha at lag a* and the largest beta at lag b* it *matches* token s - a* and *reads* token s - b*, which is
``displacement = a* - b*`` positions after the matched token. For window 1 that is KVSA's table 4:

    ================== =============== ================
    role               beta_1 > beta_2 beta_1 <= beta_2
    ================== =============== ================
    alpha_1 > alpha_2  plain           predecessor
    alpha_1 <= alpha_2 induction       delayed
    ================== =============== ================

- ``plain``: matches and reads the token itself, as without a shift.
- ``induction``: matches a token and reads one that came after it, which in a plain transformer takes two layers.
- ``predecessor``: matches a token and reads one that came before it.
- ``delayed``: matches and reads the same token, but one position late: a plain head that cannot see the newest token.

Where queries are shifted and the largest coefficient is at lag c*, the query is that of token i - c*, and what it matched is
c* positions before the copy of the current token: displacement = a* - b* - c*.

The coefficients are compared as they are, including the sign, as in the paper. Only their ratio is meaningful, since a factor
can be moved between alpha and W_K, or between beta and W_V.

Source: KVSA eq. 4-6, table 4, app. J.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import KVModel
from kvlens.model import heads_per_layer


class ShiftTaps(NamedTuple):
    """The coefficients that a layer's query heads use; (1, 0, ...) for a projection that is not shifted."""

    k: Float[Tensor, "head taps"]
    v: Float[Tensor, "head taps"]
    q: Float[Tensor, "head taps"]


def shifted_projections(model: KVModel) -> list[str]:
    """The projections ("k", "v", "q") that this model shifts."""
    shift = model.cfg.kv_shift
    if shift is None:
        return []
    return [x for x, on in (("k", shift.keys), ("v", shift.values), ("q", shift.queries)) if on]


def layer_taps(model: KVModel, layer: int, used: dict[str, Tensor], dtype: torch.dtype) -> ShiftTaps:
    """The taps of one layer, for every query head.

    Args:
        model, layer: the layer's model, and its number.
        used: the activations of ``hook_{k,v,q}_shift_coef``, [kv_head or head, taps], by "k", "v", "q"; shifted ones only.
        dtype: of the result.
    """
    n_heads, window = heads_per_layer(model)[layer], 0 if model.cfg.kv_shift is None else model.cfg.kv_shift.window
    identity = torch.eye(1, window + 1, dtype=dtype, device=model.cfg.device).expand(n_heads, -1)
    taps = {x: coef.to(dtype).repeat_interleave(n_heads // coef.shape[0], dim=0) for x, coef in used.items()}
    return ShiftTaps(**{x: taps.get(x, identity) for x in "kvq"})


def displacement(taps: ShiftTaps) -> Int[Tensor, " head"]:
    """Number of positions from the matched to the read token; among equal coefficients the earlier token counts."""
    return _largest_lag(taps.k) - _largest_lag(taps.v) - _largest_lag(taps.q)


def roles(taps: ShiftTaps) -> list[str]:
    """The role of each head, by name."""
    moved, read = displacement(taps).tolist(), _largest_lag(taps.v).tolist()
    return [
        "induction" if d > 0 else "predecessor" if d < 0 else "delayed" if lag else "plain"
        for d, lag in zip(moved, read, strict=True)
    ]


def _largest_lag(taps: Tensor) -> Int[Tensor, " head"]:
    """The lag of the largest coefficient, the longest lag if several are equal."""
    return taps.shape[1] - 1 - taps.flip(dims=[1]).argmax(dim=1)
