"""Which steps of TransformerLens' weight processing preserve a kvlens model's output, and which would silently change it."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Set
from functools import partial

import torch
from torch import Tensor
from transformer_lens.weight_processing import ProcessWeights

from kvlens.base import HookedTransformer
from kvlens.base.weights import groups_differ
from kvlens.checks import checked
from kvlens.errors import KVLensError
from kvlens.model.attention_variant import AttentionVariantConfig
from kvlens.model.config import HookedKVTransformerConfig


class ProcessesWeights(HookedTransformer):
    """A HookedTransformer whose weight processing raises an error if it would change the model's output."""

    cfg: HookedKVTransformerConfig

    def load_and_process_state_dict(  # type: ignore[override]
        self,
        state_dict: dict[str, Tensor],
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        fold_value_biases: bool | None = None,
        refactor_factored_attn_matrices: bool = False,
    ) -> None:
        """As in TransformerLens. ``fold_value_biases=None`` folds if that preserves the output; True may raise an error.

        Raises:
            KVLensError: ``fold_value_biases`` or ``refactor_factored_attn_matrices`` would change the model's output.
        """
        steps = dict(fold_ln=fold_ln, center_writing_weights=center_writing_weights, center_unembed=center_unembed)
        self.take_state_dict(dict(state_dict), fold_value_biases, refactor_factored_attn_matrices, **steps)

    def take_state_dict(
        self, weights: dict[str, Tensor], fold_value_biases: bool | None, refactor_factored_attn_matrices: bool, **steps: bool
    ) -> None:
        """:meth:`load_and_process_state_dict` of weights that nobody else needs: the dict is emptied, layer by layer.

        What has been read is freed before the next layer is processed, so that two copies of a layer are in memory, not two of
        the model.
        """
        fold_value_biases = check_weight_processing(self.cfg, fold_value_biases, refactor_factored_attn_matrices)
        refuse_wrong_folding(
            self.cfg, weights, fold_ln=steps["fold_ln"], center_writing_weights=steps["center_writing_weights"]
        )
        if self.cfg.positional_embedding_type == "sinusoidal":  # TransformerLens expects a learned table
            weights["pos_embed.W_pos"] = torch.zeros(1, self.cfg.d_model, dtype=self.cfg.dtype)
        filled = self.fill_missing_keys(weights)
        weights.clear()
        steps |= {"fold_value_biases": fold_value_biases, "refactor_factored_attn_matrices": refactor_factored_attn_matrices}
        steps["fold_ln"] = steps["fold_ln"] and self.has_norms_to_fold(filled)
        self.cfg.value_biases_folded |= _changes_values(filled, steps)
        if steps["fold_ln"]:
            self.forget_norm_weights()
        for names, process in pieces(self.cfg, filled):
            piece = {name: filled.pop(name) for name in names}
            given = {weight.untyped_storage().data_ptr() for weight in piece.values()}
            take_weights(self, process(piece, steps) if any(steps.values()) else piece, given)

    @checked
    def process_weights_(  # type: ignore[override]
        self,
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        fold_value_biases: bool | None = None,
        refactor_factored_attn_matrices: bool = False,
    ) -> None:
        """As in TransformerLens, with ``fold_value_biases`` as in :meth:`load_and_process_state_dict`."""
        self.load_and_process_state_dict(
            self.state_dict(),
            fold_ln,
            center_writing_weights,
            center_unembed,
            fold_value_biases,
            refactor_factored_attn_matrices,
        )

    def fold_value_biases(self, state_dict: dict[str, Tensor]):
        """As TransformerLens', refused where it would change the output."""
        check_weight_processing(self.cfg, True, False)
        return super().fold_value_biases(state_dict)

    def refactor_factored_attn_matrices(self, state_dict: dict[str, Tensor]):
        """As TransformerLens', refused where it would change the output."""
        check_weight_processing(self.cfg, False, True)
        return super().refactor_factored_attn_matrices(state_dict)


def _changes_values(weights: Mapping[str, Tensor], steps: Mapping[str, bool]) -> bool:
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
