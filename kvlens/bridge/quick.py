"""Components of the bridge that leave out what nobody looks at.

TransformerLens' linear layers ask at each call whether their weights are offloaded, and pass two hook points; its norms compute
what ``hook_scale`` and ``hook_normalized`` would show, and then let Transformers' norm compute the same; its blocks inspect the
signature of what they call. In a pass of one token this takes a quarter of the time.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformer_lens.model_bridge.generalized_components import BlockBridge, LinearBridge, NormalizationBridge

from kvlens.components import is_hooked


class QuickLinear(LinearBridge):
    """A linear layer, which is its Transformers module, with offloaded weights too, while nothing is hooked."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        held = self._modules
        if self._suppress_next_hook_in or kwargs or is_hooked(self, held["hook_in"], held["hook_out"]):
            return super().__call__(*args, **kwargs)
        object.__setattr__(self, "_fired_hook_out", True)  # as in LinearBridge.forward
        return held["_original_component"](*args)


class QuickNorm(NormalizationBridge):
    """A norm that looks at its scale only for a hook."""

    def _hf_autograd_forward_with_hooks(self, x: Tensor) -> Tensor:
        if is_hooked(self.hook_scale, self.hook_normalized) or isinstance(self.original_component, nn.Identity):
            return super()._hf_autograd_forward_with_hooks(x)
        result: Tensor = self.original_component(x)
        return result.to(x.dtype)


class QuickBlock(BlockBridge):
    """A block that asks once whether its Transformers module takes any keyword."""

    def _filter_kwargs_for_forward(self, kwargs: dict[str, Any], num_positional_args: int = 0) -> dict[str, Any]:
        module: Any = self.original_component
        if "forward" not in module.__dict__ and _takes_any_keyword(type(module).forward):
            return kwargs
        return super()._filter_kwargs_for_forward(kwargs, num_positional_args)


@functools.cache
def _takes_any_keyword(function: Callable[..., Any]) -> bool:
    return any(x.kind == inspect.Parameter.VAR_KEYWORD for x in inspect.signature(function).parameters.values())


CHANGED = {
    QuickLinear: (LinearBridge, ("__call__", "forward")),
    QuickNorm: (NormalizationBridge, ("forward", "_hf_autograd_forward_with_hooks")),
    QuickBlock: (BlockBridge, ("_filter_kwargs_for_forward",)),
}
"""Each class, what it takes the place of, and the methods that a subclass of that must not have changed."""


QUICK: dict[type[nn.Module], Any] = {}
"""What takes the place of each class that was seen; None where nothing does."""


def _quick(kind: type[nn.Module]) -> Any:
    """The class that takes the place of ``kind``, under its name."""
    for quick, (plain, methods) in CHANGED.items():
        if issubclass(kind, plain) and all(getattr(kind, name) is getattr(plain, name) for name in methods):
            return type(kind.__name__, (quick, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})
    return None


def quicken(bridge: nn.Module) -> None:
    """Change the classes of linear layers, norms and blocks in place."""
    for module in bridge.modules():
        kind = type(module)
        if kind not in QUICK:
            QUICK[kind] = _quick(kind)
        if QUICK[kind] is not None:
            module.__class__ = QUICK[kind]
