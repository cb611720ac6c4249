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

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

LAW = 1e-11
"""Far above float64's rounding in the models of these tests (1e-16 to 1e-13), far below what any mistake changes."""


def relative_error(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||; of numbers that are zero by theory, give what they are a part of.

    What a mask hides, -inf or float32's lowest number and below, must be the same in both, and is then left out: beside such
    numbers every difference would be nothing.
    """
    assert found.shape == expected.shape
    found, expected = found.detach().double(), expected.detach().double()
    hidden = expected <= torch.finfo(torch.float32).min / 2
    assert torch.equal(found <= torch.finfo(torch.float32).min / 2, hidden)
    off = float((found - expected).masked_fill(hidden, 0).norm())
    return off / float(expected.masked_fill(hidden, 0).norm()) if off else 0.0


def share(error: float, theirs: Sequence[float]) -> float:
    """How much of its bound an error uses: of eight times the largest error of the reference implementation, on four draws, on
    the processor that runs the test. Single errors scatter by a factor of 3; no test uses more than a third."""
    assert len(theirs) == 4
    return error / (8 * max(theirs))


class InFloat64(TorchFunctionMode):
    """Whatever asks for float32 gets float64: Transformers' norms, softmax and recurrences name float32 in any model."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            return args[0].double()
        if func is torch._grouped_mm:  # has no float64
            return _grouped_mm(*args, **kwargs)
        wide = {name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()}
        return func(*(torch.float64 if x is torch.float32 else x for x in args), **wide)


def _grouped_mm(x: Tensor, weights: Tensor, offs: Tensor, **unused: None) -> Tensor:
    """Rows up to offs[0] times the first matrix, those up to offs[1] times the second, and so on."""
    ends = offs.tolist()
    parts = [x[start:end] @ weight for start, end, weight in zip([0, *ends], ends, weights, strict=False)]
    return torch.cat([*parts, x.new_zeros(len(x) - ends[-1], weights.shape[-1])])


@contextmanager
def float64() -> Iterator[None]:
    """Inside, models are built and run in float64. MiniMax makes its decays when it is built, in the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with InFloat64():
            yield
    finally:
        torch.set_default_dtype(before)
