"""A result on its way. One class for threads and for asyncio, so that nothing here has a blocking and an async twin."""

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
_MAX_ERRANDS = 4096  # waiting for a thread
T = TypeVar("T")


class Pending(Generic[T]):
    """wait() for it on a thread, await it on any event loop, or leave a callback. Thread-safe.

    When a task that awaits it is cancelled, cancel() is called and the await still ends only when all is over; then
    CancelledError goes on. An await that ended sooner would give the task its buffers back while others fill or send
    them: what it puts there next would be overwritten, or sent in place of the right bytes. The wait is bounded: what
    is under way ends with its deadline, what has not begun is dropped. Others who wait for the same get Cancelled.
    """

    def __init__(self, canceller: Callable[[], None] | None = None) -> None:
        """`canceller` asks whoever works on it to stop; without one cancel() changes nothing."""
        self._done = False
        self._ended: threading.Event | None = None  # made by the first thread that has to wait: most never do
        self._ending = threading.Lock()
        self._canceller = canceller
        self._callbacks: list[Callable[[Pending[T]], object]] = []
        self._result: T | None = None
        self._failure: MoonpoolError | None = None

    def done(self) -> bool:
        """True when it has succeeded or failed and nothing of the caller's is touched any more."""
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
        """The result; raises what it failed with. DeadlineExceeded when it takes longer than `timeout_s` (None: its
        own deadline ends it); it goes on then.
        """
        if not self._done and not self.done_within(timeout_s):
            raise DeadlineExceeded(f"not done after {timeout_s:g} s")
        return self._outcome()

    def __await__(self) -> Generator[Any, None, T]:
        return self._awaited().__await__()

    def cancel(self) -> None:
        """Asks for an end. wait() says what became of it: Cancelled, unless it was too late."""
        canceller = self._canceller
        if canceller is not None and not self.done():
            canceller()

    @property
    def failure(self) -> MoonpoolError | None:
        """What wait() raises; None as long as it is not done, and when it succeeded."""
        return self._failure

    def add_done_callback(self, callback: Callable[[Pending[T]], object]) -> None:
        """Calls it once, with this, when it is over: at once if it is, else on the thread that ends it. So it must be
        short. What it raises is logged and goes no further.
        """
        with self._ending:
            if not self.done():
                self._callbacks.append(callback)
                return
        self._call(callback)

    def resolve(self, result: T) -> None:
        """For whoever brings the result; the first of resolve() and fail() counts."""
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
        except Exception:  # noqa: BLE001 - a stranger's bug must not end a thread of ours
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
        if not loop.is_closed():  # then nobody waits there any more
            raise


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
