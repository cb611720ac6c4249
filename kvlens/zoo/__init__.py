"""Small trained models that ship inside the package: each a folder with weights, tokenizer, configuration and a model card."""

from importlib.resources import files
from pathlib import Path

from kvlens.errors import KVLensError, nearest

_ROOT = Path(str(files("kvlens.zoo")))


def names() -> list[str]:
    """The names of the shipped models."""
    return sorted(path.parent.name for path in _ROOT.glob("*/config.json"))


def folder_of(name: str) -> Path:
    """The folder of a shipped model, for ``HookedKVTransformer.load``.

    Raises:
        KVLensError: no such model; the nearest name is proposed.
    """
    if name not in names():
        raise KVLensError(f"zoo: no shipped model is called {name!r}{nearest(name, names())}; there are {', '.join(names())}")
    return _ROOT / name
