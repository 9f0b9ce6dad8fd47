"""Batches of transfer requests: what engine.submit() takes and returns.

A batch's slices wait in the engine's queue, which cuts them into runs and gives each run a thread and a path. Slices of
one run that go to one segment are moved together. When they fail together, and not because the peer is gone, each is
tried alone, so that a request fails only for its own reason; bytes may be moved twice then, always the same ones to the
same place.

A single small request by one path needs none of this: run_inline() moves it on the caller's thread.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from moonpool.base.errors import Cancelled, DeadlineExceeded, MoonpoolError, PeerLost, Unauthorized
from moonpool.transfer.memory.buffers import Buffer, Memory, as_memory, cut
from moonpool.transfer.paths.path_load import is_retriable
from moonpool.transfer.paths.peer_queue import Slice, SliceOutcome, SliceRun
from moonpool.transfer.paths.places import Place, move, read_expecting, write_places
from moonpool.transfer.paths.priority import Priority
from moonpool.transfer.paths.slice_queue import SliceQueue
from moonpool.transfer.pending import Pending, ThreadPool, attempt
from moonpool.transfer.transports.base import RemoteSegment


class TransferOp(Enum):
    READ = "read"
    WRITE = "write"


_new_slice = partial(tuple.__new__, Slice)  # of a tuple: half the time of Slice(), and a batch has thousands
_READ = TransferOp.READ  # looking it up in the class takes longer than the other checks of a small request


class TransferStatus(Enum):
    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class TransferRequest(msgspec.Struct, frozen=True, eq=False):
    """READ fills the buffers with the remote bytes from `offset` on; WRITE puts theirs there, with `generation`.

    A READ with `expected_generation` (1 or more) fails with StaleGeneration unless its space carried that generation
    until the last byte was taken; the buffers' content must not be used then. The segment's owner decides this, so it
    takes a remote with `checks_generation`; others fail the request with InvalidInput. Requests of one batch that
    follow each other in the segment and expect the same generation share one verdict.
    """

    op: TransferOp
    remote: RemoteSegment
    offset: int
    buffers: Sequence[Buffer]
    generation: int = 0
    expected_generation: int | None = None


class _GroupKey(NamedTuple):
    """What slices have in common that are moved together."""

    remote: RemoteSegment
    op: TransferOp
    generation: int | None  # one for all; None: each slice has its own, or none is needed
    is_expecting: bool = False


_NO_KEY = (None, None, None, False)


class _Group(NamedTuple):
    """Slices that are moved together."""

    key: _GroupKey
    places: list[Place]
    generations: list[int]  # of each place: what a write stamps, or a read expects; empty for plain reads
    parts: list[Slice]

    def one_by_one(self) -> Iterator[_Group]:
        for at, (place, part) in enumerate(zip(self.places, self.parts, strict=True)):
            yield _Group(self.key, [place], self.generations[at : at + 1], [part])


class Batch(Pending[None]):
    """Requests on their way. Their buffers are the engine's until done(), after a failed wait() too.

    wait() and await raise the first error there was; outcomes() returns the error of each request; as_completed()
    yields requests as they end. cancel() drops what has not begun; what is under way ends by itself, and done() is true
    when no buffer is touched any more. A request whose bytes were all moved is done even so.
    """

    def __init__(
        self,
        requests: Sequence[TransferRequest],
        *,
        timeout_s: float,
        slice_nbytes: int,
        priority: Priority = Priority.PREFETCH,
        notify: bytes | None = None,
        stop_at_error: bool = False,
    ) -> None:
        """InvalidInput when a buffer cannot be used. Call start() or run_inline() next, once. With `stop_at_error` the
        first error ends the batch: what has not begun fails with it.
        """
        super().__init__()
        self.priority = priority
        self._requests = list(requests)
        self._timeout_s = timeout_s
        # Of the largest slice, and of slices that are moved together.
        self.run_nbytes = max(slice_nbytes, *[request.remote.run_nbytes for request in requests], 0)
        self._notify = notify
        self._stop_at_error = stop_at_error
        self._memories, self._sizes = _borrow(requests)
        self.slices_of_peers: dict[Hashable, list[Slice]] = {}
        self._nbytes_left = [nbytes or 1 for nbytes in self._sizes]  # a request of no bytes has to be settled, too
        self._errors: list[MoonpoolError | None] = [None] * len(requests)
        self._finished: list[int] = []  # requests that have ended, in this order
        self._first_error: MoonpoolError | None = None
        self._cancelled = False
        self._lock = threading.Lock()
        self._progress: threading.Condition | None = None  # on `_lock`; made by the first call of as_completed()

    def __len__(self) -> int:
        return len(self._requests)

    def status(self, request: int) -> TransferStatus:
        if self._nbytes_left[request]:
            return TransferStatus.PENDING
        error = self._errors[request]
        if error is None:
            return TransferStatus.DONE
        return TransferStatus.CANCELLED if isinstance(error, Cancelled) else TransferStatus.FAILED

    def error(self, request: int) -> MoonpoolError | None:
        """Return why this request failed; None while it is pending or when it succeeded."""
        return self._errors[request] if not self._nbytes_left[request] else None

    def outcomes(self) -> list[MoonpoolError | None]:
        """Wait until the batch is over and return the error of each request, None where it succeeded. Raise only what
        is no request's own: `notify` was not delivered, or the engine was closed meanwhile.
        """
        self.done_within(None)
        if self.failure is not None and self._first_error is None:
            raise self.failure
        return list(self._errors)

    def as_completed(self) -> Iterator[int]:
        """Yield the position of each request as it ends, whether it succeeded or failed (see error()). Its buffers are
        the caller's from then on, so the caller can use what has arrived while the rest is moving.
        """
        with self._lock:
            progress = self._progress = self._progress or threading.Condition(self._lock)
        for at in range(len(self._requests)):
            with progress:
                while len(self._finished) <= at:
                    progress.wait()
            yield self._finished[at]

    def cancel(self) -> None:
        with self._lock:
            if self._cancelled or len(self._finished) == len(self._requests):
                return
            self._cancelled = True
        self.settle(self._queue.withdraw(self), _cancelled())

    # for the engine and its queue

    def is_small(self, max_nbytes: int) -> bool:
        """Return whether there is one request, of no more than this, and nothing else to do."""
        return len(self._requests) == 1 and self._notify is None and self._sizes[0] <= max_nbytes

    def run_inline(self, max_nbytes: int) -> bool:
        """Move the only request on this thread and return True. Return False, with nothing done, unless is_small() and
        one path leads to its segment.
        """
        if not self.is_small(max_nbytes) or self._requests[0].remote.num_paths > 1:
            return False
        error = attempt(_move_request, self._requests[0], self._memories[0], self._timeout_s)
        self._errors[0] = self._first_error = error
        self._nbytes_left[0] = 0
        self._finished.append(0)
        self._end(None, error)
        return True

    def start(
        self,
        queue: SliceQueue[Batch],
        room_timeout_s: float | None,
        *,
        threads: ThreadPool | None = None,
        carry: bool = False,
    ) -> None:
        """Queue all requests. Raise Overloaded, with nothing begun, when the queue has no room within `room_timeout_s`;
        with None the queue takes them although it is full. `threads` send `notify`. With `carry` this thread moves
        slices, too, if several paths lead to the segment.
        """
        if not self._requests:
            self.resolve(None)
            return
        self._queue, self._threads = queue, threads
        self.deadline_s = time.monotonic() + self._timeout_s
        slices = list(map(_new_slice, zip(itertools.count(), itertools.repeat(0), self._sizes, strict=False)))
        remotes = {request.remote for request in self._requests}
        if len(remotes) == 1:
            self.slices_of_peers[remotes.pop().peer] = slices
        else:
            for request, part in zip(self._requests, slices, strict=True):
                self.slices_of_peers.setdefault(request.remote.peer, []).append(part)
        queue.put(self, room_timeout_s, carry=carry and self._requests[0].remote.num_paths > 1)

    @property
    def wants_retry(self) -> bool:
        return not self._cancelled and not (self._stop_at_error and self._first_error is not None)

    def run(self, run: SliceRun[Batch]) -> list[SliceOutcome]:
        """Move these slices, on a thread of the queue, and return their outcomes. Never raises."""
        groups: deque[_Group] = deque()
        outcomes: list[SliceOutcome] = []
        error = attempt(lambda: groups.extend(self._group(run.slices)))
        if error is not None:
            return [SliceOutcome(run.slices, error)]
        while groups:
            group = groups.popleft()
            refusals: dict[int, MoonpoolError] = {}
            error = attempt(self._move, group, run, refusals)
            if error is not None and run.path is not None and is_retriable(error):  # the path failed: nothing is known
                outcomes.append(SliceOutcome([part for each in (group, *groups) for part in each.parts], error))
                break
            if _is_tried_alone(group, error) and not self._stop_at_error:
                groups.extendleft(group.one_by_one())
            elif refusals:
                outcomes += [SliceOutcome([part], refusals.get(at)) for at, part in enumerate(group.parts)]
            else:
                outcomes.append(SliceOutcome(group.parts, error))
        return outcomes

    def settle(self, slices: Sequence[Slice], error: MoonpoolError | None) -> None:
        """Record the end of slices."""
        if not slices:
            return
        with self._lock:
            left = self._nbytes_left
            for request, _, nbytes in slices:
                left[request] -= nbytes or 1
                if not left[request]:
                    self._finished.append(request)
            for request, _, _ in slices if error is not None else ():
                self._errors[request] = self._errors[request] or error
            self._first_error = self._first_error or error
            over = len(self._finished) == len(self._requests)
            if self._progress is not None:
                self._progress.notify_all()
        if over:
            self._finish()
        elif error is not None and self._stop_at_error:
            self.settle(self._queue.withdraw(self), error)

    def _finish(self) -> None:
        """Nothing is under way any more. Another thread sends messages: others may wait for this one."""
        if self._first_error is not None:
            self.fail(self._first_error)
        elif self._notify is None:
            self.resolve(None)
        elif self._threads is None or not self._threads.run(partial(self._notify_owners, self._notify)):
            self.fail(PeerLost("the transfer engine was closed"))

    def _notify_owners(self, message: bytes) -> None:
        for remote in dict.fromkeys(request.remote for request in self._requests):
            error = attempt(lambda remote=remote: remote.notify(message, timeout_s=self._remaining_s()))
            if error is not None:
                self.fail(error)
                return
        self.resolve(None)

    def _group(self, slices: Sequence[Slice]) -> Iterable[_Group]:
        groups: dict[_GroupKey, _Group] = {}
        remote, op, generation, is_expecting = _NO_KEY
        for part in slices:
            number, start, nbytes = part
            request = self._requests[number]
            expected = request.expected_generation
            if (
                request.remote is not remote
                or request.op is not op
                or (generation is not None and request.generation != generation)
                or (expected is None) is is_expecting
            ):
                key = remote, op, generation, is_expecting = _key_of(request)
                _, places, generations, parts = groups.setdefault(key, _Group(key, [], [], []))
            memories = self._memories[number]
            if nbytes != self._sizes[number]:
                memories = cut(memories, start, nbytes)
            places.append((request.offset + start, memories))
            parts.append(part)
            if op is not _READ:
                generations.append(request.generation)
            elif expected is not None:
                generations.append(expected)
        return groups.values()

    def _move(self, group: _Group, run: SliceRun[Batch], refusals: dict[int, MoonpoolError]) -> None:
        timeout_s = min(self._remaining_s(), run.timeout_s)
        refusals.update(group.key.remote.on_path(run.path, partial(_move_group, group), timeout_s))

    def _remaining_s(self) -> float:
        """Raise when nothing should begin any more."""
        if self._cancelled:
            raise _cancelled()
        remaining_s = self.deadline_s - time.monotonic()
        if remaining_s <= 0.0:
            raise DeadlineExceeded(f"the batch was not done within {self._timeout_s:g} s")
        return remaining_s


def _cancelled() -> Cancelled:
    return Cancelled("the batch was cancelled")


def _borrow(requests: Sequence[TransferRequest]) -> tuple[list[list[Memory]], list[int]]:
    """Return each request's memory and its size. Batches of a thousand small ones are built here: every line counts."""
    memories: list[list[Memory]] = []
    sizes: list[int] = []
    for request in requests:
        writable, nbytes = request.op is _READ, 0
        own: list[Memory] = []
        for buffer in request.buffers:
            memory: Memory
            kind = type(buffer)
            if kind is memoryview or kind is np.ndarray or kind is bytearray:
                memory = memoryview(buffer)  # type: ignore[arg-type]  # see Buffer
                plain = memory.format == "B" and memory.ndim == 1 and memory.c_contiguous
                if not plain or (writable and memory.readonly):
                    memory = as_memory(buffer, writable)
            else:
                memory = as_memory(buffer, writable)
            own.append(memory)
            nbytes += memory.nbytes
        memories.append(own)
        sizes.append(nbytes)
    return memories, sizes


