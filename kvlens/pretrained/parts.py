"""Pretrained weights without a network: from a local Hugging Face folder, or from a model already in memory.

The configuration is translated and the weights are renamed by the table in :mod:`kvlens.base.families`. A field that would be
ignored raises an error that names it (:mod:`kvlens.pretrained.fields`), and :mod:`kvlens.pretrained.trial` compares the result
with transformers' own model.
Shift coefficients that a checkpoint holds in addition to the weights of a known architecture are read too,
and Baichuan-M1, which transformers does not know, has its own translation (:mod:`kvlens.pretrained.baichuan`).

Two limits on float64 lie outside kvlens: TransformerLens' weight processing casts to float32, so only unprocessed weights
stay exact, and Hugging Face computes rotary angles and RMS norms in float32 whatever the model's dtype is.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvlens.arguments import check_device, path_of
from kvlens.base import HookedTransformerConfig
from kvlens.base.loading import official_names
from kvlens.checks import ensure
from kvlens.dtypes import dtype_of
from kvlens.errors import KVLensError, brief
from kvlens.files import read_json
from kvlens.pretrained.architectures import architecture_of, check_readable
from kvlens.pretrained.baichuan import (
    baichuan_m1_config,
    conv_window_of,
    convert_baichuan_m1_weights,
    is_baichuan_m1,
    is_baichuan_m1_weight,
)
from kvlens.pretrained.checkpoint_files import check_checkpoint, check_positions, read_tensors
from kvlens.pretrained.code import refuse_to_run_code
from kvlens.pretrained.folder import check_tied, load_folder
from kvlens.pretrained.names import is_local_folder, official_name
from kvlens.pretrained.shift_import import import_shift_coefficients, is_shift_coefficient
from kvlens.pretrained.tokenizer import find_tokenizer
from kvlens.pretrained.translation import alibi_slopes, convert_weights, translate_config
from kvlens.pretrained.trial import Trial, run_trial

logger = logging.getLogger(__name__)

VERIFIED_PARAMETERS = 2_000_000_000
"""Models of up to this size are compared with transformers' own pass by default, which takes some seconds on a CPU."""


class PretrainedParts(NamedTuple):
    """Everything needed to build a ``HookedTransformer``.

    Attributes:
        cfg: the configuration; ``tokenizer_name`` is None when there is no tokenizer.
        state_dict: weights under ``HookedTransformer``'s names, before any folding or centring, all floating tensors in
            the asked dtype, detached. They may share memory with the Hugging Face model: copy before writing into them.
        tokenizer: ready for ``HookedTransformer(cfg, tokenizer=...)`` without a network, or None.
        shift_coefficients: the KV shift, as :func:`kvlens.pretrained.import_shift_coefficients` returns it; empty for a model
            without one. A plain ``HookedTransformer`` cannot hold them and computes something else.
        own_fields: fields that the model needs and only :class:`kvlens.HookedKVTransformerConfig` has: ``alibi_slopes`` for
            BLOOM if the number of heads is not a power of two. Usually empty.
        trial: the predictions of transformers' own model on a few tokens, or None if it was not run.
    """

    cfg: HookedTransformerConfig
    state_dict: dict[str, Tensor]
    tokenizer: PreTrainedTokenizerBase | None
    shift_coefficients: dict[str, Tensor]
    own_fields: Mapping[str, Any] = {}
    trial: Trial | None = None


