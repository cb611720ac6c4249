"""Where kvlens computes in another way than TransformerLens, and how its modules replace those of a model already built.

A linear model always does. A softmax model does in the fused form: ``cfg.softmax_form``, or the form of a
``model.using_softmax_form(...)`` block, which counts only in the thread that opened it. Threads share the configuration,
so a block does not write to it.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from torch import nn

_BLOCKS: ContextVar[tuple[tuple[Any, str], ...]] = ContextVar("softmax_form_blocks", default=())
"""(configuration, form) of the blocks that this thread is in, the innermost last."""


def form_of_block(cfg: Any) -> str | None:
    """The softmax form of the innermost block that this thread opened for a model with this very configuration, or None."""
    for asked, form in reversed(_BLOCKS.get()):
        if asked is cfg:
            return form
    return None


@contextlib.contextmanager
def softmax_form_block(cfg: Any, form: str) -> Iterator[None]:
    """Inside, and in this thread alone, the model of ``cfg`` runs in ``form``, which must be checked before."""
    before = _BLOCKS.set((*_BLOCKS.get(), (cfg, form)))
    try:
        yield
    finally:
        _BLOCKS.reset(before)


def runs_fused(cfg: Any) -> bool:
    """Whether softmax attention runs in the fused form now, in this thread."""
    return (form_of_block(cfg) or cfg.softmax_form) == "fused"


def on_fast_path(cfg: Any) -> bool:
    """Whether kvlens may compute in another way than TransformerLens: in all but softmax models in the eager form."""
    return cfg.attention == "linear" or runs_fused(cfg)


class Replaces:
    """Mixed in before a TransformerLens class, to replace an instance of that class in a model already built."""

    @classmethod
    def of(cls, module: nn.Module) -> Any:
        """This class with everything that ``module`` holds; ``module`` is to be dropped."""
        new = cls.__new__(cls)
        new.__dict__ = module.__dict__
        return new
