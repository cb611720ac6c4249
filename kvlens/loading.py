"""Any model by where it is, on the front end that runs it: :func:`load`, which is ``kvlens.load``."""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import HF_HUB_CACHE
from transformer_lens.utilities import get_device
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvlens.arguments import check_device, path_of
from kvlens.bridge import KVTransformerBridge
from kvlens.checks import checked
from kvlens.dtypes import dtype_of
from kvlens.errors import KVLensError
from kvlens.files import read_json
from kvlens.model import HookedKVTransformer, KVModel
from kvlens.pretrained import (
    cached_folder,
    is_gguf,
    is_rwkv_cpp,
    is_rwkv_folder,
    official_name,
    official_names,
    read_gguf,
    read_rwkv_cpp,
    read_rwkv_folder,
)
from kvlens.pretrained.translation import BAICHUAN_M1, SUPPORTED_ARCHITECTURES
from kvlens.zoo import folder_of, is_hugging_face, names, source_of


@checked
def load(
    source: str | Path,
    *,
    tokenizer: str | Path | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    verify: bool | None = None,
    download: bool = False,
) -> KVModel:
    """The model of ``source``: a HookedKVTransformer where that class can build it, else a KVTransformerBridge.

    The bridge runs Transformers' own model of architectures that HookedKVTransformer does not have: Qwen3.5, Qwen3-Next,
    Nemotron-H and others. To choose the front end, or for more options, call what this function calls:
    ``HookedKVTransformer.from_zoo``, ``load``, ``from_pretrained`` or ``from_llama2c``, or ``KVTransformerBridge.from_zoo`` or
    ``boot_transformers``. It reads files on this machine, and fetches nothing unless ``download``.

    >>> from kvlens import load
    >>> load("bigram-linear").cfg.attention
    'linear'

    Args:
        source: the name of a model that ships with kvlens; a folder that ``HookedKVTransformer.save`` wrote, or one in Hugging
            Face's format; a GGUF file, one of rwkv.cpp, a llama2.c checkpoint; or a name on the hub whose files are in Hugging
            Face's cache. A string that names a shipped model is that model, a Path never is.
        tokenizer: the file of a llama2.c tokenizer; everything else brings its own.
        device: None takes CUDA where there is one.
        dtype: of the weights; None keeps the stored one of a kvlens folder, and is float32 elsewhere.
        verify: compare the model with Transformers' own on a few tokens, as ``from_pretrained`` and ``boot_transformers`` do;
            False saves the time. Folders of kvlens and llama2.c checkpoints have nothing to be compared with.
        download: fetch the files of a name on the hub into Hugging Face's cache, where it lacks them.

    Raises:
        KVLensError: there is no such model, or none that can be read; a tokenizer for anything but a llama2.c checkpoint;
            ``verify=True`` where there is nothing to compare with.
    """
    found = source_of(source, "load", download) if isinstance(source, str) else path_of("load: source", source)
    options: dict[str, Any] = {"device": device, "dtype": None if dtype is None else dtype_of(dtype, "load: dtype")}
    options = {name: value for name, value in options.items() if value is not None}
    if isinstance(found, Path) and found.is_file() and not (is_gguf(found) or is_rwkv_cpp(found)):
        _refuse_to_verify(verify, "a llama2.c checkpoint")
        return HookedKVTransformer.from_llama2c(found, tokenizer, **options)
    if tokenizer is not None:
        raise KVLensError("load: a tokenizer file is for a llama2.c checkpoint; a folder brings its own")
    if isinstance(found, Path) and found.is_file():
        return _from_file(found, verify, **options)
    official = official_names().get(found.lower()) if isinstance(found, str) else None
    folder = _in_the_cache(found, official) if isinstance(found, str) else found
    if not is_hugging_face(folder):
        _refuse_to_verify(verify, "a folder of kvlens")
        return HookedKVTransformer.load(folder, **options)
    if is_rwkv_folder(folder):
        return _on_bridge(*read_rwkv_folder(folder, options.pop("dtype", torch.float32)), verify, **options)
    if _is_for_hooked_transformer(folder):
        return HookedKVTransformer.from_pretrained(official or folder, verify=verify, **options)
    if folder.name in names() and folder == folder_of(folder.name):
        return KVTransformerBridge.from_zoo(folder.name, verify=verify, **options)
    return KVTransformerBridge.boot_transformers(folder, verify=verify, **options)


def _refuse_to_verify(verify: bool | None, what: str) -> None:
    if verify:
        raise KVLensError(f"load: verify=True: Transformers does not read {what}, so nothing can be compared; leave verify out")


def _from_file(
    path: Path, verify: bool | None, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> KVModel:
    check_device("load: device", device)
    read = read_rwkv_cpp if is_rwkv_cpp(path) else read_gguf
    model, tokenizer = read(path, dtype)
    if type(model).__name__ in SUPPORTED_ARCHITECTURES:
        return HookedKVTransformer.from_pretrained(
            path.stem, hf_model=model, tokenizer=tokenizer, verify=verify, dtype=dtype, device=device
        )
    return _on_bridge(model, tokenizer, verify, device)


def _on_bridge(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    verify: bool | None,
    device: torch.device | str | None = None,
) -> KVTransformerBridge:
    check_device("load: device", device)
    return KVTransformerBridge.boot_transformers(model.to(device or get_device()), tokenizer=tokenizer, verify=verify)


def _in_the_cache(name: str, official: str | None) -> Path:
    """Find where Hugging Face's cache has the files of a name."""
    folder = cached_folder(official or name)
    if folder is None:
        official_name(name)  # which refuses an unknown one
        raise KVLensError(
            f"load: TransformerLens knows {name!r}, but its files are not in the local cache ({HF_HUB_CACHE}): "
            "--download, or download=True, fetches them; or give its folder"
        )
    return folder


def _is_for_hooked_transformer(folder: Path) -> bool:
    """Whether HookedKVTransformer can build the architecture, or the folder names none."""
    named = read_json("load", folder / "config.json").get("architectures")
    return not isinstance(named, list) or not named or any(name in (*SUPPORTED_ARCHITECTURES, BAICHUAN_M1) for name in named)
