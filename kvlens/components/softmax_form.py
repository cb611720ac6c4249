"""Which form softmax attention runs in: the model's own, ``cfg.softmax_form``, or for the duration of a block another one.

The other one is a matter of the thread that asked for it: the configuration, which threads share, is not written to.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

_FOR_NOW: ContextVar[tuple[tuple[Any, str], ...]] = ContextVar("softmax_form", default=())
"""(configuration, form), the latest last."""


def form_of(cfg: Any) -> str:
    """The form in which the softmax attention of a model with this very configuration runs now, in this thread."""
    for asked, form in reversed(_FOR_NOW.get()):
        if asked is cfg:
            return form
    return cfg.softmax_form


@contextlib.contextmanager
def in_form(cfg: Any, form: str) -> Iterator[None]:
    """Inside, and in this thread alone, the model of ``cfg`` runs in ``form``, which it must be able to."""
    before = _FOR_NOW.set((*_FOR_NOW.get(), (cfg, form)))
    try:
        yield
    finally:
        _FOR_NOW.reset(before)
