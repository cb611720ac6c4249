"""Which keys a query sees."""

import torch
from jaxtyping import Bool
from torch import Tensor

from kvlens.errors import KVLensError


def visible_keys(
    n_queries: int,
    n_keys: int,
    causal: bool = True,
    padding: Bool[Tensor, "batch key"] | None = None,
    window: int | None = None,
    device: torch.device | None = None,
) -> Bool[Tensor, "batch_or_1 1 query key"] | None:
    """True where a query sees a key, with an axis for the heads; None where every query sees every key.

    The queries are the last ``n_queries`` of ``n_keys`` positions. The other arguments are those of
    :mod:`kvlens.ops.softmax_attention.types`.

    Raises:
        KVLensError: more queries than keys where positions matter, or padding for a different number of keys.
    """
    if (causal or window is not None) and n_queries > n_keys:
        raise KVLensError(f"softmax attention: expected at most as many queries as keys ({n_keys}), got {n_queries}")
    if padding is not None and padding.shape[1] != n_keys:
        raise KVLensError(f"softmax attention: expected padding [batch, {n_keys}], got {list(padding.shape)}")
    visible = None
    if (causal and n_queries > 1) or (window is not None and window < n_keys):
        key = torch.arange(n_keys, device=device)
        query = key[n_keys - n_queries :, None]
        visible = (key <= query) if causal else torch.ones_like(key <= query)
        if window is not None:
            visible = visible & (key > query - window)
        visible = visible[None, None]
    if padding is not None:
        seen = padding[:, None, None, :].expand(-1, 1, n_queries, -1)
        visible = seen if visible is None else visible & seen
    return visible
