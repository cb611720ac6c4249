"""Transformers' own model of a folder: every weight came from its files, and no code that comes with it ran.

Hugging Face folders can contain Python files (``auto_map``), which Transformers runs if they are trusted, and otherwise asks
about on the terminal; an attention implementation with a "/" in its name is a kernel that it downloads and runs. kvlens
disables this in every call.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, dynamic_module_utils
from transformers.utils import logging

from kvlens.dtypes import DTYPES
from kvlens.errors import KVLensError
from kvlens.pretrained.checkpoint_files import BUFFER, check_known_ranges

SAFE = {"trust_remote_code": False, "weights_only": True, "local_files_only": True}
"""What every call of Transformers' ``from_pretrained`` is given."""


def refuse_to_run_code(kwargs: Mapping[str, object]) -> None:
    """Raise KVLensError if an argument for Hugging Face's ``from_pretrained`` would let files of others run."""
    if kwargs.get("trust_remote_code"):
        raise KVLensError(
            "from_pretrained: trust_remote_code=True is refused: kvlens runs no code that comes with a model. If you trust "
            "it, load the model with transformers yourself and pass hf_model= and tokenizer="
        )
    if kwargs.get("weights_only") is False:
        raise KVLensError("from_pretrained: weights_only=False is refused: a pickle in a weights file could run anything")
    if "/" in str(kwargs.get("attn_implementation", "")):
        raise KVLensError(
            f"from_pretrained: attn_implementation={kwargs['attn_implementation']!r} is code from the hub, which is not run; "
            "take 'eager' or 'sdpa'"
        )


@contextlib.contextmanager
def nothing_asked() -> Iterator[None]:
    """No question on the terminal, also from calls that leave ``trust_remote_code`` open."""
    before = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # transformers' own switch: no time to answer, so it raises
    try:
        yield
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = before


@contextlib.contextmanager
def nothing_fetched() -> Iterator[None]:
    """Hugging Face's cache answers and the hub is not asked, in every call of transformers too."""
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True  # what the environment variable of this name sets; read at every request
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


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


def read_config(folder: Path, **options: object) -> PreTrainedConfig:
    """Transformers' configuration of a folder."""
    return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True, **options)


def read_model(
    door: str,
    folder: Path,
    config: PreTrainedConfig,
    n_stored: int,
    *,
    dtype: torch.dtype,
    source: str = "",
    saved_as: str = "",
    known: Callable[[str], bool] = lambda name: False,
    **options: object,
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """Transformers' causal language model in ``folder``: its weights came from there, and all that is there is used.

    Args:
        door: what an error starts with.
        folder: one that ``check_checkpoint`` let pass.
        config: of :func:`read_config`, changed perhaps.
        n_stored: what ``check_checkpoint`` returned.
        dtype: of the weights.
        source: what an error calls the folder, if not by its path.
        saved_as, known: as for :func:`check_loaded`.
        options: for Transformers' ``from_pretrained``; what could run code is overruled.

    Returns:
        The model, and what Transformers says about loading.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise quantized_model_error(door, source or str(folder))
    check_known_ranges(door, config.to_dict())
    check_size(door, source or str(folder), config, n_stored)
    # eager: the file may name a kernel of the hub, which transformers would fetch and run
    options = {"attn_implementation": "eager", **options, **SAFE}
    with without_progress_bars():
        loaded = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # check_loaded says which
            **options,
        )
    model, report = loaded
    check_loaded(report, door, source or str(folder), saved_as, known)
    return model, report


def quantized_model_error(door: str, what: str) -> KVLensError:
    """Make the error for a model whose weights stand for other numbers."""
    return KVLensError(
        f"{door}{what} holds a quantized model: its weights are quantized, and kvlens reads weights as numbers; dequantize "
        "them by Transformers (model.dequantize()), save the model, and load that, or pass it as hf_model="
    )


def check_size(door: str, source: str, config: PreTrainedConfig, n_stored: int) -> None:
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


@torch.no_grad()
def check_readable(door: str, model: PreTrainedModel) -> None:
    """Raise if a weight is packed, quantized, not loaded, not finite, or under an adapter: it would become nonsense."""
    kind, weights = type(model).__name__, dict(model.named_parameters())
    elsewhere = [name for name, weight in weights.items() if weight.is_meta]
    if elsewhere:
        raise KVLensError(
            f"{door}{len(elsewhere)} weights of {kind} are not in memory ({elsewhere[0]}, for example), but on the meta "
            "device: load the model with real weights, by a device_map that leaves every layer on a device if by any"
        )
    for name, weight in weights.items():
        if "lora_" in name:
            raise KVLensError(f"{door}the model carries an adapter ({name}): merge it first")
        if weight.dtype not in DTYPES.values():
            raise KVLensError(
                f"{door}{name} is stored as {weight.dtype}: a quantized model cannot be converted. Load it dequantized."
            )
    broken = [name for name, weight in weights.items() if weight.numel() and not _is_finite(weight)]
    if broken:
        raise KVLensError(
            f"{door}{len(broken)} weights of {kind} hold NaN or infinity: {broken[:5]}; use an intact copy of the model"
        )


def _is_finite(weight: Tensor) -> bool:
    return all(bool(end.isfinite()) for end in weight.aminmax())
