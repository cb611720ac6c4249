"""Hooks by name: one that no hook point has, which TransformerLens passes over, is an error that proposes the nearest."""

from typing import Any

from torch import Tensor

from kvlens._tl import HookedTransformer
from kvlens.model.caching import saving_hooks
from kvlens.model.inputs import check_hook_names


class ChecksHookNames(HookedTransformer):
    """A HookedTransformer whose hooks and caches are asked for by names that exist."""

    def add_hook(self, name: Any, *args: Any, **kwargs: Any) -> None:
        """As TransformerLens'."""
        check_hook_names(name, self.hook_dict)
        return super().add_hook(name, *args, **kwargs)

    def _enable_hook(self, name: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(name, str) and name not in self.hook_dict:  # asked before: a cache of everything comes by here for each
            check_hook_names(name, self.hook_dict)
        return super()._enable_hook(name, *args, **kwargs)

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
        cache, fwd, bwd = super().get_caching_hooks(names_filter, incl_bwd, device, remove_batch_dim, cache, pos_slice)
        how = dict(device=device, remove_batch_dim=remove_batch_dim)
        saving, saving_gradients = saving_hooks([name for name, _ in fwd], cache, pos_slice, **how)
        return cache, saving, saving_gradients if bwd else []

    def add_caching_hooks(self, names_filter: Any = None, *args: Any, **kwargs: Any):
        """As TransformerLens'; ``names_filter`` must name hook points that exist."""
        check_hook_names(names_filter, self.hook_dict)
        return super().add_caching_hooks(names_filter, *args, **kwargs)
