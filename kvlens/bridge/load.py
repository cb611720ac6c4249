"""A plain TransformerBridge from a folder, from a name on the hub, or around a loaded Transformers model.

Every weight comes from the files, and every weight of the files is used. Of a model of images and text whose language model
stands alone (Qwen3.5), the language model is taken.
"""

import copy
import inspect
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_config_from_hf, configure_tokenizer
from transformer_lens.model_bridge.sources.transformers_driver import TransformersDriver
from transformer_lens.utilities import get_device
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from kvlens.bridge import adapters  # noqa: F401  (registers them)
from kvlens.bridge.comparison import logits_of_transformers
from kvlens.bridge.parts import refuse_encoders
from kvlens.errors import KVLensError, first_line
from kvlens.files import check_listed
from kvlens.pretrained.checkpoint_files import check_checkpoint, check_positions
from kvlens.pretrained.names import cached_folder, official_names
from kvlens.pretrained.transformers_model import check_readable, quantized_model_error, read_config, read_model
from kvlens.tokenizer import check_vocabulary, read_tokenizer
from kvlens.zoo import fetch

DOOR = "KVTransformerBridge: "
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model")
TEXT_PART = ("qwen3_5", "qwen3_5_moe")
"""Model types, of images and text, of which Transformers has the language model as a class of its own."""
N_CTX = ("n_positions", "max_position_embeddings")
"""What Transformers calls the number of positions."""
NOT_HERE = {
    "load_weights": "a bias needs weights",
    "trust_remote_code": "kvlens runs no code that comes with a model",
    "model_class": "load the model by Transformers, and give the loaded model",
    "n_devices": "give device_map",
    "checkpoint_index": "give revision",
    "checkpoint_value": "give revision",
}
"""Options of TransformerLens' loader that are refused, and what to do."""


Loaded = tuple[TransformerBridge, Float[Tensor, "text pos d_vocab"] | None]
"""A bridge, and the logits that it is compared with, if it is: see :mod:`kvlens.bridge.comparison`."""


def wrapped(model: PreTrainedModel, *, tokenizer: PreTrainedTokenizerBase | None = None, verify: bool = True) -> Loaded:
    """A bridge around ``model``, which keeps its device and dtype; with ``verify``, the logits that it is to be compared with.

    Raises:
        KVLensError: no stack of decoder blocks, or no architecture that TransformerLens knows; weights that were offloaded,
            are quantized or not finite; a model that Transformers itself cannot run.
    """
    kind = type(model).__name__
    refuse_encoders(kind, model.config)
    if getattr(model.config, "quantization_config", None) is not None:
        raise quantized_model_error(DOOR, f"this {kind}")
    check_positions("KVTransformerBridge", model.config.to_dict())
    check_readable(DOOR, model)
    model = _language_model(model)
    kind = type(model).__name__
    if tokenizer is not None:
        d_vocab = int(model.config.get_text_config().vocab_size)
        check_vocabulary(tokenizer, d_vocab, "KVTransformerBridge", f"the vocabulary of this {kind}")
    logits = logits_of_transformers(model) if verify else None
    config = copy.copy(model.config)
    if getattr(config, "position_embedding_type", "") is None:
        config.position_embedding_type = "nope"  # Granite 4: TransformerLens takes None for rotary positions
    name = getattr(model, "name_or_path", "") or kind
    try:
        bridge = _built(model, config, tokenizer, str(name))
    except Exception as error:
        raise _unreadable(kind, error) from error
    return bridge, logits


class _NotScanned(TransformerBridge):
    """A bridge that does not look for its hook points: TransformerLens does so twice, which takes half of the time of loading,
    and :meth:`kvlens.KVTransformerBridge.of` finds all of them in the end."""

    def _scan_existing_hooks(self, module: nn.Module, prefix: str = "") -> None:
        pass


def _built(
    model: PreTrainedModel, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None, name: str
) -> TransformerBridge:
    """Build the bridge as TransformerLens' ``build_bridge_from_module`` does, but its hook points are not registered."""
    weight = next(model.parameters())
    cfg = build_bridge_config_from_hf(config, type(model).__name__, name, weight.dtype)
    adapter = ArchitectureAdapterFactory.select_architecture_adapter(cfg)
    adapter.cfg.device = str(weight.device)
    adapter.prepare_model(model)
    tokenizer = None if tokenizer is None else configure_tokenizer(tokenizer, adapter.cfg)
    driver = TransformersDriver(model, adapter, tokenizer)
    driver.supported_hook_points = frozenset({"not scanned"})  # none at all would be refused
    return _NotScanned(model, adapter, tokenizer, driver=driver)


