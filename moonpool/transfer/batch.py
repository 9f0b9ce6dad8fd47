"""Batches of transfer requests: what engine.submit() takes and returns.

A batch's slices wait in the engine's queue, except slices for peers with several paths. These wait in the planner of
that peer, which keeps all of its paths busy and no thread of the engine. Slices of one run that go to one segment are
moved together. When they fail together, and not because the peer is gone, each is tried alone, so that a request fails
only for its own reason; bytes may be moved twice then, always the same ones to the same place.

A single small request needs none of this: run_inline() moves it on the caller's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple

import msgspec

from moonpool.base.clock import Deadline
from moonpool.base.errors import Cancelled, DeadlineExceeded, InvalidInput, MoonpoolError, PeerLost
from moonpool.transfer.memory.buffers import Buffer, Memory, as_memory, cut, total_nbytes
from moonpool.transfer.paths.multipath import MultiPathRemote
from moonpool.transfer.paths.places import Place, move, read_expecting, write_places
from moonpool.transfer.paths.plan import Slice, cut_batch, take_run
from moonpool.transfer.paths.priority import Priority
from moonpool.transfer.paths.slice_queue import SliceQueue
from moonpool.transfer.pending import Pending, ThreadPool, attempt
from moonpool.transfer.transports.base import RemoteSegment


class TransferOp(Enum):
    READ = "read"
    WRITE = "write"


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
    ) -> None:
        """InvalidInput when a buffer cannot be used. Call start() or run_inline() next, once."""
        super().__init__()
        self.priority = priority
        self._requests = list(requests)
        self._timeout_s = timeout_s
        self._slice_nbytes = slice_nbytes
        self._notify = notify
        self._memories, self._sizes = _borrow(requests)
        self.slices_of_peers: dict[Hashable, list[Slice]] = {}
        self._path_slices: Sequence[Slice] = ()
        self._num_slices = 0
        self._slices_left = [1] * len(requests)
        self._errors: list[MoonpoolError | None] = [None] * len(requests)
        self._finished: list[int] = []  # requests that have ended, in this order
        self._first_error: MoonpoolError | None = None
        self._cancelled = False
        self._lock = threading.Lock()
        self._progress: threading.Condition | None = None  # on `_lock`; made by the first call of as_completed()

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_slices(self) -> int:
        return self._num_slices

    def status(self, request: int) -> TransferStatus:
        if self._slices_left[request]:
            return TransferStatus.PENDING
        error = self._errors[request]
        if error is None:
            return TransferStatus.DONE
        return TransferStatus.CANCELLED if isinstance(error, Cancelled) else TransferStatus.FAILED

    def error(self, request: int) -> MoonpoolError | None:
        """Return why this request failed; None while it is pending or when it succeeded."""
        return self._errors[request] if not self._slices_left[request] else None

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
            moving = list(self._moving)
        self._settle(self._queue.withdraw(self), _cancelled())
        for each in moving:
            each.cancel()

    # for the engine

    def run_inline(self, max_nbytes: int) -> bool:
        """Move the only request on this thread and return True; return False, with nothing done, if it is larger than
        `max_nbytes` or there is more to do than to move its bytes.
        """
        if len(self._requests) != 1 or self._notify is not None or self._sizes[0] > max_nbytes:
            return False
        request = self._requests[0]
        error = attempt(_move_request, request, self._memories[0], self._timeout_s, self.priority)
        self._errors[0] = self._first_error = error
        self._slices_left[0] = 0
        self._finished.append(0)
        self._end(None, error)
        return True

    def start(self, queue: SliceQueue[Batch], threads: ThreadPool, room_timeout_s: float) -> None:
        """Queue all requests. Overloaded, with nothing begun, when there is no room in time."""
        if not self._requests:
            self.resolve(None)
            return
        self._queue, self._threads = queue, threads
        self._deadline = Deadline(self._timeout_s)
        self._moving: set[Pending[None]] = set()
        self._cut()
        groups = list(self._path_groups())
        self._queue.put(self, room_timeout_s)
        for group in groups:
            self._start_on_paths(group)

    def run(self, parts: Sequence[Slice]) -> None:
        """Move these slices, on a thread of the engine. Never raises."""
        wanted, groups = self._still_wanted(parts), list[_Group]()
        error = attempt(lambda: groups.extend(self._group(wanted)))
        if error is not None:
            self._settle(wanted, error)
        for group in groups:
            self._move(group)

    def abandon(self, parts: Sequence[Slice]) -> None:
        """Fail slices that will not be moved, because the engine was closed."""
        self._settle(parts, PeerLost("the transfer engine was closed"))

    def _settle(self, parts: Sequence[Slice], error: MoonpoolError | None) -> None:
        """Record the end of slices."""
        if not parts:
            return
        with self._lock:
            left = self._slices_left
            for request, _, _ in parts:
                if error is not None and self._errors[request] is None:
                    self._errors[request] = error
                    self._first_error = self._first_error or error
                left[request] -= 1
                if not left[request]:
                    self._finished.append(request)
            over = len(self._finished) == len(self._requests)
            if self._progress is not None:
                self._progress.notify_all()
        if over:
            self._finish()

    def _finish(self) -> None:
        """Nothing is under way any more. Another thread sends messages: others may wait for this one."""
        if self._first_error is not None:
            self.fail(self._first_error)
        elif self._notify is None:
            self.resolve(None)
        elif not self._threads.run(partial(self._notify_owners, self._notify)):
            self.fail(PeerLost("the transfer engine was closed"))

    def _notify_owners(self, message: bytes) -> None:
        for remote in dict.fromkeys(request.remote for request in self._requests):
            error = attempt(lambda remote=remote: remote.notify(message, timeout_s=self._remaining_s()))
            if error is not None:
                self.fail(error)
                return
        self.resolve(None)

    def _cut(self) -> None:
        """Make the slices for the engine's threads, by peer, and those for planners. A planner cuts by itself, and
        better when it sees the whole request.
        """
        limit, requests = self._slice_nbytes, self._requests
        remotes = {request.remote for request in requests}
        limits: int | list[int] = limit
        if any(isinstance(remote, MultiPathRemote) for remote in remotes):
            by_paths = [isinstance(request.remote, MultiPathRemote) for request in requests]
            limits = [max(n, limit) if paths else limit for n, paths in zip(self._sizes, by_paths, strict=True)]
        slices = cut_batch(self._sizes, limits)
        self._num_slices = len(slices)
        if len(slices) > len(requests):
            self._slices_left = [0] * len(requests)
            for request, _, _ in slices:
                self._slices_left[request] += 1
        by_peer = self.slices_of_peers
        if len(remotes) == 1:
            by_peer[remotes.pop().peer] = slices
        else:
            for part in slices:
                by_peer.setdefault(requests[part.request].remote.peer, []).append(part)
        self._path_slices = by_peer.pop(MultiPathRemote.peer, [])

    def _still_wanted(self, parts: Sequence[Slice]) -> Sequence[Slice]:
        """Return the slices without those of requests that have failed already, which are settled here."""
        if self._first_error is None:
            return parts
        wanted: list[Slice] = []
        for part in parts:
            error = self._errors[part.request]
            if error is None:
                wanted.append(part)
            else:
                self._settle([part], error)
        return wanted

    def _path_groups(self) -> Iterator[_Group]:
        at = 0
        while at < len(self._path_slices):
            end = take_run(self._path_slices, at, self._slice_nbytes)
            yield from self._group(self._path_slices[at:end])
            at = end

    def _group(self, parts: Sequence[Slice]) -> Iterable[_Group]:
        groups: dict[_GroupKey, _Group] = {}
        group: _Group | None = None
        last: TransferRequest | None = None
        for part in parts:
            number, start, nbytes = part
            request = self._requests[number]
            if (
                group is None
                or last is None
                or request.remote is not last.remote
                or request.op is not last.op
                or request.generation != last.generation
                or request.expected_generation != last.expected_generation
            ):
                key = _key_of(request)
                group, last = groups.setdefault(key, _Group(key, [], [], [])), request
            memories = self._memories[number]
            if nbytes != self._sizes[number]:
                memories = cut(memories, start, nbytes)
            group.places.append((request.offset + start, memories))
            group.parts.append(part)
            if request.op is not _READ:
                group.generations.append(request.generation)
            elif request.expected_generation is not None:
                group.generations.append(request.expected_generation)
        return groups.values()

    def _move(self, group: _Group) -> None:
        """Move the group and settle its slices."""
        refusals: dict[int, MoonpoolError] = {}
        error = attempt(lambda: refusals.update(_move_group(group, self._remaining_s())))
        if _is_tried_alone(group, error):
            for single in group.one_by_one():
                self._move(single)
        elif error is not None or not refusals:
            self._settle(group.parts, error)
        else:
            for at, part in enumerate(group.parts):
                self._settle([part], refusals.get(at))

    def _start_on_paths(self, group: _Group) -> None:
        started: list[Pending[None]] = []
        error = attempt(lambda: started.append(self._moving_of(group)))
        if error is not None:
            self._ended_on_paths(group, error)
            return
        [moving] = started
        with self._lock:
            self._moving.add(moving)
            cancelled = self._cancelled
        if cancelled:
            moving.cancel()
        moving.add_done_callback(partial(self._moved_on_paths, group))

    def _moving_of(self, group: _Group) -> Pending[None]:
        remote = group.key.remote
        assert isinstance(remote, MultiPathRemote)
        if group.key.is_expecting:
            raise InvalidInput("a segment reached by several paths is read without generations")
        return remote.start(
            group.places, generation=group.key.generation, timeout_s=self._remaining_s(), priority=self.priority
        )

    def _moved_on_paths(self, group: _Group, moving: Pending[None]) -> None:
        with self._lock:
            self._moving.discard(moving)
        self._ended_on_paths(group, moving.failure)

    def _ended_on_paths(self, group: _Group, error: MoonpoolError | None) -> None:
        if _is_tried_alone(group, error):
            for single in group.one_by_one():
                self._start_on_paths(single)
            return
        self._queue.release(self.priority, len(group.parts))
        self._settle(group.parts, error)

    def _remaining_s(self) -> float:
        """Raise when nothing should begin any more."""
        if self._cancelled:
            raise _cancelled()
        remaining_s = self._deadline.remaining_s()
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
        buffers, writable = request.buffers, request.op is _READ
        if len(buffers) == 1:
            only = as_memory(buffers[0], writable)
            memories.append([only])
            sizes.append(only.nbytes)
        else:
            memories.append([as_memory(buffer, writable) for buffer in buffers])
            sizes.append(total_nbytes(memories[-1]))
    return memories, sizes


def _key_of(request: TransferRequest) -> _GroupKey:
    remote = request.remote
    if request.op is _READ:
        return _GroupKey(remote, _READ, None, request.expected_generation is not None)
    return _GroupKey(remote, request.op, None if remote.pipelines_writes else request.generation)


def _move_request(request: TransferRequest, memories: list[Memory], timeout_s: float, priority: Priority) -> None:
    """Move a whole request on this thread."""
    remote, expected = request.remote, request.expected_generation
    if isinstance(remote, MultiPathRemote) and expected is None:
        generation = None if request.op is _READ else request.generation
        remote.transfer([(request.offset, memories)], generation, timeout_s, priority)
    elif request.op is not _READ:
        remote.write_from(request.offset, memories, generation=request.generation, timeout_s=timeout_s)
    elif expected is None:
        remote.read_into(request.offset, memories, timeout_s=timeout_s)
    else:
        for refusal in read_expecting(remote, [(request.offset, memories)], [expected], timeout_s=timeout_s).values():
            raise refusal


def _move_group(group: _Group, timeout_s: float) -> dict[int, MoonpoolError]:
    """Return the refusals by the position of the slice. Raise what may be true of any slice."""
    key, places, generations = group.key, group.places, group.generations
    if key.is_expecting:
        return read_expecting(key.remote, places, generations, timeout_s=timeout_s)
    if not generations:
        move(key.remote, places, generation=None, timeout_s=timeout_s)
        return {}
    return write_places(key.remote, places, generations, timeout_s=timeout_s)


def _is_tried_alone(group: _Group, error: MoonpoolError | None) -> bool:
    """Whether the error may be that of one of the slices only."""
    if error is None or len(group.parts) == 1:
        return False
    return not isinstance(error, PeerLost | DeadlineExceeded | Cancelled)
