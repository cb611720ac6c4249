"""Small models whose axes all differ, in every variant that the tests go through."""

from collections.abc import Callable
from typing import Any

import torch

from kvlens import HookedKVTransformer, HookedKVTransformerConfig, KVShiftConfig
from kvlens.base import HookedTransformer, HookedTransformerConfig

SIZES = dict(n_layers=2, d_model=30, d_head=6, n_heads=5, n_ctx=41, d_vocab=17, d_mlp=23, act_fn="gelu", device="cpu", seed=3)


def small_model(**changes: Any) -> HookedKVTransformer:
    """A model of the sizes above; softmax with learned positions unless ``changes`` say otherwise."""
    model = HookedKVTransformer(HookedKVTransformerConfig(**{**SIZES, **changes}))
    return with_random_biases(model)


def linear_model(**changes: Any) -> HookedKVTransformer:
    """A linear-attention model with RoPE and a KV shift, in float64, unless ``changes`` say otherwise."""
    defaults = dict(
        attention="linear", positional_embedding_type="rotary", kv_shift=KVShiftConfig(window=2), dtype=torch.float64
    )
    return small_model(**{**defaults, **changes})


def plain_model(**changes: Any) -> HookedTransformer:
    """TransformerLens' own, with the weights of :func:`small_model`."""
    return with_random_biases(HookedTransformer(HookedTransformerConfig(**{**SIZES, **changes})))


class Shared:
    """Models that are built once for many tests, which leave them as they are."""

    def __init__(self, build: Callable[..., HookedKVTransformer]):
        self.build = build
        self.made: dict[Any, tuple[HookedKVTransformer, Any]] = {}

    def __call__(self, *of: Any) -> HookedKVTransformer:
        if of not in self.made:
            model = self.build(*of)
            self.made[of] = model, self._state(model)
        return self.made[of][0]

    def assert_untouched(self) -> None:
        for of, (model, before) in self.made.items():
            assert self._state(model) == before, of

    @staticmethod
    def _state(model: HookedKVTransformer) -> Any:
        hooked = [name for name, point in model.hook_dict.items() if point.has_hooks()]
        return model.fingerprint(), {**model.cfg.to_dict()}, model.training, hooked, model.attached_kv_bias


def with_random_biases(model: Any) -> Any:
    """TransformerLens starts biases at 0 and norms at 1, which hides mistakes: draw them."""
    generator = torch.Generator().manual_seed(11)
    for name, parameter in sorted(model.named_parameters()):
        leaf = name.rsplit(".", 1)[-1]
        if (leaf.lstrip("_").startswith("b_") and leaf not in ("b_KV", "b_D")) or leaf in ("b", "w"):
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
            parameter.data.add_(drawn.to(parameter.dtype))
    return model


def tokens(batch: int, pos: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, SIZES["d_vocab"], (batch, pos), generator=torch.Generator().manual_seed(seed))


def relative_error(new: torch.Tensor, old: torch.Tensor) -> float:
    return float((new - old).detach().norm() / old.detach().norm())
