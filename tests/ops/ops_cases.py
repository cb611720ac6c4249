"""What the tests of the ops share: draws whose axes all differ, and bounds on rounding that are derived, not guessed.

Every op here but the feature maps is a sum of products, linear in each argument. Computed in any order, such a sum of n terms
is wrong by at most about n * eps * (the sum of the terms' absolute values), and that last sum is the op itself on the absolute
values of its arguments. So is a gradient's, on the absolute values of everything that enters it. The bound holds element by
element, however much the terms cancel.
"""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import settings
from torch import Tensor

laws = settings(max_examples=30, deadline=None, derandomize=True, database=None)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(dtype)


def random_mask(batch: int, pos: int, seed: int) -> Tensor:
    """True at about two of three random positions; the last row has at least one position of each kind."""
    mask = torch.rand(batch, pos, generator=torch.Generator().manual_seed(seed)) < 0.65
    if pos > 1:
        mask[-1, 0], mask[-1, 1] = False, True
    return mask


def flatten(values: Any) -> list[Tensor]:
    """The tensors of a (nested) tuple, in order; None left out."""
    if isinstance(values, Tensor):
        return [values]
    return [tensor for value in values or () for tensor in flatten(value)]


def map_tensors(function: Callable[[Tensor], Tensor], values: Any) -> Any:
    """``values`` with ``function`` applied to its floating-point tensors."""
    if isinstance(values, Tensor):
        return function(values) if values.is_floating_point() else values
    if isinstance(values, dict):
        return {key: map_tensors(function, value) for key, value in values.items()}
    if isinstance(values, tuple):
        mapped = [map_tensors(function, value) for value in values]
        return type(values)(*mapped) if hasattr(values, "_fields") else tuple(mapped)
    return values


def values_and_gradients(op: Callable[..., Any], arguments: dict[str, Any], absolute: bool = False) -> list[Tensor]:
    """An op's outputs, and the gradients of one fixed weighted sum of them in each argument that is a float tensor.

    ``absolute`` gives the same with every number that enters replaced by its size: the bound's sum of sizes.
    """
    arguments = map_tensors(lambda t: (t.abs() if absolute else t).detach().clone().requires_grad_(), arguments)
    outputs = flatten(op(**arguments))
    leaves = flatten([value for value in arguments.values() if not isinstance(value, (bool, int, float, str))])
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    weights = [normal(*out.shape, seed=77 + i, dtype=out.dtype) for i, out in enumerate(outputs)]
    total = sum((out * (w.abs() if absolute else w)).sum() for out, w in zip(outputs, weights, strict=True))
    gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    zeros = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, gradients, strict=True)]
    return [*(out.detach() for out in outputs), *zeros]


def assert_within_rounding(got: list[Tensor], expected: list[Tensor], sizes: list[Tensor], n_terms: int) -> None:
    """Element by element: off by no more than n_terms * eps * the sum of the terms' sizes."""
    assert len(got) == len(expected) == len(sizes)
    for i, (a, b, size) in enumerate(zip(got, expected, sizes, strict=True)):
        assert a.shape == b.shape, (i, a.shape, b.shape)
        bound = n_terms * torch.finfo(a.dtype).eps * size.double() + torch.finfo(a.dtype).tiny
        excess = ((a.double() - b.double()).abs() / bound).max() if a.numel() else torch.zeros(())
        assert excess <= 1, f"tensor {i} of {len(got)}: off by {float(excess):.3g} times the bound"


def double(values: Any) -> Any:
    return map_tensors(Tensor.double, values)
