"""Results that are not there yet, for threads and for asyncio alike, and a thread pool that produces them.

One class serves both, so that nothing here has a blocking and an async twin.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar, cast

from moonpool.base.errors import Cancelled, DeadlineExceeded, Internal, MoonpoolError, Overloaded, PeerLost

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
_IDLE_S = 10.0
_MAX_CALLS = 4096  # waiting for a thread


class Pending(Generic[T]):
    """A future: wait() for it on a thread, await it on any event loop, or add a callback. Thread-safe.

    When a task that awaits it is cancelled, cancel() is called, and the await still ends only when the work is over;
    then CancelledError is raised. An await that ended sooner would return the task's buffers while threads still fill
    or send them: what the task puts there next would be overwritten, or sent in place of the right bytes. The wait is
    bounded: what is under way ends with its deadline, what has not begun is dropped. Other waiters get Cancelled.
    """

    def __init__(self, canceller: Callable[[], None] | None = None) -> None:
        """`canceller` asks the producer of the result to stop; without one cancel() changes nothing."""
        self._done = False
        self._ended: threading.Event | None = None  # made by the first thread that has to wait: most never do
        self._ending = threading.Lock()
        self._canceller = canceller
        self._callbacks: list[Callable[[Pending[T]], object]] = []
        self._result: T | None = None
        self._failure: MoonpoolError | None = None

    def done(self) -> bool:
        """Return True when it has succeeded or failed and the caller's memory is touched no more."""
        return self._done

    def done_within(self, timeout_s: float | None) -> bool:
        """Wait at most `timeout_s` (None: until it is over) and return done()."""
        if self.done():
            return True
        with self._ending:
            if self.done():
                return True
            ended = self._ended = self._ended or threading.Event()
        return ended.wait(timeout_s)

    def wait(self, timeout_s: float | None = None) -> T:
        """Return the result; raise what it failed with. DeadlineExceeded when it takes longer than `timeout_s` (None:
        its own deadline ends it); the work continues then.
        """
        if not self._done and not self.done_within(timeout_s):
            raise DeadlineExceeded(f"not done after {timeout_s:g} s")
        return self._outcome()

    def __await__(self) -> Generator[Any, None, T]:
        return self._awaited().__await__()

    def cancel(self) -> None:
        """Ask for an early end. wait() raises Cancelled then, unless the result was there already."""
        canceller = self._canceller
        if canceller is not None and not self.done():
            canceller()

    @property
    def failure(self) -> MoonpoolError | None:
        """What wait() raises; None while it is not done, and when it succeeded."""
        return self._failure

    def add_done_callback(self, callback: Callable[[Pending[T]], object]) -> None:
        """Call `callback(self)` once when it is over: at once if it is, else on the thread that ends it. So the
        callback must be short. What it raises is logged only.
        """
        with self._ending:
            if not self.done():
                self._callbacks.append(callback)
                return
        self._call(callback)

    def resolve(self, result: T) -> None:
        """For the producer of the result; the first call of resolve() or fail() counts."""
        self._end(result, None)

    def fail(self, error: MoonpoolError) -> None:
        self._end(None, error)

    def _end(self, result: T | None, failure: MoonpoolError | None) -> None:
        with self._ending:
            if self._done:
                return
            self._result, self._failure, self._canceller = result, failure, None
            callbacks, self._callbacks = self._callbacks, []
            self._done = True
            if self._ended is not None:
                self._ended.set()
        for callback in callbacks:
            self._call(callback)

    def _call(self, callback: Callable[[Pending[T]], object]) -> None:
        try:
            callback(self)
        except Exception:  # noqa: BLE001 - a bug of the caller must not end a thread of ours
            _LOG.exception("a callback of a finished transfer failed")

    def _outcome(self) -> T:
        if self._failure is not None:
            raise self._failure
        return cast(T, self._result)

    async def _awaited(self) -> T:
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        self.add_done_callback(lambda _: _call_soon(loop, arrived.set))
        cancellation: asyncio.CancelledError | None = None
        while not self.done():
            try:
                await arrived.wait()
            except asyncio.CancelledError as error:
                cancellation = error
                self.cancel()
        if cancellation is not None:
            raise cancellation
        return self._outcome()


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        if not loop.is_closed():  # a closed loop has no waiter
            raise


class ThreadPool:
    """At most `size` threads, started on demand; a thread that is idle for a while ends. Thread-safe. Work must not
    raise.
    """

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._size = size
        self._changed = threading.Condition()
        self._work: deque[Callable[[], None]] = deque()
        self._threads: set[threading.Thread] = set()
        self._num_idle = 0
        self._closed = False

    def run(self, work: Callable[[], None]) -> bool:
        """Queue the work without waiting. Return False, with nothing queued, after close()."""
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
        """Return the Pending result of `act`; it fails with Overloaded when too much is queued. Its cancel() ends the
        wait at once, while an act that has begun continues: so the act must not use memory of the caller.
        """
        pending = _PendingCall(act)
        if len(self._work) >= _MAX_CALLS:
            pending.fail(Overloaded(f"{len(self._work)} segments wait to be opened already"))
        elif not self.run(pending.run):
            pending.fail(PeerLost("the transfer engine is closed"))
        return pending

    def close(self) -> None:
        """Idempotent. Take no more work; the threads end when they have done what is queued."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> None:
        """Wait for the threads to end, after close()."""
        with self._changed:
            threads = list(self._threads)
        for thread in threads:
            thread.join(timeout_s)

    def _run(self) -> None:
        while self._run_one():
            pass

    def _run_one(self) -> bool:
        """A separate function, so that an idle thread keeps no buffers of a caller alive."""
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


class _PendingCall(Pending[T]):
    def __init__(self, act: Callable[[], T]) -> None:
        super().__init__(lambda: self.fail(Cancelled("the call was cancelled")))
        self._act = act

    def run(self) -> None:
        if self.done():
            return
        error = attempt(lambda: self.resolve(self._act()))
        if error is not None:
            self.fail(error)


def attempt(act: Callable[..., object], *arguments: object) -> MoonpoolError | None:
    """Call `act` and return its error, None if it succeeded; other exceptions become Internal."""
    try:
        act(*arguments)
    except MoonpoolError as error:
        return error
    except Exception as error:  # noqa: BLE001 - a bug must fail its transfer, not hang it
        return Internal(f"{type(error).__name__}: {error}")
    return None
