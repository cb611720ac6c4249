"""A bias as the cache of a Transformers model, which then generates, or does whatever takes a cache, without kvlens; and a
cache, as Transformers or a method that compresses caches leaves it, as a bias.

A prompt's own keys and values, each with weight 1, are what Transformers' ``DynamicCache`` holds. Other keys have weights, of
another number in every layer and head, while the mask of a Transformers model is one for all layers and heads. So each key
carries, in :data:`N_COLUMNS` further dimensions, what is to be added to its score, and the attention function
:data:`ATTENTION`, which ``model.set_attn_implementation("kvlens")`` chooses, reads it there:

    softmax over [q.c_r / scale + log w_r; q.k_j / scale], c_r the keys of the bias and k_j the text's

Any other attention function fails on keys of that size, instead of giving other numbers.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import eager_mask

from kvlens.errors import KVLensError, brief
from kvlens.kv_bias.features import VirtualKeys
from kvlens.kv_bias.fields import Fingerprint
from kvlens.kv_bias.fit import edited
from kvlens.kv_bias.layers import Keys, Layer
from kvlens.ops.softmax_attention import ExtraKeys

ATTENTION = "kvlens"
N_COLUMNS = 4
"""The logarithm of a key's weight and the key's distance from the text, in two parts each, since half precision has 8 bits."""
FURTHEST, PART = 2**15 - 1, 2**7
LOWEST = torch.finfo(torch.float16).min
"""The logarithm, in any dtype, of a weight of 0."""


def cache_of(bias: Any) -> DynamicCache:
    """See :meth:`kvlens.KVBias.to_cache`."""
    _refuse_what_no_cache_holds(bias)
    n_positions, cache = int(torch.as_tensor(bias.position_offset).flatten()[0]), DynamicCache()
    if all(_is_a_prompts_own(part, n_positions) for part in bias.attention):
        for layer, part in enumerate(bias.attention):
            cache.update(part.keys, part.b_kv, layer)
    else:
        if bias.fingerprint.positional_embedding_type == "alibi":
            raise KVLensError("to_cache: in a model with ALiBi only a bias that keeps every key of its prompt can be a cache")
        cache.layers = [_weighted(part, n_positions) for part in bias.attention]
    return cache


def _refuse_what_no_cache_holds(bias: Any) -> None:
    """Raise KVLensError with the reason where Transformers' cache cannot hold a bias."""
    what = "to_cache: this bias cannot be a cache of Transformers"
    _refuse_models_without(what, bias.fingerprint, any(layer.state is not None for layer in bias.layers))
    virtual, offsets = bias.kind == "virtual_keys", torch.as_tensor(bias.position_offset)
    by_query_head = virtual and any(part.n_heads != part.n_kv_heads for part in bias.attention)
    reasons = [
        (not virtual, "its features are no keys; convert with a method that keeps or fits keys, such as landmark"),
        (by_query_head, "query heads of a group read different keys, since single heads were selected; select layers"),
        (bool((offsets != offsets.flatten()[0]).any()), "its prompts differ in length; select_prompt takes one"),
    ]
    _refuse(what, reasons)


def _refuse_models_without(what: str, f: Fingerprint, recurrent: bool) -> None:
    """Raise KVLensError, which begins with ``what``, where a model's keys and values are not those of Transformers' cache."""
    changed = "value_biases_folded True", '"weights_processed": true'
    reasons = [
        (f.attention == "linear", "a model with linear attention has no keys to cache; convert a prompt, and attach its bias"),
        (recurrent, "the model has states of recurrent layers; convert a prompt, and attach its bias"),
        (f.d_key is not None, "the cache of latent attention holds no keys, but what they are computed from"),
        (f.kv_shift != "none", "no model of Transformers shifts keys and values; convert a prompt, and attach its bias"),
        (
            any(word in f.rest for word in changed),
            "weight processing moved the biases of values into b_O, so its values are not those of the Transformers model; "
            "load it with HookedKVTransformer.from_pretrained_no_processing, or as KVTransformerBridge, and convert again",
        ),
    ]
    _refuse(what, reasons)


