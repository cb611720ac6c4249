"""What is computed of tensors once, instead of in every pass."""

import operator
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class Remembered(Generic[Result]):
    """The last result computed from some tensors, reused until one of them is replaced or written to.

    Writes are counted as autograd counts them, which leaves out those through ``tensor.data`` or numpy. Nothing is kept of
    tensors that require gradients, or that were made in inference mode, where writes are not counted. A copy of this object
    starts empty.
    """

    def __init__(self) -> None:
        self._tensors: tuple[Tensor, ...] = ()
        self._then: Any = None
        self._made: Any = None

    def __reduce__(self) -> Any:
        return Remembered, ()

    def of(self, make: Callable[[], Result], *tensors: Tensor, under: Any = None) -> Result:
        """``make()``, or what it gave when these tensors and ``under`` were the same."""
        if any(x.requires_grad or x.is_inference() for x in tensors):
            return make()
        then = under, torch.is_inference_mode_enabled(), [x._version for x in tensors]
        if then != self._then or len(tensors) != len(self._tensors) or any(map(operator.is_not, tensors, self._tensors)):
            self._made, self._then, self._tensors = make(), then, tensors
        made: Result = self._made
        return made
