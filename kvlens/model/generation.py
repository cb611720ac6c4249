"""Checks of what is generated, and reading a long text without logits, whose memory would exceed everything else."""

from typing import Annotated, Any

from jaxtyping import Int
from torch import Tensor
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

from kvlens.base import HookedTransformer
from kvlens.checks import Within
from kvlens.errors import KVLensError
from kvlens.model.streaming import has_hooks

LONG = 1024
"""Texts of at least this many tokens are read without logits, which would take more memory than everything else."""
MOST_NEW = Annotated[int, Within(1, 2**31 - 1)]
TEMPERATURE = Annotated[float, Within(0, 1e20)]
"""0 means the most probable token."""


def read_before_the_last(
    model: HookedTransformer, new: Tensor, mask: Tensor | None, cache: TransformerLensKeyValueCache | None
) -> tuple[Tensor, Tensor | None]:
    """Read a long text into the state of linear attention without logits; returns what is still to be read, with its mask."""
    n = new.shape[1] - 1
    if cache is None or mask is None or new.is_floating_point() or model.cfg.attention != "linear":
        return new, mask
    if n < LONG or has_hooks(model):  # a hook expects the whole text
        return new, mask
    model(new[:, :n], attention_mask=mask[:, :n], past_kv_cache=cache, return_type=None)
    return new[:, n:], mask[:, n:]


def check_left_padding(tokenizer: Any, tokens: Int[Tensor, "batch pos"], mask: Int[Tensor, "batch pos"]) -> None:
    """Raise KVLensError if rows end in padding (new tokens follow the last position), or if padding would be read as text."""
    pads_are_their_own = tokenizer.pad_token_id not in (None, tokenizer.bos_token_id, tokenizer.eos_token_id)
    read_as_text = pads_are_their_own and bool(((tokens[:, 0] == tokenizer.pad_token_id) & mask[:, 0].bool()).any())
    if read_as_text or not bool(mask[:, -1].all()):
        raise KVLensError(
            "generate: rows must be padded on the left, so that the new token follows the text: give strings (which are padded "
            "on the left), or tokens padded on the left together with padding_side='left'"
        )
