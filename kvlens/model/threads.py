"""Thread safety: a KV bias belongs to one thread at a time, and forward passes of several threads run in turn.

An attached bias is part of the model: a second thread that attached its own, or ran with another thread's bias, would silently
get wrong numbers, so this raises an error. Hooks belong to the model in the same way but are not checked: give every thread a
copy (``copy.deepcopy(model)``).

TransformerLens stores ``prepend_bos=`` and ``padding_side=`` in the model during a call and restores the old values
afterwards. If the calls of two threads overlapped, one thread's values would remain for good; therefore calls take turns.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator

from kvlens.errors import KVLensError

_LOCK = threading.Lock()
_REMEDY = "give every thread its own copy: copy.deepcopy(model)"


class OneThread:
    """Records which thread attached the bias, and which threads are in a forward pass. A copied model gets a new record."""

    def __init__(self) -> None:
        self._owner: int | None = None
        self._claims = 0
        self._running: Counter[int] = Counter()
        self.turn = threading.RLock()
        """Held while a call of TransformerLens may have replaced defaults of the model."""

    def __deepcopy__(self, memo: object) -> "OneThread":
        return OneThread()

    def __reduce__(self) -> tuple[type["OneThread"], tuple[()]]:
        return OneThread, ()

    @contextlib.contextmanager
    def changes(self, what: str, attached: Callable[[], bool]) -> Iterator[None]:
        """Make this thread the owner of the model inside the block, and afterwards too if ``attached`` returns True.

        Raises:
            KVLensError: another thread has one attached, or is in a forward pass.
        """
        me = threading.get_ident()
        with _LOCK:
            self._check_owner(what, me)
            if any(thread != me for thread in self._running):
                raise KVLensError(f"{what}: another thread is in a forward pass of this model; {_REMEDY}")
            self._claims = self._claims + 1 if self._owner == me else 1
            self._owner = me
        try:
            yield
        finally:
            with _LOCK:
                self._claims -= 1
                if self._claims <= 0 and not attached():
                    self._owner = None

    @contextlib.contextmanager
    def passes(self, attached: Callable[[], bool]) -> Iterator[None]:
        """Enclose a forward pass; ``attached`` returns whether a bias is attached.

        Raises:
            KVLensError: the bias belongs to another thread.
        """
        me = threading.get_ident()
        with _LOCK:
            self._check_owner("forward pass", me)
            if attached() and self._owner is None:
                self._owner = me  # a copied model with a bias belongs to the first thread that uses it
            self._running[me] += 1
        try:
            yield
        finally:
            with _LOCK:
                self._running[me] -= 1
                if not self._running[me]:
                    del self._running[me]

    def _check_owner(self, what: str, me: int) -> None:
        alive = {thread.ident for thread in threading.enumerate()}
        if self._owner not in (None, me) and self._owner in alive:
            raise KVLensError(f"{what}: another thread has a KV bias attached to this model; {_REMEDY}")
