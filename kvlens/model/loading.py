"""Making a HookedKVTransformer from a Hugging Face folder, a loaded Hugging Face model, a name, a file of llama2.c, a folder of
kvlens or another model; processing its weights; saving it; and putting the KV shift of a public checkpoint into it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvlens.arguments import check_device
from kvlens.base import HookedTransformer
from kvlens.base.model import M
from kvlens.base.weights import GROUPS_DIFFER, allowed_steps, check_factors, groups_differ, why_norms_stay
from kvlens.checks import checked
from kvlens.components.attention_variant import AttentionVariantConfig
from kvlens.dtypes import dtype_of
from kvlens.errors import KVLensError, warn
from kvlens.model.config import HookedKVTransformerConfig, KVShiftConfig
from kvlens.model.fingerprint import is_weight
from kvlens.model.storage import build_with_ready_tokenizer, check_weights_have_these_sizes, load_model, save_model
from kvlens.pretrained import check_trial, load_llama2c_parts, load_pretrained_parts, read_tensors
from kvlens.pretrained.shift_import import import_shift_coefficients, is_shift_coefficient, place_shift_coefficients
from kvlens.zoo import folder_of

DRAWN_ANEW = ("shift_coef", ".b_KV", ".b_D", ".feature_map.", ".augment_")
"""Parts of the names of kvlens' own parameters, which keep their initial values if the source model lacks them."""


