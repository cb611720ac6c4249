"""Whether a token that the attention mask hides keeps its position.

Padding takes no position: TransformerLens counts the tokens that the mask shows, and so do RoPE, learned positions and decay.
A counterfactual prompt hides tokens that were there, and what comes after them may stay where it stood: positions are then
counted over all tokens, hidden ones included, and the state of linear attention decays past them as past any other token.
In both cases a hidden token adds nothing to A, D or the keys, and the KV shift mixes a token with the last *visible* one.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from torch import Tensor

_KEPT: ContextVar[bool] = ContextVar("hidden_tokens_keep_positions", default=False)


@contextlib.contextmanager
def hidden_tokens_keep_positions(keep: bool = True) -> Iterator[None]:
    """Inside, and in this thread alone, tokens that the attention mask hides keep their positions."""
    before = _KEPT.set(keep)
    try:
        yield
    finally:
        _KEPT.reset(before)


def counted_by(attention_mask: Tensor | None) -> Tensor | None:
    """The mask whose tokens take positions: ``attention_mask``, or None where every token takes one."""
    return None if _KEPT.get() else attention_mask


def all_take_positions() -> bool:
    """Whether hidden tokens keep their positions now, in this thread."""
    return _KEPT.get()
