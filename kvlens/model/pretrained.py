"""Pretrained weights without a network: from a local Hugging Face folder, or from a model already in memory.

TransformerLens knows how to turn a Hugging Face config and its weights into a ``HookedTransformerConfig`` and a state
dict, but its own entry point goes through the official name: it fetches the config from the hub even when the weights
are given, and any path that contains "llama", "gemma", "bert", "t5" ... takes hard-coded sizes or another model class.

Here the user's name never reaches those branches. The config is written alone into a temporary folder with a neutral
name, TransformerLens' ``get_pretrained_model_config`` reads it there, and its ``get_pretrained_state_dict`` converts
the weights of a model that is already loaded. What the loader would read wrongly or drop without a word (a rotary base,
an MLP width, attention biases, a rotary scaling, a sliding window) is put right where ``HookedTransformer`` can express
it and refused where it cannot. Shift coefficients that lie in a checkpoint beside the weights of a known architecture are read
too, and Baichuan-M1, which transformers does not know, has its own translation (:mod:`kvlens.model.baichuan`).

Two limits on float64 are not ours: TransformerLens' weight processing casts to float32, so only unprocessed weights
stay exact, and Hugging Face computes rotary angles and RMS norms in float32 whatever the model's dtype is.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvlens._tl import HookedTransformerConfig, loading
from kvlens.errors import KVLensError, nearest
from kvlens.model import baichuan
from kvlens.model.checkpoint_files import read_json_config, read_tensors
from kvlens.model.pretrained_config import translate_config
from kvlens.model.pretrained_tokenizer import find_tokenizer
from kvlens.model.pretrained_weights import NO_BIAS_ARCHITECTURES, convert_weights
from kvlens.model.shift_import import import_shift_coefficients, is_shift_coefficient

__all__ = ["SUPPORTED_ARCHITECTURES", "PretrainedParts", "is_local_folder", "load_pretrained_parts", "official_name"]

logger = logging.getLogger(__name__)

SUPPORTED_ARCHITECTURES = (
    "BloomForCausalLM",
    "GPT2LMHeadModel",
    "GPTJForCausalLM",
    "GPTNeoForCausalLM",
    "GPTNeoXForCausalLM",
    "OPTForCausalLM",
    "Qwen2ForCausalLM",
    *NO_BIAS_ARCHITECTURES,
)
"""Architectures that TransformerLens sizes from a config and converts to the same logits.

