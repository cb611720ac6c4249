"""A model's fingerprint, its structure and a hash of its weights (:mod:`kvlens.kv_bias.fields`); and whether they changed."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from typing import Any, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import xxhash
from torch import Tensor, nn

from kvlens.base import HookedTransformer
from kvlens.base.config import HEAD_SIZES
from kvlens.errors import warn
from kvlens.kv_bias import Fingerprint, KVBias
from kvlens.memory import BLOCK_NUMBERS
from kvlens.model.config import HookedKVTransformerConfig

_Made = TypeVar("_Made")
NAMED = {
    *(f.name for f in fields(Fingerprint)),
    *("n_key_value_heads", "n_heads_by_layer", "n_key_value_heads_by_layer", "d_head_by_layer"),
}
"""Fields of the configuration that have a field of the fingerprint; each layer's sizes are in ``heads``."""
WITHOUT_EFFECT = {
    *("model_name", "tokenizer_name", "n_ctx", "seed", "dtype", "n_devices", "n_params", "trust_remote_code", "d_vocab_out"),
    *("init_weights", "init_mode", "initializer_range", "from_checkpoint", "tie_word_embeddings", "default_prepend_bos"),
    *("checkpoint_index", "checkpoint_label_type", "checkpoint_value", "tokenizer_prepends_bos", "layer_norm_folding"),
    *("use_attn_result", "use_split_qkv_input", "use_attn_in", "use_hook_mlp_in", "use_hook_tokens", "uses_rms_norm"),
    *("ungroup_grouped_query_attention", "linear_attention_form", "accumulation_dtype", "trainable_kv_bias"),
    *("load_in_4bit", "quantization_method", "train_seq_length"),
}
"""Fields of the configuration that change no activation, or only how it is computed. All others count, even new ones."""
_TRAINED_BIAS = (".attn.b_KV", ".attn.b_D")  # an attached bias replaces them
_FOUND: WeakKeyDictionary[nn.Module, tuple[list[ReferenceType[Tensor]], object, Any]] = WeakKeyDictionary()
"""What a model's weights and settings were when it was last looked at, and what was computed of them."""


def while_unchanged(model: nn.Module, settings: Sequence[object], compute: Callable[[], _Made]) -> _Made:
    """``compute()``, or what it gave last if since then no weight changed, as :class:`WeightsThen` sees it, and no setting.

    To hash the weights of a real model takes longer than to read a token.
    """
    now = WeightsThen(model)
    writes, places, firsts = now.seen
    held, then = list(map(ref, now.tensors)), (settings, writes, places, [of.tolist() for of in firsts])
    last = _FOUND.get(model)
    if last is None or then != last[1] or not all(map(operator.is_, held, last[0])):
        last = _FOUND[model] = held, then, compute()
    found: _Made = last[2]
    return found


def forget_hash(model: nn.Module) -> None:
    """Let :func:`while_unchanged` read all weights again."""
    _FOUND.pop(model, None)


class WeightsThen:
    """Whether a model's weights may have changed since, at less than a microsecond for each tensor: they are not read.

    Seen: a parameter in place of another; other memory (``weight.data = ...``, ``model.to``); what autograd counts as a write
    in place (``load_state_dict``, ``weight.add_`` under ``no_grad``, most optimizers); any write that changes the first number
    of a tensor (fused optimizers, ``weight.data.mul_``). Not seen: a write to other numbers alone through ``weight.data`` or
    numpy, or in a fused optimizer; a module in place of another.
    """

    def __init__(self, model: nn.Module):
        held = [
            (owner, name, tensor)
            for place, module in _modules(model)
            for owner in (module._parameters, module._buffers)
            for name, tensor in owner.items()
            if tensor is not None and is_weight(name) and not f".{place}.{name}".endswith(_TRAINED_BIAS)
        ]
        self.owners, self.names, self.tensors = (list(of) for of in zip(*held, strict=True))
        self.counted = [tensor for tensor in self.tensors if not tensor.is_inference()]
        self.firsts: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for tensor in self.tensors:
            if tensor.numel():
                first = tensor.detach().as_strided((1,), (1,))  # a view
                self.firsts.setdefault((tensor.device, tensor.dtype), []).append(first)
        self.seen = self._look()

    def changed(self) -> bool:
        """Whether anything of the above was seen."""
        if not all(map(operator.is_, map(dict.get, self.owners, self.names), self.tensors)):
            return True
        *before, firsts = self.seen
        *now, firsts_now = self._look()
        return now != before or not all(map(torch.equal, firsts, firsts_now))

    @torch.no_grad()
    def _look(self) -> tuple[list[int], list[int], list[Tensor]]:
        """How often each tensor was written to, where it lies, and its first number."""
        writes, places = list(map(_WRITES, self.counted)), list(map(Tensor.data_ptr, self.tensors))
        return writes, places, [torch.cat(of) for of in self.firsts.values()]


