"""x W + b, the dense product on which a transformer spends most of its time, by the fastest kernel that torch has for it.

On a CPU torch multiplies float32 matrices with MKL. oneDNN ships with torch as well and is faster for large weights or
many rows: on one thread of an otherwise idle AMD EPYC (Zen 4), ``torch.addmm`` took 1.0 to 1.9 times as long as oneDNN
with at least 2**18 weights, 1.0 to 1.4 times as long with at least 2,048 rows, and 0.4 to 1.0 times as long below both.
Without oneDNN, a forward pass of 4 layers of width 512 over 128 / 512 / 4,096 tokens took 1.19 / 1.21 / 1.24 times as long
on one thread and 1.27 / 1.17 / 1.07 times as long on two. The operator used here is the one that ``torch.compile`` calls.
``torch.addmm`` runs where oneDNN is missing (other devices, other dtypes, other builds of torch), cannot be used (autocast,
transforms of ``torch.func``) or is turned off (``torch.backends.mkldnn.flags(enabled=False)``). Both round in float32, but
they sum in different orders, and oneDNN's error is the larger: 4e-7 against MKL's 2.4e-7, for sums of 512 terms.

A decoded token is a single row, for which ``torch.addmm`` uses one core; a sum over slices of the weights uses all of them.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad

from kvlens.checks import checked

Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    "relu": torch.nn.functional.relu,
    "silu": torch.nn.functional.silu,
}
_ONE_DNN_NAMES: dict[Activation | None, tuple[str, str]] = {
    None: ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
    "silu": ("swish", ""),
}
FEW_ROWS = 8
"""With at most this many rows, as in decoding, oneDNN is not used; a product with large weights is sliced instead."""
MANY_ROWS = 2048
"""With at least this many rows, oneDNN is faster whatever the size of the weights."""
LARGE_WEIGHTS = 2**18
"""With at least this many weights, oneDNN is faster for more than a few rows."""
SLICES = 8


@checked
def affine(
    x: Float[Tensor, "*lead d_in"],
    weight: Float[Tensor, "d_in d_out"],
    bias: Float[Tensor, " d_out"] | None = None,
    activation: Activation | None = None,
) -> Float[Tensor, "*lead d_out"]:
    """activation(x W + b), with gradients of every order."""
    rows = x.reshape(-1, x.shape[-1])
    by_one_dnn = _one_dnn_serves(rows, weight)
    if by_one_dnn and not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))):
        y = _by_one_dnn(rows, weight, bias, activation)
    else:
        y = _Affine.apply(rows, weight, bias) if by_one_dnn else _plain(rows, weight, bias)  # type: ignore[no-untyped-call]
        y = y if activation is None else ACTIVATIONS[activation](y)
    return y.view(*x.shape[:-1], weight.shape[1])


def _by_one_dnn(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation | None = None) -> Tensor:
    name, algorithm = _ONE_DNN_NAMES[activation]
    return _one_dnn()(x, weight.T, bias, name, [], algorithm)


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if _pays_in_slices(x, weight):
        y = torch.bmm(x.unflatten(1, (SLICES, -1)).transpose(0, 1), weight.unflatten(0, (SLICES, -1))).sum(dim=0)
        return y if bias is None else y + bias
    return x @ weight if bias is None else torch.addmm(bias, x, weight)


def _pays_in_slices(x: Tensor, weight: Tensor) -> bool:
    n_rows, d_in = x.shape
    much = n_rows <= FEW_ROWS and weight.numel() >= LARGE_WEIGHTS and d_in % SLICES == 0
    precise = x.dtype in (torch.float32, torch.float64)  # in half precision each slice would be rounded
    return much and precise and x.device.type == "cpu" and torch.get_num_threads() > 1


def _one_dnn_serves(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and (x.shape[0] >= MANY_ROWS or (x.shape[0] > FEW_ROWS and weight.numel() >= LARGE_WEIGHTS))
        and not torch.is_autocast_enabled("cpu")
        and forward_ad._current_level < 0
        and not any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in (x, weight))
        and bool(torch.backends.mkldnn.enabled)
        and _one_dnn() is not None
    )


@functools.cache
def _one_dnn() -> Any:
    """oneDNN's product as an operator, or None if this build of torch has none that gives the right answer."""
    try:
        operator = torch.ops.mkldnn._linear_pointwise.default
        x, weight, bias = torch.arange(6.0).view(3, 2), torch.arange(8.0).view(2, 4), torch.arange(4.0)
        right = torch.equal(operator(x, weight.T, bias, "none", [], ""), torch.addmm(bias, x, weight))
    except (AttributeError, NotImplementedError, RuntimeError):
        return None
    return operator if right else None


class _Affine(torch.autograd.Function):
    """The product of rows, and its gradients by the same kernel, for which torch defines no backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _by_one_dnn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            affine(gradient, weight.T) if of_x else None,
            affine(x.T, gradient) if of_weight else None,
            gradient.sum(dim=0) if of_bias else None,
        )
