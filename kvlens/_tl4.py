"""Placeholders for what TransformerLens 4 removed: names that can be imported and subclassed, but raise an error when used."""

from typing import Any

from torch import nn

from kvlens.errors import KVLensError

NEEDS_3 = (
    "HookedKVTransformer needs transformer-lens>=3.9,<4: TransformerLens 4, which is installed here, removed the "
    "HookedTransformer that it extends. Install that release, or use kvlens.KVTransformerBridge, which runs on both"
)


def check_release() -> None:
    """Raise KVLensError: the release of TransformerLens that is installed has no HookedTransformer."""
    raise KVLensError(NEEDS_3)


class _Removed:
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        check_release()


class HookedTransformerConfig(_Removed): ...


class HookedTransformer(_Removed, nn.Module): ...


class AbstractAttention(_Removed, nn.Module): ...


class Attention(AbstractAttention): ...


class GroupedQueryAttention(AbstractAttention): ...


class MLP(_Removed, nn.Module): ...


class GatedMLP(_Removed, nn.Module): ...


class LayerNorm(_Removed, nn.Module): ...


class LayerNormPre(_Removed, nn.Module): ...


class PosEmbed(_Removed, nn.Module): ...


class TransformerBlock(_Removed, nn.Module): ...


class Unembed(_Removed, nn.Module): ...


class Output(_Removed): ...


class _Loading:
    """Placeholder for the module that loads weights into a HookedTransformer."""

    def __getattr__(self, name: str) -> Any:
        raise KVLensError(NEEDS_3)


loading: Any = _Loading()
