"""Threads on demand: work starts at once or waits its turn, and a thread that finds nothing to do for a while ends."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from moonpool.base.errors import Cancelled, Internal, MoonpoolError, Overloaded, PeerLost
from moonpool.transfer.pending import Pending

_IDLE_S = 10.0
_MAX_ERRANDS = 4096  # waiting for a thread
T = TypeVar("T")


class ThreadPool:
    """At most `size` threads. Thread-safe. Work must not raise."""

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._size = size
        self._changed = threading.Condition()
        self._work: deque[Callable[[], None]] = deque()
        self._threads: set[threading.Thread] = set()
        self._num_idle = 0
        self._closed = False

    def run(self, work: Callable[[], None]) -> bool:
        """Never waits. True: it will be done; False: not done, because of close()."""
        with self._changed:
            if self._closed:
                return False
            self._work.append(work)
            if self._num_idle >= len(self._work) or len(self._threads) >= self._size:
                self._changed.notify()
                return True
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._threads.add(thread)
            thread.start()
            return True

    def call(self, act: Callable[[], T]) -> Pending[T]:
        """Its result, or what it raised; Overloaded when too much waits already. cancel() is for work that touches
        nothing of the caller's: it ends the waiting at once; work that has begun goes on, and nobody gets its result.
        """
        errand = _Errand(act)
        if len(self._work) >= _MAX_ERRANDS:
            errand.fail(Overloaded(f"{len(self._work)} segments wait to be opened already"))
        elif not self.run(errand.run):
            errand.fail(PeerLost("the transfer engine is closed"))
        return errand

    def close(self) -> None:
        """Idempotent. Takes no more work; the threads end when they have done what was taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> None:
        """Waits for the threads to end, after close()."""
        with self._changed:
            threads = list(self._threads)
        for thread in threads:
            thread.join(timeout_s)

    def _run(self) -> None:
        while self._run_one():
            pass

    def _run_one(self) -> bool:
        """A function of its own, so that an idle thread keeps no caller's buffers alive."""
        work = self._next()
        if work is None:
            return False
        work()
        return True

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            self._num_idle += 1
            try:
                found = self._changed.wait_for(lambda: self._work or self._closed, _IDLE_S)
            finally:
                self._num_idle -= 1
            if not found or not self._work:
                self._threads.discard(threading.current_thread())
                return None
            return self._work.popleft()


class _Errand(Pending[T]):
    def __init__(self, act: Callable[[], T]) -> None:
        super().__init__(lambda: self.fail(Cancelled("nobody waits for it any more")))
        self._act = act

    def run(self) -> None:
        if self.done():
            return
        error = attempt(lambda: self.resolve(self._act()))
        if error is not None:
            self.fail(error)


def attempt(act: Callable[..., object], *arguments: object) -> MoonpoolError | None:
    """Why it failed; None when it did not."""
    try:
        act(*arguments)
    except MoonpoolError as error:
        return error
    except Exception as error:  # noqa: BLE001 - a bug must fail what it happened in, not hang it
        return Internal(f"{type(error).__name__}: {error}")
    return None