def _refuse(what: str, reasons: Sequence[tuple[bool, str]]) -> None:
    """Raise KVLensError with the first reason that holds."""
    for holds, reason in reasons:
        if holds:
            raise KVLensError(f"{what}: {reason}")


def _is_a_prompts_own(part: Keys, n_positions: int) -> bool:
    """Whether the keys of a layer are those of all tokens before the text, in order and with weight 1."""
    distance = part.distance
    in_order = torch.arange(distance.shape[2], 0, -1, device=distance.device)
    whole = distance.shape[2] == n_positions
    return whole and bool((part.b_d == 1).all()) and not bool(part.log_scale.any()) and bool((distance == in_order).all())


def _weighted(part: Keys, n_positions: int) -> "BiasLayer":
    """The cache of one layer, whose keys carry their weights."""
    keys, distance, wide = part.keys, part.distance, torch.promote_types(part.b_d.dtype, torch.float32)
    extra = ExtraKeys.of(keys, part.b_kv.to(wide), part.b_d.to(wide), part.log_scale.to(wide))
    if extra is None:
        raise KVLensError(
            "to_cache: this bias cannot be a cache of Transformers: some of its keys have a negative weight, or a value "
            "without a weight, which a softmax cannot express; attach the bias to the model in kvlens"
        )
    order = distance.masked_fill(~part.used, FURTHEST).argsort(dim=-1, descending=True, stable=True)  # as windows expect
    log_weights, distance = (x.gather(-1, order) for x in (extra.log_weights, distance))
    keys, values = (x.gather(-2, order[..., None].expand_as(x)) for x in (keys, extra.values))
    columns = _columns(log_weights, distance).to(keys)
    return BiasLayer(torch.cat([keys, columns], dim=-1), values.to(keys), n_positions)


