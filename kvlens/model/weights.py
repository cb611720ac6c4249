"""What is done with a model's weights: processing that preserves the output, their fingerprint, and whether they have changed.

**Processing**: which of TransformerLens' steps preserve a kvlens model's output, and which would silently change it.

**The fingerprint** is a model's structure, and a hash of its weights in float32 (see :mod:`kvlens.kv_bias.fields`).
"""

import copy
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import asdict, fields
from functools import partial
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import xxhash
from torch import Tensor, nn
from transformer_lens.weight_processing import ProcessWeights

from kvlens.base import HookedTransformer
from kvlens.base.config import HEADS
from kvlens.base.weights import groups_differ
from kvlens.errors import KVLensError, warn
from kvlens.kv_bias import Fingerprint
from kvlens.memory import BLOCK_NUMBERS
from kvlens.model.attention_variant import AttentionVariantConfig
from kvlens.model.config import HookedKVTransformerConfig


def changes_values(weights: Mapping[str, Tensor], steps: Mapping[str, bool]) -> bool:
    """Whether processing makes other values than the weights do now: without b_V, part of which comes from a folded norm."""
    names = ("attn.b_V", "attn._b_V", "ln1.b") if steps["fold_ln"] else ("attn.b_V", "attn._b_V")
    biases = (weight for name, weight in weights.items() if name.endswith(names))
    return steps["refactor_factored_attn_matrices"] or (steps["fold_value_biases"] and any(bool(b.any()) for b in biases))


Process = Callable[[dict[str, Tensor], Mapping[str, bool]], dict[str, Tensor]]


def pieces(cfg: HookedKVTransformerConfig, names: Iterable[str]) -> list[tuple[list[str], Process]]:
    """The weights in pieces that can be processed one by one: the names of each piece, and what processes it."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        parts = name.split(".")
        found[parts[1] if parts[0] == "blocks" else "end" if parts[0] in ("unembed", "ln_final") else ""].append(name)
    every: dict[str, Process] = {str(layer): partial(processed_layer, cfg, layer) for layer in range(cfg.n_layers)}
    every |= {"end": partial(processed_end, cfg), "": partial(processed_embedding, cfg)}
    return [(found.get(piece, []), process) for piece, process in every.items()]


def processed_layer(
    cfg: HookedKVTransformerConfig, layer: int, weights: dict[str, Tensor], steps: Mapping[str, bool]
) -> dict[str, Tensor]:
    """The weights of a layer as TransformerLens' ``process_weights`` makes them, which gets it as the only one of a model."""
    own, alone = f"blocks.{layer}.", "blocks.0."
    one = copy.copy(cfg)
    one.n_layers = 1
    dtypes = {name: weight.dtype for name, weight in weights.items()}
    renamed = {name.replace(own, alone): weight for name, weight in weights.items()}
    renamed = {name: weight.float() if weight.is_floating_point() else weight for name, weight in renamed.items()}
    nothing = torch.zeros(1, 1)  # of the ends, which TransformerLens asks for
    ends = {"embed.W_E": nothing, "pos_embed.W_pos": nothing}
    processed = ProcessWeights.process_weights({**renamed, **ends}, one, **{**steps, "center_unembed": False})
    processed = {name.replace(alone, own): weight for name, weight in processed.items() if name not in ends}
    return {name: weight.to(dtypes.get(name, weight.dtype)) for name, weight in processed.items()}


