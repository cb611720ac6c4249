"""Thread safety: a KV bias belongs to one thread at a time, and forward passes of several threads run in turn.

An attached bias is part of the model: a second thread that attached its own, or ran with another thread's bias, would silently
get wrong numbers, so this raises an error. So it does when the thread that attached the bias has ended: until another thread
detaches or replaces it, no thread reads it. Hooks belong to the model in the same way but are not checked: give every thread a
copy (``copy.deepcopy(model)``).

A tokenizer holds the padding and truncation of the call that it serves, and the tables of positions grow during a pass; so
calls take turns.
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
        self._owner: threading.Thread | None = None  # the object: a new thread may get the number of one that has ended
        self._claims = 0
        self._running: Counter[int] = Counter()
        self.turn = threading.RLock()
        """Held during calls that read text or run a pass."""

    def __deepcopy__(self, memo: object) -> "OneThread":
        return OneThread()

    def __reduce__(self) -> tuple[type["OneThread"], tuple[()]]:
        return OneThread, ()

    @contextlib.contextmanager
    def changes(self, what: str, attached: Callable[[], bool]) -> Iterator[bool]:
        """Make this thread the owner of the model inside the block, and afterwards too if ``attached`` returns True.

        Yields whether this thread may read what is attached: False if a thread that has ended left it.

        Raises:
            KVLensError: another thread has one attached, or is in a forward pass.
        """
        me, running = threading.current_thread(), threading.get_ident()
        with _LOCK:
            self._check_owner(what, me, may_replace=True)
            if any(thread != running for thread in self._running):
                raise KVLensError(f"{what}: another thread is in a forward pass of this model; {_REMEDY}")
            own = self._owner in (None, me)
            self._claims = self._claims + 1 if self._owner is me else 1
            self._owner = me
        try:
            yield own
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
        me, running = threading.current_thread(), threading.get_ident()
        with _LOCK:
            self._check_owner("forward pass", me, may_replace=not attached())
            if attached() and self._owner is None:
                self._owner = me  # a copied model with a bias belongs to the first thread that uses it
            self._running[running] += 1
        try:
            yield
        finally:
            with _LOCK:
                self._running[running] -= 1
                if not self._running[running]:
                    del self._running[running]

    def _check_owner(self, what: str, me: threading.Thread, *, may_replace: bool) -> None:
        """``may_replace``: whether what a thread that has ended left attached does not matter."""
        if self._owner is None or self._owner is me:
            return
        if self._owner.is_alive():
            raise KVLensError(f"{what}: another thread has a KV bias attached to this model; {_REMEDY}")
        if not may_replace:
            raise KVLensError(
                f"{what}: a thread that has ended left a KV bias attached to this model, which no other thread reads; "
                "model.detach_kv_bias() removes it, and attaching a bias in this thread replaces it"
            )
