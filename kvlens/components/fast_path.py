"""When kvlens uses faster code than the base's, which rounds differently.

A linear model always uses it. A softmax model uses it in the fused form, set by ``cfg.softmax_form`` or by a
``model.using_softmax_form(...)`` block, which applies only to the thread that opened it. Threads share the configuration,
so such a block does not change it.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

_BLOCKS: ContextVar[tuple[tuple[Any, str], ...]] = ContextVar("softmax_form_blocks", default=())
"""(configuration, form) of the open blocks of this thread, the innermost last."""


def form_of_block(cfg: Any) -> str | None:
    """The softmax form of the innermost block that this thread opened for this configuration object, or None."""
    for asked, form in reversed(_BLOCKS.get()):
        if asked is cfg.whole:
            return form
    return None


@contextlib.contextmanager
def softmax_form_block(cfg: Any, form: str) -> Iterator[None]:
    """Run the model of ``cfg`` in ``form`` inside the block, in this thread only. The caller checks ``form``."""
    before = _BLOCKS.set((*_BLOCKS.get(), (cfg, form)))
    try:
        yield
    finally:
        _BLOCKS.reset(before)


def runs_fused(cfg: Any) -> bool:
    """Whether softmax attention currently runs in the fused form in this thread."""
    return (form_of_block(cfg) or cfg.softmax_form) == "fused"


def on_fast_path(cfg: Any) -> bool:
    """Whether kvlens may use faster code than the base's: in all models except softmax models in the eager form."""
    return cfg.attention == "linear" or runs_fused(cfg)
