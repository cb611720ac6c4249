"""Models as the command line names them: a shipped one, or a folder."""

from pathlib import Path
from typing import Any

from kvlens.arguments import check_device

DEFAULT_MODEL = "docs-linear"


def load_on(source: Path, device: str | None, dtype: str | None, tokenizer: str | None = None) -> Any:
    """The model of ``source`` on ``device`` in ``dtype``; None keeps the default. Imports torch.

    Args:
        source: a folder of ours or of Hugging Face, or a checkpoint of llama2.c.
        device, dtype: as in :meth:`kvlens.HookedKVTransformer.load`.
        tokenizer: the file of a llama2.c tokenizer.
    """
    import torch

    from kvlens.model import load_source

    check_device("--device", device)
    wanted = None if dtype is None else getattr(torch, dtype)
    return load_source(source, tokenizer=tokenizer, device=device, dtype=wanted)
