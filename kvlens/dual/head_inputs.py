"""The queries, keys, values and normalizers of th. 3.1 for a layer's heads on one text, read through hook points.

For a softmax head these are q and k after RoPE (and after shift and norm), v after the shift, and D = sum exp(q.k / scale). For
a linear head they are phi~(q) and phi~(k), v after the shift, and D from ``hook_normalizer``, or ``attn_scale`` under
normalizer "none". Grouped keys and values are repeated, so that everything has one row per query head. Numbers are float64.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from einops import repeat
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.checks import checked
from kvlens.errors import KVLensError
from kvlens.model import Augmented, HookedKVTransformer, heads_per_layer

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
    model: HookedKVTransformer,
    tokens: TokenRow,
    visit: Callable[[int, LayerReading], None],
    layers: Sequence[int] | None = None,
) -> None:
    """Run one text and pass each layer's reading to ``visit(layer, reading)`` during the forward pass.

    One forward pass without logits; nothing of a layer is kept after its visit. Layers after the last requested one do not run.

    Args:
        model: a model whose attention has a dual model.
        tokens: [pos].
        visit: called layer by layer.
        layers: which ones; None for all.

    Raises:
        KVLensError: invalid tokens, a layer that does not exist, or attention without a dual model.
    """
    wanted = range(model.cfg.n_layers) if layers is None else sorted(layers)
    for layer in wanted:
        check_index("layer", layer, model.cfg.n_layers)
    text = _one_text(model, tokens)
    check_attention(model, len(tokens))
    held: dict[str, Tensor] = {}

    def keep(x: Tensor, hook: Any) -> None:
        held[hook.name] = x

    def last(x: Tensor, hook: Any) -> None:
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


def reading_hooks(model: HookedKVTransformer, layer: int) -> list[str]:
    """The hook points from which a layer is read, ``hook_z`` first; all of them fire on every forward pass of this model."""
    cfg = model.cfg
    names = ["hook_z", _query_hook(model, "q"), _query_hook(model, "k"), _value_hook(model)]
    if cfg.normalizer == "kernel" if cfg.attention == "linear" else _has_bias(model):
        names.append("hook_normalizer")
    if _has_bias(model):
        names += ["hook_b_kv"] if cfg.attention == "linear" else ["hook_b_kv", "hook_b_keys"]
    return [f"blocks.{layer}.attn.{name}" for name in names]


def layer_reading(model: HookedKVTransformer, layer: int, cache: Any) -> LayerReading:
    """The reading from a cache that holds :func:`reading_hooks`, of one text (batch 1)."""

    def get(name: str) -> Tensor:
        x = cache[f"blocks.{layer}.attn.{name}"][0].double()
        return repeat(x, "pos head ... -> (head group) pos ...", group=heads_per_layer(model)[layer] // x.shape[1])

    q, k, v, z = (get(name) for name in (_query_hook(model, "q"), _query_hook(model, "k"), _value_hook(model), "hook_z"))
    softmax = model.cfg.attention == "softmax"
    terms = _softmax_terms(model, layer, cache, q, k) if softmax else _linear_terms(model, layer, cache)
    return LayerReading(q, k, v, z, **{"bias_features": k[:, :0], "bias_values": v[:, :0], **terms})


@checked
def check_attention(model: HookedKVTransformer, pos: int) -> None:
    """Raise KVLensError, with the reason, for attention that is not a kernel-weighted sum of values."""
    cfg = model.cfg
    rotary = cfg.positional_embedding_type == "rotary"
    variant, bias = cfg.attention_variant, model.attached_kv_bias
    changes_step = variant is not None and any(x is not None for x in (variant.regularised, variant.negative, variant.ridge))
    refused = [
        (changes_step, "regularised, negative or ridge attention: they correspond to a step on a different loss"),
        (
            cfg.attention == "softmax" and bias is not None and bias.kind != "virtual_keys",
            "a softmax bias whose features are not those of the exact kernel; virtual keys have them (methods exact, landmark)",
        ),
        (bias is not None and bias.batch_size not in (None, 1), "several prompts' biases at once; attach that of one prompt"),
        (
            cfg.attention == "softmax" and bias is not None and cfg.positional_embedding_type == "alibi",
            "ALiBi with a KV bias, whose keys have their own distances",
        ),
        (cfg.attention_dir != "causal", "bidirectional attention: tokens after the query would be demonstrations too"),
        (cfg.attn_scores_soft_cap > 0, "soft-capped scores: they are not a product of a query's features and a key's"),
        (cfg.use_logn_attn, "log-n scaling: it rescales queries after the last hook point on them"),
        (cfg.clip_qkv is not None, "clip_qkv: it clamps after the hook points on q, k and v"),
        (cfg.positional_embedding_type == "relative_positional_bias", "T5's position bias: each distance has its own kernel"),
        (
            cfg.use_local_attn and cfg.window_size is not None and pos > cfg.window_size,
            f"local windows: of {pos} tokens a query sees only the last {cfg.window_size}",
        ),
        (
            cfg.use_qk_norm and cfg.attention == "softmax" and not rotary and cfg.kv_shift is None,
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


def _one_text(model: HookedKVTransformer, tokens: Tensor) -> Int[Tensor, "one pos"]:
    model.check_tokens(tokens)
    return tokens[None].to(model.W_E.device)


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


def _has_bias(model: HookedKVTransformer) -> bool:
    return model.attached_kv_bias is not None or model.cfg.trainable_kv_bias


def _softmax_terms(model: HookedKVTransformer, layer: int, cache: Any, q: Tensor, k: Tensor) -> dict[str, Any]:
    attention: Any = model.blocks[layer].attn
    scale, pos = float(attention.attn_scale), q.shape[1]
    scores = q @ k.transpose(-1, -2) / scale
    log_decay = None
    if model.cfg.positional_embedding_type == "alibi":
        log_decay = -attention.alibi_slopes(q.device).to(q)  # the bias at distance 1
        tokens = torch.arange(pos, device=q.device, dtype=q.dtype)
        scores = scores + log_decay[:, None, None] * (tokens[:, None] - tokens)
    above = torch.ones(pos, pos, dtype=torch.bool, device=q.device).triu(1)
    log_normalizer = scores.masked_fill_(above, float("-inf")).logsumexp(dim=-1)
    if model.cfg.use_attention_sinks:
        log_normalizer = torch.logaddexp(log_normalizer, attention.sinks.to(q)[:, None])
    rows: dict[str, Tensor] = {}
    if _has_bias(model):  # its virtual keys, and their values times their weights
        at = f"blocks.{layer}.attn.hook_"
        log_normalizer = cache[at + "normalizer"][0].double().T
        rows = {"bias_features": cache[at + "b_keys"][0].double(), "bias_values": cache[at + "b_kv"][0].double()}
    signs = torch.ones_like(log_normalizer)
    return dict(log_normalizer=log_normalizer, normalizer_sign=signs, scale=scale, log_decay=log_decay, **rows)


def _linear_terms(model: HookedKVTransformer, layer: int, cache: Any) -> dict[str, Any]:
    attention: Any = model.blocks[layer].attn
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
