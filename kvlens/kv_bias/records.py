"""What becomes of the record (:class:`kvlens.kv_bias.BiasFit`) when something is done to its bias.

None is the record of an exact bias: sums, multiples and selections of such are exact too. What rounds it, or replaces its
numbers by others, makes it approximate by an unknown error. Functions of the biases that they are given: the class itself
(:class:`kvlens.KVBias`) stands above this module.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from kvlens.kv_bias.fingerprint import Fingerprint
from kvlens.kv_bias.fit import BiasFit

Record = BiasFit | None
OLD_FILE = "read from a file of format 3 or older, which did not record what was done to the bias"


def since(record: Record, step: str) -> Record:
    """The record after ``step``, an operation that keeps exact biases exact."""
    return None if record is None else _after(record, step)


def of_sum(records: Iterable[Record], step: str) -> Record:
    """Of a sum."""
    approximate = [record for record in records if record is not None]
    return BiasFit.of_several(approximate, step) if approximate else None


def replaced(record: Record, before: Mapping[str, Any], now: Mapping[str, Any]) -> Record:
    """After dataclasses.replace: fields by name, as they were and as they are."""
    names = [name for name, value in before.items() if not _same(value, now[name])]
    return _after(record, f"{', '.join(names)} replaced") if names else record


def rounded(bias: Any, dtype: torch.dtype) -> Record:
    """In another dtype. Rounding to a half type is an error of 0.1 % and more, which no fit has measured."""
    lost = torch.finfo(dtype).eps > max(torch.finfo(bias.b_KV.dtype).eps, torch.finfo(torch.float32).eps)
    return (
        _after(bias.fit, f"rounded to {str(dtype).removeprefix('torch.')}") if lost and bias.features is not None else bias.fit
    )


def of_old_file(bias: Any) -> Record:
    """Of a softmax bias from a file up to format 3.

    Those were written with the record of a fit although heads had been selected since, or without any although a sum held
    fitted keys. Where the number of keys tells so, the error is unknown.
    """
    used = (bias.b_D != 0).sum(dim=-1)
    if bias.fit is None:
        n_tokens = torch.as_tensor(bias.n_prompt_tokens).to(used.device)
        every_key = used == (n_tokens[:, None] if n_tokens.dim() else n_tokens)
        as_it_was = bias.features.per_prompt and bool(every_key.all()) and bool(((bias.b_D == 0) | (bias.b_D == 1)).all())
    else:
        as_it_was = used.shape == bias.fit.n_keys.shape and torch.equal(used, bias.fit.n_keys.to(used))
    return bias.fit if as_it_was else _after(bias.fit, OLD_FILE)


def _after(record: Record, step: str) -> BiasFit:
    return BiasFit.of_several([] if record is None else [record], step)


def _same(a: Any, b: Any) -> bool:
    """Whether a field is what it was: numbers by their value, tensors (and what holds them) as objects."""
    return a is b or (isinstance(a, int | Fingerprint) and a == b)
