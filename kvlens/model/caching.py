"""Caching with ``pos_slice``: finding each hook point's position axis, which TransformerLens guesses from the number of axes.

TransformerLens takes the second-to-last axis, except for ``hook_q``, ``hook_k``, ``hook_v``, ``hook_z``, ``hook_result``. This
would slice the heads of ``hook_phi_q``, the features of ``hook_b_kv``, and with ``use_split_qkv_input`` the heads of
``ln1.hook_scale``.

Some matrices have one row per position of each text (a router's weights), or per position and head (``q_norm``). The shape of
the block's residual stream tells which row belongs to which position; the rows stay in one axis.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import Slice

BY_QUERY = ("hook_attn_scores", "hook_pattern")
"""[batch, head, query, key]; all other tensors have positions in the second axis, if at all."""
WITHOUT_POSITIONS = ("hook_b_kv", "hook_b_d", "hook_b_keys", "hook_last_k", "hook_last_v", "hook_last_q")
WITHOUT_BATCH = ("shift_coef", ".experts.")
"""Parts of names of tensors without a batch axis: parameters, and the tokens that are routed to a single expert."""
IN_ROWS = (".q_norm.", ".k_norm.", ".hook_expert_")
"""Parts of names of tensors that may be matrices with the positions of all texts as rows."""

Hooks = list[tuple[str, Callable]]


def saving_hooks(names: Iterable[str], cache: dict[str, Tensor], pos_slice: Any, **how: Any) -> tuple[Hooks, Hooks]:
    """Forward and backward hooks that save the tensors at hook points, sliced by ``pos_slice``.

    Args:
        names: names of the hook points.
        cache: where tensors are saved.
        pos_slice: as in ``run_with_cache``.
        how: ``device`` and ``remove_batch_dim``.
    """
    forwards = _Saver(cache, Slice.unwrap(pos_slice), **how)
    backwards = _Saver(cache, forwards.pos_slice, **how, suffix="_grad", positions=forwards.positions)
    fwd: Hooks = [(name, forwards) for name in names]
    bwd: Hooks = [(name, backwards) for name, _ in fwd]
    layers = {_block(name) for name, _ in fwd if any(part in name for part in IN_ROWS)}
    watching: Hooks = [(f"{block}.hook_resid_pre", forwards.note_positions) for block in sorted(layers)]
    return (fwd if forwards.pos_slice.mode == "identity" else watching + fwd), bwd


def saves(hook: Any) -> bool:
    """Whether a hook function is one of those that :func:`saving_hooks` returns."""
    return isinstance(getattr(hook, "__self__", hook), _Saver)


@dataclass(repr=False, eq=False)  # TransformerLens names a hook by its repr, which would print the cache
class _Saver:
    """Saves the tensors of hook points under their names, followed by ``suffix``.

    ``positions`` holds the shape [batch, pos] of each block's residual stream, if it is needed to assign rows to positions.
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

    def note_positions(self, residual: Tensor, hook: HookPoint) -> None:
        """Record the numbers of texts and positions in a block."""
        self.positions[_block(str(hook.name))] = tuple(residual.shape[:2])


def _block(name: str) -> str:
    """The block of a hook point's name: ``blocks.3`` for ``blocks.3.attn.hook_q``."""
    return ".".join(name.split(".")[:2])