class LoadsAndSaves(HookedTransformer):
    """A HookedTransformer that is loaded from several kinds of checkpoints and saved to a kvlens folder, and whose weight
    processing raises an error if it would change the model's output."""

    cfg: HookedKVTransformerConfig

    @classmethod
    @checked
    def from_pretrained(
        cls: type[M],
        model_name: str | Path,
        *,
        hf_model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        kv_shift: KVShiftConfig | None = None,
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        fold_value_biases: bool | None = None,
        refactor_factored_attn_matrices: bool = False,
        default_padding_side: Literal["left", "right"] | None = None,
        move_to_device: bool = True,
        verify: bool | None = None,
        **loader_kwargs: Any,
    ) -> M:
        """Load a softmax model as TransformerLens does, from this machine unless ``local_files_only=False``.

        Peak memory on a CPU, with the pages of the file that are in memory: about twice the float32 weights, more where a
        larger share of them belongs to the vocabulary.

        Args:
            model_name: a folder in Hugging Face's format, or an official TransformerLens name.
            hf_model: a loaded Hugging Face model; its own configuration is used, whatever ``model_name`` says.
            tokenizer: its tokenizer; a folder's own tokenizer is used if None.
            kv_shift: add a KV shift; ``KVShiftConfig(init="identity")`` changes no output. A checkpoint that has one
                (Baichuan-M1, or shift coefficients next to the weights of a known architecture) keeps it in any case;
                ``kv_shift`` may then extend it (queries, another parametrization), but not remove anything.
            fold_ln, center_writing_weights, center_unembed, fold_value_biases, refactor_factored_attn_matrices:
                TransformerLens' weight processing; ``fold_value_biases=None`` folds unless values are shifted.
            default_padding_side, move_to_device: as in TransformerLens.
            verify: compare the model with transformers' own pass on a few tokens, up to rounding (about 1e-4 of the logits'
                size in float32, 0.1 to 0.5 in bfloat16), before a KV shift is added. False takes the model as it is, and saves
                the time and the certainty; of Baichuan-M1 and models in their authors' own format there is nothing to compare
                with.
            loader_kwargs: ``dtype``, ``device``, ``n_ctx``, ``first_n_layers``, ``default_prepend_bos``, ``local_files_only``
                (False fetches what Hugging Face's cache on this machine lacks of a name), ``checkpoint_index``,
                ``checkpoint_value``, and arguments of Hugging Face's own ``from_pretrained``.

        Raises:
            KVLensError: an unknown name (the nearest is suggested) or one whose files are not here, an incomplete folder, an
                unsupported architecture, or a model whose results differ from those of transformers.
        """
        parts = load_pretrained_parts(model_name, hf_model=hf_model, tokenizer=tokenizer, verify=verify, **loader_kwargs)
        asked = dict(fold_ln=fold_ln, center_writing_weights=center_writing_weights, center_unembed=center_unembed)
        steps: dict[str, bool | None] = {**allowed_steps(parts.cfg, asked)}
        steps["refactor_factored_attn_matrices"] = refactor_factored_attn_matrices
        kv_shift = kv_shift or shift_config_of(parts.shift_coefficients)
        cfg = HookedKVTransformerConfig.from_tl(parts.cfg, kv_shift=kv_shift, init_weights=False, **parts.own_fields)
        steps["fold_value_biases"] = check_weight_processing(cfg, fold_value_biases, refactor_factored_attn_matrices)
        check_weights_have_these_sizes(cfg, parts.state_dict, f"from_pretrained: the weights of {cfg.model_name}")
        if parts.trial is not None:  # the comparison is made without the shift
            cfg.kv_shift = None
        model = build_with_ready_tokenizer(cls, cfg, None, move_to_device=False)
        if parts.tokenizer is not None:
            model.set_tokenizer(parts.tokenizer, default_padding_side=default_padding_side)
        model.init_kv_parameters()
        model.take_state_dict(parts.state_dict, **steps)
        if move_to_device:
            model.move_model_modules_to_device()
        if parts.trial is not None:
            device, cfg.device = cfg.device, str(model.W_E.device)  # which is another one unless the model was moved
            with torch.no_grad():
                check_trial(parts.trial, model(parts.trial.tokens))
            cfg.device = device
            if kv_shift is not None:
                model = _changed(cls, model, {"kv_shift": kv_shift}, move_to_device)
        if parts.shift_coefficients:
            place_shift_coefficients(model, parts.shift_coefficients)
        return model

    @classmethod
    def from_pretrained_no_processing(cls: type[M], model_name: str | Path, **kwargs: object) -> M:
        """:meth:`from_pretrained` with the weights as they are."""
        steps = ("fold_ln", "center_writing_weights", "center_unembed", "refactor_factored_attn_matrices", "fold_value_biases")
        return cls.from_pretrained(model_name, **{**dict.fromkeys(steps, False), **kwargs})

    @classmethod
    @checked
    def from_llama2c(
        cls: type[M],
        path: str | Path,
        tokenizer_path: str | Path | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str = torch.float32,
    ) -> M:
        """Load a checkpoint of llama2.c with unprocessed weights (nothing folded or centered).

        Args:
            path: the ``.bin`` file of the weights, of llama2.c's first ("legacy") export.
            tokenizer_path: the ``.bin`` file of the tokenizer; without it the model works on token ids.
            device: where to put the model; None leaves the choice to TransformerLens.
            dtype: dtype of the weights, a torch dtype or its name.

        Raises:
            KVLensError: an unavailable device; a file that is truncated, too long or damaged, has another format, or belongs to
                another vocabulary.
        """
        check_device("from_llama2c: device", device)
        parts = load_llama2c_parts(path, tokenizer_path, dtype=dtype_of(dtype, "from_llama2c: dtype"))
        cfg = HookedKVTransformerConfig.from_tl(parts.cfg, init_weights=False, device=device)
        model = build_with_ready_tokenizer(cls, cfg, parts.tokenizer)
        cfg.init_weights = True
        model.load_and_process_state_dict(
            parts.state_dict, fold_ln=False, center_writing_weights=False, center_unembed=False, fold_value_biases=False
        )
        return model

    @classmethod
    @checked
    def from_hooked_transformer(cls: type[M], model: HookedTransformer, **changes: object) -> M:
        """A copy of ``model`` with ``changes`` to its configuration.

        Args:
            model: a HookedTransformer (processed or not), or a HookedKVTransformer.
            changes: fields of :class:`HookedKVTransformerConfig`, e.g. ``kv_shift=KVShiftConfig(init="identity")`` to graft a
                shift that changes nothing yet, or ``attention="linear"`` (another function of the same weights).

        Permanent hooks are copied too, with a warning that names them: one that reads ``model`` still reads it, not the
        copy. Other hooks are not copied.

        Raises:
            KVLensError: a change of shape (``n_layers``, ``d_model``, ...), which the weights cannot follow.
        """
        return _changed(cls, model, changes)

    @classmethod
    @checked
    def from_zoo(
        cls: type[M],
        name: str = "docs-linear",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> M:
        """A small trained model that ships with kvlens, by name; see :func:`kvlens.zoo.names`.

        Raises:
            KVLensError: no such model, or one in Transformers' format, which :class:`kvlens.KVTransformerBridge` loads.
        """
        return cls.load(folder_of(name), device=device, dtype=dtype)

    @classmethod
    @checked
    def load(
        cls: type[M], folder: str | Path, *, device: torch.device | str | None = None, dtype: torch.dtype | str | None = None
    ) -> M:
        """Read what :meth:`save` wrote."""
        return load_model(cls, folder, device=device, dtype=dtype)

    @checked
    def save(self, folder: str | Path, *, overwrite: bool = False, stored_dtype: torch.dtype | str | None = None) -> None:
        """Write weights (safetensors), configuration (JSON) and tokenizer to ``folder``, atomically."""
        save_model(self, folder, overwrite=overwrite, stored_dtype=stored_dtype)

    @checked
    def load_shift_coefficients(self, source: Mapping[str, Tensor] | str | Path) -> None:
        """Take the KV-shift coefficients of a public checkpoint; other weights stay as they are.

        ``kv_shift`` must match the checkpoint in window, keys and values. Under ``gate`` and ``clamp`` the *parameter* is set
        so that the coefficients as used are the checkpoint's.

        Args:
            source: a state dict, a checkpoint's folder, or one weights file, in a format of
                :mod:`kvlens.pretrained.shift_import`.

        Raises:
            KVLensError: there are no coefficients, one is missing, or they do not fit the model. The model is then unchanged.
        """
        tensors = source if isinstance(source, Mapping) else read_tensors(source, is_shift_coefficient)
        coefficients = import_shift_coefficients(tensors)
        place_shift_coefficients(self, coefficients)

    def take_state_dict(self, weights: dict[str, Tensor], **steps: bool | None) -> None:
        """As the base's, refused where it would change the output."""
        refactor, folds = bool(steps["refactor_factored_attn_matrices"]), steps["fold_value_biases"]
        steps["fold_value_biases"] = check_weight_processing(self.cfg, folds, refactor)
        chosen = {name: bool(step) for name, step in steps.items()}
        refuse_wrong_folding(self.cfg, weights, chosen["fold_ln"], chosen["center_writing_weights"])
        if self.cfg.positional_embedding_type == "sinusoidal":  # TransformerLens expects a learned table
            weights["pos_embed.W_pos"] = torch.zeros(1, self.cfg.d_model, dtype=self.cfg.dtype)
        weights.update(self.fill_missing_keys(weights))
        self.cfg.value_biases_folded |= changes_values(weights, chosen)
        super().take_state_dict(weights, **chosen)

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
        steps = fold_ln, center_writing_weights, center_unembed, fold_value_biases, refactor_factored_attn_matrices
        self.load_and_process_state_dict(self.state_dict(), *steps)

    def fold_value_biases(self, state_dict: dict[str, Tensor]):
        """As TransformerLens', refused where it would change the output."""
        check_weight_processing(self.cfg, True, False)
        return super().fold_value_biases(state_dict)

    def refactor_factored_attn_matrices(self, state_dict: dict[str, Tensor]):
        """As TransformerLens', refused where it would change the output."""
        check_weight_processing(self.cfg, False, True)
        return super().refactor_factored_attn_matrices(state_dict)


def changes_values(weights: Mapping[str, Tensor], steps: Mapping[str, bool]) -> bool:
    """Whether processing makes other values than the weights do now: without b_V, part of which comes from a folded norm."""
    names = ("attn.b_V", "attn._b_V", "ln1.b") if steps["fold_ln"] else ("attn.b_V", "attn._b_V")
    biases = (weight for name, weight in weights.items() if name.endswith(names))
    return steps["refactor_factored_attn_matrices"] or (steps["fold_value_biases"] and any(bool(b.any()) for b in biases))


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
    differs = cfg.attention == "linear" or cfg.clip_qkv is not None
    if refactor and (differs or cfg.kv_shift is not None or cfg.attention_variant is not None):
        raise KVLensError(
            "refactor_factored_attn_matrices keeps only q.k and folds b_V away, which would change this model's output: "
            f"{reason or f'{between} between the two factors'}. Pass refactor_factored_attn_matrices=False."
        )
    if refactor:
        check_factors(cfg)
    return reason is None if fold_value_biases is None else fold_value_biases


def refuse_wrong_folding(
    cfg: HookedKVTransformerConfig, state_dict: Mapping[str, Tensor], fold_ln: bool, center_writing_weights: bool
) -> None:
    """Raise KVLensError if folding norms or centering writing weights would change the output or is not supported.

    TransformerLens does not check these cases and would return a different model.
    """
    kind = cfg.normalization_type
    reason = why_norms_stay(cfg)
    if reason and (fold_ln or center_writing_weights) and kind is not None:
        _refuse(reason, fold_ln, center_writing_weights)
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
        return GROUPS_DIFFER
    if cfg.use_attention_sinks:
        return "with attention sinks the rows of the pattern sum to less than 1"
    if cfg.clip_qkv is not None:
        return "values are clamped after b_V is added"
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
        return "regularized attention subtracts alpha times a token's own value"
    return None


def _changed(cls: type[M], model: HookedTransformer, changes: dict[str, object], move_to_device: bool = True) -> M:
    cfg = HookedKVTransformerConfig.from_tl(model.cfg, **{**changes, "init_weights": False})
    copy = build_with_ready_tokenizer(cls, cfg, model.tokenizer, move_to_device)
    cfg.init_weights = model.cfg.init_weights
    copy.init_kv_parameters()
    _copy_weights(copy, model)
    copy.rounded_from = getattr(model, "rounded_from", None)
    _copy_permanent_hooks(copy, model)
    return copy


def _copy_permanent_hooks(copy: HookedTransformer, model: HookedTransformer) -> None:
    """Copy permanent hooks in their order, since they are part of what a model computes (a padding mask, for example)."""
    copied = []
    for name, point in model.hook_dict.items():
        for direction, handles in (("fwd", point.fwd_hooks), ("bwd", point.bwd_hooks)):
            for handle in handles:
                if not handle.is_permanent:
                    continue
                if name not in copy.hook_dict:
                    raise KVLensError(
                        f"from_hooked_transformer: the model has a permanent hook on {name}, which the copy does not have; "
                        "call reset_hooks(including_permanent=True) on the model first, then add the hook to the copy"
                    )
                copy.hook_dict[name].add_hook(handle.user_hook, dir=direction, is_permanent=True)
                copied.append(name)
    if copied:
        names = ", ".join(dict.fromkeys(copied))
        warn(
            f"from_hooked_transformer: the permanent hooks on {names} are copied as the same functions: a hook that reads the "
            "old model, or what other hooks recorded during its pass, does not read the copy. If there is such a hook, call "
            "copy.reset_hooks(including_permanent=True) and add hooks for the copy with add_perma_hook"
        )


def _copy_weights(copy: HookedTransformer, model: HookedTransformer) -> None:
    report = copy.load_state_dict(model.state_dict(), strict=False)
    lost = [name for name in report.unexpected_keys if "shift_coef" not in name and not name.endswith(("b_KV", "b_D"))]
    new = [name for name in report.missing_keys if is_weight(name) and not any(part in name for part in DRAWN_ANEW)]
    if lost or new:
        raise KVLensError(
            f"from_hooked_transformer: the new configuration does not use the weights {lost[:3]}, and needs {new[:3]}, which "
            "the model does not have: leave out the change that asks for it"
        )


def shift_config_of(coefficients: Mapping[str, Float[Tensor, "kv_head taps"]]) -> KVShiftConfig | None:
    """The :class:`kvlens.KVShiftConfig` for the result of :func:`import_shift_coefficients`; None if that is empty."""
    if not coefficients:
        return None
    window = max(coef.shape[1] for coef in coefficients.values()) - 1
    keys, values = (any(name.endswith(f".{x}_shift_coef") for name in coefficients) for x in "kv")
    return KVShiftConfig(window=window, keys=keys, values=values)
