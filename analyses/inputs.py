"""How the fields of a record become arguments: token ids, with BOS where it belongs.

A prompt begins as the model is used to, with BOS where that is its default; everything else without. A model
without a tokenizer reads token numbers: a list, or their text with blanks between.
"""

from typing import Any

import torch
from torch import Tensor

from kvlens import HookedKVTransformer, KVLensError
from kvlens.checks import checked

from .declaration import Field


@checked
def tokens_field(name: str, *, prepend_bos: bool, required: bool = True) -> Field:
    """A field as tokens [pos], with a BOS in front where ``prepend_bos`` and the model wants one."""

    def read(model: HookedKVTransformer, value: Any) -> Tensor:
        return read_tokens(model, name, value, prepend_bos=prepend_bos and model.prepends_bos)

    return Field(name, read, required)


def read_tokens(model: HookedKVTransformer, what: str, value: Any, *, prepend_bos: bool) -> Tensor:
    """``value`` as tokens [pos].

    Raises:
        KVLensError: neither text nor token numbers, or text for a model that has no tokenizer; ``what`` is named.
    """
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


PROMPT = tokens_field("prompt", prepend_bos=True)
"""The prompt's tokens [pos], with BOS where the model wants one."""
TEXT = tokens_field("text", prepend_bos=False)
"""The text's tokens [pos], without BOS: it stands behind the prompt."""
ANSWER = Field("answer", required=False)
"""The token whose logit counts: an id, or the text of one; None where the record names none."""
RIVAL = Field("rival", required=False)
"""The token whose logit is subtracted from the answer's, likewise."""
