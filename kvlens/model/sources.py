"""Any model by where it is: one that ships, a folder of ours, a folder of Hugging Face, or a checkpoint of llama2.c."""

from pathlib import Path
from typing import Any

from kvlens.errors import KVLensError
from kvlens.files import read_json
from kvlens.model.transformer import HookedKVTransformer


def load_source(
    source: Path,
    *,
    tokenizer: str | Path | None = None,
    device: Any = None,
    dtype: Any = None,
    **processing: Any,
) -> HookedKVTransformer:
    """The model of ``source``.

    Args:
        source: a folder of ours or of Hugging Face, or a checkpoint of llama2.c; :func:`kvlens.zoo.source_of` finds those that
            ship.
        tokenizer: the file of a llama2.c tokenizer; folders bring their own.
        device, dtype: as in :meth:`HookedKVTransformer.load`; None keeps the default.
        processing: what :meth:`HookedKVTransformer.from_pretrained` does to the weights of a Hugging Face folder
            (``center_unembed=False``, ...); nothing is done to the others.

    Raises:
        KVLensError: a tokenizer for a folder, or a source that cannot be read.
    """
    wanted = {name: value for name, value in (("device", device), ("dtype", dtype)) if value is not None}
    if source.is_file():
        return HookedKVTransformer.from_llama2c(source, tokenizer, **wanted)
    if tokenizer is not None:
        raise KVLensError("--tokenizer is for a llama2.c checkpoint; a folder brings its own")
    if _is_hugging_face(source):
        return HookedKVTransformer.from_pretrained(source, **wanted, **processing)
    return HookedKVTransformer.load(source, **wanted)


def _is_hugging_face(folder: Path) -> bool:
    """Whether the folder's config.json is one of transformers, which names the type of model and not our format."""
    try:
        config = read_json("model", folder / "config.json")
    except KVLensError:
        return False
    return isinstance(config, dict) and "model_type" in config and "format" not in config
