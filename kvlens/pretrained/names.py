"""Deciding whether a model is given as a local folder or by name, and resolving aliases to official names."""

import os
from pathlib import Path

from kvlens.arguments import path_of
from kvlens.base.loading import official_names
from kvlens.errors import KVLensError, nearest, nearest_name
from kvlens.zoo import names as shipped_names


def is_local_folder(model_name: str | Path) -> bool:
    """Whether ``model_name`` is a local folder rather than a TransformerLens name.

    A ``Path``, a folder with a ``config.json``, and anything that looks like a path or exists on disk is a folder. An
    official name wins over a folder of that name that has no ``config.json``.
    """
    if isinstance(model_name, Path):
        return True
    path = path_of("from_pretrained", model_name)
    if (path / "config.json").is_file():
        return True
    if model_name.lower() in official_names():
        return False
    written_as_path = model_name.startswith((".", "~", os.sep)) or "\\" in model_name or model_name.count("/") > 1
    return written_as_path or path.exists()


def official_name(model_name: str) -> str:
    """Return TransformerLens' official name for ``model_name``, which may be an alias.

    Raises:
        KVLensError: TransformerLens has no such name; the message suggests the nearest one, or says that kvlens ships it.
    """
    names = official_names()
    found = names.get(str(model_name).lower())
    shipped = nearest_name(model_name, shipped_names(), likeness=0.8)
    if found is None and shipped is not None:
        raise KVLensError(
            f"from_pretrained: {str(model_name)!r} names no model of Hugging Face's; those that ship with kvlens are loaded by "
            f'HookedKVTransformer.from_zoo("{shipped}")'
        )
    if found is None:
        raise KVLensError(
            f"from_pretrained: {str(model_name)!r} is neither a folder on this machine (for a model that is not one of "
            "TransformerLens' own, pass its folder, or hf_model=) nor one of the "
            f"{len(set(names.values()))} official model names or their aliases{nearest(str(model_name).lower(), names)}"
        )
    return found
