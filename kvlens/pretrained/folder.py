"""A folder in Hugging Face's format: is all there, and what transformers makes of it."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from kvlens.base.families import SAME_TEXT_MODEL, SUPPORTED_ARCHITECTURES, unsupported
from kvlens.dtypes import DTYPES
from kvlens.errors import KVLensError
from kvlens.pretrained.checkpoint_files import BUFFER, read_tensors
from kvlens.pretrained.shift_import import is_shift_coefficient


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """transformers draws its bars on stderr, which a notebook shows as a red box; here it draws none."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_folder(
    folder: Path, n_stored: int, dtype: torch.dtype, kwargs: dict[str, Any]
) -> tuple[PreTrainedModel, Mapping[str, Tensor]]:
    """Load the causal language model in ``folder`` and make sure that every one of its weights came from there.

    Args:
        folder: one that ``check_checkpoint`` let pass.
        n_stored: what it returned.
        dtype: of the weights.
        kwargs: for Transformers' ``from_pretrained``.

    Returns:
        The model, and the shift coefficients that the checkpoint holds in addition to its weights: transformers drops them.
    """
    kwargs = {**kwargs, "trust_remote_code": False, "weights_only": True, "local_files_only": True}
    try:
        hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        # the file may name a kernel of the hub, which transformers would fetch and run
        hf_config._attn_implementation = kwargs.pop("attn_implementation", "eager")
    except Exception as error:
        raise KVLensError(f"from_pretrained: transformers cannot read {folder / 'config.json'}: {error}") from error
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(hf_config.model_type)
    if SAME_TEXT_MODEL.get(class_name, class_name) not in SUPPORTED_ARCHITECTURES:
        raise unsupported((hf_config.architectures or [class_name or hf_config.model_type])[0], str(folder))
    if getattr(hf_config, "quantization_config", None):
        raise KVLensError(
            f"from_pretrained: {folder} holds a quantized model ({hf_config.quantization_config}); its weights cannot "
            "be converted. Load it dequantized with transformers and pass it as hf_model=."
        )
    try:
        check_size("from_pretrained: ", str(folder), hf_config, n_stored)
        with without_progress_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=hf_config,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # check_loaded says which
                **kwargs,
            )
    except KVLensError:
        raise
    except Exception as error:
        raise KVLensError(
            f"from_pretrained: transformers cannot load the model in {folder}: {type(error).__name__}: {error}"
        ) from error
    hf_model, report = loaded
    saved_as = f" It was saved as {hf_config.architectures}; expected {class_name}."
    check_loaded(report, "from_pretrained: ", str(folder), saved_as, is_shift_coefficient)
    if hf_model.config.tie_word_embeddings:
        check_tied(hf_model.get_output_embeddings().weight, hf_model.get_input_embeddings().weight, str(folder))
    for weight in hf_model.parameters():
        if not weight.untyped_storage().resizable():
            # pages of a file are given back all together, when the last weight is gone; a weight's own memory goes with it
            weight.data = weight.data.clone()
    if not any(is_shift_coefficient(name) for name in report["unexpected_keys"]):
        return hf_model, {}
    return hf_model, read_tensors(folder, is_shift_coefficient)


def check_size(door: str, source: str, config: Any, n_stored: int) -> None:
    """Raise KVLensError where a configuration describes far more weights than are stored: Transformers makes room for them.

    Args:
        door: what an error starts with.
        source: where the weights are.
        config: Transformers' configuration, of no more layers than there are (``check_counts``).
        n_stored: how many numbers the weights are; a tied unembedding may be described and not stored.
    """
    with torch.device("meta"):
        # eager: the configuration may name a kernel of the hub, which Transformers would fetch and run
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, attn_implementation="eager")
    described = sum(weight.numel() for weight in model.parameters())
    if described > 2 * n_stored:
        raise KVLensError(
            f"{door}the configuration describes {described:,} weights, and {source} holds {n_stored:,} numbers: they have "
            "other shapes; put config.json right"
        )


def check_loaded(
    report: Mapping[str, Any], door: str, source: str, saved_as: str = "", known: Callable[[str], bool] = lambda name: False
) -> None:
    """Raise unless a model has every weight of its files, and its files every weight of the model.

    Args:
        report: what transformers says about loading (``output_loading_info=True``).
        door: what an error starts with.
        source: where the weights are.
        saved_as: what an error adds about the model's class.
        known: whether a tensor of this name is read in another way.
    """
    other_shapes = [f"{name} {[*found]} for {[*wanted]}" for name, found, wanted in sorted(report.get("mismatched_keys") or ())]
    if other_shapes:
        raise KVLensError(
            f"{door}{len(other_shapes)} weights in {source} have other shapes than its configuration says: {other_shapes[:5]}; "
            "put config.json right"
        )
    unknown = sorted(name for name in report["unexpected_keys"] if not known(name) and not BUFFER.search(name))
    if unknown:
        raise KVLensError(
            f"{door}the weights in {source} hold {len(unknown)} tensors that its configuration has no place for: "
            f"{unknown[:5]}. Without them it would be another model: put config.json right, or take them out of the file"
        )
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise KVLensError(
            f"{door}the weights in {source} lack {len(missing)} of the model's parameters (they would be "
            f"random): {missing[:5]}.{saved_as}"
        )


def check_tied(head: Tensor, embedding: Tensor, where: str) -> None:
    """Raise if a configuration ties the head to the embedding and the weights hold another: who is right cannot be told."""
    if head is not embedding and not torch.equal(head, embedding):
        raise KVLensError(
            f"from_pretrained: {where} has tie_word_embeddings=True in its configuration and an output embedding of its own: "
            "some releases of transformers take the one and some the other. Set tie_word_embeddings to false, or take the "
            "tensor out of the file"
        )


def check_readable(hf_model: PreTrainedModel) -> None:
    """Raise if a weight is packed, quantized, not loaded, not finite, or under an adapter: it would become nonsense."""
    for name, weight in hf_model.named_parameters():
        if "lora_" in name:
            raise KVLensError(f"from_pretrained: the model carries an adapter ({name}): merge it first")
        if weight.device.type == "meta":
            raise KVLensError(f"from_pretrained: {name} is on the meta device: load the model with real weights")
        if weight.dtype not in DTYPES.values():
            raise KVLensError(
                f"from_pretrained: {name} is stored as {weight.dtype}: a quantized model cannot be converted. Load it "
                "dequantized."
            )
    check_finite("from_pretrained", hf_model)


@torch.no_grad()
def check_finite(door: str, hf_model: PreTrainedModel) -> None:
    """Raise KVLensError, starting with ``door``, if a weight is no floating-point number, NaN or infinite; it is named."""
    kind = type(hf_model).__name__
    integers = [name for name, weight in hf_model.named_parameters() if not weight.is_floating_point()]
    if integers:
        raise KVLensError(f"{door}: weights of {kind} are integers ({integers[:5]}); use a copy that is not quantized")
    broken = [name for name, weight in hf_model.named_parameters() if weight.numel() and not _is_finite(weight)]
    if broken:
        raise KVLensError(
            f"{door}: {len(broken)} weights of {kind} hold NaN or infinity: {broken[:5]}; use an intact copy of the model"
        )


def _is_finite(weight: Tensor) -> bool:
    return all(bool(end.isfinite()) for end in weight.aminmax())
