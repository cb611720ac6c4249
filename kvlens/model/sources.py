"""Loading a model from any source: a kvlens or Hugging Face folder, a llama2.c checkpoint, or Hugging Face's local cache."""

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
    """Load the model at ``source``.

    Args:
        source: the result of :func:`kvlens.zoo.source_of`: a kvlens or Hugging Face folder, or a llama2.c checkpoint; or an
            official TransformerLens name whose files are in Hugging Face's local cache.
        tokenizer: the file of a llama2.c tokenizer; folders include their own.
        device, dtype: as in :meth:`HookedKVTransformer.load`; None keeps the default.
        processing: weight processing of :meth:`HookedKVTransformer.from_pretrained` for a Hugging Face folder
            (``center_unembed=False``, ...); other sources are not processed.

    Raises:
        KVLensError: a tokenizer given with a folder, an unreadable source, an unknown name, or a name whose files are not
            in the cache.
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
            f'HookedKVTransformer.from_pretrained("{official}", local_files_only=False) fetches them; or give its folder'
        )
    return official


def _is_hugging_face(folder: Path) -> bool:
    """Whether the folder's config.json was written by transformers: it names the type of model and not kvlens' format."""
    try:
        config = read_json("model", folder / "config.json")
    except KVLensError:
        return False
    return isinstance(config, dict) and "model_type" in config and "format" not in config