def _key_of(request: TransferRequest) -> _GroupKey:
    remote = request.remote
    if request.op is _READ:
        return _GroupKey(remote, _READ, None, request.expected_generation is not None)
    return _GroupKey(remote, request.op, None if remote.pipelines_writes else request.generation)


def _move_request(request: TransferRequest, memories: list[Memory], timeout_s: float) -> None:
    """Move a whole request on this thread."""
    remote, expected = request.remote, request.expected_generation
    if request.op is not _READ:
        remote.write_from(request.offset, memories, generation=request.generation, timeout_s=timeout_s)
    elif expected is None:
        remote.read_into(request.offset, memories, timeout_s=timeout_s)
    else:
        remote.read_unchanged(request.offset, memories, generation=expected, timeout_s=timeout_s)


def _move_group(group: _Group, remote: RemoteSegment, timeout_s: float) -> dict[int, MoonpoolError]:
    """Move the group by this handle of its segment. Return the refusals by the position of the slice; raise what may be
    true of any slice.
    """
    key, places, generations = group.key, group.places, group.generations
    if key.is_expecting:
        return read_expecting(key.remote, places, generations, timeout_s=timeout_s)
    if not generations:
        move(remote, places, generation=None, timeout_s=timeout_s)
        return {}
    return write_places(remote, places, generations, timeout_s=timeout_s)


def _is_tried_alone(group: _Group, error: MoonpoolError | None) -> bool:
    """Whether the error may be that of one of the slices only."""
    if error is None or len(group.parts) == 1:
        return False
    return not isinstance(error, PeerLost | DeadlineExceeded | Cancelled | Unauthorized)
