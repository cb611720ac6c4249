"""Small trained models that ship inside the package: each a folder with weights, tokenizer, configuration and a model card."""

import os
from importlib.resources import files
from pathlib import Path

from kvlens.errors import KVLensError, nearest
from kvlens.signature import checked

_ROOT = Path(str(files("kvlens.zoo")))


def names() -> list[str]:
    """The names of the shipped models."""
    return sorted(path.parent.name for path in _ROOT.glob("*/config.json"))


@checked
def folder_of(name: str) -> Path:
    """The folder of a shipped model, for ``HookedKVTransformer.load``.

    Raises:
        KVLensError: no such model; the nearest name is proposed.
    """
    if name not in names():
        raise KVLensError(f"zoo: no shipped model is called {name!r}{nearest(name, names())}; there are {', '.join(names())}")
    return _ROOT / name


@checked
def source_of(name: str) -> Path:
    """Where a model is that a person names: the folder of a shipped model, else ``name`` itself as a folder or a file.

    Raises:
        KVLensError: there is neither; the nearest shipped name is proposed.
    """
    shipped = names()
    if name in shipped:
        return folder_of(name)
    path = os.path.expanduser(name)
    if os.path.exists(path):  # False for what can be no path at all
        return Path(path)
    listed = f"shipped are: {', '.join(shipped)}" if shipped else "this installation ships none"
    raise KVLensError(
        f"--model: {name!r} is neither a shipped model nor a folder or file that holds one; {listed}{nearest(name, shipped)}"
    )
