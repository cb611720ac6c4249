"""Products of every query head with what its key-value head holds (GQA: query head h reads key-value head h // group)."""

from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from kvlens.checks import checked


@checked(head="kv_head")
def by_kv_head(
    x: Float[Tensor, "batch query head d"], held: Float[Tensor, "#batch kv_head d n"]
) -> Float[Tensor, "batch kv_head row n"]:
    """``x @ held`` by key-value head. Its rows are the queries of a group's heads, query by query.

    What all of a batch share is read once, its rows one after the other: a product of matrices instead of one for each row.
    """
    kv_heads = held.shape[1]
    if len(held) == 1:
        rows = rearrange(x, "b p (g s) d -> g (b p s) d", g=kv_heads)
        return rearrange(rows @ held[0], "g (b i) n -> b g i n", b=len(x))
    return rearrange(x, "b p (g s) d -> b g (p s) d", g=kv_heads) @ held
