"""The dtypes that a model's weights can have, by themselves or by name."""

from typing import Any

import torch

from kvlens.errors import KVLensError, nearest

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


def dtype_of(value: Any, what: str = "dtype") -> torch.dtype:
    """The floating dtype that is meant by a dtype or by its name.

    Raises:
        KVLensError: something else; the nearest name is proposed.
    """
    found = DTYPES.get(value.removeprefix("torch."), value) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype) or found not in DTYPES.values():
        raise KVLensError(f"{what} must be one of {', '.join(DTYPES)}, got {value!r}{nearest(value, DTYPES)}")
    return found
