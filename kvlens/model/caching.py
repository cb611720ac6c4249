"""Caching with ``pos_slice``: each hook point's position axis, which TransformerLens guesses from the end of a tensor's shape.

By its rule the axis is the last but one, save for ``hook_q``, ``hook_k``, ``hook_v``, ``hook_z``, ``hook_result``. That would
cut heads off ``hook_phi_q``, features off ``hook_b_kv``, and with ``use_split_qkv_input`` heads off ``ln1.hook_scale``.

Some matrices have a row for every place of every text (a router's weights) or for every head there (``q_norm``): their rows are
told apart by the residual stream in front of them, and stay in one axis.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvlens._tl import HookPoint, Slice

BY_QUERY = ("hook_attn_scores", "hook_pattern")
"""[batch, head, query, key]; all else has its positions behind the batch, if it has any."""
WITHOUT_POSITIONS = ("hook_b_kv", "hook_b_d", "hook_last_k", "hook_last_v", "hook_last_q")
WITHOUT_BATCH = ("shift_coef", ".experts.")
"""In names: parameters, and what single experts see, the tokens sent to them."""
IN_ROWS = (".q_norm.", ".k_norm.", ".hook_expert_")
"""In names of what may be a matrix with the positions of all texts as its rows."""

Hooks = list[tuple[str, Callable]]


def saving_hooks(names: Iterable[str], cache: dict[str, Tensor], pos_slice: Any, **how: Any) -> tuple[Hooks, Hooks]:
    """Hooks that save what passes hook points, cut to ``pos_slice``, forwards and backwards.

    Args:
        names: of the hook points.
        cache: where they save.
        pos_slice: as given to ``run_with_cache``.
        how: ``device`` and ``remove_batch_dim``.
    """
    forwards = _Saver(cache, Slice.unwrap(pos_slice), **how)
    backwards = _Saver(cache, forwards.pos_slice, **how, suffix="_grad", positions=forwards.positions)
    fwd: Hooks = [(name, forwards) for name in names]
    bwd: Hooks = [(name, backwards) for name, _ in fwd]
    layers = {_block(name) for name, _ in fwd if any(part in name for part in IN_ROWS)}
    watching: Hooks = [(f"{block}.hook_resid_pre", forwards.note_places) for block in sorted(layers)]
    return (fwd if forwards.pos_slice.mode == "identity" else watching + fwd), bwd


def saves(hook: Any) -> bool:
    """Whether a hook function is one of :func:`saving_hooks`, or watches for them."""
    return isinstance(getattr(hook, "__self__", hook), _Saver)


@dataclass(repr=False, eq=False)  # TransformerLens names a hook by its repr, which would print the cache
class _Saver:
    """Saves the tensors of hook points; ``suffix`` goes behind their names.

    ``positions`` holds [batch, pos] of each block's residual stream, where rows have to be told apart.
    """

    cache: dict[str, Tensor]
    pos_slice: Any
    device: Any
    remove_batch_dim: bool
    suffix: str = ""
    positions: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def __call__(self, tensor: Tensor, hook: HookPoint) -> None:
        name = str(hook.name)
        kept, leaf = tensor.detach().to(self.device), name.rsplit(".", 1)[-1]
        has_batch = not any(part in name for part in WITHOUT_BATCH)
        if kept.dim() == 2 and any(part in name for part in IN_ROWS):
            has_batch = False
            if _block(name) in self.positions:
                kept = kept.unflatten(0, (*self.positions[_block(name)], -1))
                kept = self.pos_slice.apply(kept, dim=1).reshape(-1, kept.shape[-1])
        elif has_batch and leaf not in WITHOUT_POSITIONS:
            kept = self.pos_slice.apply(kept, dim=2 if leaf in BY_QUERY else 1)
        self.cache[name + self.suffix] = kept[0] if self.remove_batch_dim and has_batch else kept

    def note_places(self, residual: Tensor, hook: HookPoint) -> None:
        """Remember how many texts and positions there are in a block."""
        self.positions[_block(str(hook.name))] = tuple(residual.shape[:2])


def _block(name: str) -> str:
    """``blocks.3`` of ``blocks.3.attn.hook_q``."""
    return ".".join(name.split(".")[:2])
