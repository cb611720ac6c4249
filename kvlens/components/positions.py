"""Whether a token hidden by the attention mask keeps its position.

Padding takes up no position: TransformerLens counts the tokens that the mask shows, and so do RoPE, learned positions and
decay. A counterfactual prompt hides tokens of the original prompt, and later tokens may keep their positions: positions are
then counted over all tokens, including hidden ones, and the state of linear attention decays past them as past any other. In
both cases a hidden token adds nothing to A, D or the keys, and the KV shift mixes a token with the last *visible* one.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from torch import Tensor

_KEPT: ContextVar[bool] = ContextVar("hidden_tokens_keep_positions", default=False)


@contextlib.contextmanager
def hidden_tokens_keep_positions(keep: bool = True) -> Iterator[None]:
    """Inside the block, in this thread only, tokens hidden by the attention mask keep their positions."""
    before = _KEPT.set(keep)
    try:
        yield
    finally:
        _KEPT.reset(before)


def counted_by(attention_mask: Tensor | None) -> Tensor | None:
    """The mask of tokens that take up positions: ``attention_mask``, or None if every token does."""
    return None if _KEPT.get() else attention_mask


def all_take_positions() -> bool:
    """Whether hidden tokens currently keep their positions in this thread."""
    return _KEPT.get()
