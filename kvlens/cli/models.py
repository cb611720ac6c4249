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

    check_device(device)
    return HookedKVTransformer.load(folder, device=device, dtype=None if dtype is None else getattr(torch, dtype))


def check_device(device: str | None) -> None:
    """Raise KVLensError unless tensors can be computed on ``device``; None is always fine. Imports torch."""
    if device is None:
        return
    import torch

    try:
        torch.ones(1, device=device).sum().item()  # "meta" makes tensors, and holds no numbers
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise KVLensError(f"--device: {device!r} cannot be used here ({reason}); cpu always can") from error


def check_seed(seed: int) -> None:
    """Raise KVLensError unless torch's generators take ``seed``."""
    if not 0 <= seed < 2**63:
        raise KVLensError(f"--seed: expected a number from 0 to 2**63 - 1, got {seed}")
