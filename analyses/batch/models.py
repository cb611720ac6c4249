"""Models by name, as a batch is given them: shipped ones, folders of kvlens, and folders of Hugging Face."""

import json
import os
from pathlib import Path
from typing import Any

import torch

from kvlens import HookedKVTransformer, KVLensError, zoo
from kvlens.arguments import check_device, path_of
from kvlens.errors import nearest


class ModelShelf:
    """Keeps the model that was asked for last: a batch goes model by model, and two might not fit in memory.

    Args:
        names: shipped models or folders.
        device: where they run; None takes TransformerLens' choice.
        dtype: of the weights, e.g. ``float64``; None keeps the stored one.
    """

    def __init__(self, names: tuple[str, ...], *, device: str | None, dtype: str | None):
        self.names, self.device, self.dtype = names, device, dtype
        self._held: tuple[int, HookedKVTransformer] | None = None

    def __getitem__(self, index: int) -> HookedKVTransformer:
        if self._held is None or self._held[0] != index:
            self._held = None  # frees the old model before the new one is read
            self._held = (index, load_model(self.names[index], device=self.device, dtype=self.dtype))
        return self._held[1]


def check_model_name(name: str) -> None:
    """Raise KVLensError unless ``name`` is a shipped model or a folder; nothing is read."""
    shipped = zoo.names()
    if name not in shipped and not os.path.isdir(os.path.expanduser(name)):
        raise KVLensError(
            f"model: {name!r} is neither a shipped model nor a folder; shipped are: {', '.join(shipped)}"
            f"{nearest(name, shipped)}"
        )


def load_model(name: str, *, device: str | None = None, dtype: str | None = None) -> HookedKVTransformer:
    """Load a shipped model, a folder that ``HookedKVTransformer.save`` wrote, or one in Hugging Face's format.

    Raises:
        KVLensError: it cannot be read, or the device cannot be used here.
    """
    check_model_name(name)
    check_device("device", device)
    kwargs: dict[str, Any] = dict(device=device, dtype=None if dtype is None else getattr(torch, dtype))
    folder = path_of("model", name)
    if name in zoo.names():
        return HookedKVTransformer.from_zoo(name, **kwargs)
    if _is_hugging_face(folder):
        return HookedKVTransformer.from_pretrained(folder, **{k: v for k, v in kwargs.items() if v is not None})
    return HookedKVTransformer.load(folder, **kwargs)


def _is_hugging_face(folder: Path) -> bool:
    try:
        return "model_type" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False
