"""Models as the command line names them: a shipped one, or a folder."""

from pathlib import Path
from typing import Any

from kvlens import zoo
from kvlens.errors import KVLensError, nearest

DEFAULT_MODEL = "docs-linear"


def model_folder(name: str) -> Path:
    """The folder of a shipped model, else ``name`` itself as a folder."""
    shipped = zoo.names()
    if name in shipped:
        return zoo.folder_of(name)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    listed = f"shipped are: {', '.join(shipped)}" if shipped else "this installation ships none"
    raise KVLensError(
        f"--model: {name!r} is neither a shipped model nor a folder that HookedKVTransformer.save wrote; "
        f"{listed}{nearest(name, shipped)}"
    )


def load_on(folder: Path, device: str | None, dtype: str | None) -> Any:
    """The model of ``folder`` on ``device`` in ``dtype``; None keeps the default. Imports torch."""
    import torch

    from kvlens.model import HookedKVTransformer

    if device is not None:
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).splitlines()[0]
            raise KVLensError(f"--device: {device!r} cannot be used here ({reason}); cpu always can") from error
    return HookedKVTransformer.load(folder, device=device, dtype=None if dtype is None else getattr(torch, dtype))
