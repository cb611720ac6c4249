"""Models as the command line names them: a shipped one, or a folder."""

from pathlib import Path
from typing import Any

from kvlens.errors import KVLensError

DEFAULT_MODEL = "docs-linear"


def load_on(source: Path, device: str | None, dtype: str | None, tokenizer: str | None = None) -> Any:
    """The model of ``source`` on ``device`` in ``dtype``; None keeps the default. Imports torch.

    Args:
        source: a folder of ours or of Hugging Face, or a checkpoint of llama2.c.
        device, dtype: as in :meth:`kvlens.HookedKVTransformer.load`.
        tokenizer: the file of a llama2.c tokenizer.
    """
    import torch

    from kvlens.model.sources import load_source

    check_device(device)
    wanted = None if dtype is None else getattr(torch, dtype)
    return load_source(source, tokenizer=tokenizer, device=device, dtype=wanted)


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