_WRITES = operator.attrgetter("_version")


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, with its name in the module that holds it; paths, as ``named_modules`` gives them, take most of its
    time."""
    seen, left = set(), [("", model)]
    while left:
        place, module = left.pop()
        if module not in seen:
            seen.add(module)
            yield place, module
            left += [(name, part) for name, part in module._modules.items() if part is not None]


def look_again(model: Any, bias: KVBias | None, then: WeightsThen | None) -> WeightsThen | None:
    """Warn if ``model`` no longer has the weights that ``bias`` was made from, as far as ``then`` sees it.

    Returns:
        What the next pass compares with; None once it was said.
    """
    if then is None or bias is None or not then.changed():
        return then
    if bias.fingerprint.weights == model.fingerprint().weights:
        return WeightsThen(model)
    warn(
        "the weights of this model have changed since the KV bias was attached. The bias holds keys and values of the old "
        "weights, which the new ones read as their own: convert the prompt again"
    )
    return None


def fingerprint_of(model: HookedTransformer) -> Fingerprint:
    """Structure and weights of this model, against which biases are checked.

    Reads every weight (about 10 GB per second) if one has changed since the last time.
    """
    settings = [list(value) if isinstance(value, list) else value for value in vars(model.cfg).values()]
    return while_unchanged(model, [*settings, model.rounded_from], partial(_fingerprint, model, model.cfg))


def _fingerprint(model: HookedTransformer, cfg: HookedKVTransformerConfig) -> Fingerprint:
    weights, rounded_from = weights_hash(model.state_dict()), model.rounded_from
    linear, shift, decay = cfg.attention == "linear", cfg.kv_shift, cfg.decay_per_head()
    shift_words = () if shift is None else (f"{k} {v}" for k, v in asdict(shift).items() if k != "init")
    layers = map(cfg.of_layer, range(cfg.n_layers))
    return Fingerprint(
        attention=cfg.attention,
        n_layers=cfg.n_layers,
        n_heads=cfg.n_heads,
        n_kv_heads=cfg.n_kv_heads,
        d_model=cfg.d_model,
        d_head=cfg.d_head,
        d_phi=cfg.d_phi if linear else 0,
        d_vocab=cfg.d_vocab,
        feature_map=cfg.feature_map if linear else "none",
        normalizer=cfg.normalizer if linear else "softmax",
        attn_scale=float(cfg.attn_scale),
        positional_embedding_type=cfg.positional_embedding_type,
        rotary_placement=cfg.rotary_placement,
        decay="none" if decay is None else ", ".join(f"{g:.9g}" for g in decay.tolist()),
        kv_shift=", ".join(shift_words) or "none",
        rest=_rest(cfg),
        heads=tuple((of.n_heads, of.n_kv_heads, of.d_head, of.d_phi if linear else 0) for of in layers),
        weights=rounded_from[1] if rounded_from is not None and weights == rounded_from[0] else weights,
    )


def weights_hash(state: Mapping[str, Tensor]) -> str:
    """xxh3-128 over names, shapes and float32 values of the weights and random projections in ``state_dict``."""
    hasher = xxhash.xxh3_128()
    for name in sorted(name for name in state if is_weight(name) and not name.endswith(_TRAINED_BIAS)):
        values = state[name].detach()
        hasher.update(f"{name}{list(values.shape)}".encode())
        for part in values.flatten().split(BLOCK_NUMBERS):
            hasher.update(part.to("cpu", torch.float32).numpy().data)
    return hasher.hexdigest()


def is_weight(name: str) -> bool:
    """Whether a name in the state dict is a weight rather than a table that TransformerLens recomputes."""
    return name.rsplit(".", 1)[-1] not in ("mask", "IGNORE", "rotary_sin", "rotary_cos")


def _rest(cfg: HookedKVTransformerConfig) -> str:
    plain = cfg.to_json()
    newer = ("attention_variant", "value_biases_folded", *(f"{name}_by_layer" for name in HEAD_SIZES))
    for name in newer:  # older biases stay valid
        if not plain[name]:
            del plain[name]
    return "; ".join(f"{name} {plain[name]}" for name in sorted(plain) if name not in NAMED | WITHOUT_EFFECT)
