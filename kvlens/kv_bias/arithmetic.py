"""Adding biases. b_KV and b_D are sums over tokens, so they add; a boundary is not a sum, and must be chosen."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from kvlens.errors import KVLensError
from kvlens.kv_bias.kv_bias import BOUNDARY, KVBias


def combine(
    *biases: KVBias,
    weights: Sequence[float | int] | None = None,
    boundary: Literal["equal", "first", "last", "zero"] = "equal",
) -> KVBias:
    """The weighted sum of b_KV and b_D.

    Args:
        biases: of one model, with one batch shape.
        weights: one a bias; 1 if None.
        boundary: ``equal`` refuses biases whose boundaries differ; ``first`` and ``last`` take that bias's boundary and
            position offset; ``zero`` takes no boundary and the first one's offset, which must then agree.

    Returns:
        Their combination. ``n_prompt_tokens`` is the number of tokens of all of them.

    Raises:
        KVLensError: nothing to add, different models or batch shapes, boundaries or offsets that differ.
    """
    if not biases or not all(isinstance(bias, KVBias) for bias in biases):
        came = ", ".join(type(bias).__name__ for bias in biases) or "nothing"
        raise KVLensError(f"combine: expected biases, combine(a, b, ...), got {came}")
    weights = [1.0] * len(biases) if weights is None else list(weights)
    if len(weights) != len(biases):
        raise KVLensError(f"combine: expected one weight a bias, got {len(weights)} weights for {len(biases)} biases")
    if boundary not in ("equal", "first", "last", "zero"):
        raise KVLensError(f"combine: unknown boundary {boundary!r}, expected 'equal', 'first', 'last' or 'zero'")
    first = biases[0]
    for other in biases[1:]:
        other.fingerprint.check(first.fingerprint, "combine", whose="the first bias")
        if other.b_KV.dtype != first.b_KV.dtype:
            raise KVLensError(f"combine: dtypes differ: {first.b_KV.dtype} and {other.b_KV.dtype}; bias.to(dtype) converts")
        if other.b_KV.device != first.b_KV.device:
            raise KVLensError(f"combine: devices differ: {first.b_KV.device} and {other.b_KV.device}; bias.to(device) moves")
        if other.b_KV.shape != first.b_KV.shape:
            raise KVLensError(f"combine: batch shapes differ: {list(first.b_KV.shape)} and {list(other.b_KV.shape)}")
        _check_agreement(first, other, boundary)
    chosen = biases[-1] if boundary == "last" else first
    if boundary == "zero":
        zeros: dict[str, Any] = {name: torch.zeros_like(getattr(chosen, name)) for name in BOUNDARY}
        chosen = replace(chosen, **zeros)
    return replace(
        chosen,
        b_KV=torch.stack([w * b.b_KV for w, b in zip(weights, biases, strict=True)]).sum(dim=0),
        b_D=torch.stack([w * b.b_D for w, b in zip(weights, biases, strict=True)]).sum(dim=0),
        n_prompt_tokens=sum(b.n_prompt_tokens for b in biases),
    )


def _check_agreement(first: KVBias, other: KVBias, boundary: str) -> None:
    hint = "; kvlens.combine(a, b, boundary='last') chooses one"
    if boundary == "equal":
        for name in BOUNDARY:
            if not torch.equal(getattr(first, name), getattr(other, name)):
                raise KVLensError(f"adding KV biases: the shift boundaries differ ({name}){hint}")
    if boundary in ("equal", "zero") and not _equal(first.position_offset, other.position_offset):
        raise KVLensError(
            f"adding KV biases: the position offsets differ ({first.position_offset} and {other.position_offset}){hint}"
        )


def _equal(a: int | Tensor, b: int | Tensor) -> bool:
    return bool((torch.as_tensor(a) == torch.as_tensor(b)).all())
