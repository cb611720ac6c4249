"""One layer's share of a KV bias, as its attention reads it."""

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor


class LayerBias(NamedTuple):
    """b_KV, b_D and the shift boundary of one layer. The leading axis is the batch of prompts, 1 for a single prompt."""

    b_kv: Float[Tensor, "batch head d_phi d_head"]
    b_d: Float[Tensor, "batch head d_phi"]
    last_k: Float[Tensor, "batch window_k kv_head d_head"]
    last_v: Float[Tensor, "batch window_v kv_head d_head"]
    last_q: Float[Tensor, "batch window_q head d_head"]
    position_offset: int | Int[Tensor, " batch"]