def processed_end(cfg: HookedKVTransformerConfig, weights: dict[str, Tensor], steps: Mapping[str, bool]) -> dict[str, Tensor]:
    """The final norm and the unembedding with the norm folded in and the mean of each row taken out, in one copy.

    TransformerLens' steps make four of what may be most of a model.
    """
    dtype = weights["unembed.W_U"].dtype
    wide = torch.promote_types(dtype, torch.float32)
    w_u = weights.pop("unembed.W_U").to(wide, copy=True, memory_format=torch.contiguous_format)
    b_u = weights["unembed.b_U"].to(wide)
    is_layer_norm = cfg.normalization_type in ("LN", "LNPre")
    if steps["fold_ln"] and "ln_final.w" in weights:
        if is_layer_norm and not cfg.final_rms:
            b_u = b_u + weights.pop("ln_final.b").to(wide) @ w_u
        w_u *= weights.pop("ln_final.w").to(wide)[:, None]
        if is_layer_norm and not cfg.final_rms:
            w_u -= w_u.mean(0, keepdim=True)
    if steps["center_unembed"]:
        w_u -= w_u.mean(-1, keepdim=True)
        b_u = b_u - b_u.mean()
    return {**weights, "unembed.W_U": w_u.to(dtype), "unembed.b_U": b_u.to(dtype)}


def processed_embedding(
    cfg: HookedKVTransformerConfig, weights: dict[str, Tensor], steps: Mapping[str, bool]
) -> dict[str, Tensor]:
    """The embeddings as TransformerLens' ``process_weights`` makes them, which gets them as a model without layers."""
    none = copy.copy(cfg)
    none.n_layers = 0
    only = dict.fromkeys(steps, False) | {"center_writing_weights": steps["center_writing_weights"]}
    return ProcessWeights.process_weights(weights, none, **only)


@torch.no_grad()
def take_weights(model: HookedTransformer, weights: dict[str, Tensor], given: Set[int]) -> None:
    """Move weights from the dict into ``model`` one by one, copying those whose storage is shared.

    Args:
        model: the model whose parameters are replaced in place.
        weights: the weights by name.
        given: addresses of storage that belongs to other owners.
    """
    parameters = dict(model.named_parameters())
    rest: dict[str, Tensor] = {}
    for name in list(weights):
        weight, own = weights.pop(name), parameters.get(name)
        is_ours = weight.untyped_storage().data_ptr() not in given
        if own is not None and is_ours and (own.shape, own.dtype, own.device) == (weight.shape, weight.dtype, weight.device):
            own.data = weight.contiguous()
        elif own is not None and own.shape == weight.shape:
            own.copy_(weight)
        else:  # buffers, and weights that do not match
            rest[name] = weight
    if rest:
        model.load_state_dict(rest, strict=False)


def check_weight_processing(cfg: HookedKVTransformerConfig, fold_value_biases: bool | None, refactor: bool) -> bool:
    """Whether to fold value biases; None means "if that preserves the output".

    Folding b_V into b_O assumes that each row of the pattern sums to 1 and that every value contains b_V exactly once. Linear
    attention need not satisfy the first (with RoPE after the map, or normalizer "none"), nor does a value shift satisfy the
    second, since the first token lacks a predecessor.

    Raises:
        KVLensError: the requested processing would change the output.
    """
    reason = _why_not_fold(cfg)
    if fold_value_biases and reason:
        raise KVLensError(f"fold_value_biases would change this model's output: {reason}. Pass fold_value_biases=False.")
    between = "the shift acts" if cfg.kv_shift is not None else "an attention variant may act"
    if refactor and groups_differ(cfg):
        raise KVLensError(f"refactor_factored_attn_matrices: {reason}. Pass refactor_factored_attn_matrices=False.")
    if refactor and (cfg.attention == "linear" or cfg.kv_shift is not None or cfg.attention_variant is not None):
        raise KVLensError(
            "refactor_factored_attn_matrices keeps only q.k and folds b_V away, which would change this model's output: "
            f"{reason or f'{between} between the two factors'}. Pass refactor_factored_attn_matrices=False."
        )
    return reason is None if fold_value_biases is None else fold_value_biases


