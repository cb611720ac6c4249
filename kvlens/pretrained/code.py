"""Code that comes with a model is never run, and the user is never asked whether it may be.

Hugging Face folders can contain Python files (``auto_map``), which transformers runs if they are trusted, and otherwise asks
about on the terminal; an attention implementation with a "/" in its name is a kernel that it downloads and runs. kvlens
disables this in every call.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from huggingface_hub import constants
from transformers import dynamic_module_utils

from kvlens.errors import KVLensError


def refuse_to_run_code(kwargs: Mapping[str, Any]) -> None:
    """Raise KVLensError if an argument for Hugging Face's ``from_pretrained`` would let files of others run."""
    if kwargs.get("trust_remote_code"):
        raise KVLensError(
            "from_pretrained: trust_remote_code=True is refused: kvlens runs no code that comes with a model. If you trust "
            "it, load the model with transformers yourself and pass hf_model= and tokenizer="
        )
    if kwargs.get("weights_only") is False:
        raise KVLensError("from_pretrained: weights_only=False is refused: a pickle in a weights file could run anything")
    if "/" in str(kwargs.get("attn_implementation", "")):
        raise KVLensError(
            f"from_pretrained: attn_implementation={kwargs['attn_implementation']!r} is code from the hub, which is not run; "
            "take 'eager' or 'sdpa'"
        )


@contextlib.contextmanager
def nothing_asked() -> Iterator[None]:
    """No question on the terminal, also from calls that leave ``trust_remote_code`` open."""
    before = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # transformers' own switch: no time to answer, so it raises
    try:
        yield
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = before


@contextlib.contextmanager
def nothing_fetched() -> Iterator[None]:
    """Hugging Face's cache answers and the hub is not asked, in every call of transformers too."""
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True  # what the environment variable of this name sets; read at every request
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
