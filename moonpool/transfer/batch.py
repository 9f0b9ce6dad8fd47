"""What is asked of the engine and what became of it.

A batch's slices wait in the engine's queue, except those for peers with several paths: these wait with the planner of
that peer, which keeps all of its paths busy and no thread of the engine. Slices of one run that go to one segment are
moved together. When they fail together, and not because the peer is gone, each is tried alone, so that a request fails
for a reason of its own; bytes may be moved twice then, always the same ones to the same place.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple

import msgspec

from moonpool.base.clock import Deadline
from moonpool.base.errors import Cancelled, DeadlineExceeded, MoonpoolError, PeerLost
from moonpool.transfer.memory.buffers import Buffer, Memory, as_memory, cut
from moonpool.transfer.paths.multipath import MultiPathRemote
from moonpool.transfer.paths.places import Place, move, nbytes_of
from moonpool.transfer.paths.plan import Slice, cut_batch, take_run
from moonpool.transfer.paths.priority import Priority
from moonpool.transfer.paths.slice_queue import SliceQueue
from moonpool.transfer.pending import Pending
from moonpool.transfer.thread_pool import ThreadPool, attempt
from moonpool.transfer.transports.base import RemoteSegment


class TransferOp(Enum):
    READ = "read"
    WRITE = "write"


_READ = TransferOp.READ  # looking it up in the class takes longer than all else that is asked of a small request


class TransferStatus(Enum):
    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class TransferRequest(msgspec.Struct, frozen=True, eq=False):
    """READ fills the buffers with the remote bytes from `offset` on; WRITE puts theirs there."""

    op: TransferOp
    remote: RemoteSegment
    offset: int
    buffers: Sequence[Buffer]
    generation: int = 0


class _Group(NamedTuple):
    """Slices that are moved together: to one remote segment with one generation, or from it (None)."""

    remote: RemoteSegment
    generation: int | None
    places: list[Place]
    parts: list[Slice]

    def one_by_one(self) -> Iterator[_Group]:
        for place, part in zip(self.places, self.parts, strict=True):
            yield _Group(self.remote, self.generation, [place], [part])


class Batch(Pending[None]):
    """Requests on their way. Their buffers are the engine's until done(), after a failed wait() too.

    wait() and await raise the first error there was. cancel() drops what has not begun; what is under way ends by
    itself, and done() is true when no buffer is touched any more. A request whose bytes were all moved is done, all the
    same.
    """

    def __init__(
        self,
        requests: Sequence[TransferRequest],
        *,
        queue: SliceQueue[Batch],
        crew: ThreadPool,
        timeout_s: float,
        slice_nbytes: int,
        priority: Priority = Priority.PREFETCH,
        notify: bytes | None = None,
    ) -> None:
        super().__init__()
        self.priority = priority
        self._requests = list(requests)
        self._queue = queue
        self._crew = crew
        self._timeout_s = timeout_s
        self._deadline = Deadline(timeout_s)
        self._slice_nbytes = slice_nbytes
        self._notify = notify
        self._memories, self._sizes = _borrow(self._requests)
        self.slices, self._path_slices = self._cut()
        self._slices_left = self._count_slices()
        self._errors: list[MoonpoolError | None] = [None] * len(self._requests)
        self._requests_left = len(self._requests)
        self._first_error: MoonpoolError | None = None
        self._cancelled = False
        self._moving: set[Pending[None]] = set()
        self._books = threading.Lock()
        if not self._requests:
            self.resolve(None)

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_slices(self) -> int:
        return len(self.slices) + len(self._path_slices)

    def status(self, request: int) -> TransferStatus:
        if self._slices_left[request]:
            return TransferStatus.PENDING
        error = self._errors[request]
        if error is None:
            return TransferStatus.DONE
        return TransferStatus.CANCELLED if isinstance(error, Cancelled) else TransferStatus.FAILED

    def error(self, request: int) -> MoonpoolError | None:
        """Why this request failed; None while it is pending or when it succeeded."""
        return self._errors[request] if not self._slices_left[request] else None

    def cancel(self) -> None:
        with self._books:
            if self._cancelled or not self._requests_left:
                return
            self._cancelled = True
            moving = list(self._moving)
        self.settle(self._queue.withdraw(self), _cancelled())
        for each in moving:
            each.cancel()

    def start(self, room_timeout_s: float) -> None:
        """For the engine. Overloaded, with nothing begun, when there is no room in time."""
        if not self._requests:
            return
        groups = list(self._path_groups())
        self._queue.put(self, room_timeout_s)
        for group in groups:
            self._start_on_paths(group)

    def run(self, parts: Sequence[Slice]) -> None:
        """Moves these slices, for a thread of the engine. Never raises."""
        wanted, groups = self._still_wanted(parts), list[_Group]()
        error = attempt(lambda: groups.extend(self._group(wanted)))
        if error is not None:
            self.settle(wanted, error)
        for group in groups:
            error = attempt(self._move, group)
            if not _tried_alone(group, error):
                self.settle(group.parts, error)
                continue
            for single in group.one_by_one():
                self.settle(single.parts, attempt(self._move, single))

    def settle(self, parts: Sequence[Slice], error: MoonpoolError | None) -> None:
        """Records the end of slices, for the engine."""
        if not parts:
            return
        with self._books:
            left = self._slices_left
            for request, _, _ in parts:
                if error is not None and self._errors[request] is None:
                    self._errors[request] = error
                    self._first_error = self._first_error or error
                left[request] -= 1
                if not left[request]:
                    self._requests_left -= 1
            over = not self._requests_left
        if over:
            self._finish()

    def _finish(self) -> None:
        """Nothing is under way any more. Messages go by a crew: this thread may be one that others wait for."""
        if self._first_error is not None:
            self.fail(self._first_error)
        elif self._notify is None:
            self.resolve(None)
        elif not self._crew.run(partial(self._tell_owners, self._notify)):
            self.fail(PeerLost("the transfer engine was closed"))

    def _tell_owners(self, message: bytes) -> None:
        for remote in dict.fromkeys(request.remote for request in self._requests):
            error = attempt(lambda remote=remote: remote.notify(message, timeout_s=self._remaining_s()))
            if error is not None:
                self.fail(error)
                return
        self.resolve(None)

    def _cut(self) -> tuple[list[Slice], list[Slice]]:
        """Slices for the engine's threads and for planners. These cut by themselves, and better when they see the
        whole.
        """
        limit = self._slice_nbytes
        if not any(isinstance(remote, MultiPathRemote) for remote in {request.remote for request in self._requests}):
            return cut_batch(self._sizes, limit), []
        by_paths = {n for n, request in enumerate(self._requests) if isinstance(request.remote, MultiPathRemote)}
        limits = [max(nbytes, limit) if n in by_paths else limit for n, nbytes in enumerate(self._sizes)]
        slices = cut_batch(self._sizes, limits)
        return [s for s in slices if s.request not in by_paths], [s for s in slices if s.request in by_paths]

    def _count_slices(self) -> list[int]:
        """How many each request has."""
        if self.num_slices == len(self._requests):
            return [1] * len(self._requests)
        left = [0] * len(self._requests)
        for request, _, _ in (*self.slices, *self._path_slices):
            left[request] += 1
        return left

    def _still_wanted(self, parts: Sequence[Slice]) -> Sequence[Slice]:
        """Without those of requests that have failed already, which are settled."""
        if self._first_error is None:
            return parts
        wanted: list[Slice] = []
        for part in parts:
            error = self._errors[part.request]
            if error is None:
                wanted.append(part)
            else:
                self.settle([part], error)
        return wanted

    def _path_groups(self) -> Iterator[_Group]:
        at = 0
        while at < len(self._path_slices):
            end = take_run(self._path_slices, at, self._slice_nbytes)
            yield from self._group(self._path_slices[at:end])
            at = end

    def _group(self, parts: Sequence[Slice]) -> list[_Group]:
        groups: dict[tuple[RemoteSegment, int | None], _Group] = {}
        group: _Group | None = None
        for part in parts:
            number, start, nbytes = part
            request = self._requests[number]
            generation = None if request.op is _READ else request.generation
            if group is None or group.remote is not request.remote or group.generation != generation:
                key = (request.remote, generation)
                group = groups.setdefault(key, _Group(*key, [], []))
            memories = self._memories[number]
            if nbytes != self._sizes[number]:
                memories = cut(memories, start, nbytes)
            group.places.append((request.offset + start, memories))
            group.parts.append(part)
        return list(groups.values())

    def _move(self, group: _Group) -> None:
        move(group.remote, group.places, generation=group.generation, timeout_s=self._remaining_s())

    def _start_on_paths(self, group: _Group) -> None:
        started: list[Pending[None]] = []
        error = attempt(lambda: started.append(self._moving_of(group)))
        if error is not None:
            self._ended_on_paths(group, error)
            return
        [moving] = started
        with self._books:
            self._moving.add(moving)
            cancelled = self._cancelled
        if cancelled:
            moving.cancel()
        moving.add_done_callback(partial(self._moved_on_paths, group))

    def _moving_of(self, group: _Group) -> Pending[None]:
        assert isinstance(group.remote, MultiPathRemote)
        return group.remote.start(
            group.places, generation=group.generation, timeout_s=self._remaining_s(), priority=self.priority
        )

    def _moved_on_paths(self, group: _Group, moving: Pending[None]) -> None:
        with self._books:
            self._moving.discard(moving)
        self._ended_on_paths(group, moving.failure)

    def _ended_on_paths(self, group: _Group, error: MoonpoolError | None) -> None:
        if _tried_alone(group, error):
            for single in group.one_by_one():
                self._start_on_paths(single)
            return
        self._queue.release(self.priority, len(group.parts))
        self.settle(group.parts, error)

    def _remaining_s(self) -> float:
        """Raises when nothing should begin any more."""
        if self._cancelled:
            raise _cancelled()
        remaining_s = self._deadline.remaining_s()
        if remaining_s <= 0.0:
            raise DeadlineExceeded(f"the batch was not done within {self._timeout_s:g} s")
        return remaining_s


def _cancelled() -> Cancelled:
    return Cancelled("the batch was cancelled")


def _borrow(requests: Sequence[TransferRequest]) -> tuple[list[list[Memory]], list[int]]:
    """Each request's memory and its size. Batches of a thousand small ones are built here: every line counts."""
    memories: list[list[Memory]] = []
    sizes: list[int] = []
    for request in requests:
        buffers, writable = request.buffers, request.op is _READ
        if len(buffers) == 1:
            only = as_memory(buffers[0], writable)
            memories.append([only])
            sizes.append(only.nbytes)
        else:
            memories.append([as_memory(buffer, writable) for buffer in buffers])
            sizes.append(nbytes_of(memories[-1]))
    return memories, sizes


def _tried_alone(group: _Group, error: MoonpoolError | None) -> bool:
    """Whether the error may be of one of the slices only."""
    if error is None or len(group.parts) == 1:
        return False
    return not isinstance(error, PeerLost | DeadlineExceeded | Cancelled)
