"""A plain TransformerBridge from a folder, from a name on the hub, or around a loaded Transformers model.

Of a model of images and text whose language model stands alone (Qwen3.5), the language model is taken.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvlens.bridge.adapters import ADAPTERS
from kvlens.bridge.table import FAMILIES, NAMES
from kvlens.errors import KVLensError, first_line
from kvlens.files import check_listed
from kvlens.pretrained.folder import without_progress_bars

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model")
N_CHECKED = 8
"""Tokens on which the bridge of an untested family is compared with Transformers."""
TEXT_PART = ("qwen3_5", "qwen3_5_moe")
"""Model types, of images and text, of which Transformers has the language model as a class of its own."""
BY_TRANSFORMERS = (*TEXT_PART, *(adapter.model_type for adapter in ADAPTERS.values()))
"""Model types that TransformerLens' loader does not read, or not so."""
PLACEMENT = {"device_map", "max_memory"}
"""Options that Transformers' loader takes as they are."""
PLAIN_OPTIONS = {"device", "dtype", "tokenizer", *PLACEMENT}


def wrapped(model: PreTrainedModel, *, tokenizer: Any = None) -> TransformerBridge:
    """A bridge around ``model``, which keeps its device and dtype.

    Raises:
        KVLensError: no architecture that TransformerLens knows, or an untested one (not in
            :data:`kvlens.bridge.table.FAMILIES`) for which the bridge gives other logits than Transformers; weights that were
            offloaded.
    """
    offloaded = [name for name, weight in model.named_parameters() if weight.is_meta]
    if offloaded:
        raise KVLensError(
            f"KVTransformerBridge: {len(offloaded)} weights of {type(model).__name__} are not in memory ({offloaded[0]}, for "
            "example): a device_map offloaded them to disk or to the CPU. A bridge reads weights outside of passes too; load "
            "the model with a device_map that leaves every layer on a device"
        )
    model = _language_model(model)
    name = getattr(model, "name_or_path", "") or type(model).__name__
    expected = None if model.config.model_type in FAMILIES else _few_logits(model)
    try:
        bridge = build_bridge_from_module(
            model, type(model).__name__, hf_config=model.config, tokenizer=tokenizer, model_name=str(name)
        )
    except (ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise _unreadable(type(model).__name__, error) from error
    if expected is not None:
        _check_logits(type(model).__name__, _few_logits(bridge), expected)
    return bridge


@torch.no_grad()
def _few_logits(model: Any) -> Tensor:
    """Without dropout, of as many tokens as a check needs, before or after a bridge was built around a model."""
    plain = getattr(model, "original_model", model)
    tokens = torch.arange(N_CHECKED)[None] % int(plain.config.get_text_config().vocab_size)
    was_training = plain.training
    plain.eval()
    found = model(tokens.to(next(model.parameters()).device))
    plain.train(was_training)
    return found if isinstance(found, Tensor) else found.logits


def _check_logits(architecture: str, found: Tensor, expected: Tensor) -> None:
    error = float((found - expected).norm() / expected.norm())
    if not error <= torch.finfo(found.dtype).eps ** 0.5:  # rounding is below that in every dtype
        raise KVLensError(
            f"KVTransformerBridge: TransformerLens' bridge does not compute what {architecture} computes: on {N_CHECKED} "
            f"tokens its logits differ from Transformers' by {error:.1%}, so whatever was measured would be about another "
            f"model. Try another release of TransformerLens, or take one of the tested families: {NAMES}"
        )


def loaded(source: str | Path, *args: Any, **options: Any) -> TransformerBridge:
    """A bridge to the model in a folder, or of a name on the hub; without a tokenizer, of token ids.

    Raises:
        KVLensError: nothing that Transformers and TransformerLens can load; a model of an untested family with options that
            only TransformerLens' loader has, since it could not be compared with Transformers.
    """
    folder = Path(source).expanduser()
    if isinstance(source, Path) and not folder.is_dir():
        raise KVLensError(f"KVTransformerBridge: there is no folder {folder}; expected one with config.json and weights")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise KVLensError(f"KVTransformerBridge: no config.json in {folder}; expected a folder written by save_pretrained")
    if folder.is_dir():
        check_listed(folder)
    has_tokenizer = options.get("tokenizer") is not None or any((folder / name).is_file() for name in TOKENIZER_FILES)
    try:
        with without_progress_bars():
            name = str(folder) if folder.is_dir() else str(source)
            plain = not args and set(options) <= PLAIN_OPTIONS
            kind = _model_type(name)
            by_transformers = kind in BY_TRANSFORMERS or (kind is not None and kind not in FAMILIES)
            if plain and ((folder.is_dir() and not has_tokenizer) or by_transformers):
                where = {option: value for option, value in options.items() if option in PLACEMENT and value is not None}
                if where and options.get("device") is not None:
                    raise ValueError("device and device_map exclude each other")
                model = AutoModelForCausalLM.from_pretrained(
                    name,
                    dtype=options.get("dtype") or torch.float32,
                    attn_implementation="eager",
                    trust_remote_code=False,
                    **where,
                )
                tokenizer = options.get("tokenizer")
                if tokenizer is None and (has_tokenizer or not folder.is_dir()):
                    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
                return wrapped(model if where else model.to(options.get("device") or "cpu"), tokenizer=tokenizer)
            if kind is not None and kind not in FAMILIES:
                others = ", ".join(sorted(set(options) - PLAIN_OPTIONS)) or "options by position"
                raise KVLensError(
                    f"KVTransformerBridge: {kind} is no tested family, and with {others} it cannot be compared with "
                    "Transformers when it is loaded; load it by Transformers, and give the loaded model"
                )
            return TransformerBridge.boot_transformers(name, *args, **options)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        if isinstance(error, KVLensError):
            raise
        raise _unreadable(str(source), error) from error


def _model_type(name: str) -> str | None:
    try:
        return str(AutoConfig.from_pretrained(name, trust_remote_code=False).model_type)
    except (OSError, ValueError, KeyError):
        return None  # TransformerLens says what is wrong with it, or knows another way


def _language_model(model: PreTrainedModel) -> PreTrainedModel:
    """The language model of a model of images and text, with the same weights; other models as they are."""
    if model.config.model_type not in TEXT_PART:
        return model
    held: Any = model
    with torch.device("meta"):
        text: Any = AutoModelForCausalLM.from_config(model.config.get_text_config())
    text.model, text.lm_head = held.model.language_model, held.lm_head
    return text.train(model.training)


def _unreadable(what: str, error: Exception) -> KVLensError:
    return KVLensError(
        f"KVTransformerBridge: {what} cannot be loaded by Transformers and TransformerLens ({first_line(error)}); give a "
        "folder written by save_pretrained, a name on the hub whose files can be reached, or a loaded Transformers model of an "
        "architecture that TransformerLens' bridge knows"
    )
