"""A stand-in for a GPU on a machine that has none: tensors in memory that say they are on ``cuda:0``.

Inside `stand_in_gpu` torch reports a GPU. What is moved there, or made there, carries a mark, and so does all that is computed
from it; `Tensor.device` reads the mark. What a GPU refuses is refused: operations on tensors of both devices (numbers without
axes may come from the CPU, and so may indices), ``.numpy()``, and random draws there with a generator of the CPU. All numbers
are those of the CPU, so that results can be compared exactly.

Not seen: what happens inside one call of torch, such as functions that torch transforms (``torch.func``).
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ANYWHERE = {"copy_", "set_", "_has_compatible_shallow_copy_type"}
"""Operations between tensors of two devices."""
BOTH = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"


def tensors(given: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]


def is_there(tensor: Tensor) -> bool:
    return tensor.__dict__.get("_is_there", False)


def marked(result: Any, there: bool) -> Any:
    for tensor in tensors(result):
        tensor.__dict__["_is_there"] = there
    return result


class StandIn(TorchFunctionMode):
    """Reads and sets the marks around every call of torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name, of = dict(kwargs or {}), func.__name__, getattr(func, "__self__", None)
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if name == "__get__":
            own = {Tensor.device: GPU, Tensor.is_cuda: True, Tensor.is_cpu: False}
            return own[of] if of in own and is_there(first) else marked(func(*args, **kwargs), is_there(first))
        if name == "__set__":
            func(*args, **kwargs)
            if of is Tensor.data:
                marked(first, is_there(args[1]))
            return None
        if name in ("to", "cuda", "cpu", "type_as"):
            return _moved(func, first, args[1:], kwargs)
        if name in ("numpy", "__array__") and is_there(first):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        if func in _device_constructors() and name not in ("as_tensor", "asarray"):
            there = name.endswith("_like") and is_there(first)
        elif name == "grad" and first is None and len(args) > 1:  # torch.autograd.grad(outputs, inputs)
            found = func(*args, **kwargs)
            return type(found)(marked(g, is_there(x)) for g, x in zip(found, tensors(args[1]), strict=True))
        elif name in ("__getitem__", "__setitem__", *ANYWHERE) or name.startswith("new_"):
            there = is_there(first)
            if any(map(is_there, tensors(args[1:2]))) > there and name not in ANYWHERE:
                raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
            if name == "__setitem__" and tensors(args[1:2]) and any(x.ndim and is_there(x) != there for x in tensors(args[2:])):
                raise RuntimeError(f"{BOTH} ({name})")
        else:
            places = {is_there(x) for x in tensors((args, kwargs)) if x.ndim or is_there(x)}
            if len(places) > 1:
                raise RuntimeError(f"{BOTH} ({name})")
            there = True in places
        if kwargs.get("device") is not None:
            there, kwargs["device"] = torch.device(kwargs["device"]).type == "cuda", CPU
        if there and kwargs.get("generator") is not None:
            raise RuntimeError(f"Expected a 'cuda' device type for generator but found 'cpu' ({name})")
        return marked(func(*args, **kwargs), there)


def _moved(func: Any, tensor: Tensor, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """``tensor.to(...)``, ``.cuda()``, ``.cpu()`` and ``.type_as(other)``: a copy, unless nothing changes."""
    there = {"cuda": True, "cpu": False}.get(func.__name__, is_there(tensor))
    given = {**dict(enumerate(args)), **kwargs}
    for place, value in given.items():
        if isinstance(value, Tensor):
            there = is_there(value)
        elif value is not None and not isinstance(value, (torch.dtype, bool, torch.memory_format)):
            there, given[place] = torch.device(value).type == "cuda", CPU
    if func.__name__ == "cuda":
        moved = tensor.clone()
    else:
        moved = func(tensor, *(given[i] for i in range(len(args))), **{name: given[name] for name in kwargs})
    return marked(moved.clone() if moved is tensor and there != is_there(tensor) else moved, there)


@contextlib.contextmanager
def stand_in_gpu() -> Iterator[None]:
    new, fork = nn.Parameter.__new__, torch.random.fork_rng

    def parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> nn.Parameter:
        made = new(cls, data, requires_grad)
        return made if data is None else marked(made, is_there(data))

    functions = dict(is_available=lambda: True, is_initialized=lambda: False, device_count=lambda: 1)
    functions |= dict(synchronize=lambda *_: None, manual_seed_all=lambda seed: None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **functions))
        stack.enter_context(mock.patch.object(nn.Parameter, "__new__", parameter))
        stack.enter_context(mock.patch.object(torch.random, "fork_rng", lambda devices=None, **more: fork(devices=[], **more)))
        stack.enter_context(StandIn())
        yield
