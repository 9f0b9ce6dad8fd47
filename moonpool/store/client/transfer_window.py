"""Threads for the transfers and large copies of one client.

TransferWindow runs transfers in bundles, a few at once: the caller prepares or checks one bundle while others are being
moved. Bundles of some MiB keep a connection busy without a pause; two threads keep two connections busy.

for_each() copies large objects on two threads. Copying and checksumming release Python's lock, so a second processor
nearly halves the time. Small copies run on the caller's thread: waking another one would take longer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, NamedTuple, TypeVar

from moonpool.base.checksum import runs_beside_others
from moonpool.base.errors import MoonpoolError, PeerLost

T = TypeVar("T")

BUNDLE_NBYTES = 8 * 1024 * 1024
BUNDLE_ITEMS = 256
_NUM_THREADS = 2
_MAX_UNDER_WAY = 3  # bundles of one caller
# Two threads copy in parallel from these sizes on.
_MIN_PARALLEL_NBYTES = 2 * 1024 * 1024  # in total
_MIN_ITEM_NBYTES = 128 * 1024  # on average: for small items most of the time is Python's, which has one lock


def bundles(items: Iterable[T], nbytes_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield the items in order, as many at a time as one transfer should move."""
    bundle: list[T] = []
    nbytes = 0
    for each in items:
        bundle.append(each)
        nbytes += nbytes_of(each)
        if nbytes >= BUNDLE_NBYTES or len(bundle) >= BUNDLE_ITEMS:
            yield bundle
            bundle, nbytes = [], 0
    if bundle:
        yield bundle


class TransferThreads:
    """A client's transfer threads. They start when first needed. Thread-safe."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="store-transfer")
        self._lock = threading.Lock()
        self._closed = False

    def start(self, job: Callable[[], None]) -> Future[None]:
        """Run the job on a thread. Raise PeerLost after close()."""
        with self._lock:
            if self._closed:
                raise PeerLost("this client is closed")
            return self._executor.submit(job)

    def run_parallel(self, work: Callable[[], None], stop: Callable[[], None], num_helpers: int = 1) -> None:
        """Run `work` on the caller's thread and on up to `num_helpers` threads, as they become free. Return or raise
        when all have ended. `stop` is called when the caller's part is over, so that the others end soon. Raise
        PeerLost after close().
        """
        helpers: list[Future[None]] = []
        failed: BaseException | None = None
        try:
            for _ in range(num_helpers):
                helpers.append(self.start(work))
            work()
        finally:
            stop()
            for helper in helpers:
                try:
                    if not helper.cancel():
                        helper.result()
                except BaseException as error:  # noqa: BLE001 - raised below, when all helpers have ended
                    failed = error
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Wait for running jobs, which end with their deadlines. Idempotent."""
        with self._lock:
            self._closed = True
        self._executor.shutdown(wait=True)


class FinishedTransfer(NamedTuple, Generic[T]):
    """The caller's tag of a bundle, and the error if it failed."""

    tag: T
    error: MoonpoolError | None


class TransferWindow(Generic[T]):
    """One caller's bundles, which are returned in the order in which they were added. A context manager: when it ends,
    in whichever way, no bundle is under way and all memory is the caller's again.
    """

    def __init__(self, threads: TransferThreads) -> None:
        self._threads = threads
        self._under_way: deque[tuple[T, Future[None] | MoonpoolError]] = deque()

    def __enter__(self) -> TransferWindow[T]:
        return self

    def __exit__(self, *_: object) -> None:
        for _finished in self.wait_all():
            pass

    def add(self, job: Callable[[], None], tag: T) -> list[FinishedTransfer[T]]:
        """Start a bundle. Wait for the oldest one if too many are under way, and return it."""
        try:
            self._under_way.append((tag, self._threads.start(job)))
        except MoonpoolError as error:
            self._under_way.append((tag, error))
        return [self._wait_first()] if len(self._under_way) > _MAX_UNDER_WAY else []

    def wait_all(self) -> Iterator[FinishedTransfer[T]]:
        """Wait for the others and yield them in order."""
        while self._under_way:
            yield self._wait_first()

    def _wait_first(self) -> FinishedTransfer[T]:
        tag, under_way = self._under_way[0]
        try:
            if isinstance(under_way, MoonpoolError):
                return FinishedTransfer(tag, under_way)
            under_way.result()
            return FinishedTransfer(tag, None)
        except MoonpoolError as error:
            return FinishedTransfer(tag, error)
        finally:
            # After an interrupted wait the bundle stays in the window.
            if isinstance(under_way, MoonpoolError) or under_way.done():
                self._under_way.popleft()


def is_large(nbytes: int, num_items: int) -> bool:
    """Return whether a second thread makes copying these items faster."""
    return num_items > 1 and nbytes >= max(_MIN_PARALLEL_NBYTES, _MIN_ITEM_NBYTES * num_items) and runs_beside_others()


def for_each(threads: TransferThreads, items: Sequence[T], nbytes: int, work: Callable[[T], None]) -> None:
    """Call `work` for every item, in any order, on two threads if the items, of `nbytes` in total, are large.

    Raise what `work` raises, when all calls have ended.
    """
    if not is_large(nbytes, len(items)):
        for item in items:
            work(item)
        return
    left = deque(items)

    def work_off() -> None:
        while left:
            try:
                item = left.popleft()
            except IndexError:  # the other thread took the last item
                return
            work(item)

    threads.run_parallel(work_off, left.clear)
