"""Checking hook names: an unknown name, which TransformerLens ignores, is an error that suggests the nearest hook point.

A hook on a point that exists but does not fire, such as ``hook_b_kv`` without a bias, causes a warning when the model runs,
since a bias may be attached until then. A function hooked to several points, or a cache of several (or all, as with a bare
``run_with_cache``), causes a warning only if none of them fires.

Caching with ``pos_slice``: finding each hook point's position axis, which TransformerLens guesses from the number of axes.

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

from kvlens.base import HookedTransformer
from kvlens.errors import warn
from kvlens.model.inputs import check_hook_names

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


class ChecksHookNames(HookedTransformer):
    """A HookedTransformer that checks the names of hooks and caches, and warns if a requested hook will not fire."""

    _may_be_silent: tuple[tuple[str, Any], ...] = ()
    """(hook point, function) pairs requested while no bias was attached; checked again at the next forward pass."""

    def warn_of_silent_hooks(self) -> None:
        """Warn about hooks requested by name since the last pass that do not fire in this one because no bias is attached."""
        asked, self._may_be_silent = self._may_be_silent, ()
        hooked = [(name, hook) for name, hook in asked if self._is_silent(name) and self.hook_dict[name].has_hooks()]
        silent = sorted({name for name, hook in hooked if not self._is_called(hook)})
        if silent:
            more = f" and {len(silent) - 3} more" if len(silent) > 3 else ""
            warn(
                f"the hooks on {', '.join(silent[:3])}{more} are not called in this pass: no KV bias is attached "
                "(model.attach_kv_bias, or `with model.kv_bias(bias): ...`)"
            )

    def _ask_for(self, names: Any, hook: Any = None) -> None:
        """Record a name that would not fire; several names, or those of a filter, only if none of them would.

        The same applies to the names that one function is hooked to in separate calls.
        """
        if names is None:
            return
        asked = [names] if isinstance(names, str) else list(filter(names, self.hook_dict)) if callable(names) else names
        if all(map(self._is_silent, asked)):
            self._may_be_silent += tuple((name, hook) for name in asked)

    def _is_called(self, hook: Any) -> bool:
        """Whether a function is also hooked to a point that fires, in which case there is no warning."""
        points = [point for name, point in self.hook_dict.items() if not self._is_silent(name)]
        handles = [handle for point in points for handle in (*point.fwd_hooks, *point.bwd_hooks)]
        return hook is not None and any(handle.user_hook is hook for handle in handles)

    def _is_silent(self, name: str) -> bool:
        block, _, hook_point = name.rpartition(".attn.")
        return bool(block) and self.mod_dict[f"{block}.attn"].waits_for_a_bias(hook_point)  # type: ignore[operator]

    def add_hook(self, name: Any, hook: Any, *args: Any, **kwargs: Any) -> None:
        """As TransformerLens'."""
        check_hook_names(name, self.hook_dict)
        self._ask_for(name, hook)
        return super().add_hook(name, hook, *args, **kwargs)

    def _enable_hook(self, name: Any, hook: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(name, str) and name not in self.hook_dict:  # tested first: caching everything calls this per name
            check_hook_names(name, self.hook_dict)
        if not saves(hook):  # cached names are checked in the methods below
            self._ask_for(name, hook)
        return super()._enable_hook(name, hook, *args, **kwargs)

    def remove_all_hook_fns(self, direction: Any = "both", including_permanent: bool = False, level: int | None = None) -> None:
        """As in TransformerLens, whose own method writes to all hook points, hooked or not, after every hooked pass."""
        for point in self.hook_points():
            if point.fwd_hooks or point.bwd_hooks:
                point.remove_hooks(direction, including_permanent=including_permanent, level=level)

    def get_caching_hooks(
        self,
        names_filter: Any = None,
        incl_bwd: bool = False,
        device: Any = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
        pos_slice: Any = None,
    ):
        """As TransformerLens'; ``names_filter`` must name hook points that exist."""
        check_hook_names(names_filter, self.hook_dict)
        self._ask_for(names_filter)
        names_filter = list(names_filter) if isinstance(names_filter, tuple) else names_filter  # TransformerLens reads lists
        cache, fwd, bwd = super().get_caching_hooks(names_filter, incl_bwd, device, remove_batch_dim, cache, pos_slice)
        how = dict(device=device, remove_batch_dim=remove_batch_dim)
        saving, saving_gradients = saving_hooks([name for name, _ in fwd], cache, pos_slice, **how)
        return cache, saving, saving_gradients if bwd else []

    def add_caching_hooks(self, names_filter: Any = None, *args: Any, **kwargs: Any):
        """As TransformerLens'; ``names_filter`` must name hook points that exist."""
        check_hook_names(names_filter, self.hook_dict)
        self._ask_for(names_filter)
        return super().add_caching_hooks(names_filter, *args, **kwargs)
