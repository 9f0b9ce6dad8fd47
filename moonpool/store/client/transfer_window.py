"""Transfers and large copies of one call, on the threads of the transfer engine.

TransferWindow has a few bundles of transfers under way: the caller prepares or checks one bundle while the engine's
threads move others. A bundle of some MiB is one exchange with its owner, which keeps a connection busy without a pause,
and there are two connections per peer. At most four bundles are under way, so a call of any size queues little, and a
more urgent batch waits for one bundle per thread at most.

for_each() copies large objects on two threads. Copying and checksumming release Python's lock, so a second processor
nearly halves the time. Small copies run on the caller's thread: waking another one would take longer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from moonpool.base.checksum import runs_beside_others
from moonpool.base.errors import MoonpoolError
from moonpool.transfer import Batch, Priority, TransferEngine, TransferRequest

T = TypeVar("T")

BUNDLE_NBYTES = 8 * 1024 * 1024
BUNDLE_ITEMS = 256
_MAX_UNDER_WAY = 3  # bundles of one caller, while it prepares or checks another
_EXCHANGE_NBYTES = 2 * BUNDLE_NBYTES  # a bundle is larger than its limit by a part of its last item
_THREADS_PER_PEER = 2
# Two threads copy in parallel from these sizes on.
_MIN_PARALLEL_NBYTES = 2 * 1024 * 1024  # in total
_MIN_ITEM_NBYTES = 128 * 1024  # on average: for small items most of the time is Python's, which has one lock


def bundles(
    items: Iterable[T], nbytes_of: Callable[[T], int], max_nbytes: int = BUNDLE_NBYTES, max_items: int = BUNDLE_ITEMS
) -> Iterator[list[T]]:
    """Yield the items in order, as many at a time as one transfer should move."""
    bundle: list[T] = []
    nbytes = 0
    for each in items:
        bundle.append(each)
        nbytes += nbytes_of(each)
        if nbytes >= max_nbytes or len(bundle) >= max_items:
            yield bundle
            bundle, nbytes = [], 0
    if bundle:
        yield bundle


Outcomes: TypeAlias = Sequence[MoonpoolError | None]  # the error of each request, None where it succeeded


class FinishedBundle(NamedTuple, Generic[T]):
    """A bundle that is over, by the caller's tag."""

    tag: T
    errors: Outcomes


class _Moving(NamedTuple, Generic[T]):
    """A bundle that is under way. `wait` returns the error of each request, or raises that of all."""

    tag: T
    num_requests: int
    wait: Callable[[], Outcomes]
    batch: Batch | None  # if it was submitted


class TransferWindow(Generic[T]):
    """One caller's bundles, which are returned in the order in which they were added. A context manager: when it ends,
    in whichever way, no bundle is under way and all memory is the caller's again.
    """

    def __init__(self, engine: TransferEngine, *, timeout_s: float, priority: Priority) -> None:
        """Every bundle of add() has `timeout_s` from the moment at which a thread can be free for it."""
        self._engine, self._timeout_s, self._priority = engine, timeout_s, priority
        self._under_way: deque[_Moving[T]] = deque()

    def __enter__(self) -> TransferWindow[T]:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._under_way:
            if each.batch is not None:
                each.batch.cancel()
        for _finished in self.wait_all():
            pass

    def add(self, requests: Sequence[TransferRequest], tag: T, *, is_only: bool = False) -> list[FinishedBundle[T]]:
        """Submit a bundle. Wait for the oldest one if too many are under way, and return it. A bundle for one segment
        that `is_only` is moved on the caller's thread: the caller has nothing else to do.
        """
        try:
            batch = self._engine.submit(
                requests,
                timeout_s=self._timeout_s * (1 + len(self._under_way) // _THREADS_PER_PEER),
                priority=self._priority,
                slice_nbytes=_EXCHANGE_NBYTES,
                inline_nbytes=_EXCHANGE_NBYTES if is_only else 0,
            )
        except MoonpoolError as error:
            outcomes: Outcomes = [error] * len(requests)
            return self._append(_Moving(tag, len(requests), lambda: outcomes, None))
        return self._append(_Moving(tag, len(requests), batch.outcomes, batch))

    def add_call(
        self, move: Callable[[], Outcomes], num_requests: int, tag: T, *, is_only: bool = False
    ) -> list[FinishedBundle[T]]:
        """As add(), for a bundle that `move` moves by a direct call of its remote segment, on a thread of the engine.
        `move` returns the error of each request, or raises that of all.
        """
        wait = move if is_only else self._engine.call_on_thread(move).wait
        return self._append(_Moving(tag, num_requests, wait, None))

    def wait_all(self) -> Iterator[FinishedBundle[T]]:
        """Wait for the others and yield them in order."""
        while self._under_way:
            yield self._wait_first()

    def _append(self, moving: _Moving[T]) -> list[FinishedBundle[T]]:
        self._under_way.append(moving)
        return [self._wait_first()] if len(self._under_way) > _MAX_UNDER_WAY else []

    def _wait_first(self) -> FinishedBundle[T]:
        first = self._under_way[0]
        try:
            errors = first.wait()
        except MoonpoolError as error:
            errors = [error] * first.num_requests
        self._under_way.popleft()  # after an interrupted wait the bundle stays in the window
        return FinishedBundle(first.tag, errors)


def is_large(nbytes: int, num_items: int) -> bool:
    """Return whether a second thread makes copying these items faster."""
    return num_items > 1 and nbytes >= max(_MIN_PARALLEL_NBYTES, _MIN_ITEM_NBYTES * num_items) and runs_beside_others()


def for_each(engine: TransferEngine, items: Sequence[T], nbytes: int, work: Callable[[T], None]) -> None:
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

    run_parallel(engine, work_off, left.clear)


def run_parallel(
    engine: TransferEngine, work: Callable[[], None], stop: Callable[[], None], num_helpers: int = 1
) -> None:
    """Run `work` on the caller's thread, and on up to `num_helpers` threads of the engine that are free before the
    caller's part is over. `stop` is called then, so that the others end soon. Return, or raise what a part has raised,
    when all are over.
    """
    failures: list[BaseException] = []

    def help_out(helping: threading.Lock) -> None:
        if helping.acquire(blocking=False):
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                failures.append(error)
            finally:
                helping.release()

    # Each is held while its thread works. The caller takes them for good at the end: later threads do nothing.
    locks = [threading.Lock() for _ in range(num_helpers)]
    for each in locks:
        engine.call_on_thread(partial(help_out, each))
    try:
        work()
    finally:
        stop()
        for each in locks:
            each.acquire()
    for failure in failures:
        raise failure
