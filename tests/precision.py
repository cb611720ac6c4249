"""Laws in float64, and the bound of the few tests whose subject is precision.

A law says that two ways lead to the same number. It is tested in :func:`float64`, where :func:`relative_error` stays below
:data:`LAW`: there the rounding of some ten thousand operations is far below it, and a mistake far above.

float32 and half precision are the subject of these tests alone, whose bound is that of :func:`share`:

| test | of what | the reference |
|---|---|---|
| bridge/test_exactness: as exact as Transformers' own cache, also in half precision | logits | Transformers' own cache |
| bridge/test_exactness: states beyond half precision | logits under states times a million | Transformers' logits |
| mixers/test_mixers: as exact as Transformers in float32 | outputs and states of a layer | Transformers' output |
| model/test_linear_model: low precision accumulates in float32 | logits | float64, with rounded weights |
| model/test_regressor: float32 and float64 agree | predictions | float64, with rounded weights and numbers |
| components/test_zero_normalizer: large scores | logits and gradients | float64, with float32's queries and keys |
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

LAW = 1e-11
"""Far above float64's rounding in the models of these tests (1e-16 to 1e-13), far below what any mistake changes."""


MASKED = torch.finfo(torch.float32).min / 2
"""What masks add is below it."""


def relative_error(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||; of numbers that are zero by theory, give what they are a part of.

    What a mask hides, -inf or float32's lowest number and below, must be the same in both, and is then left out: beside such
    numbers every difference would be nothing.
    """
    assert found.shape == expected.shape
    found, expected = found.detach().double(), expected.detach().double()
    hidden = expected <= MASKED
    assert torch.equal(found <= MASKED, hidden)
    off = float((found - expected).masked_fill(hidden, 0).norm())
    return off / float(expected.masked_fill(hidden, 0).norm()) if off else 0.0


def close(found: Tensor, expected: Tensor) -> None:
    """They are the same number by two ways."""
    assert relative_error(found, expected) < LAW


def share(error: float, theirs: Sequence[float]) -> float:
    """How much of its bound an error uses: of eight times the largest error of the reference implementation, on four draws, on
    the processor that runs the test. Single errors scatter by a factor of 3; no test uses more than a third."""
    assert len(theirs) == 4
    return error / (8 * max(theirs))


def _grouped_mm(x: Tensor, weights: Tensor, offs: Tensor, **unused: None) -> Tensor:
    """Rows up to offs[0] times the first matrix, those up to offs[1] times the second, and so on."""
    ends = offs.tolist()
    parts = [x[start:end] @ weight for start, end, weight in zip([0, *ends], ends, weights, strict=False)]
    return torch.cat([*parts, x.new_zeros(len(x) - ends[-1], weights.shape[-1])])


@contextmanager
def float64() -> Iterator[None]:
    """Inside, models are built and run in float64, and whoever names float32 gets it: Transformers' norms, softmax and
    recurrences do in any model. MiniMax makes its decays when it is built, in the default dtype. Files must be in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        patch.setattr(torch, "_grouped_mm", _grouped_mm)  # has no float64
        try:
            yield
        finally:
            torch.set_default_dtype(before)
