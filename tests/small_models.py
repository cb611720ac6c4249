"""The models that laws go through: one table, a row for each kind of attention and of the rest of a block, and one builder.

No two axes are alike. A test of a law names the rows that concern it, and what it alone needs as ``changes`` of a row.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from precision import relative_error as relative_error

from kvlens import HookedKVTransformer, HookedKVTransformerConfig, KVShiftConfig
from kvlens.base import HookedTransformer, HookedTransformerConfig
from kvlens.model import AttentionVariantConfig, Augmented, Negative, Regularised, Ridge

SIZES = dict(n_layers=2, d_model=30, d_head=6, n_heads=5, n_ctx=41, d_vocab=17, d_mlp=23, act_fn="gelu", device="cpu", seed=3)
GROUPED = dict(n_heads=6, d_model=36, n_key_value_heads=2)
LINEAR: dict[str, dict[str, Any]] = {
    "rope after": {},
    "rope before": dict(rotary_placement="before", rotary_dim=4),
    "rope before, no shift": dict(rotary_placement="before", kv_shift=None),
    "window 3 with queries": dict(kv_shift=KVShiftConfig(window=3, queries=True)),
    "keys only": dict(kv_shift=KVShiftConfig(values=False)),
    "no shift": dict(kv_shift=None),
    "hedgehog": dict(feature_map="hedgehog"),
    "taylor": dict(feature_map="taylor", normalizer="none"),
    "random": dict(feature_map="random", n_random_features=7),
    "gqa": GROUPED,
    "gqa decay": dict(GROUPED, normalizer="none", decay="retnet"),
    "decay": dict(normalizer="none", decay=[0.9, 0.8, 0.7, 0.6, 1.0], feature_map="identity"),
    "gqa, taylor, values shifted": dict(GROUPED, feature_map="taylor", kv_shift=KVShiftConfig(window=3, keys=False)),
    "gqa, queries shifted": dict(GROUPED, n_key_value_heads=3, kv_shift=KVShiftConfig(queries=True)),
    "values shifted, relu": dict(normalizer="none", feature_map="relu", kv_shift=KVShiftConfig(keys=False)),
    "no normalizer, keys shifted, rms": dict(
        normalizer="none", feature_map="identity", kv_shift=KVShiftConfig(values=False), normalization_type="RMS"
    ),
    "learned": dict(positional_embedding_type="standard"),
    "learned, queries shifted": dict(positional_embedding_type="standard", kv_shift=KVShiftConfig(window=2, queries=True)),
    "sinusoidal": dict(positional_embedding_type="sinusoidal"),
    "no positions": dict(positional_embedding_type="none"),
    "split": dict(use_split_qkv_input=True, use_attn_result=True),
    "attn in": dict(use_attn_in=True),
    "trained bias": dict(trainable_kv_bias=True),
}
SOFTMAX: dict[str, dict[str, Any]] = {
    "learned": {},
    "rotary": dict(positional_embedding_type="rotary", rotary_dim=4),
    "adjacent rotary": dict(positional_embedding_type="rotary", rotary_adjacent_pairs=True),
    "rotary, grouped": dict(positional_embedding_type="rotary", n_heads=6, n_key_value_heads=3),
    "sinusoidal": dict(positional_embedding_type="sinusoidal"),
    "no positions": dict(positional_embedding_type="none"),
    # powers of two: TransformerLens rounds slope times distance to float32, differently in tables of different sizes
    "alibi": dict(positional_embedding_type="alibi", alibi_slopes=(0.5, 0.25, 0.0, 1.0, 0.125)),
    "alibi, grouped": dict(positional_embedding_type="alibi", n_heads=6, n_key_value_heads=2),
    "shifted": dict(positional_embedding_type="rotary", kv_shift=KVShiftConfig(window=2, queries=True)),
    "shifted, grouped": dict(positional_embedding_type="rotary", n_heads=6, n_key_value_heads=3, kv_shift=KVShiftConfig()),
    "soft-capped": dict(attn_scores_soft_cap=0.8),
    "local": dict(use_local_attn=True, window_size=5, attn_types=["local", "global"]),
    "sinks": dict(use_attention_sinks=True),
    "clamped": dict(clip_qkv=0.05),
    "qk norm": dict(use_qk_norm=True),
    "norms over all heads": dict(positional_embedding_type="rotary", original_architecture="Olmo2ForCausalLM", kv_shift=True),
    "scaled by layer": dict(scale_attn_by_inverse_layer_idx=True),
    "split": dict(use_split_qkv_input=True, use_attn_result=True),
}
BLOCKS: dict[str, dict[str, Any]] = {
    "LN": {},
    "RMS, gated": dict(normalization_type="RMS", gated_mlp=True),
    "RMS at the end": dict(final_rms=True, use_attn_result=True),
    "no norm": dict(normalization_type=None),
    "no norm, attention only": dict(normalization_type=None, attn_only=True),
    "folded LN": dict(normalization_type="LNPre"),
    "folded RMS": dict(normalization_type="RMSPre"),
    "norms behind heads": dict(normalization_type="RMS", use_normalization_before_and_after=True),
    "side by side": dict(parallel_attn_mlp=True),
    "shortformer": dict(positional_embedding_type="shortformer", kv_shift=None),
}
"""The rest of a block: norms, MLP, what is added where."""
PARALLEL = Augmented(keys=True, values=True, depth=2, parallel=0.5)
ATTENTION_VARIANTS = {
    "self-attention form": AttentionVariantConfig(regularised=Regularised(0.3)),
    "normalised, negative alpha": AttentionVariantConfig(regularised=Regularised(-0.7, form="normalised")),
    "one step": AttentionVariantConfig(regularised=Regularised(0.3, form="one_step")),
    "augmented keys": AttentionVariantConfig(augmented=Augmented(keys=True)),
    "augmented in parallel": AttentionVariantConfig(augmented=PARALLEL),
    "negative per query": AttentionVariantConfig(negative=Negative(k=3, beta=0.4)),
    "negative per label": AttentionVariantConfig(negative=Negative(k=0.3, beta=0.4, per="label")),
    "ridge": AttentionVariantConfig(ridge=Ridge(0.5)),
    "all but ridge": AttentionVariantConfig(
        regularised=Regularised(0.2), augmented=Augmented(values=True, depth=2), negative=Negative(k=2, beta=0.1)
    ),
    "regularised, augmented": AttentionVariantConfig(regularised=Regularised(0.2, form="one_step"), augmented=PARALLEL),
    "regularised, negative": AttentionVariantConfig(regularised=Regularised(-0.5), negative=Negative(k=2, beta=0.3)),
    "ridge, augmented": AttentionVariantConfig(ridge=Ridge(0.5), augmented=Augmented(keys=True, activation="relu")),
}
TABLES = {"linear": LINEAR, "softmax": SOFTMAX}
WITHOUT_BIAS = [name for name, variant in ATTENTION_VARIANTS.items() if variant.negative or variant.ridge]


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


def row_of(name: str) -> dict[str, Any]:
    """What a row of the tables changes; a row behind ``softmax, `` is one of a softmax model, any other of a linear one."""
    attention, row = _attention_and_row(name)
    rows = {**BLOCKS, **TABLES[attention]}
    shift = dict(kv_shift=KVShiftConfig(), positional_embedding_type="rotary")
    chosen = rows[row] if row in rows else {**GROUPED, **shift, "attention_variant": ATTENTION_VARIANTS[row]}
    softmax = dict(attention="softmax", positional_embedding_type="standard", kv_shift=None)
    return chosen if attention == "linear" else {**softmax, **chosen}


def _attention_and_row(name: str) -> tuple[str, str]:
    return ("softmax", name.removeprefix("softmax, ")) if name.startswith("softmax, ") else ("linear", name)


def model_of(attention: str, row: str, /, *, gain: float = 1, peak: float = 1, **changes: Any) -> HookedKVTransformer:
    """A model of one row in float64, without gradients; what starts at 0, which hides mistakes, is drawn.

    Attention's weights are multiplied by ``gain``, and its queries by ``peak`` besides.
    """
    build = {"linear": linear_model, "softmax": small_model}[attention]
    name = row if attention == "linear" else f"softmax, {row}"
    model = build(**{"dtype": torch.float64, **row_of(name), **changes}).requires_grad_(False)
    generator = torch.Generator().manual_seed(5)
    for path, parameter in model.named_parameters():
        leaf = path.rsplit(".", 1)[-1]
        if leaf in ("b_KV", "b_D"):
            parameter.uniform_(leaf == "b_D", 1 + (leaf == "b_D"), generator=generator)
        elif leaf == "sinks":
            parameter.normal_(generator=generator)
        elif ".augment_" in path:
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * parameter.shape[1] ** -0.5)
        elif ".attn.W_" in path:
            parameter.mul_(gain * peak if path.endswith("attn.W_Q") else gain)
    return model


def sharp(name: str = "rope after", /, gain: float = 5, **changes: Any) -> HookedKVTransformer:
    """A model of one row, named as in :func:`row_of`, whose attention matters: TransformerLens draws its weights small."""
    return model_of(*_attention_and_row(name), gain=gain, **changes)


shared = functools.cache(sharp)
"""One for all tests that leave it as it is."""


def peaked(name: str, /, **changes: Any) -> HookedKVTransformer:
    """A model of one row whose attention is anything but uniform: keys must matter, or every choice of them is as good."""
    return sharp(name, gain=1, **{"peak": 12, "n_ctx": 120, **changes})


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


def logits_under(model: Any, bias: Any, text: torch.Tensor) -> torch.Tensor:
    with model.kv_bias(bias):
        return model(text)


def by_steps(model: Any, wanted: bool = True) -> Any:
    """``with by_steps(model): ...``: every layer computes scores and pattern as the base does, since they are hooked."""
    return model.hooks(fwd_hooks=[(lambda name: wanted and name.endswith("hook_pattern"), lambda x, hook: None)])


def warned_of(run: Callable[[], Any]) -> list[str]:
    """What ``run`` warns of."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in found]
