"""Pretrained weights without a network: from a local Hugging Face folder, or from a model already in memory.

TransformerLens knows how to turn a Hugging Face config and its weights into a ``HookedTransformerConfig`` and a state
dict, but its own entry point goes through the official name: it fetches the config from the hub even when the weights
are given, and any path that contains "llama", "gemma", "bert", "t5" ... takes hard-coded sizes or another model class.

Here the user's name never reaches those branches. The config is written alone into a temporary folder with a neutral
name, TransformerLens' ``get_pretrained_model_config`` reads it there, and its ``get_pretrained_state_dict`` converts
the weights of a model that is already loaded. What the loader would read wrongly or drop without a word (a rotary base,
an MLP width, attention biases, a rotary scaling, a sliding window) is put right where ``HookedTransformer`` can express
it and refused where it cannot.

Two limits on float64 are not ours: TransformerLens' weight processing casts to float32, so only unprocessed weights
stay exact, and Hugging Face computes rotary angles and RMS norms in float32 whatever the model's dtype is.
"""

import logging
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvlens._tl import HookedTransformerConfig, loading
from kvlens.errors import KVLensError, nearest
from kvlens.model.pretrained_config import translate_config
from kvlens.model.pretrained_tokenizer import find_tokenizer
from kvlens.model.pretrained_weights import NO_BIAS_ARCHITECTURES, convert_weights

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
    """

    cfg: HookedTransformerConfig
    state_dict: dict[str, Tensor]
    tokenizer: PreTrainedTokenizerBase | None


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
    if hf_model is None:
        if folder is None:
            raise KVLensError(
                f"load_pretrained_parts: {official_name(str(model_name))!r} is a name on the hub. Pass a local folder, "
                "or hf_model=, or load it by name with from_pretrained."
            )
        hf_model = _load_folder(folder, dtype, from_pretrained_kwargs)
    architecture = _architecture(hf_model)
    _check_readable(hf_model)
    official = None if folder else loading.make_model_alias_map().get(str(model_name).lower())
    cfg = translate_config(
        hf_model.config,
        architecture,
        official,
        dtype=dtype,
        device=device,
        n_devices=n_devices,
        fold_ln=fold_ln,
        default_prepend_bos=default_prepend_bos,
        first_n_layers=first_n_layers,
        n_ctx=n_ctx,
    )
    cfg.model_name = folder.name if folder else (official or str(model_name)).split("/")[-1]
    state_dict = convert_weights(hf_model, cfg)
    tokenizer = find_tokenizer(tokenizer, folder, official, cfg)
    return PretrainedParts(cfg, state_dict, tokenizer)


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
    unused = sorted(set(kwargs) - {"trust_remote_code", "token", "cache_dir", "local_files_only"})
    if unused:
        raise KVLensError(f"from_pretrained: {unused} would have no effect on a loaded hf_model: remove them")


def _load_folder(folder: Path, dtype: torch.dtype, kwargs: dict[str, Any]) -> PreTrainedModel:
    """Load the causal language model in ``folder`` and make sure that every one of its weights came from there."""
    _check_folder_files(folder)
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
    return hf_model


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
        f"{', '.join(sorted(SUPPORTED_ARCHITECTURES))}. (Gemma, OLMo 1 and 2 load by official name only.)"
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
