"""Transfers and large copies of one call, on the threads of the transfer engine.

TransferWindow has a few bundles of transfers under way: the caller prepares or checks one bundle while the engine's
threads move others. A bundle of some MiB is one exchange with its owner, which keeps a connection busy without a pause,
and there are two connections per peer. At most four bundles are under way, so a call of any size queues little.

for_each() copies large objects on two threads, copy_shared() a single one. Copying and checksumming release Python's
lock, so a second processor nearly halves the time. Small copies run on the caller's thread: waking another one would
take longer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from moonpool.base.errors import MoonpoolError
from moonpool.transfer import TransferEngine
from moonpool.transfer.memory.buffers import copy_bytes

T = TypeVar("T")

BUNDLE_NBYTES = 8 * 1024 * 1024
BUNDLE_ITEMS = 256
_MAX_UNDER_WAY = 3  # bundles of one caller, while it prepares or checks another
# Two threads copy in parallel from these sizes on.
MIN_PARALLEL_NBYTES = 2 * 1024 * 1024  # in total
_MIN_ITEM_NBYTES = 128 * 1024  # on average: for small items most of the time is Python's, which has one lock
_CHUNK_NBYTES = 256 * 1024  # of an object that two threads copy


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


class TransferWindow(Generic[T]):
    """One caller's bundles, which are returned in the order in which they were added. A context manager: when it ends,
    in whichever way, no bundle is under way and all memory is the caller's again.
    """

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._under_way: deque[_Moving[T]] = deque()

    def __enter__(self) -> TransferWindow[T]:
        return self

    def __exit__(self, *_: object) -> None:
        for _finished in self.wait_all():
            pass

    def add(
        self, move: Callable[[], Outcomes], num_requests: int, tag: T, *, is_only: bool = False
    ) -> list[FinishedBundle[T]]:
        """Start a bundle on a thread of the engine. Wait for the oldest one if too many are under way, and return it.
        `move` returns the error of each request, or raises that of all. A bundle that `is_only` is moved on the
        caller's thread and returned: the caller has nothing else to do.
        """
        if is_only:
            return [_wait_for(_Moving(tag, num_requests, move))]
        self._under_way.append(_Moving(tag, num_requests, self._engine.call_on_thread(move).wait))
        return [self._wait_first()] if len(self._under_way) > _MAX_UNDER_WAY else []

    def wait_all(self) -> Iterator[FinishedBundle[T]]:
        """Wait for the others and yield them in order."""
        while self._under_way:
            yield self._wait_first()

    def _wait_first(self) -> FinishedBundle[T]:
        finished = _wait_for(self._under_way[0])
        self._under_way.popleft()  # after an interrupted wait the bundle stays in the window
        return finished


def _wait_for(moving: _Moving[T]) -> FinishedBundle[T]:
    try:
        return FinishedBundle(moving.tag, moving.wait())
    except MoonpoolError as error:
        return FinishedBundle(moving.tag, [error] * moving.num_requests)


def is_large(nbytes: int, num_items: int) -> bool:
    """Return whether a second thread makes copying these items faster."""
    return num_items > 1 and nbytes >= max(MIN_PARALLEL_NBYTES, _MIN_ITEM_NBYTES * num_items)


def for_each(engine: TransferEngine, items: Sequence[T], nbytes: int, work: Callable[[T], None]) -> None:
    """Call `work` for every item, in any order, on two threads if the items, of `nbytes` in total, are large.

    Raise what `work` raises, when all calls have ended.
    """
    if not is_large(nbytes, len(items)):
        for item in items:
            work(item)
    else:
        _share_out(engine, items, work)


def copy_shared(
    engine: TransferEngine, memory: memoryview, parts: Sequence[memoryview], also: Callable[[], object]
) -> None:
    """Copy the parts to `memory`, one behind the other, and call `also`, on two threads."""
    jobs: list[Callable[[], object]] = [also]
    at = 0
    for part in parts:
        for start in range(0, part.nbytes, _CHUNK_NBYTES):
            chunk = part[start : start + _CHUNK_NBYTES]
            jobs.append(partial(copy_bytes, memory[at : at + chunk.nbytes], chunk))
            at += chunk.nbytes
    _share_out(engine, jobs, lambda job: job())


def _share_out(engine: TransferEngine, items: Iterable[T], work: Callable[[T], object]) -> None:
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