def load_pretrained_parts(
    model_name: str | Path,
    *,
    hf_model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: torch.dtype | str = torch.float32,
    device: str | torch.device | None = None,
    n_devices: int = 1,
    fold_ln: bool = True,
    default_prepend_bos: bool | None = None,
    first_n_layers: int | None = None,
    n_ctx: int | None = None,
    verify: bool | None = False,
    **from_pretrained_kwargs: Any,
) -> PretrainedParts:
    """Make config, weights and tokenizer from a local folder or from a loaded Hugging Face model. No network is used.

    Args:
        model_name: a Hugging Face folder (``config.json``, weights, possibly a tokenizer); with ``hf_model`` any name.
        hf_model: a loaded causal language model; its weights and config are used, and it is not changed.
        tokenizer: used instead of the folder's. It is copied, and the copy prepends BOS, as models expect.
            Without one, an official name uses its tokenizer from the local Hugging Face cache if it fits.
        dtype: dtype of the config and of all floating weights; a torch dtype or its name.
        device: device in the config (None: a GPU if there is one); the weights are not moved.
        n_devices: number of devices in the config.
        fold_ln: whether the layer norms will be folded (the config then has ``LNPre`` or ``RMSPre``).
        default_prepend_bos: overrides the architecture's own default.
        first_n_layers: keep only this many layers.
        n_ctx: context length; it may exceed the model's own only if positions are not learned.
        verify: run transformers' model on a few tokens, for comparison; None does so up to ``VERIFIED_PARAMETERS``, and logs
            a line for larger models.
        from_pretrained_kwargs: for Hugging Face's ``from_pretrained``, with a folder only. ``torch_dtype`` replaces
            ``dtype``, as in TransformerLens.

    Returns:
        The ``PretrainedParts``.

    Raises:
        KVLensError: no such folder or name, files missing, an architecture or a feature of it that TransformerLens
            cannot express, a quantized model, or sizes out of range.
    """
    dtype = dtype_of(from_pretrained_kwargs.pop("torch_dtype", dtype), "from_pretrained: dtype")
    _check_arguments(model_name, hf_model, from_pretrained_kwargs)
    _check_options(tokenizer, device, {"n_devices": n_devices, "first_n_layers": first_n_layers, "n_ctx": n_ctx})
    folder = path_of("from_pretrained", model_name).resolve() if is_local_folder(model_name) else None
    if hf_model is None and folder is None:
        raise KVLensError(
            f"load_pretrained_parts: {official_name(str(model_name))!r} is a name on the hub. Pass a local folder, "
            "or hf_model=, or load it by name with from_pretrained."
        )
    source: Any = folder if hf_model is None else hf_model
    official = None if folder else official_names().get(str(model_name).lower())
    ensure("from_pretrained: verify", bool | None, verify)
    options: dict[str, Any] = {
        "dtype": dtype,
        "device": device,
        "n_devices": n_devices,
        "fold_ln": fold_ln,
        "default_prepend_bos": default_prepend_bos,
        "first_n_layers": first_n_layers,
        "n_ctx": n_ctx,
    }
    config, n_stored = _own_config(source)
    if is_baichuan_m1(config):
        if verify:
            raise KVLensError(
                "from_pretrained: verify=True: transformers does not know Baichuan-M1, so nothing can be compared"
            )
        cfg, state_dict, checkpoint, trial = *_convert_baichuan_m1(source, config, from_pretrained_kwargs, options), None
    else:
        cfg, state_dict, checkpoint, trial = _convert_by_family(
            source, n_stored, official, from_pretrained_kwargs, options, verify
        )
    cfg.model_name = folder.name if folder else (official or str(model_name)).split("/")[-1]
    shift = import_shift_coefficients(checkpoint)
    shift = {name: coef.detach() for name, coef in shift.items() if int(name.split(".")[1]) < cfg.n_layers}
    tokenizer = find_tokenizer(tokenizer, folder, official, cfg)
    slopes = alibi_slopes(cfg.n_heads) if cfg.positional_embedding_type == "alibi" else None
    return PretrainedParts(cfg, state_dict, tokenizer, shift, {} if slopes is None else {"alibi_slopes": slopes}, trial)


def _own_config(source: Path | PreTrainedModel) -> tuple[dict[str, Any], int]:
    """The Hugging Face configuration of a folder (made sure to hold a checkpoint) or of a loaded model, and its size."""
    if isinstance(source, PreTrainedModel):
        check_positions("from_pretrained", source.config.to_dict())
        return source.config.to_dict(), source.num_parameters()
    n_stored = check_checkpoint("from_pretrained", source)
    return read_json("from_pretrained", source / "config.json"), n_stored


def _convert_by_family(
    source: Path | PreTrainedModel,
    n_stored: int,
    official: str | None,
    kwargs: dict[str, Any],
    options: dict[str, Any],
    verify: bool | None,
) -> tuple[HookedTransformerConfig, dict[str, Tensor], Mapping[str, Tensor], Trial | None]:
    """Configuration and weights by the table of families, the tensors that may hold a KV shift, and a trial."""
    if isinstance(source, PreTrainedModel):
        hf_model, checkpoint = source, source.state_dict()
    else:
        hf_model, checkpoint = load_folder(source, n_stored, options["dtype"], kwargs)
    architecture = architecture_of(hf_model)
    check_readable(hf_model)
    cfg = translate_config(hf_model.config, architecture, official, **options)
    trial = None
    why_not = _not_comparable(cfg, checkpoint, hf_model)
    if verify and why_not:
        raise KVLensError(f"from_pretrained: verify=True: {why_not}; leave verify out")
    if verify or (verify is None and not why_not and _is_small(hf_model)):
        trial = run_trial(hf_model, cfg.n_ctx, cfg.dtype)
    weights = convert_weights(hf_model, cfg)
    if hf_model is not source:
        for weight in hf_model.parameters():  # of nobody but these weights, which are freed as they are taken
            weight.data = weight.new_empty(0)
    return cfg, weights, checkpoint, trial


