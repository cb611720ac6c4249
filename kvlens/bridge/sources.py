"""Any model by where it is, on the front end that runs it: :func:`load_model`, which the command line and batches call."""

from pathlib import Path
from typing import Any

from kvlens import zoo
from kvlens.bridge.bridge import KVTransformerBridge
from kvlens.dtypes import dtype_of
from kvlens.errors import KVLensError
from kvlens.files import read_json
from kvlens.model import KVModel, load_source
from kvlens.pretrained.architectures import SUPPORTED_ARCHITECTURES
from kvlens.pretrained.baichuan import ARCHITECTURE as BAICHUAN_M1


def load_model(source: Path | str, *, tokenizer: str | Path | None = None, device: Any = None, dtype: Any = None) -> KVModel:
    """The model of ``source``: a HookedKVTransformer where that class can build it, else a KVTransformerBridge.

    The bridge runs folders in Hugging Face's format whose architecture HookedKVTransformer does not have: Qwen3.5, Qwen3-Next,
    GPT-OSS and others. ``KVTransformerBridge.boot_transformers(folder)`` takes any of them.

    Args:
        source: as :func:`kvlens.model.load_source`.
        tokenizer: the file of a llama2.c tokenizer; folders bring their own.
        device: None takes CUDA where there is one.
        dtype: of the weights; None keeps the stored one of a kvlens folder, and is float32 elsewhere.

    Raises:
        KVLensError: as :func:`kvlens.model.load_source`; an architecture whose layers have no way to read a KV bias.
    """
    if not is_for_the_bridge(source):
        return load_source(source, tokenizer=tokenizer, device=device, dtype=dtype)
    if tokenizer is not None:
        raise KVLensError("--tokenizer is for a llama2.c checkpoint; a folder brings its own")
    options: dict[str, Any] = {} if dtype is None else {"dtype": dtype_of(dtype, "--dtype")}
    if device is not None:
        options["device"] = device
    if isinstance(source, Path) and source.name in zoo.names() and source == zoo.folder_of(source.name):
        return KVTransformerBridge.from_zoo(source.name, **options)
    return KVTransformerBridge.boot_transformers(source, **options)


def is_for_the_bridge(source: Path | str) -> bool:
    """Whether ``source`` is a folder in Hugging Face's format of an architecture that HookedKVTransformer cannot build."""
    if not isinstance(source, Path) or not source.is_dir():
        return False
    try:
        config = read_json("model", source / "config.json")
    except KVLensError:
        return False  # load_source says what is wrong with it
    if not isinstance(config, dict) or "model_type" not in config or "format" in config:
        return False
    named = config.get("architectures")
    return isinstance(named, list) and bool(named) and not {*named} & {*SUPPORTED_ARCHITECTURES, BAICHUAN_M1}