Not here: Gemma and OLMo 1 and 2 (sized by official name only), Phi 1 and 2 (its branch reads
``partial_rotary_factor``, which transformers 5 moved away), GPT-OSS (its attention sinks make folding the value biases
wrong: the pattern no longer sums to one).
"""

READABLE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in READABLE_DTYPES}
WEIGHT_PATTERNS = ("model*.safetensors", "pytorch_model*.bin", "model*.safetensors.index.json")


class PretrainedParts(NamedTuple):
    """What a ``HookedTransformer`` is made of.

    Attributes:
        cfg: TransformerLens' own config; ``tokenizer_name`` is None when there is no tokenizer.
        state_dict: weights under ``HookedTransformer``'s names, before any folding or centring, all floating tensors in
            the asked dtype, detached. They may share memory with the Hugging Face model: copy before writing into them.
        tokenizer: ready for ``HookedTransformer(cfg, tokenizer=...)`` without a network, or None.
        shift_coefficients: the KV shift, as :func:`kvlens.model.shift_import.import_shift_coefficients` returns it; empty for
            a model without one. A plain ``HookedTransformer`` has no place for them and computes another function.
    """

    cfg: HookedTransformerConfig
    state_dict: dict[str, Tensor]
    tokenizer: PreTrainedTokenizerBase | None
    shift_coefficients: dict[str, Tensor]


def is_local_folder(model_name: str | Path) -> bool:
    """Say whether ``model_name`` is meant as a folder on this machine, not as a name that TransformerLens knows.

    A ``Path``, a folder with a ``config.json``, and whatever is written as a path or exists on disk are folders. An
    official name wins over a folder of that name that has no ``config.json``.
    """
    if isinstance(model_name, Path):
        return True
    path = Path(model_name).expanduser()
    if (path / "config.json").is_file():
        return True
    if model_name.lower() in loading.make_model_alias_map():
        return False
    written_as_path = model_name.startswith((".", "~", os.sep)) or "\\" in model_name or model_name.count("/") > 1
    return written_as_path or path.exists()


def official_name(model_name: str) -> str:
    """Return TransformerLens' official name for ``model_name``, which may be an alias.

    Raises:
        KVLensError: TransformerLens knows no such name; the message proposes the nearest one.
    """
    names = loading.make_model_alias_map()
    found = names.get(str(model_name).lower())
    if found is None:
        raise KVLensError(
            f"from_pretrained: {str(model_name)!r} is neither a folder on this machine (for a model that is not one of "
            "TransformerLens' own, pass its folder, or hf_model=) nor one of the "
            f"{len(set(names.values()))} official model names or their aliases{nearest(str(model_name).lower(), names)}"
        )
    return found


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
    **from_pretrained_kwargs: Any,
) -> PretrainedParts:
    """Make config, weights and tokenizer from a local folder or from a loaded Hugging Face model. No network is used.

    Args:
        model_name: a Hugging Face folder (``config.json``, weights, possibly a tokenizer); with ``hf_model`` any name.
        hf_model: a loaded causal language model; its weights and config are used, and it is left as it is.
        tokenizer: used in place of the folder's. It is copied, the copy prepends BOS (as TransformerLens wants it).
            Without one, a name that is official takes its tokenizer from the local Hugging Face cache if it fits.
        dtype: of the config and of all floating weights; a torch dtype or its name.
        device: goes into the config (None: TransformerLens chooses); the weights stay on the device where they are.
        n_devices: goes into the config.
        fold_ln: whether the layer norms will be folded (the config then says ``LNPre`` or ``RMSPre``).
        default_prepend_bos: overrides the architecture's own default.
        first_n_layers: keep only this many layers.
        n_ctx: context length; longer than the model's own only where positions are not learned.
        from_pretrained_kwargs: for Hugging Face's ``from_pretrained``, with a folder only. ``torch_dtype`` replaces
            ``dtype``, as in TransformerLens.

    Returns:
        The ``PretrainedParts``.

    Raises:
        KVLensError: no such folder or name, files missing, an architecture or a feature of it that TransformerLens
            cannot express, a quantised model, or sizes out of range.
    """
    dtype = _dtype(from_pretrained_kwargs.pop("torch_dtype", dtype))
    _check_arguments(model_name, hf_model, from_pretrained_kwargs)
    folder = Path(model_name).expanduser().resolve() if is_local_folder(model_name) else None
    if hf_model is None and folder is None:
        raise KVLensError(
            f"load_pretrained_parts: {official_name(str(model_name))!r} is a name on the hub. Pass a local folder, "
            "or hf_model=, or load it by name with from_pretrained."
        )
    source: Any = folder if hf_model is None else hf_model
    official = None if folder else loading.make_model_alias_map().get(str(model_name).lower())
    options: dict[str, Any] = {
        "dtype": dtype,
        "device": device,
        "n_devices": n_devices,
        "fold_ln": fold_ln,
        "default_prepend_bos": default_prepend_bos,
        "first_n_layers": first_n_layers,
        "n_ctx": n_ctx,
    }
    config = _own_config(source)
    if baichuan.is_baichuan_m1(config):
        cfg, state_dict, checkpoint = _convert_baichuan_m1(source, config, from_pretrained_kwargs, options)
    else:
        cfg, state_dict, checkpoint = _convert_by_transformer_lens(source, official, from_pretrained_kwargs, options)
    cfg.model_name = folder.name if folder else (official or str(model_name)).split("/")[-1]
    shift = import_shift_coefficients(checkpoint)
    shift = {name: coef.detach() for name, coef in shift.items() if int(name.split(".")[1]) < cfg.n_layers}
    tokenizer = find_tokenizer(tokenizer, folder, official, cfg)
    return PretrainedParts(cfg, state_dict, tokenizer, shift)


def _own_config(source: Path | PreTrainedModel) -> dict[str, Any]:
    """The Hugging Face configuration of a folder (made sure to hold a checkpoint) or of a loaded model, as a dict."""
    if isinstance(source, PreTrainedModel):
        return source.config.to_dict()
    _check_folder_files(source)
    return read_json_config(source)


def _convert_by_transformer_lens(
    source: Path | PreTrainedModel, official: str | None, kwargs: dict[str, Any], options: dict[str, Any]
) -> tuple[HookedTransformerConfig, dict[str, Tensor], Mapping[str, Tensor]]:
    """Configuration and weights through transformers and TransformerLens, and the tensors that may hold a KV shift."""
    if isinstance(source, PreTrainedModel):
        hf_model, checkpoint = source, source.state_dict()
    else:
        hf_model, checkpoint = _load_folder(source, options["dtype"], kwargs)
    architecture = _architecture(hf_model)
    _check_readable(hf_model)
    cfg = translate_config(hf_model.config, architecture, official, **options)
    return cfg, convert_weights(hf_model, cfg), checkpoint


def _convert_baichuan_m1(
    source: Path | PreTrainedModel, config: dict[str, Any], kwargs: dict[str, Any], options: dict[str, Any]
) -> tuple[HookedTransformerConfig, dict[str, Tensor], Mapping[str, Tensor]]:
    """As :func:`_convert_by_transformer_lens`, by kvlens' own translation: transformers does not know the architecture."""
    _refuse_without_effect(kwargs, "a Baichuan-M1 checkpoint")
    cfg = baichuan.baichuan_m1_config(config, **options)

    def wanted(name: str) -> bool:
        return baichuan.is_baichuan_m1_weight(name, cfg.n_layers)

    if isinstance(source, PreTrainedModel):
        _check_readable(source)
        checkpoint = {name: tensor for name, tensor in source.state_dict().items() if wanted(name)}
    else:
        checkpoint = read_tensors(source, wanted)
    weights = baichuan.convert_baichuan_m1_weights(
        checkpoint,
        cfg,
        tied=config.get("tie_word_embeddings", True),  # transformers' default where the file does not say
        conv_window=baichuan.conv_window_of(config),
    )
    return cfg, weights, checkpoint


