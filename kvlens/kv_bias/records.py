"""How the fit record (:class:`kvlens.kv_bias.BiasFit`) changes when its bias is changed.

The record of an exact bias is None; sums, multiples and selections of exact biases are exact too. Rounding a bias, or replacing
its numbers, makes it approximate with an unknown error. These functions do not import :class:`kvlens.KVBias`, which depends on
this module.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from kvlens.kv_bias.fingerprint import Fingerprint
from kvlens.kv_bias.fit import BiasFit

Record = BiasFit | None


def since(record: Record, step: str) -> Record:
    """The record after ``step``, an operation that keeps exact biases exact."""
    return None if record is None else _after(record, step)


def of_sum(records: Iterable[Record], step: str) -> Record:
    """The record of a sum."""
    approximate = [record for record in records if record is not None]
    return BiasFit.of_several(approximate, step) if approximate else None


def replaced(record: Record, before: Mapping[str, Any], now: Mapping[str, Any]) -> Record:
    """The record after dataclasses.replace, given the old and new values of fields by name."""
    names = [name for name, value in before.items() if not _same(value, now[name])]
    return _after(record, f"{', '.join(names)} replaced") if names else record


def rounded(bias: Any, dtype: torch.dtype) -> Record:
    """The record after a change of dtype. Rounding to half precision adds an unmeasured error of at least 0.1 %."""
    lost = torch.finfo(dtype).eps > max(torch.finfo(bias.b_KV.dtype).eps, torch.finfo(torch.float32).eps)
    return (
        _after(bias.fit, f"rounded to {str(dtype).removeprefix('torch.')}") if lost and bias.features is not None else bias.fit
    )


def _after(record: Record, step: str) -> BiasFit:
    return BiasFit.of_several([] if record is None else [record], step)


def _same(a: Any, b: Any) -> bool:
    """Whether a field is unchanged: numbers are compared by value, tensors (and their containers) by identity."""
    return a is b or (isinstance(a, int | Fingerprint) and a == b)
