"""The dtypes that a model's weights can have, given as torch dtypes or by name."""

import torch

from kvlens.errors import KVLensError, nearest

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


def is_dtype(value: object) -> bool:
    """Whether ``value`` is a dtype, or the name of a supported one, rather than a device."""
    return isinstance(value, torch.dtype) or (isinstance(value, str) and value.removeprefix("torch.") in DTYPES)


def check_holds(what: str, stored: torch.Tensor, tensor: torch.Tensor) -> None:
    """Raise KVLensError if a tensor became infinite, or all zeros, when rounded to another dtype."""
    if stored.dtype == tensor.dtype or not tensor.numel():
        return
    largest = float(tensor.abs().max())
    if (bool(tensor.isfinite().all()) and not bool(stored.isfinite().all())) or (largest > 0 and not bool(stored.any())):
        dtype = str(stored.dtype).removeprefix("torch.")
        raise KVLensError(
            f"{what}: its largest number is {largest:.3g}, which {dtype} cannot hold ({torch.finfo(stored.dtype).tiny:.1g} to "
            f"{torch.finfo(stored.dtype).max:.3g}); take bfloat16, which reaches as far as float32"
        )


def dtype_of(value: object, what: str = "dtype") -> torch.dtype:
    """The floating dtype given as a torch dtype or by name.

    Raises:
        KVLensError: anything else; the nearest name is suggested.
    """
    found = DTYPES.get(value.removeprefix("torch."), value) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype) or found not in DTYPES.values():
        raise KVLensError(f"{what} must be one of {', '.join(DTYPES)}, got {value!r}{nearest(value, DTYPES)}")
    return found
