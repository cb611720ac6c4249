"""The configuration of a :class:`kvlens.HookedKVTransformer`: the base's, plus what kvlens adds.

It is validated on construction: an invalid combination raises an error with the reason instead of giving wrong results later.
"""

import functools
import math
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Annotated, Any, Literal

from kvlens.arguments import check_device
from kvlens.base import HookedTransformerConfig
from kvlens.base.config import NORM_OVER_ALL_HEADS
from kvlens.checks import INT_MAX, Within, checked, ensure, from_fields, one_of
from kvlens.components import FEATURE_MAPS
from kvlens.components.attention_variant import AttentionVariantConfig
from kvlens.components.config import AttentionConfig, KVShiftConfig
from kvlens.dtypes import dtype_of
from kvlens.errors import KVLensError, check_known

SIZE, POSITIVE = Annotated[int, Within(1, 2**31 - 1)], Annotated[float, Within(above=0)]
RANGES: dict[str, object] = {
    "n_layers": Annotated[
        int, Within(1, 10_000)
    ],  # each layer is a Python module: more would take minutes, and is probably a typing error
    **dict.fromkeys(("d_model", "d_head", "n_ctx"), SIZE),
    **dict.fromkeys(
        ("d_mlp", "n_key_value_heads", "window_size", "num_experts", "experts_per_token", "rotary_dim", "n_random_features"),
        SIZE | None,
    ),
    **dict.fromkeys(("n_heads", "d_vocab", "d_vocab_out"), SIZE | Literal[-1]),  # -1: d_model // d_head, and the tokenizer's
    "n_devices": SIZE,
    "eps": POSITIVE,
    "attn_scale": POSITIVE | Literal[-1],  # -1: sqrt(d_head)
    "clip_qkv": POSITIVE | None,
    "seed": Annotated[int, Within(-(2**63), 2**64 - 1)] | None,
    "normalization_type": Literal["LN", "LNPre", "RMS", "RMSPre"] | None,
    "attention_dir": Literal["causal", "bidirectional"],
    "init_mode": Literal["gpt2", "xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal", "muP"],
}
"""Types of fields whose TransformerLens annotation is not specific enough."""
OTHERS = ("device", "dtype", "n_params", "kv_shift", "attention_variant")
"""Fields that are checked elsewhere and may be given in several forms."""


def check_sizes(cfg: HookedTransformerConfig) -> None:
    """Raise KVLensError unless every field of ``cfg`` is valid. Called before TransformerLens reads it."""
    kinds = {**_annotations(cfg.__class__), **RANGES}  # type: ignore[arg-type]
    for field in fields(cfg):
        value = getattr(cfg, field.name)
        if field.name in OTHERS or value is field.default:
            continue
        value = ensure(field.name, kinds[field.name], value)
        is_huge = isinstance(value, int) and abs(value) > INT_MAX and field.name != "seed"
        setattr(cfg, field.name, float(value) if is_huge else value)
    check_device("device", cfg.device)


@functools.cache
def _annotations(kind: type) -> dict[str, object]:
    return typing.get_type_hints(kind)


ATTENTION_KINDS = ("softmax", "linear")
NORMALIZERS = ("kernel", "none")
LINEAR_ATTENTION_FORMS = ("auto", "parallel", "chunked", "recurrent")
POSITIONAL_TYPES = ("standard", "rotary", "alibi", "shortformer", "sinusoidal", "none")
NAMES: dict[str, Collection[str]] = {
    "attention": ATTENTION_KINDS,
    "positional_embedding_type": POSITIONAL_TYPES,
    "feature_map": FEATURE_MAPS,
    "normalizer": NORMALIZERS,
    "linear_attention_form": LINEAR_ATTENTION_FORMS,
    "accumulation_dtype": ("float32", "float64"),
}
"""Fields with a fixed set of values."""


