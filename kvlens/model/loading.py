"""Making a HookedKVTransformer from a Hugging Face folder, a loaded Hugging Face model, a name, or a HookedTransformer."""

from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from kvlens.arguments import check_device
from kvlens.base import HookedTransformer
from kvlens.base.weights import allowed_steps
from kvlens.checks import checked
from kvlens.dtypes import dtype_of
from kvlens.errors import KVLensError, warn
from kvlens.model.config import HookedKVTransformerConfig, KVShiftConfig
from kvlens.model.fingerprint import is_weight
from kvlens.model.shift_graft import place_shift_coefficients, shift_config_of
from kvlens.model.sizes import check_weights_have_these_sizes
from kvlens.model.weights import check_weight_processing
from kvlens.pretrained import check_trial, load_llama2c_parts, load_pretrained_parts

M = TypeVar("M", bound=HookedTransformer)
"""The requested class: HookedKVTransformer or a subclass. It depends on this module, which therefore never imports it."""
DRAWN_ANEW = ("shift_coef", ".b_KV", ".b_D", ".feature_map.", ".augment_")
"""Parts of the names of kvlens' own parameters, which keep their initial values if the source model lacks them."""


def build_with_ready_tokenizer(cls: type[M], cfg: HookedKVTransformerConfig, tokenizer: Any, move_to_device: bool = True) -> M:
    """Construct a model without the base's lookup of the tokenizer by name, which accesses the network, then set it.

    That lookup also determines whether the tokenizer prepends a BOS by itself, which is done here instead if necessary.
    """
    name, cfg.tokenizer_name = cfg.tokenizer_name, None
    model = cls(cfg, move_to_device=move_to_device)
    cfg.tokenizer_name = name
    model.tokenizer = tokenizer
    if tokenizer is not None and cfg.tokenizer_prepends_bos is None:
        cfg.tokenizer_prepends_bos = len(tokenizer.encode("")) > 0
    return model


def from_hooked_transformer(cls: type[M], model: HookedTransformer, **changes: Any) -> M:
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


def _changed(cls: type[M], model: HookedTransformer, changes: dict[str, Any], move_to_device: bool = True) -> M:
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
    if lost:
        raise KVLensError(f"from_hooked_transformer: the new configuration does not use these weights: {lost[:3]}")
    new = [name for name in report.missing_keys if is_weight(name) and not any(part in name for part in DRAWN_ANEW)]
    if new:
        raise KVLensError(f"from_hooked_transformer: the changes need weights that the model does not have: {new[:3]}")


@checked
def from_pretrained(
    cls: type[M],
    model_name: str | Path,
    *,
    hf_model: Any = None,
    tokenizer: Any = None,
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

    Peak memory on a CPU, with the pages of the file that are in memory: about twice the float32 weights, more where a larger
    share of them belongs to the vocabulary.

    Args:
        model_name: a folder in Hugging Face's format, or an official TransformerLens name.
        hf_model: a loaded Hugging Face model; its own configuration is used, whatever ``model_name`` says.
        tokenizer: its tokenizer; a folder's own tokenizer is used if None.
        kv_shift: add a KV shift; ``KVShiftConfig(init="identity")`` changes no output. A checkpoint that has one
            (Baichuan-M1, or shift coefficients next to the weights of a known architecture) keeps it in any case;
            ``kv_shift`` may then extend it (queries, another parametrization), but not remove anything.
        fold_ln, center_writing_weights, center_unembed, fold_value_biases, refactor_factored_attn_matrices: TransformerLens'
            weight processing; ``fold_value_biases=None`` folds unless values are shifted.
        default_padding_side, move_to_device: as in TransformerLens.
        verify: compare the model with transformers' own pass on a few tokens, up to rounding (about 1e-4 of the logits' size
            in float32, 0.1 to 0.5 in bfloat16), before a KV shift is added. False takes the model as it is, and saves the time
            and the certainty; of Baichuan-M1 and models in their authors' own format there is nothing to compare with.
        loader_kwargs: ``dtype``, ``device``, ``n_ctx``, ``first_n_layers``, ``default_prepend_bos``, ``local_files_only``
            (False fetches what Hugging Face's cache on this machine lacks of a name), ``checkpoint_index``,
            ``checkpoint_value``, and arguments of Hugging Face's own ``from_pretrained``.

    Raises:
        KVLensError: an unknown name (the nearest is suggested) or one whose files are not here, an incomplete folder, an
            unsupported architecture, or a model whose results differ from those of transformers.
    """
    parts = load_pretrained_parts(
        model_name, hf_model=hf_model, tokenizer=tokenizer, fold_ln=fold_ln, verify=verify, **loader_kwargs
    )
    steps = dict(fold_ln=fold_ln, center_writing_weights=center_writing_weights, center_unembed=center_unembed)
    steps = allowed_steps(parts.cfg, steps)
    kv_shift = kv_shift or shift_config_of(parts.shift_coefficients)
    cfg = HookedKVTransformerConfig.from_tl(parts.cfg, kv_shift=kv_shift, init_weights=False, **parts.own_fields)
    fold_value_biases = check_weight_processing(cfg, fold_value_biases, refactor_factored_attn_matrices)
    check_weights_have_these_sizes(cfg, parts.state_dict, f"from_pretrained: the weights of {cfg.model_name}")
    if parts.trial is not None:  # the comparison is made without the shift
        cfg.kv_shift = None
    model = build_with_ready_tokenizer(cls, cfg, None, move_to_device=False)
    if parts.tokenizer is not None:
        model.set_tokenizer(parts.tokenizer, default_padding_side=default_padding_side)
    model.init_kv_parameters()
    model.take_state_dict(parts.state_dict, fold_value_biases, refactor_factored_attn_matrices, **steps)
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


def from_llama2c(
    cls: type[M],
    path: str | Path,
    tokenizer_path: str | Path | None = None,
    *,
    device: Any = None,
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
