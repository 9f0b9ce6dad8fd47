"""Transfers in bundles, a few of them under way at once: the caller works on what has landed while the rest flies.

Bundles of some MiB keep a connection busy without a pause; two threads keep two connections busy.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, NamedTuple, TypeVar

from moonpool.base.errors import MoonpoolError, PeerLost

T = TypeVar("T")

BUNDLE_NBYTES = 8 * 1024 * 1024
BUNDLE_ITEMS = 256
_NUM_THREADS = 2
_MAX_UNDER_WAY = 3  # bundles of one caller


def bundles(items: Iterable[T], nbytes_of: Callable[[T], int]) -> Iterator[list[T]]:
    """The items in their order, as many together as one transfer should move."""
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
    """The threads, for all callers of a client. Started when first needed."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="store-flight")
        self._lock = threading.Lock()
        self._closed = False

    def start(self, job: Callable[[], None]) -> Future[None]:
        """PeerLost after close()."""
        with self._lock:
            if self._closed:
                raise PeerLost("this client is closed")
            return self._threads.submit(job)

    def together(self, work: Callable[[], None], stop: Callable[[], None], num_helpers: int = 1) -> None:
        """Does the work on the caller's thread and, as soon as they are free, on some of the crew. Returns or raises
        when all have ended; `stop` makes the others end soon when the caller's part is over. PeerLost after close().
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
                except BaseException as error:  # noqa: BLE001 - raised when the others have ended too
                    failed = error
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Idempotent. Waits for what is under way, which ends with its deadline."""
        with self._lock:
            self._closed = True
        self._threads.shutdown(wait=True)


class FinishedTransfer(NamedTuple, Generic[T]):
    """What a bundle was about, and why it failed, if it did."""

    tag: T
    error: MoonpoolError | None


class TransferWindow(Generic[T]):
    """One caller's bundles, which land in the order in which they were added. A context manager: when it ends, however
    it does, nothing is under way and all memory is the caller's again.
    """

    def __init__(self, crew: TransferThreads) -> None:
        self._crew = crew
        self._under_way: deque[tuple[T, Future[None] | MoonpoolError]] = deque()

    def __enter__(self) -> TransferWindow[T]:
        return self

    def __exit__(self, *_: object) -> None:
        for _landed in self.land_all():
            pass

    def add(self, job: Callable[[], None], tag: T) -> list[FinishedTransfer[T]]:
        """Starts a bundle, and gives those that had to land to keep to the limit."""
        try:
            self._under_way.append((tag, self._crew.start(job)))
        except MoonpoolError as error:
            self._under_way.append((tag, error))
        return [self._land()] if len(self._under_way) > _MAX_UNDER_WAY else []

    def land_all(self) -> Iterator[FinishedTransfer[T]]:
        """The rest, as it comes."""
        while self._under_way:
            yield self._land()

    def _land(self) -> FinishedTransfer[T]:
        tag, under_way = self._under_way[0]
        try:
            if isinstance(under_way, MoonpoolError):
                return FinishedTransfer(tag, under_way)
            under_way.result()
            return FinishedTransfer(tag, None)
        except MoonpoolError as error:
            return FinishedTransfer(tag, error)
        finally:
            if isinstance(under_way, MoonpoolError) or under_way.done():  # an interrupted wait is taken up again
                self._under_way.popleft()