@checked
class HookedKVTransformerConfig(AttentionConfig):
    """The base's configuration plus attention kind, KV shift and KV bias. Every argument is a keyword.

    Args:
        attention: ``softmax`` (the base's) or ``linear`` (ICLCA eq. 12-13).
        feature_map: phi of linear attention, one of :data:`kvlens.components.FEATURE_MAPS`.
        normalizer: ``kernel`` (divide by phi(q).D) or ``none`` (divide phi(q).phi(k) by ``attn_scale``).
        rotary_placement: RoPE ``after`` or ``before`` the feature map; None uses the map's default: ICLCA's "after" for
            identity, elu_plus_one and relu, "before" for the others.
        decay: None, ``"retnet"`` (gamma_h = 1 - 2^(-5-h)) or one gamma per query head; needs normalizer "none".
        n_random_features: m of the ``random`` map; None means 2 d_head.
        random_feature_kind: ``orthogonal`` (FAVOR+) or ``iid``.
        linear_attention_form: the form that computes a forward pass; ``auto`` uses the recurrent form for decoding, the
            parallel form up to 128 tokens and if the scores or the pattern are hooked, and the chunked form otherwise.
        accumulation_dtype: ``float32`` or ``float64``: features, states and sums of linear attention are computed in at least
            this precision. float64 makes a conversion exact to the last bit of a float32 model in nearly all cases.
        kv_shift: a :class:`KVShiftConfig` (or a dict of its fields, or True for the default one), None for no shift.
        attention_variant: a :class:`AttentionVariantConfig` (or a dict of its fields): regularised, augmented, negative or
            ridge attention (DUAL sec. 4); None for plain attention.
        trainable_kv_bias: make b_KV and b_D parameters (ICLCA sec. 6.3).
        alibi_slopes: one slope per head, with ``positional_embedding_type="alibi"``; None uses powers of 2^(-8 / n_heads).
        positional_embedding_type: the base's values, and ``"sinusoidal"`` and ``"none"``.
        value_biases_folded: weight processing moved b_V into b_O, so that values are not those of the original model; it is
            set there.
        seed: seed of the initial weights; unlike in TransformerLens, the global generators are left unchanged.

    Raises:
        KVLensError: an unknown value (the nearest is suggested) or an invalid combination.
    """

    def __post_init__(self):
        self.dtype = dtype_of(self.dtype)
        self.kv_shift = shift_of(self.kv_shift)
        check_sizes(self)
        super().__post_init__()
        if self.trust_remote_code:
            raise KVLensError("trust_remote_code=True is refused: kvlens runs no code that comes with a model or a tokenizer")
        for name, known in NAMES.items():
            ensure(name, one_of(known), getattr(self, name))
        if isinstance(self.attention_variant, Mapping):
            self.attention_variant = from_fields(AttentionVariantConfig, self.attention_variant)
        if self.attention == "linear":
            self._fill_linear()
        for refused, reason in self._contradictions():
            if refused:
                raise KVLensError(f"config: {reason}")
        if self.attention == "linear":
            FEATURE_MAPS[self.feature_map].check(self)

    @property
    def d_phi(self) -> int:
        """Features per head of the feature map."""
        return FEATURE_MAPS[self.feature_map].d_phi(self)

    @property
    def needs_own_cache(self) -> bool:
        """Whether decoding needs more than the base's cache of keys and values."""
        negatives = self.attention_variant is not None and self.attention_variant.needs_pattern
        return self.attention == "linear" or self.kv_shift is not None or negatives

    @property
    def why_no_kv_bias(self) -> str | None:
        """Why a prompt of a model like this has no KV bias; None if it has one."""
        return None if self.attention_variant is None else self.attention_variant.why_no_kv_bias

    @property
    def has_position_limit(self) -> bool:
        """Whether texts longer than ``n_ctx`` are impossible (learned positions, or the base's rotary tables)."""
        if self.attention == "linear":
            return self.positional_embedding_type == "standard"
        return self.positional_embedding_type not in ("sinusoidal", "none", "alibi")

    def to_json(self) -> dict[str, object]:
        """All fields as JSON types; :meth:`from_json` reads them back."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "device"}
        plain["dtype"] = str(self.dtype).removeprefix("torch.")
        plain["kv_shift"] = None if self.kv_shift is None else asdict(self.kv_shift)
        plain["attention_variant"] = None if self.attention_variant is None else self.attention_variant.to_json()
        for name in ("decay", "alibi_slopes", "attn_types"):
            value = plain[name]
            plain[name] = value if value is None or isinstance(value, str) else list(value)
        plain["attn_scale"] = float(self.attn_scale)
        plain["initializer_range"] = float(self.initializer_range)
        return plain

    @classmethod
    def from_json(cls, plain: dict[str, Any], **overrides: object) -> "HookedKVTransformerConfig":
        """Build from :meth:`to_json`'s dict."""
        return cls(**{**plain, **overrides})

    @classmethod
    def unwrap(cls, config: Any) -> "HookedKVTransformerConfig":
        """``config`` itself, or made from a TransformerLens configuration or a dict of fields."""
        config = super().unwrap(config)
        return config if isinstance(config, cls) else cls.from_tl(config)

    @classmethod
    def from_tl(cls, cfg: HookedTransformerConfig, **changes: object) -> "HookedKVTransformerConfig":
        """The same configuration as a plain TransformerLens one, with ``changes``."""
        check_known("config: no field", changes, (f.name for f in fields(cls)))
        values = {f.name: getattr(cfg, f.name) for f in fields(type(cfg)) if f.init}
        return cls(**{**values, "trust_remote_code": False, **changes})

    def _fill_linear(self) -> None:
        """Where positions rotate, by the feature map's default; and the decay by its name."""
        if self.positional_embedding_type == "rotary":
            if self.rotary_placement is None:
                self.rotary_placement = FEATURE_MAPS[self.feature_map].rotary_placement
            ensure("rotary_placement", Literal["after", "before"], self.rotary_placement)
        if isinstance(self.decay, str):
            ensure("decay", Literal["retnet"], self.decay)

    def _contradictions(self) -> Iterator[tuple[bool, str]]:
        """(whether it is there, what contradicts what) for fields that would be left out, or read in two ways."""
        for cfg in map(self.of_layer, range(self.n_layers if self.layers_differ else 1)):
            of = f"n_heads ({cfg.n_heads}) must be a multiple of n_key_value_heads ({cfg.n_key_value_heads})"
            yield cfg.n_heads % cfg.n_kv_heads != 0, of
        yield self.attn_only and self.parallel_attn_mlp, "parallel_attn_mlp needs MLPs: with attn_only=True there are none"
        yield (
            self.use_normalization_before_and_after and self.normalization_type not in (None, "RMS", "RMSPre"),
            "use_normalization_before_and_after: TransformerLens supports only RMS normalization after a layer; "
            f"normalization_type is {self.normalization_type!r}",
        )
        for name in ("alibi_slopes", "decay"):
            yield from self._by_head(name, getattr(self, name))
        alibi = self.positional_embedding_type == "alibi"
        yield self.alibi_slopes is not None and not alibi, "alibi_slopes needs positional_embedding_type='alibi'"
        if self.kv_shift is not None:
            yield self.attention_dir != "causal", "kv_shift looks at predecessors only: it needs attention_dir='causal'"
            yield (
                self.attention == "softmax" and self.clip_qkv is not None,
                "kv_shift reads the projections at hook_k and hook_v; clamps (clip_qkv) come after these, and exclude it",
            )
        if self.attention_variant is not None:
            yield from self._with_variant(self.attention_variant)
        if self.attention == "linear":
            for refused, reason in self._with_linear():
                yield refused, f"attention='linear' cannot be combined with {reason}"
            yield from self._of_rotation_and_decay()
        yield (
            self.trainable_kv_bias and self.attention != "linear",
            "trainable_kv_bias needs attention='linear': softmax attention has no b_KV to train",
        )

    def _by_head(self, name: str, numbers: str | Sequence[float] | None) -> Iterator[tuple[bool, str]]:
        if numbers is None or isinstance(numbers, str):
            return
        yield (
            self.n_heads_by_layer is not None,
            f"{name} holds one number per head, and the layers differ in their heads: leave it out",
        )
        yield len(numbers) != self.n_heads, f"{name}: expected one number per head ({self.n_heads}), got {len(numbers)}"

    def _with_variant(self, variant: AttentionVariantConfig) -> Iterator[tuple[bool, str]]:
        negative, ridge = "attention_variant: negative", "attention_variant: ridge"
        solved = "its kernel must be one function of key and key, and of query and key"
        alibi = self.positional_embedding_type == "alibi"
        weighted = alibi or self.decay is not None or self.attn_scores_soft_cap > 0 or self.use_attention_sinks
        yield (
            bool(variant.ridge and weighted),
            f"{ridge} cannot be combined with decay, ALiBi, position biases, caps or sinks: {solved}",
        )
        one_kernel = not (self.use_local_attn or self.use_logn_attn)
        yield bool(variant.ridge and not one_kernel), f"{ridge} needs one kernel for all queries: {solved}"
        causal = self.attention_dir == "causal"
        yield bool(variant.ridge and not causal), f"{ridge} is solved causally: it needs attention_dir='causal'"
        yield (
            bool(variant.negative and self.attention == "linear" and self.linear_attention_form not in ("auto", "parallel")),
            f"{negative} needs all scores, which linear_attention_form={self.linear_attention_form!r} never computes",
        )
        yield (
            self.trainable_kv_bias and variant.why_no_kv_bias is not None,
            f"trainable_kv_bias cannot be combined with this attention_variant: {variant.why_no_kv_bias}",
        )
        yield (
            self.original_architecture in NORM_OVER_ALL_HEADS or self.clip_qkv is not None,
            "attention_variant cannot be combined with norms over all heads or clip_qkv, which act inside the base's attention",
        )

    def _with_linear(self) -> list[tuple[bool, str]]:
        linear_in_scores = "linear attention has no softmax scores to act on"
        return [
            (self.positional_embedding_type == "alibi", f"ALiBi: it adds to softmax scores; {linear_in_scores}"),
            (
                self.positional_embedding_type == "shortformer",
                "shortformer: its keys include positions and its values do not, which no stored state can represent",
            ),
            (self.use_local_attn, "local windows: a state cannot forget one token; use decay, or softmax attention"),
            (self.attn_scores_soft_cap > 0, f"soft-capping: {linear_in_scores}"),
            (self.use_attention_sinks, f"attention sinks: {linear_in_scores}"),
            (self.use_logn_attn, "log-n scaling: it rescales softmax scores by the context length"),
            (self.use_dynamic_ntk_rope, "dynamic NTK: it rotates old keys again as the text grows, which a state cannot do"),
            (self.attention_dir != "causal", "bidirectional attention: the state holds only the past"),
            (self.clip_qkv is not None, "clip_qkv"),
            (
                self.original_architecture in NORM_OVER_ALL_HEADS,
                "the norm over all heads at once of OLMo 2, 3 and OLMoE",
            ),
        ]

    def _of_rotation_and_decay(self) -> Iterator[tuple[bool, str]]:
        rotary = self.positional_embedding_type == "rotary"
        yield self.rotary_placement is not None and not rotary, "rotary_placement needs positional_embedding_type='rotary'"
        if rotary:
            yield (
                self.rotary_placement == "after" and self.d_phi != self.d_head,
                f"rotary_placement='after' rotates the features, which needs d_phi = d_head; {self.feature_map!r} gives "
                f"d_phi = {self.d_phi} for d_head = {self.d_head}; use rotary_placement='before'",
            )
            yield (
                self.rotary_dim is None or not 0 < self.rotary_dim <= self.d_head or self.rotary_dim % 2 != 0,
                f"rotary_dim must be even and in 2..d_head ({self.d_head}), got {self.rotary_dim}",
            )
            yield (
                self.use_yarn_rope and self.yarn_attention_factor != 1.0,
                "a YaRN attention factor rescales keys, so that R_a R_b = R_(a+b) fails; linear needs it at 1",
            )
        yield (
            self.decay is not None and self.normalizer != "none",
            "decay needs normalizer='none': D does not decay, so a normalized sum would shrink",
        )
        if self.decay is not None and not isinstance(self.decay, str):
            inside = all(math.isfinite(g) and 0 < g <= 1 for g in self.decay)
            yield not inside, f"decay: every gamma must lie in (0, 1], got {list(self.decay)}"


def shift_of(value: KVShiftConfig | Mapping[str, Any] | bool | None) -> KVShiftConfig | None:
    """The shift given as a KVShiftConfig, a dict of its fields, True (the default shift) or False (no shift)."""
    if value is None or isinstance(value, KVShiftConfig):
        return value
    if isinstance(value, bool):
        return KVShiftConfig() if value else None
    return from_fields(KVShiftConfig, value)
