"""The queries, keys, values and normalizers of th. 3.1 for a layer's heads on one text, read through hook points.

For a softmax head these are q and k after RoPE (and after shift and norm), v after the shift, and D = sum exp(q.k / scale). For
a linear head they are phi~(q) and phi~(k), v after the shift, and D from ``hook_normalizer``, or ``attn_scale`` under
normalizer "none". Grouped keys and values are repeated, so that everything has one row per query head. Numbers are float64.

Of another front end, whose attention is softmax, they are what conversion reads of it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from einops import repeat
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import get_device_for_block_index

from kvlens.checks import checked
from kvlens.components import KVAttention
from kvlens.errors import KVLensError
from kvlens.model import Augmented, HeadsRead, HookedKVTransformer, KVModel, attention_parts, heads_per_layer, visit_heads
from kvlens.model.protocol import PromptBatch
from kvlens.ops.softmax_features import ScoreRule

TokenRow = Int[Tensor, " pos"]


class LayerReading(NamedTuple):
    """One layer on one text, with one row per query head.

    Attributes:
        queries, keys: softmax: after RoPE; linear: phi~(q) and phi~(k).
        values: v.
        z: the head's own output, ``hook_z``.
        log_normalizer: log D of every position as a query; linear: log |D|.
        normalizer_sign: sign of D; it may be negative in a linear head with signed features or a subtracted bias.
        scale: scale in exp(q.k / scale); None for linear attention, where ``queries`` and ``keys`` are features.
        log_decay: log gamma, or minus ALiBi's slope; None for no decay.
        bias_features, bias_values: a linear model's attached or trained KV bias as rows phi and v with sum phi v^T = b_KV; a
            softmax model's as its virtual keys and their values, times their weights. No rows without.
    """

    queries: Float[Tensor, "head pos d_query"]
    keys: Float[Tensor, "head pos d_query"]
    values: Float[Tensor, "head pos d_head"]
    z: Float[Tensor, "head pos d_head"]
    log_normalizer: Float[Tensor, "head pos"]
    normalizer_sign: Float[Tensor, "head pos"]
    scale: float | None
    log_decay: Float[Tensor, " head"] | None
    bias_features: Float[Tensor, "head row d_query"]
    bias_values: Float[Tensor, "head row d_head"]


@checked
@torch.no_grad()
def read_layers(
    model: KVModel,
    tokens: TokenRow,
    visit: Callable[[int, LayerReading], None],
    layers: Sequence[int] | None = None,
) -> None:
    """Run one text and pass each layer's reading to ``visit(layer, reading)`` during the forward pass.

    One forward pass without logits; nothing of a layer is kept after its visit. Layers after the last requested one do not run.
    Of a model that is no HookedKVTransformer, two passes; the queries, keys, values and outputs of all layers are kept.

    Args:
        model: a model whose attention has a dual model.
        tokens: [pos].
        visit: called layer by layer.
        layers: which ones; None for all.

    Raises:
        KVLensError: invalid tokens, a layer that does not exist, or attention without a dual model.
    """
    n_layers = model.cfg.n_layers
    wanted = range(n_layers) if layers is None else [check_index("layer", layer, n_layers) for layer in sorted(layers)]
    text = _one_text(model, tokens)
    check_attention(model, len(tokens))
    if not isinstance(model, HookedKVTransformer):
        return _read_softmax(model, text, lambda layer, reading: visit(layer, reading) if layer in wanted else None)
    held: dict[str, Tensor] = {}

    def keep(x: Tensor, hook: HookPoint) -> None:
        held[hook.name] = x

    def last(x: Tensor, hook: HookPoint) -> None:
        held[hook.name] = x
        layer = int(hook.name.split(".")[1])
        reading = layer_reading(model, layer, held)
        held.clear()
        visit(layer, reading)

    hooks: list[tuple[str, Callable]] = []
    for layer in wanted:
        z, *others = reading_hooks(model, layer)
        hooks += [*((name, keep) for name in others), (z, last)]
    stop = None if wanted[-1] == model.cfg.n_layers - 1 else wanted[-1] + 1
    mask = torch.ones_like(text)  # a pad token in the given text is text, not padding
    model.run_with_hooks(text, attention_mask=mask, return_type=None, fwd_hooks=hooks, stop_at_layer=stop)


def _read_softmax(model: KVModel, text: Int[Tensor, "one pos"], visit: Callable[[int, LayerReading], None]) -> None:
    """As :func:`read_layers`, of all layers of another front end: one pass for queries, keys and values, another for z."""
    read, held = model.read_prompt(PromptBatch(text, None, has_batch=True), with_queries=True), dict[str, Tensor]()
    queries = read.queries or []

    def keep(x: Tensor, hook: HookPoint) -> None:
        held[hook.name] = x

    def see(layer: int, heads: HeadsRead) -> None:
        q, z = (x[0].double().transpose(0, 1) for x in (queries[layer], heads.z))
        k, v = (x[0].double().repeat_interleave(len(q) // x.shape[1], dim=0) for x in (read.keys[layer], read.values[layer]))
        terms = _softmax_terms(model, layer, held, q, k)
        visit(layer, LayerReading(q, k, v, z, **{"bias_features": k[:, :0], "bias_values": v[:, :0], **terms}))

    of_a_bias = ("normalizer", "b_keys", "b_kv") if _has_bias(model) else ()
    hooks = [(f"blocks.{layer}.attn.hook_{name}", keep) for layer in range(model.cfg.n_layers) for name in of_a_bias]
    with model.hooks(fwd_hooks=hooks):
        visit_heads(model, text, see, ("z",))


def reading_hooks(model: HookedKVTransformer, layer: int) -> list[str]:
    """The hook points from which a layer is read, ``hook_z`` first; all of them fire on every forward pass of this model."""
    cfg = model.cfg
    names = ["hook_z", _query_hook(model, "q"), _query_hook(model, "k"), _value_hook(model)]
    if cfg.normalizer == "kernel" if cfg.attention == "linear" else _has_bias(model):
        names.append("hook_normalizer")
    if _has_bias(model):
        names += ["hook_b_kv"] if cfg.attention == "linear" else ["hook_b_kv", "hook_b_keys"]
    return [f"blocks.{layer}.attn.{name}" for name in names]


def layer_reading(model: HookedKVTransformer, layer: int, cache: Mapping[str, Tensor]) -> LayerReading:
    """The reading from a cache that holds :func:`reading_hooks`, of one text (batch 1)."""

    def get(name: str) -> Tensor:
        x = cache[f"blocks.{layer}.attn.{name}"][0].double()
        return repeat(x, "pos head ... -> (head group) pos ...", group=heads_per_layer(model)[layer] // x.shape[1])

    q, k, v, z = (get(name) for name in (_query_hook(model, "q"), _query_hook(model, "k"), _value_hook(model), "hook_z"))
    softmax = model.cfg.attention == "softmax"
    terms = _softmax_terms(model, layer, cache, q, k) if softmax else _linear_terms(model, layer, cache)
    return LayerReading(q, k, v, z, **{"bias_features": k[:, :0], "bias_values": v[:, :0], **terms})


@checked
def check_attention(model: KVModel, pos: int) -> None:
    """Raise KVLensError, with the reason, for attention that is not a kernel-weighted sum of values."""
    cfg, hooked = model.cfg, isinstance(model, HookedKVTransformer)
    rotary = cfg.positional_embedding_type == "rotary"
    variant, bias = cfg.attention_variant, model.attached_kv_bias
    parts = attention_parts(model) if cfg.attention == "softmax" else []
    rules: list[ScoreRule] = [part.score_rule() for part in parts]
    window = min((rule.window for rule in rules if rule.window is not None), default=pos)
    changes_step = variant is not None and any(x is not None for x in (variant.regularised, variant.negative, variant.ridge))
    refused = [
        (not hooked and len(rules) < cfg.n_layers, "a layer without attention"),
        (any("gate" in part.attention_points() for part in parts), "gated heads, whose outputs are no sum of values"),
        (changes_step, "regularised, negative or ridge attention: they correspond to a step on a different loss"),
        (
            cfg.attention == "softmax" and bias is not None and bias.kind != "virtual_keys",
            "a softmax bias whose features are not those of the exact kernel; virtual keys have them (methods exact, landmark)",
        ),
        (bias is not None and bias.batch_size not in (None, 1), "several prompts' biases at once; attach that of one prompt"),
        (
            bias is not None and any(rule.slopes is not None for rule in rules),
            "ALiBi with a KV bias, whose keys have their own distances",
        ),
        (cfg.attention_dir != "causal", "bidirectional attention: tokens after the query would be demonstrations too"),
        (any(rule.soft_cap for rule in rules), "soft-capped scores: they are not a product of a query's features and a key's"),
        (hooked and cfg.use_logn_attn, "log-n scaling: it rescales queries after the last hook point on them"),
        (hooked and cfg.clip_qkv is not None, "clip_qkv: it clamps after the hook points on q, k and v"),
        (cfg.positional_embedding_type == "relative_positional_bias", "T5's position bias: each distance has its own kernel"),
        (pos > window, f"local windows: of {pos} tokens a query sees only the last {window}"),
        (
            hooked and cfg.use_qk_norm and cfg.attention == "softmax" and not rotary and cfg.kv_shift is None,
            "a query-key norm without rotary positions: no hook point shows q and k after the norm",
        ),
    ]
    for refuse, reason in refused:
        if refuse:
            raise KVLensError(f"dual model: not defined for {reason}")


def check_index(what: str, index: int, n: int) -> int:
    """``index`` counted from 0. Raises KVLensError if it does not exist."""
    if not -n <= index < n:
        raise KVLensError(f"dual model: {what} {index!r} does not exist; there are {n}, from 0 to {n - 1}")
    return index % n


def _one_text(model: KVModel, tokens: Tensor) -> Int[Tensor, "one pos"]:
    model.check_tokens(tokens)
    return tokens[None].to(get_device_for_block_index(0, model.cfg))


def _query_hook(model: HookedKVTransformer, x: str) -> str:
    """The hook point of q or k as used in the scores."""
    cfg = model.cfg
    rotary = cfg.positional_embedding_type == "rotary"
    if cfg.attention == "linear":
        return f"hook_rot_{x}" if rotary and cfg.rotates_after else f"hook_phi_{x}"
    if rotary:
        return f"hook_rot_{x}"
    augmented = _augmented(model)
    if x == "k" and augmented is not None and augmented.keys:
        return "hook_k_augmented"
    shifted = cfg.kv_shift is not None and (cfg.kv_shift.queries if x == "q" else cfg.kv_shift.keys)
    return f"hook_{x}_shifted" if shifted else f"hook_{x}"


def _value_hook(model: HookedKVTransformer) -> str:
    shift, augmented = model.cfg.kv_shift, _augmented(model)
    if augmented is not None and augmented.values:
        return "hook_v_augmented"
    return "hook_v_shifted" if shift is not None and shift.values else "hook_v"


def _augmented(model: HookedKVTransformer) -> Augmented | None:
    return None if model.cfg.attention_variant is None else model.cfg.attention_variant.augmented


def _has_bias(model: KVModel) -> bool:
    return model.attached_kv_bias is not None or getattr(model.cfg, "trainable_kv_bias", False)


def _softmax_terms(model: KVModel, layer: int, cache: Mapping[str, Tensor], q: Tensor, k: Tensor) -> dict[str, Any]:
    part = attention_parts(model)[layer]
    rule, pos = part.score_rule(), q.shape[1]
    scores = q @ k.transpose(-1, -2) / rule.scale
    log_decay = None
    if rule.slopes is not None:
        log_decay = -rule.slopes.to(q)  # the bias at distance 1
        tokens = torch.arange(pos, device=q.device, dtype=q.dtype)
        scores = scores + log_decay[:, None, None] * (tokens[:, None] - tokens)
    above = torch.ones(pos, pos, dtype=torch.bool, device=q.device).triu(1)
    log_normalizer = scores.masked_fill_(above, float("-inf")).logsumexp(dim=-1)
    if part.sinks is not None:
        log_normalizer = torch.logaddexp(log_normalizer, part.sinks.to(q)[:, None])
    rows: dict[str, Tensor] = {}
    if _has_bias(model):  # its virtual keys, and their values times their weights
        at = f"blocks.{layer}.attn.hook_"
        log_normalizer = cache[at + "normalizer"][0].double().T
        rows = {"bias_features": cache[at + "b_keys"][0].double(), "bias_values": cache[at + "b_kv"][0].double()}
    signs = torch.ones_like(log_normalizer)
    return dict(log_normalizer=log_normalizer, normalizer_sign=signs, scale=rule.scale, log_decay=log_decay, **rows)


def _linear_terms(model: HookedKVTransformer, layer: int, cache: Mapping[str, Tensor]) -> dict[str, Any]:
    attention: KVAttention = model.blocks[layer].attn
    at = f"blocks.{layer}.attn."
    z = cache[at + "hook_z"][0]
    if model.cfg.normalizer == "kernel":
        normalizer = cache[at + "hook_normalizer"][0].double().T
    else:
        normalizer = z.new_full((z.shape[1], z.shape[0]), float(attention.attn_scale), dtype=torch.float64)
    rows: dict[str, Tensor] = {}
    if _has_bias(model):
        left, sizes, right = torch.linalg.svd(cache[at + "hook_b_kv"][0].double(), full_matrices=False)
        rows = {"bias_features": left.transpose(-1, -2), "bias_values": sizes[..., None] * right}
    gamma = model.cfg.decay_per_head()
    return dict(
        log_normalizer=normalizer.abs().log(),
        normalizer_sign=normalizer.sign(),
        scale=None,
        log_decay=None if gamma is None else gamma.log().to(z.device),
        **rows,
    )