def refuse_wrong_folding(
    cfg: HookedKVTransformerConfig, state_dict: Mapping[str, Tensor], *, fold_ln: bool, center_writing_weights: bool
) -> None:
    """Raise KVLensError if folding norms or centering writing weights would change the output or is not supported.

    TransformerLens does not check these cases and would return a different model.
    """
    kind = cfg.normalization_type
    if cfg.positional_embedding_type == "shortformer" and (fold_ln or center_writing_weights) and kind is not None:
        _refuse("shortformer adds positions to keys and queries after the norm", fold_ln, center_writing_weights)
    layer_norm = kind in ("LN", "LNPre")
    if center_writing_weights and layer_norm and cfg.num_experts:
        _refuse("TransformerLens centers the experts' router too", False, True)
    if layer_norm and cfg.final_rms and (fold_ln or center_writing_weights):
        _refuse("the final RMS norm, unlike a LayerNorm, depends on the mean of the stream", fold_ln, center_writing_weights)
    if fold_ln and kind == "LN" and cfg.gated_mlp and any(bool(w.any()) for n, w in state_dict.items() if n.endswith("ln2.b")):
        _refuse("the gate has no bias that could absorb the norm's", True, False)
    if fold_ln and any(bool(weight.any()) for weight in _beside_projections(cfg, state_dict)):
        _refuse("the MLP beside a projection has no bias that could absorb the norm's", True, False)
    if (
        fold_ln
        and kind is not None
        and cfg.act_fn is not None
        and cfg.act_fn.endswith("_ln")
        and (cfg.attn_only or kind != "LN")
    ):
        _refuse(f"TransformerLens folds the norm of act_fn={cfg.act_fn!r} into MLPs only with LayerNorm", True, False)


def _beside_projections(cfg: HookedKVTransformerConfig, state_dict: Mapping[str, Tensor]) -> list[Tensor]:
    """The last layers of all MLPs that read what the norms of ``state_dict`` give."""
    augmented = None if cfg.attention_variant is None else cfg.attention_variant.augmented
    if augmented is None or augmented.parallel is None or not any(name.endswith("ln1.w") for name in state_dict):
        return []
    return [w for name, w in state_dict.items() if ".augment_" in name and name.endswith(f".weights.{augmented.depth - 1}")]


def _refuse(reason: str, fold_ln: bool, center_writing_weights: bool) -> None:
    wrong = [n for n, asked in (("fold_ln", fold_ln), ("center_writing_weights", center_writing_weights)) if asked]
    remedy = ", ".join(f"{name}=False" for name in wrong)
    raise KVLensError(f"{' and '.join(wrong)} would change this model's output: {reason}. Pass {remedy}.")


def _why_not_fold(cfg: HookedKVTransformerConfig) -> str | None:
    if cfg.attention == "linear":
        return "rows of linear attention need not sum to 1"
    if cfg.kv_shift is not None and cfg.kv_shift.values:
        return "with a value shift the first token lacks a predecessor, so its value contains b_V beta_1 times, not once"
    if groups_differ(cfg):
        return "its layers differ in the number of query heads per key-value head, of which TransformerLens' folding knows one"
    if cfg.use_attention_sinks:
        return "with attention sinks the rows of the pattern sum to less than 1"
    return None if cfg.attention_variant is None else _why_not_fold_under(cfg.attention_variant)


def _why_not_fold_under(variant: AttentionVariantConfig) -> str | None:
    """Why an attention variant prevents folding b_V into b_O; "normalised" regularization and augmented keys do not."""
    if variant.ridge is not None:
        return "the weights of ridge attention need not sum to 1"
    if variant.negative is not None:
        return "negative samples subtract beta from each row's sum"
    if variant.augmented is not None and variant.augmented.values and variant.augmented.parallel is None:
        return "values pass through an MLP after b_V is added"
    if variant.regularised is not None and variant.regularised.form != "normalised":
        return "regularised attention subtracts alpha times a token's own value"
    return None


NAMED = {f.name for f in fields(Fingerprint)} | {"n_key_value_heads", *(f"{name}_by_layer" for name in HEADS)}
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
_HASHED: WeakKeyDictionary[nn.Module, tuple[list[ReferenceType[Tensor]], Any, str]] = WeakKeyDictionary()
"""What a model's weights were when they were last hashed, and their hash."""


