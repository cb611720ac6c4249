"""Hooks by name: one that no hook point has, which TransformerLens passes over, is an error that proposes the nearest.

Hooks on a point that exists and does not fire, as ``hook_b_kv`` without a bias, are warned of when the model runs: until then a
bias may be attached. Asking for everything, as a bare ``run_with_cache`` does, asks for what there is.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from kvlens._tl import HookedTransformer
from kvlens.errors import warn
from kvlens.model.caching import saves, saving_hooks
from kvlens.model.inputs import check_hook_names


class ChecksHookNames(HookedTransformer):
    """A HookedTransformer whose hooks and caches are asked for by names that exist, and says so where one will not fire."""

    _may_be_silent: frozenset[str] = frozenset()
    """Names that were asked for and did not fire as things stood then; looked at again when the model runs next."""

    def warn_of_silent_hooks(self) -> None:
        """Warn of hooks that were asked for by name since the last pass, and do not fire in this one."""
        asked, self._may_be_silent = self._may_be_silent, frozenset()
        reasons: dict[str, list[str]] = {}
        for name in sorted(asked):
            reason = self._why_silent(name)
            if reason is not None and self.hook_dict[name].has_hooks():
                reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            warn(f"the hooks on {', '.join(names[:3])}{more} are not called in this pass: {reason}")

    def _ask_for(self, names: Any) -> None:
        """Remember which of ``names`` (one, several, or a filter) would not fire; of a filter only if none of its would."""
        if names is None:
            return
        asked: Iterable[str] = [names] if isinstance(names, str) else names
        if callable(names):
            asked = [name for name in self.hook_dict if names(name)]
            if any(self._why_silent(name) is None for name in asked):
                return
        self._may_be_silent |= {name for name in asked if self._why_silent(name) is not None}

    def _why_silent(self, name: str) -> str | None:
        block, _, hook_point = name.rpartition(".attn.")
        return self.mod_dict[f"{block}.attn"].why_silent(hook_point) if block else None  # type: ignore[operator,union-attr]

    def add_hook(self, name: Any, *args: Any, **kwargs: Any) -> None:
        """As TransformerLens'."""
        check_hook_names(name, self.hook_dict)
        self._ask_for(name)
        return super().add_hook(name, *args, **kwargs)

    def _enable_hook(self, name: Any, hook: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(name, str) and name not in self.hook_dict:  # asked before: a cache of everything comes by here for each
            check_hook_names(name, self.hook_dict)
        if not saves(hook):  # what is cached was asked for below, or not at all
            self._ask_for(name)
        return super()._enable_hook(name, hook, *args, **kwargs)

    def remove_all_hook_fns(self, direction: Any = "both", including_permanent: bool = False, level: int | None = None) -> None:
        """As TransformerLens', which at the end of every hooked pass writes to all hook points, hooked or not."""
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
        cache, fwd, bwd = super().get_caching_hooks(names_filter, incl_bwd, device, remove_batch_dim, cache, pos_slice)
        how = dict(device=device, remove_batch_dim=remove_batch_dim)
        saving, saving_gradients = saving_hooks([name for name, _ in fwd], cache, pos_slice, **how)
        return cache, saving, saving_gradients if bwd else []

    def add_caching_hooks(self, names_filter: Any = None, *args: Any, **kwargs: Any):
        """As TransformerLens'; ``names_filter`` must name hook points that exist."""
        check_hook_names(names_filter, self.hook_dict)
        self._ask_for(names_filter)
        return super().add_caching_hooks(names_filter, *args, **kwargs)
