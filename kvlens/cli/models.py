"""Models as the command line names them: a shipped one, or a folder."""

import json
from pathlib import Path
from typing import Any

from kvlens import zoo
from kvlens.errors import KVLensError, nearest

DEFAULT_MODEL = "docs-linear"


def model_folder(name: str) -> Path:
    """The folder of a shipped model, else ``name`` itself as a folder or a file."""
    shipped = zoo.names()
    if name in shipped:
        return zoo.folder_of(name)
    folder = Path(name).expanduser()
    if folder.exists():
        return folder
    listed = f"shipped are: {', '.join(shipped)}" if shipped else "this installation ships none"
    raise KVLensError(
        f"--model: {name!r} is neither a shipped model nor a folder or file that holds one; {listed}{nearest(name, shipped)}"
    )


def load_on(source: Path, device: str | None, dtype: str | None, tokenizer: str | None = None) -> Any:
    """The model of ``source`` on ``device`` in ``dtype``; None keeps the default. Imports torch.

    Args:
        source: a folder of ours or of Hugging Face, or a checkpoint of llama2.c.
        device, dtype: as in :meth:`kvlens.HookedKVTransformer.load`.
        tokenizer: the file of a llama2.c tokenizer.
    """
    import torch

    from kvlens.model import HookedKVTransformer

    check_device(device)
    wanted = {} if dtype is None else {"dtype": getattr(torch, dtype)}
    if source.is_file():
        return HookedKVTransformer.from_llama2c(source, tokenizer, device=device, **wanted)
    if tokenizer is not None:
        raise KVLensError("--tokenizer is for a llama2.c checkpoint; a folder brings its own")
    if _is_hugging_face(source):
        return HookedKVTransformer.from_pretrained(source, device=device, **wanted)
    return HookedKVTransformer.load(source, device=device, **wanted)


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


def _is_hugging_face(folder: Path) -> bool:
    """Whether the folder's config.json is one of transformers, which names the type of model and not our format."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "model_type" in config and "format" not in config