def loaded(source: str | Path, *args: object, verify: bool = True, **options: object) -> Loaded:
    """A bridge to the model in a folder, or of a name on the hub; without a tokenizer, of token ids.

    Args:
        source: the folder or the name.
        args, options: as ``TransformerBridge.boot_transformers`` takes them.
        verify: as for :func:`wrapped`.

    Raises:
        KVLensError: nothing that Transformers and TransformerLens can load; weights that the model has and the files lack, or
            the other way round; an option in :data:`NOT_HERE`; and as :func:`wrapped`.
    """
    signature = inspect.signature(TransformerBridge.boot_transformers)
    given = signature.bind(str(source), *args, **options).arguments
    for option, instead in NOT_HERE.items():
        if option in given and given[option] != signature.parameters[option].default:
            raise KVLensError(f"KVTransformerBridge: {option}={given[option]!r} is not supported: {instead}")
    if given.get("hf_model") is not None:
        return wrapped(given["hf_model"], tokenizer=given.get("tokenizer"), verify=verify)
    folder, name = Path(source).expanduser(), str(source)
    if not isinstance(source, Path) and not folder.is_dir():
        name = official_names().get(name.lower(), name)
        revision = given.get("revision")
        folder = cached_folder(name, revision) or fetch(name, "KVTransformerBridge", revision=revision)
    n_stored = check_checkpoint("KVTransformerBridge", folder)
    check_listed(folder)
    try:
        model = _from_files(folder, n_stored, given)
        tokenizer = given.get("tokenizer")
        if tokenizer is None and any((folder / file).is_file() for file in TOKENIZER_FILES):
            tokenizer = _tokenizer(folder)
    except KVLensError:
        raise
    except Exception as error:
        raise _unreadable(name, error) from error
    model.name_or_path = name
    return wrapped(model, tokenizer=tokenizer, verify=verify)


def _from_files(folder: Path, n_stored: int, given: dict[str, Any]) -> PreTrainedModel:
    """The model of a folder of ``n_stored`` numbers; ``given`` as of ``TransformerBridge.boot_transformers``."""
    config = read_config(folder)
    refuse_encoders((config.architectures or [config.model_type])[0], config)
    changes = dict(given.get("hf_config_overrides") or {})
    if given.get("n_ctx") is not None:
        changes[next((field for field in N_CTX if hasattr(config, field)), N_CTX[-1])] = given["n_ctx"]
    check_positions("KVTransformerBridge", changes)
    for field, value in changes.items():
        setattr(config, field, value)
    where = {option: given[option] for option in ("device_map", "max_memory") if given.get(option) is not None}
    device = given.get("device")
    if where and device is not None:
        raise ValueError("device and device_map exclude each other")
    dtype = given.get("dtype") or torch.float32
    model, _ = read_model(DOOR, folder, config, n_stored, dtype=dtype, **where)
    placed: PreTrainedModel = model if where else model.to(device or get_device())
    return placed


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer as TransformerLens does: with a BOS where it has one."""
    try:
        return read_tokenizer(folder, add_bos_token=True)
    except ValueError:
        return read_tokenizer(folder)


def _language_model(model: PreTrainedModel) -> PreTrainedModel:
    """The language model of a model of images and text, with the same weights; other models as they are."""
    if model.config.model_type not in TEXT_PART:
        return model
    with torch.device("meta"):
        text = AutoModelForCausalLM.from_config(model.config.get_text_config())
    text.model, text.lm_head = model.model.language_model, model.lm_head
    return text.train(model.training)


def _unreadable(what: str, error: Exception) -> KVLensError:
    return KVLensError(
        f"KVTransformerBridge: {what} cannot be loaded by Transformers and TransformerLens ({first_line(error)}); give a "
        "folder written by save_pretrained, a name on the hub whose files can be reached, or a loaded Transformers model of an "
        "architecture that TransformerLens' bridge knows"
    )
