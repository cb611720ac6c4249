"""What the fields of a bias must be: shapes that agree with each other and with the fingerprint, counts, finite numbers."""

from typing import Any

import torch
from torch import Tensor

from kvlens.errors import KVLensError, brief

TENSORS = ("b_KV", "b_D", "last_k", "last_v", "last_q")
COUNTS = ("n_prompt_tokens", "position_offset")
LAST_POSITION = 2**24
"""Angles are computed in float32, which represents whole numbers exactly up to here."""


def check_fields(bias: Any) -> None:
    """Check every field of a :class:`~kvlens.kv_bias.KVBias`.

    Raises:
        KVLensError: a field has the wrong type or shape; what was expected, and what came.
    """
    f, lead = bias.fingerprint, tuple(bias.b_KV.shape[:-3])
    if not isinstance(f.heads, tuple) or [len(of) if isinstance(of, tuple) else 0 for of in f.heads] != [4] * f.n_layers:
        raise KVLensError(
            f"KVBias: fingerprint.heads must be four numbers for each layer, [layer={f.n_layers}, 4], got {brief(f.heads)}"
        )
    bias.recurrent.check(f.n_layers, lead[1:])
    n_layers = len(bias.attention_layers)
    if len(lead) not in (1, 2) or lead[0] != n_layers:
        raise KVLensError(f"KVBias: b_KV must be [layer={n_layers}, (batch,) head, d_phi, d_head], got {_shape(bias.b_KV)}")
    if (bias.features is None) != (f.attention == "linear") or (bias.features is None) != (bias.log_scale is None):
        raise KVLensError(f"KVBias: features and log_scale are only for softmax attention, but this is {f.attention}")
    heads, d_phi = f.n_heads, f.d_phi
    if bias.features is not None:
        bias.features.check(lead, f.n_kv_heads, f.d_key or f.d_head)
        d_phi = bias.features.n_features
        heads = f.n_heads if bias.b_KV.shape[-3] == f.n_heads else f.n_kv_heads
    expected = {
        "b_KV": (heads, d_phi, f.d_head),
        "b_D": (heads, d_phi),
        "last_k": (bias.last_k.shape[-3], f.n_kv_heads, f.d_head),
        "last_v": (bias.last_v.shape[-3], f.n_kv_heads, f.d_head),
        "last_q": (bias.last_q.shape[-3], f.n_heads, f.d_head),
    }
    if bias.log_scale is not None:
        expected["log_scale"] = (f.n_kv_heads,)
    for name, shape in expected.items():
        tensor = getattr(bias, name)
        if tuple(tensor.shape) != lead + shape:
            raise KVLensError(f"KVBias: {name} must be {list(lead + shape)}, got {_shape(tensor)}")
        if not tensor.is_floating_point():
            raise KVLensError(f"KVBias: {name} must hold floating-point numbers, got {tensor.dtype}")
    for name in COUNTS:
        _check_count(name, getattr(bias, name), lead[1:])


def check_numbers(bias: Any, what: str) -> None:
    """Raise KVLensError, as ``what``, where a number of the bias is NaN or infinite; names the tensor and its layer."""
    for name, tensor in bias.tensors().items():
        if bool(tensor.sum().isfinite()):
            continue  # a quarter of the time of looking at each number; a sum of finite ones can overflow
        if not bool(tensor.isfinite().all()):
            row = int((~tensor.isfinite()).flatten(1).any(dim=1).nonzero()[0])
            layer = (bias.recurrent.layers if name.startswith("recurrent.") else bias.attention_layers)[row]
            raise KVLensError(
                f"{what}: {name} of layer {layer} is not finite ({tensor.dtype}): numbers overflowed in the prompt's pass "
                "(convert it with the model in a wider dtype), or a hook changed them"
            )


def _shape(x: Tensor) -> list[int]:
    return list(x.shape)


def _check_count(name: str, value: Any, batch: tuple[int, ...]) -> None:
    """Raise unless ``value`` is a whole number from 0 to LAST_POSITION, or a tensor of one per prompt."""
    wanted = f"a whole number from 0 to {LAST_POSITION}" + (f", or {batch[0]} of them in a tensor" if batch else "")
    if isinstance(value, Tensor):
        fits = tuple(value.shape) == batch and not value.is_floating_point() and value.dtype != torch.bool
        low, high = (int(value.min()), int(value.max())) if fits and value.numel() else (0, 0)
    else:
        fits = isinstance(value, int) and not isinstance(value, bool)
        low = high = value if fits else 0
    if not fits or low < 0 or high > LAST_POSITION:
        raise KVLensError(f"KVBias: {name} must be {wanted}, got {value!r}")
