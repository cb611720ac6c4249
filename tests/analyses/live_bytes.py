"""How many bytes of tensors were alive at once: an allocator's view, exact and without noise."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside, ``peak`` is the largest number of bytes that tensors made inside held at one time."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self._count(x.untyped_storage())
        return out

    def _count(self, storage):
        key = storage._cdata
        if key in self._known or not storage.nbytes():
            return
        size = storage.nbytes()

        def freed(_):
            self.now -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)


def peak_bytes(function: Callable[[], Any]) -> int:
    """``peak`` of a call, what it returns included."""
    with LiveBytes() as live:
        function()
    return live.peak


def growth(function: Callable[[int], Any], short: int, long: int) -> float:
    """By how many bytes the peak of ``function(n)`` grows with each further token."""
    return (peak_bytes(lambda: function(long)) - peak_bytes(lambda: function(short))) / (long - short)
