"""Any model by where it is: a folder of ours or of Hugging Face, a checkpoint of llama2.c, or Hugging Face's local cache."""

from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.constants import HF_HUB_CACHE

from kvlens.errors import KVLensError
from kvlens.files import read_json
from kvlens.model.transformer import HookedKVTransformer
from kvlens.pretrained import official_name


def load_source(
    source: Path | str,
    *,
    tokenizer: str | Path | None = None,
    device: Any = None,
    dtype: Any = None,
    **processing: Any,
) -> HookedKVTransformer:
    """The model of ``source``.

    Args:
        source: what :func:`kvlens.zoo.source_of` finds: a folder of ours or of Hugging Face, or a checkpoint of llama2.c; or a
            name that TransformerLens knows, whose files are in Hugging Face's local cache.
        tokenizer: the file of a llama2.c tokenizer; folders bring their own.
        device, dtype: as in :meth:`HookedKVTransformer.load`; None keeps the default.
        processing: what :meth:`HookedKVTransformer.from_pretrained` does to the weights of a Hugging Face folder
            (``center_unembed=False``, ...); nothing is done to the others.

    Raises:
        KVLensError: a tokenizer for a folder, a source that cannot be read, an unknown name, or whose files are not
            here.
    """
    wanted = {name: value for name, value in (("device", device), ("dtype", dtype)) if value is not None}
    if isinstance(source, str):
        source = _name_in_the_cache(source)
    elif source.is_file():
        return HookedKVTransformer.from_llama2c(source, tokenizer, **wanted)
    if tokenizer is not None:
        raise KVLensError("--tokenizer is for a llama2.c checkpoint; a folder brings its own")
    if isinstance(source, str) or _is_hugging_face(source):
        return HookedKVTransformer.from_pretrained(source, **wanted, **processing)
    return HookedKVTransformer.load(source, **wanted)


def _name_in_the_cache(name: str) -> str:
    """TransformerLens' official name for ``name``.

    Raises:
        KVLensError: no such model, or its files are not in the local cache.
    """
    official = official_name(name)
    if not isinstance(try_to_load_from_cache(official, "config.json"), str):
        raise KVLensError(
            f"--model: TransformerLens knows {name!r}, but its files are not in the local cache ({HF_HUB_CACHE}): "
            f'HookedKVTransformer.from_pretrained("{official}") fetches them; or give its folder'
        )
    return official


def _is_hugging_face(folder: Path) -> bool:
    """Whether the folder's config.json is one of transformers, which names the type of model and not our format."""
    try:
        config = read_json("model", folder / "config.json")
    except KVLensError:
        return False
    return isinstance(config, dict) and "model_type" in config and "format" not in config
