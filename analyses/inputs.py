"""How the fields of a record become arguments: token ids, with BOS for the prompt.

A prompt starts with BOS if that is the model's default; other fields never do. For a model without a tokenizer, a field is a
list of token ids, or a string of ids separated by blanks.
"""

from typing import Any

import torch
from torch import Tensor

from kvlens import KVLensError, KVModel
from kvlens.checks import checked

from .declaration import Field


@checked
def tokens_field(name: str, *, prepend_bos: bool, required: bool = True) -> Field:
    """A field read as tokens [pos], with BOS prepended if ``prepend_bos`` and that is the model's default."""

    def read(model: KVModel, value: Any) -> Tensor:
        return read_tokens(model, name, value, prepend_bos=prepend_bos and model.prepends_bos)

    return Field(name, read, required)


def read_tokens(model: KVModel, what: str, value: Any, *, prepend_bos: bool) -> Tensor:
    """Read ``value`` as tokens [pos].

    Raises:
        KVLensError: neither text nor token ids, or text for a model without a tokenizer; the message names ``what``.
    """
    if isinstance(value, str) and model.tokenizer is not None:
        return model.to_tokens(value, prepend_bos=prepend_bos, truncate=False)[0]
    numbers = value.split() if isinstance(value, str) else value
    try:
        return torch.tensor([int(number) for number in numbers], dtype=torch.long)
    except (TypeError, ValueError):
        raise KVLensError(
            f"{what}: expected token ids separated by blanks, because this model has no tokenizer, got {value!r}"
            if model.tokenizer is None
            else f"{what}: expected a string or a list of token ids, got {value!r}"
        ) from None


PROMPT = tokens_field("prompt", prepend_bos=True)
"""The prompt's tokens [pos], with BOS if the model uses one."""
TEXT = tokens_field("text", prepend_bos=False)
"""The text's tokens [pos], without BOS, since it follows the prompt."""
ANSWER = Field("answer", required=False)
"""The token whose logit is measured, by id or text; None if the record has none."""
RIVAL = Field("rival", required=False)
"""The token whose logit is subtracted from the answer's, by id or text; None if the record has none."""
