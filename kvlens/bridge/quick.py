"""Components of the bridge that leave out what nobody looks at.

TransformerLens' components ask at each call whether their weights are offloaded, and pass two hook points; its norms compute
what ``hook_scale`` and ``hook_normalized`` would show, and then let Transformers' norm compute the same; its blocks inspect the
signature of what they call. In a pass of one token this takes a third of the time.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformer_lens.model_bridge.generalized_components import BlockBridge, GatedMLPBridge, LinearBridge, NormalizationBridge

from kvlens.components import is_hooked

SWITCHES = ("use_attn_result", "use_split_qkv_input", "use_attn_in")
"""Settings of TransformerLens under which attention shows more."""


class QuickLinear(LinearBridge):
    """A linear layer, which is its Transformers module, with offloaded weights too, while nothing is hooked."""

    def __call__(self, *args: object, **kwargs: object) -> Any:
        held = self._modules
        if self._suppress_next_hook_in or kwargs or is_hooked(self, held["hook_in"], held["hook_out"]):
            return super().__call__(*args, **kwargs)
        object.__setattr__(self, "_fired_hook_out", True)  # as in LinearBridge.forward
        return held["_original_component"](*args)


class QuickMLP(GatedMLPBridge):
    """A gated MLP, which is its Transformers module, with its linear layers in it, while nothing is hooked."""

    def __call__(self, *args: object, **kwargs: object) -> Any:
        held = self._modules
        if getattr(self, "_use_processed_weights", False) or is_hooked(self, held["hook_in"], held["hook_out"]):
            return super().__call__(*args, **kwargs)
        return held["_original_component"](*args, **kwargs)


class QuickNorm(NormalizationBridge):
    """A norm that looks at its scale only for a hook, and is its Transformers module while nothing is hooked."""

    def __call__(self, *args: Tensor, **kwargs: object) -> Any:
        held = self._modules
        points = (held[f"hook_{name}"] for name in ("in", "out", "scale", "normalized"))
        if not self.use_native_layernorm_autograd or kwargs or is_hooked(self, *points):
            return super().__call__(*args, **kwargs)
        return held["_original_component"](*args).to(args[0].dtype)

    def _hf_autograd_forward_with_hooks(self, x: Tensor) -> Tensor:
        if is_hooked(self.hook_scale, self.hook_normalized) or isinstance(self.original_component, nn.Identity):
            return super()._hf_autograd_forward_with_hooks(x)
        result: Tensor = self.original_component(x)
        return result.to(x.dtype)


class QuickBlock(BlockBridge):
    """A block that asks once whether its Transformers module takes any keyword, and is that module while nothing is hooked."""

    def __call__(self, *args: object, **kwargs: object) -> Any:
        held, state = self._modules, self.__dict__
        is_part = state.get("_stop_at_layer_idx") is not None or state.get("_start_at_layer_idx") is not None
        attn_config = getattr(held.get("attn"), "config", None)  # each has its own in some families
        forks = any(getattr(attn_config, name, False) for name in SWITCHES)
        if is_part or forks or len(kwargs) < 2 or is_hooked(self, held["hook_in"], held["hook_out"], held["hook_mlp_in"]):
            return super().__call__(*args, **kwargs)
        if self._capture_hooks_wired:  # hooks on norms, for what was asked above; TransformerLens makes them again when needed
            self._teardown_capture_hooks()
        return held["_original_component"](*args, **self._filter_kwargs_for_forward(kwargs, len(args)))

    def _filter_kwargs_for_forward(self, kwargs: dict[str, object], num_positional_args: int = 0) -> dict[str, object]:
        module = self.original_component
        if "forward" not in module.__dict__ and _takes_any_keyword(type(module).forward):
            return kwargs
        return super()._filter_kwargs_for_forward(kwargs, num_positional_args)


@functools.cache
def _takes_any_keyword(function: Callable[..., object]) -> bool:
    return any(x.kind == inspect.Parameter.VAR_KEYWORD for x in inspect.signature(function).parameters.values())


CHANGED = {
    QuickLinear: (LinearBridge, ("__call__", "forward")),
    QuickMLP: (GatedMLPBridge, ("__call__", "forward")),
    QuickNorm: (NormalizationBridge, ("__call__", "forward", "_hf_autograd_forward_with_hooks")),
    QuickBlock: (BlockBridge, ("__call__", "forward", "_maybe_wire_capture_hooks", "_filter_kwargs_for_forward")),
}
"""Each class, what it takes the place of, and the methods that a subclass of that must not have changed."""


QUICK: dict[type[nn.Module], type[nn.Module] | None] = {}
"""What takes the place of each class that was seen; None where nothing does."""


def _quick(kind: type[nn.Module]) -> type[nn.Module] | None:
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
        module.__class__ = QUICK[kind] or kind
