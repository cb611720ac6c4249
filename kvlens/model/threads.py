"""One model, one thread at a time, as far as a KV bias goes; and passes of several threads one after the other.

An attached bias is part of the model: a second thread that attached its own, or ran under somebody else's, would get other
numbers without a word. It is refused instead. Hooks belong to the model in the same way, and nothing watches over them: give
every thread a copy (``copy.deepcopy(model)``).

TransformerLens keeps ``prepend_bos=`` and ``padding_side=`` in the model itself while a call lasts, and puts back afterwards
what it found: two threads that overlapped there would leave one's choice behind for good. Hence the turns.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator

from kvlens.errors import KVLensError

_LOCK = threading.Lock()
_REMEDY = "give every thread its own copy: copy.deepcopy(model)"


class OneThread:
    """Which thread attached the bias, and which threads are in a forward pass. A copy of a model starts with a fresh one."""

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
        """Inside, the model is this thread's; afterwards as well, if ``attached`` says that a bias is.

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
        """Around a forward pass. ``attached``: whether a bias is.

        Raises:
            KVLensError: the bias is another thread's.
        """
        me = threading.get_ident()
        with _LOCK:
            self._check_owner("forward pass", me)
            if attached() and self._owner is None:
                self._owner = me  # a copy of a model with a bias belongs to whoever uses it first
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
