"""Checking hook names: an unknown name, which TransformerLens ignores, is an error that suggests the nearest hook point.

A hook on a point that exists but does not fire, such as ``hook_b_kv`` without a bias, causes a warning when the model runs,
since a bias may be attached until then. A function hooked to several points, or a cache of several (or all, as with a bare
``run_with_cache``), causes a warning only if none of them fires.
"""

from typing import Any

from torch import Tensor

from kvlens.base import HookedTransformer
from kvlens.errors import warn
from kvlens.model.caching import saves, saving_hooks
from kvlens.model.inputs import check_hook_names


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