def _dtype(dtype: Any) -> torch.dtype:
    """Return the floating dtype that is meant by a dtype or by its name."""
    found = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if found not in READABLE_DTYPES:
        raise KVLensError(f"from_pretrained: dtype must be one of {sorted(DTYPES)}, got {dtype!r}{nearest(dtype, DTYPES)}")
    return found


def _check_arguments(model_name: str | Path, hf_model: Any, kwargs: dict[str, Any]) -> None:
    """Refuse what this way of loading cannot honour, before any file is read."""
    for key in ("load_in_4bit", "load_in_8bit", "quantization_config"):
        if kwargs.get(key):
            raise KVLensError(f"from_pretrained: {key} asks for quantised weights, which cannot be converted: remove it")
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


def _load_folder(folder: Path, dtype: torch.dtype, kwargs: dict[str, Any]) -> tuple[PreTrainedModel, Mapping[str, Tensor]]:
    """Load the causal language model in ``folder`` and make sure that every one of its weights came from there.

    Returns:
        The model, and the shift coefficients that the checkpoint holds beside its weights: transformers drops them.
    """
    kwargs = {**kwargs, "local_files_only": True}
    try:
        hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=kwargs.get("trust_remote_code", False))
    except Exception as error:
        raise KVLensError(f"from_pretrained: transformers cannot read {folder / 'config.json'}: {error}") from error
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(hf_config.model_type)
    if class_name not in SUPPORTED_ARCHITECTURES:
        raise _unsupported((hf_config.architectures or [class_name or hf_config.model_type])[0], str(folder))
    if getattr(hf_config, "quantization_config", None):
        raise KVLensError(
            f"from_pretrained: {folder} holds a quantised model ({hf_config.quantization_config}); its weights cannot "
            "be converted. Load it dequantised with transformers and pass it as hf_model=."
        )
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True, **kwargs)
    except Exception as error:
        raise KVLensError(
            f"from_pretrained: transformers cannot load the model in {folder}: {type(error).__name__}: {error}"
        ) from error
    hf_model, report = loaded
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise KVLensError(
            f"from_pretrained: the weights in {folder} lack {len(missing)} of the model's parameters (they would be "
            f"random): {missing[:5]}. It was saved as {hf_config.architectures}; expected {class_name}."
        )
    if not any(is_shift_coefficient(name) for name in report["unexpected_keys"]):
        return hf_model, {}
    return hf_model, read_tensors(folder, is_shift_coefficient)


def _check_folder_files(folder: Path) -> None:
    """Raise unless ``folder`` has a config and full weights; say what was expected and what is there."""
    expected = "a folder written by save_pretrained, with config.json and model.safetensors"
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise KVLensError(f"from_pretrained: {folder} {what}; expected {expected}")
    names = sorted(entry.name for entry in folder.iterdir())
    found = f"found {names[:12]}{' ...' if len(names) > 12 else ''}" if names else "the folder is empty"
    if "adapter_config.json" in names:
        raise KVLensError(
            f"from_pretrained: {folder} holds an adapter, not a full model ({found}). Merge it into its base "
            "(merge_and_unload), save that, and pass that folder."
        )
    if "config.json" not in names:
        raise KVLensError(f"from_pretrained: no config.json in {folder}: expected {expected}; {found}")
    if not any(any(folder.glob(pattern)) for pattern in WEIGHT_PATTERNS):
        raise KVLensError(f"from_pretrained: no weights in {folder}: expected {expected}; {found}")


def _unsupported(architecture: str, where: str) -> KVLensError:
    """Make the error for an architecture that cannot be built from its config."""
    return KVLensError(
        f"from_pretrained: {where} has the architecture {architecture}, which TransformerLens' HookedTransformer "
        "cannot build from a config. Supported: "
        f"{', '.join(sorted((*SUPPORTED_ARCHITECTURES, baichuan.ARCHITECTURE)))}. "
        "(Gemma, OLMo 1 and 2 load by official name only.)"
    )


def _architecture(hf_model: PreTrainedModel) -> str:
    """Name the architecture by the model's class: ``config.architectures`` is None in a model made in memory."""
    for parent in type(hf_model).__mro__:
        if parent.__name__ in SUPPORTED_ARCHITECTURES:
            return parent.__name__
    raise _unsupported(type(hf_model).__name__, "the model")


def _check_readable(hf_model: PreTrainedModel) -> None:
    """Raise if a weight is packed, quantised, not loaded, or under an adapter: it would be converted to nonsense."""
    for name, weight in hf_model.named_parameters():
        if "lora_" in name:
            raise KVLensError(f"from_pretrained: the model carries an adapter ({name}): merge it first")
        if weight.device.type == "meta":
            raise KVLensError(f"from_pretrained: {name} is on the meta device: load the model with real weights")
        if weight.dtype not in READABLE_DTYPES:
            raise KVLensError(
                f"from_pretrained: {name} is stored as {weight.dtype}: a quantised model cannot be converted. Load it "
                "dequantised."
            )