def _columns(
    log_weights: Float[Tensor, "batch kv_head r"], distance: Int[Tensor, "batch kv_head r"]
) -> Float[Tensor, "batch kv_head r 4"]:
    """Weights and distances as columns of keys; the inverse is :func:`_weights_and_distance`."""
    log_weights = log_weights.clamp(min=LOWEST)
    coarse = log_weights.bfloat16().to(log_weights)
    distance = distance.clamp(max=FURTHEST)
    return torch.stack([coarse, log_weights - coarse, distance // PART, distance % PART], dim=-1)


def _weights_and_distance(
    columns: Float[Tensor, "batch kv_head key 4"],
) -> tuple[Float[Tensor, "batch kv_head key"], Float[Tensor, "batch kv_head key"]]:
    """log w_r and distances, which are 0 of the text's own keys; the inverse of :func:`_columns`."""
    coarse, rest, far, near = columns.to(torch.promote_types(columns.dtype, torch.float32)).unbind(dim=-1)
    return coarse + rest, far * PART + near


def _read_columns(
    columns: Float[Tensor, "batch kv_head key 4"], window: int | None, n_queries: int
) -> Float[Tensor, "batch kv_head #pos key"]:
    """What is added to the scores of the last ``n_queries`` tokens: log w_r, and minus infinity beyond the window."""
    added, distance = (x[:, :, None] for x in _weights_and_distance(columns))
    if window is None:
        return added
    n_text = int((distance[0, 0, 0] == 0).sum())
    positions = torch.arange(n_text - n_queries, n_text, device=columns.device)[:, None]
    return added.masked_fill((distance > 0) & (distance + positions >= window), -torch.inf)


class BiasLayer(DynamicLayer):
    """The cache of one layer: the keys of a bias, then the text's.

    Transformers counts the tokens before the text as if all of them were there, so positions continue behind the prompt, and
    takes the keys of the bias for its last ones.

    Args:
        keys, values: [batch, kv_head, r, d_key + 4] and [batch, kv_head, r, d_head].
        n_positions: how many positions the prompt has.
    """

    def __init__(self, keys: Tensor, values: Tensor, n_positions: int):
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values, self.n_positions, self.n_of_bias = keys, values, n_positions, keys.shape[-2]

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """As Transformers' own: all keys and values, with those of new tokens behind them."""
        return super().update(F.pad(key_states, (0, N_COLUMNS)), value_states)

    def get_seq_length(self) -> int:
        """Tokens before the next one."""
        return self.n_positions + self.keys.shape[-2] - self.n_of_bias

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of keys in the next pass, and the position of the first."""
        return self.keys.shape[-2] + query_length, self.n_positions - self.n_of_bias

    def reset(self) -> None:
        """Forget the text, and keep the bias."""
        self.keys, self.values = self.keys[..., : self.n_of_bias, :], self.values[..., : self.n_of_bias, :]


READ = (DynamicLayer, DynamicSlidingWindowLayer, BiasLayer)
"""What a cache's layers may be: classes derived from them hold rounded keys, or more than keys."""


def fields_of_cache(model: Any, cache: object, positions: object, n_tokens: int | None) -> dict[str, Any]:
    """The fields of a bias; see :meth:`kvlens.KVBias.from_cache`."""
    f = model.fingerprint()
    _refuse_models_without("from_cache: a cache of Transformers is no bias of this model", f, model.cfg.attention == "hybrid")
    held = _checked_layers(cache, f)
    n = _n_tokens(model, held, positions, n_tokens)
    several = positions if isinstance(positions, Sequence) else [positions] * len(held)
    if len(several) != len(held):
        raise KVLensError(f"from_cache: expected positions of the {len(held)} layers, got those of {len(several)}")
    parts = [_part(number, layer, of_layer, n) for number, (layer, of_layer) in enumerate(zip(held, several, strict=True))]
    is_whole = positions is None and not any(isinstance(layer, BiasLayer) for layer in held)
    device = held[0].keys.device
    layers = [Layer.of_keys(part.map(lambda x: x.to(device)), of[0]) for part, of in zip(parts, f.heads, strict=True)]
    record = None if is_whole else edited(None, "taken from a cache")
    counts = {"n_prompt_tokens": n, "position_offset": n, "single": len(held[0].keys) == 1}
    return {"layers": tuple(layers), "fingerprint": f, "record": record, **counts}


def _checked_layers(cache: object, f: Fingerprint) -> list[DynamicLayer]:
    """The layers of a cache that holds keys and values of a model's sizes."""
    held = list(getattr(cache, "layers", ()))
    others = [type(layer).__name__ for layer in held if type(layer) not in READ]
    if not isinstance(cache, DynamicCache) or others:
        came = " of ".join([type(cache).__name__, *others[:1]])
        raise KVLensError(
            f"from_cache: expected a transformers.DynamicCache of keys and values as they are computed, got {came}"
        )
    wanted = "from_cache: expected keys and values of this model, {}; read the prompt with this model"
    if len(held) != f.n_layers:
        raise KVLensError(wanted.format(f"{f.n_layers} layers, got {len(held)}"))
    for number, (layer, (_, n_kv_heads, d_head, _)) in enumerate(zip(held, f.heads, strict=True)):
        sizes = [list(x.shape) for x in (layer.keys, layer.values) if x is not None]
        batch, r = (len(held[0].keys), max(1, sizes[0][2])) if sizes and len(sizes[0]) == 4 else (1, 1)
        d_stored = d_head + N_COLUMNS * isinstance(layer, BiasLayer)
        expected = [[batch, n_kv_heads, r, d_stored], [batch, n_kv_heads, r, d_head]]
        if sizes != expected:
            raise KVLensError(wanted.format(f"{expected} in layer {number}, got {sizes or 'nothing'}"))
    return held


def _n_tokens(model: Any, held: Sequence[DynamicLayer], positions: object, n_tokens: int | None) -> int:
    """How many tokens stand before the text, by what the layers count, or as given with the positions of keys."""
    counts = sorted({layer.get_seq_length() for layer in held})
    if positions is not None:
        if n_tokens is None or any(isinstance(layer, BiasLayer) for layer in held):
            raise KVLensError(
                "from_cache: expected n_tokens, the length of the prompt, with positions, and none for a bias's cache"
            )
        return n_tokens
    windows = [part.score_rule().window for layer in model.layers() for part in layer.parts]
    needed = [min(counts[-1], counts[-1] if window is None else window - 1) for window in windows]
    is_short = any(layer.keys.shape[2] < n for layer, n in zip(held, needed, strict=True) if not isinstance(layer, BiasLayer))
    if len(counts) > 1 or is_short or n_tokens not in (None, counts[0]):
        told = " to ".join(str(n) for n in dict.fromkeys((counts[0], counts[-1])))
        of = "" if n_tokens is None else f" of {n_tokens}"
        raise KVLensError(f"from_cache: the cache is not whole, it counts {told} tokens{of}; give positions and n_tokens")
    return counts[0]


def _part(number: int, layer: DynamicLayer, positions: object, n: int) -> Keys:
    """The keys of one layer, without those at no position."""
    keys, values = layer.keys.detach().clone(), layer.values.detach()
    log_scale, r = keys.new_zeros(keys.shape[:2]), keys.shape[2]
    if isinstance(layer, BiasLayer):
        log_weights, distance = _weights_and_distance(keys[..., -N_COLUMNS:])
        keys, distance = keys[..., :-N_COLUMNS], distance.long()
        distance = torch.where(distance == 0, r - torch.arange(r, device=keys.device), distance + r - layer.n_of_bias)
        log_scale = log_weights.amax(dim=-1).clamp(min=LOWEST).to(keys)
        b_d = (log_weights - log_scale[..., None]).exp().to(keys) * (log_weights > LOWEST / 2)
    else:
        at = torch.arange(n - r, n) if positions is None else _checked_positions(number, positions, keys, n)
        at = at.to(keys.device).expand(keys.shape[:3])
        b_d, distance = (at >= 0).to(keys), (n - at).masked_fill(at < 0, 1)
    b_kv = torch.where(b_d[..., None] == 0, 0, values * b_d[..., None])
    return Keys(b_kv, b_d, log_scale, VirtualKeys(keys, distance)).narrowed()


def _checked_positions(number: int, positions: object, keys: Tensor, n: int) -> Int[Tensor, "*#head key"]:
    """The positions of one layer's keys, of each row and head."""
    shape = keys.shape[:3]
    try:
        at = torch.as_tensor(positions)
    except (TypeError, ValueError, RuntimeError):  # of no numbers, or ragged
        at = torch.empty(0)
    is_whole = not (at.is_floating_point() or at.is_complex() or at.dtype == torch.bool)
    fits = is_whole and 0 < at.dim() <= 3 and at.shape[-1] == shape[2]
    fits = fits and all(a in (1, b) for a, b in zip(at.shape[::-1], shape[::-1], strict=False))
    if not fits or int(at.min()) < -1 or int(at.max()) >= n:
        raise KVLensError(
            f"from_cache: expected positions of the {shape[2]} keys of layer {number}, whole numbers below n_tokens={n} or -1 "
            f"for none, [key] or as its keys {list(shape)}, got {brief(positions)}"
        )
    return at.long()


def attention_with_weights(
    module: nn.Module,
    query: Float[Tensor, "batch head pos d_key"],
    key: Float[Tensor, "batch kv_head key d_stored"],
    value: Float[Tensor, "batch kv_head key d_head"],
    attention_mask: Float[Tensor, " batch #head pos masked"] | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Float[Tensor, " head"] | None = None,
    **unused: object,
) -> tuple[Float[Tensor, "batch pos head d_head"], None]:
    """Softmax attention, step by step as in Transformers; to scores of keys that carry weights, these are added."""
    d, n_queries, group = query.shape[-1], query.shape[2], query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (key[..., :d], value))
    scores = query @ keys.mT * (d**-0.5 if scaling is None else scaling)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is not None:
        n_keys, n_masked = scores.shape[-1], attention_mask.shape[-1]  # the mask is made for the number of keys of one layer
        mask = attention_mask[..., -n_keys:] if n_keys < n_masked else F.pad(attention_mask, (n_keys - n_masked, 0))
        scores = scores + mask
    if key.shape[-1] > d:
        scores = scores + _read_columns(key[..., d:], sliding_window, n_queries).repeat_interleave(group, dim=1)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.to(scores)[:, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    pattern = scores.softmax(dim=-1)[..., : keys.shape[2]].to(value.dtype)
    return (F.dropout(pattern, dropout, module.training) @ values).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attention_with_weights)
AttentionMaskInterface.register(ATTENTION, eager_mask)
