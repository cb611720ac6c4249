"""Caching with ``pos_slice``: TransformerLens finds a tensor's position axis by the hook's name, and knows only its own names.

By its rule the axis of an unknown name is the last but one: it would cut heads off ``hook_phi_q`` and features off
``hook_b_kv``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvlens._tl import HookPoint, Slice
from kvlens.components import KVLENS_HOOKS

WITHOUT_POSITIONS = ("hook_b_kv", "hook_b_d", "hook_last_k", "hook_last_v", "hook_last_q")
HERE = {*KVLENS_HOOKS, "hook_rot_q", "hook_rot_k"}


def slice_right_axis(hooks: list[tuple[str, Callable]], cache: dict[str, Tensor], pos_slice: Any, **how: Any) -> list:
    """Replace the saving functions of kvlens' hook points by ones that slice axis 1, or nothing where there are no positions.

    Args:
        hooks: (name, function) pairs from TransformerLens' ``get_caching_hooks``.
        cache: where they save.
        pos_slice: as given to ``run_with_cache``.
        how: ``device``, ``remove_batch_dim`` and ``suffix`` ("_grad" for backward hooks).
    """
    return [
        (name, _Saver(cache, Slice.unwrap(pos_slice), **how) if name.rsplit(".", 1)[-1] in HERE else f) for name, f in hooks
    ]


@dataclass(repr=False, eq=False)  # TransformerLens names a hook by its repr, which would print the cache
class _Saver:
    """Saves a tensor of one of our hook points; ``suffix`` goes behind its name."""

    cache: dict[str, Tensor]
    pos_slice: Any
    device: Any
    remove_batch_dim: bool
    suffix: str = ""

    def __call__(self, tensor: Tensor, hook: HookPoint) -> None:
        assert hook.name is not None
        kept, leaf = tensor.detach().to(self.device), hook.name.rsplit(".", 1)[-1]
        if leaf not in WITHOUT_POSITIONS and not leaf.endswith("shift_coef"):
            kept = self.pos_slice.apply(kept, dim=1)
        has_batch = not leaf.endswith("shift_coef")
        self.cache[hook.name + self.suffix] = kept[0] if self.remove_batch_dim and has_batch else kept