def hashed_once(model: nn.Module, weights: Callable[[], Mapping[str, Tensor]]) -> str:
    """:func:`weights_hash` of ``weights()``, or the last one if no weight changed, as :class:`WeightsThen` sees it.

    To hash the weights of a real model takes longer than to read a token.
    """
    now = WeightsThen(model)
    held, numbers = list(map(ref, now.tensors)), now.numbers()
    held_then, numbers_then, found = _HASHED.get(model, ((), None, ""))
    if numbers != numbers_then or not all(map(operator.is_, held, held_then)):
        found = weights_hash(weights())
        _HASHED[model] = held, numbers, found
    return found


def forget_hash(model: nn.Module) -> None:
    """Let :func:`hashed_once` read all weights again."""
    _HASHED.pop(model, None)


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
            for path, module in model.named_modules()
            for owner in (module._parameters, module._buffers)
            for name, tensor in owner.items()
            if tensor is not None and is_weight(name) and not f"{path}.{name}".endswith(_TRAINED_BIAS)
        ]
        self.owners, self.names, self.tensors = (list(of) for of in zip(*held, strict=True))
        self.counted = [tensor for tensor in self.tensors if not tensor.is_inference()]
        self.firsts: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for tensor in self.tensors:
            if tensor.numel():
                first = tensor.detach().as_strided((1,), (1,))  # a view
                self.firsts.setdefault((tensor.device, tensor.dtype), []).append(first)
        self.seen = self._look()

    def numbers(self) -> tuple[list[int], list[int], list[list[float]]]:
        """What was seen of the weights, without the tensors themselves."""
        writes, places, firsts = self.seen
        return writes, places, [of.tolist() for of in firsts]

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


def look_again(model: Any, bias: Any, then: WeightsThen | None) -> WeightsThen | None:
    """Warn if ``model`` no longer has the weights that ``bias`` was made from, as far as ``then`` sees it.

    Returns:
        What the next pass compares with; None once it was said.
    """
    if then is None or not then.changed():
        return then
    if bias.fingerprint.weights == model.fingerprint().weights:
        return WeightsThen(model)
    warn(
        "the weights of this model have changed since the KV bias was attached. The bias holds keys and values of the old "
        "weights, which the new ones read as their own: convert the prompt again"
    )
    return None


def fingerprint_of(model: nn.Module, cfg: HookedKVTransformerConfig) -> Fingerprint:
    """Structure and current weights. Reads every weight (about 10 GB per second) if one has changed since the last time."""
    linear = cfg.attention == "linear"
    decay = cfg.decay_per_head()
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
        kv_shift="none" if cfg.kv_shift is None else _shift_words(cfg),
        rest=_rest(cfg),
        heads=heads_of_layers(cfg),
        weights=hashed_once(model, model.state_dict),
    )


def heads_of_layers(cfg: HookedKVTransformerConfig) -> tuple[tuple[int, int, int, int], ...]:
    """Query heads, key-value heads, d_head and d_phi (0 for softmax) of each layer."""
    layers = map(cfg.of_layer, range(cfg.n_layers))
    return tuple((of.n_heads, of.n_kv_heads, of.d_head, of.d_phi if cfg.attention == "linear" else 0) for of in layers)


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


def _shift_words(cfg: HookedKVTransformerConfig) -> str:
    shift = {k: v for k, v in asdict(cfg.kv_shift).items() if k != "init"}  # type: ignore[arg-type]
    return ", ".join(f"{k} {v}" for k, v in shift.items())


def _rest(cfg: HookedKVTransformerConfig) -> str:
    plain = cfg.to_json()
    for name in ("attention_variant", "value_biases_folded"):  # newer fields: older biases stay valid
        if not plain[name]:
            del plain[name]
    return "; ".join(f"{name} {plain[name]}" for name in sorted(plain) if name not in NAMED | WITHOUT_EFFECT)