def _not_comparable(cfg: HookedTransformerConfig, checkpoint: Mapping[str, Tensor], hf_model: PreTrainedModel) -> str | None:
    """Why the converted model cannot be compared with transformers' model."""
    if cfg.n_layers != hf_model.config.num_hidden_layers:
        return "with first_n_layers the model is another one than transformers'"
    if any(map(is_shift_coefficient, checkpoint)):
        return "transformers passes over the shift coefficients of this checkpoint"
    if cfg.num_experts and cfg.dtype not in (torch.float32, torch.float64):
        return f"experts in {cfg.dtype} round differently"
    return None


def _is_small(hf_model: PreTrainedModel) -> bool:
    n_parameters = hf_model.num_parameters()
    if n_parameters > VERIFIED_PARAMETERS:
        logger.warning(
            "from_pretrained: not compared with transformers' own pass, because the model has %.1f billion parameters; "
            "verify=True does it all the same",
            n_parameters / 1e9,
        )
    return n_parameters <= VERIFIED_PARAMETERS


def _convert_baichuan_m1(
    source: Path | PreTrainedModel, config: dict[str, Any], kwargs: dict[str, Any], options: dict[str, Any]
) -> tuple[HookedTransformerConfig, dict[str, Tensor], Mapping[str, Tensor]]:
    """As :func:`_convert_by_family`, by kvlens' own translation: transformers does not know the architecture."""
    _refuse_without_effect(kwargs, "a Baichuan-M1 checkpoint")
    cfg = baichuan_m1_config(config, **options)

    def wanted(name: str) -> bool:
        return is_baichuan_m1_weight(name, range(cfg.n_layers, config["num_hidden_layers"]))

    if isinstance(source, PreTrainedModel):
        check_readable(source)
        checkpoint = {name: tensor for name, tensor in source.state_dict().items() if wanted(name)}
    else:
        checkpoint = read_tensors(source, wanted)
    head, embedding = checkpoint.get("lm_head.weight"), checkpoint.get("model.embed_tokens.weight")
    if config.get("tie_word_embeddings") and head is not None and embedding is not None:
        check_tied(head, embedding, "this Baichuan-M1 checkpoint")
    weights = convert_baichuan_m1_weights(
        checkpoint,
        cfg,
        tied=config.get("tie_word_embeddings", True),  # transformers' default where the file does not say
        conv_window=conv_window_of(config),
    )
    return cfg, weights, checkpoint


def _check_options(tokenizer: Any, device: Any, sizes: Mapping[str, Any]) -> None:
    """Raise KVLensError for arguments of the wrong type; None is always allowed."""
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise KVLensError(f"from_pretrained: tokenizer must be a loaded tokenizer of transformers, got {brief(tokenizer)}")
    check_device("from_pretrained: device", device)
    for name, size in sizes.items():
        ensure(f"from_pretrained: {name}", int | None, size)


def _check_arguments(model_name: str | Path, hf_model: Any, kwargs: dict[str, Any]) -> None:
    """Raise KVLensError for arguments that this way of loading does not support, before any file is read."""
    refuse_to_run_code(kwargs)
    for key in ("load_in_4bit", "load_in_8bit", "quantization_config"):
        if kwargs.get(key):
            raise KVLensError(f"from_pretrained: {key} asks for quantized weights, which cannot be converted: remove it")
    for key in ("checkpoint_index", "checkpoint_value"):
        if kwargs.pop(key, None) is not None:
            raise KVLensError(
                f"from_pretrained: {key} belongs to models loaded by official name; for {str(model_name)!r} pass the "
                "folder or the model of that training step instead"
            )
    if hf_model is None:
        return
    if not isinstance(hf_model, PreTrainedModel):
        raise KVLensError(
            f"from_pretrained: hf_model must be a transformers PreTrainedModel, got {type(hf_model).__name__}"
            " (for a wrapped model pass the model inside it, with adapters merged)"
        )
    _refuse_without_effect(kwargs, "a loaded hf_model")


def _refuse_without_effect(kwargs: dict[str, Any], source: str) -> None:
    """Raise if there are arguments for Hugging Face's ``from_pretrained`` where it is not called."""
    unused = sorted(set(kwargs) - {"trust_remote_code", "token", "cache_dir", "local_files_only"})
    if unused:
        raise KVLensError(f"from_pretrained: {unused} would have no effect on {source}: remove them")
