"""Products of each query head with the matrix of its key-value head (GQA: query head h reads key-value head h // group)."""

from einops import rearrange
from jaxtyping import Float
from torch import Tensor


def by_kv_head(
    x: Float[Tensor, "batch query head d"], held: Float[Tensor, "#batch kv_head d n"]
) -> Float[Tensor, "batch kv_head row n"]:
    """``x @ held`` for each key-value head. Its rows are the queries of a group's heads, query by query.

    If the whole batch shares ``held``, its rows are flattened into one matrix product instead of one product per batch row.
    """
    kv_heads = held.shape[1]
    if len(held) == 1:
        rows = rearrange(x, "b p (g s) d -> g (b p s) d", g=kv_heads)
        return rearrange(rows @ held[0], "g (b i) n -> b g i n", b=len(x))
    return rearrange(x, "b p (g s) d -> b g (p s) d", g=kv_heads) @ held
