"""The tokens that a record of a batch stands for.

Strings are read by the model's tokenizer: a prompt with BOS where the model wants one, everything else without. A model
without a tokenizer reads token numbers: a list, or their text with blanks between.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from analyses._analysis import Record
from kvlens import HookedKVTransformer, KVLensError


def read_prompt(model: HookedKVTransformer, record: Record) -> Tensor:
    """``record.prompt`` as tokens [pos], with BOS where the model wants one."""
    return _tokens(model, "prompt", record.prompt, prepend_bos=model.cfg.default_prepend_bos)


def read_text(model: HookedKVTransformer, record: Record) -> Tensor:
    """``record.text`` as tokens [pos], without BOS: it stands behind the prompt."""
    if record.text is None:
        raise KVLensError("text: this analysis needs one, and the record has none")
    return _tokens(model, "text", record.text, prepend_bos=False)


def read_field(model: HookedKVTransformer, record: Record, name: str, *, prepend_bos: bool) -> Tensor:
    """Another field of the record as tokens [pos]; KVLensError that names it where the record has none."""
    if record.fields.get(name) is None:
        held = ", ".join(record.fields) or "none"
        raise KVLensError(f"{name}: this analysis needs a field of this name in every record; this one's fields are: {held}")
    return _tokens(model, name, record.fields[name], prepend_bos=prepend_bos)


def _tokens(model: HookedKVTransformer, what: str, value: Any, *, prepend_bos: bool) -> Tensor:
    if isinstance(value, str) and model.tokenizer is not None:
        return model.to_tokens(value, prepend_bos=prepend_bos, truncate=False)[0]
    numbers = value.split() if isinstance(value, str) else value
    try:
        return torch.tensor([int(number) for number in numbers], dtype=torch.long)
    except (TypeError, ValueError):
        raise KVLensError(
            f"{what}: expected token numbers with blanks between, because this model has no tokenizer, got {value!r}"
            if model.tokenizer is None
            else f"{what}: expected a string or a list of token numbers, got {value!r}"
        ) from None


def needs_linear_attention(analysis: str) -> Callable[[HookedKVTransformer], None]:
    """For ``Analysis.check_model``: refuse models whose prompts have no exact bias."""

    def check(model: HookedKVTransformer) -> None:
        if model.cfg.attention != "linear":
            raise KVLensError(f"{analysis}: it takes the biases of converted prompts apart, which needs attention='linear'")

    return check
