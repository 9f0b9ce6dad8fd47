"""A remote segment that is reached by all paths of its peer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

from moonpool.base.clock import Deadline
from moonpool.base.errors import DeadlineExceeded, HandleClosed, MoonpoolError, PeerLost, Unavailable
from moonpool.transfer.memory.buffers import Buffer, as_memory
from moonpool.transfer.paths.path_load import is_retriable
from moonpool.transfer.paths.peer_paths import Mover, PathReport, PeerPaths
from moonpool.transfer.paths.places import Place, check_places, cut_places, move
from moonpool.transfer.paths.priority import Priority
from moonpool.transfer.pending import Pending, attempt
from moonpool.transfer.transports.base import RemoteSegment

Opener = Callable[[float], RemoteSegment]  # takes a timeout_s


class MultiPathRemote(RemoteSegment):
    """Opens the handle of each path when it is first used."""

    transport = "paths"
    peer = "paths"  # its transfers wait with the planner of the peer, not for the engine's threads

    def __init__(self, paths: PeerPaths, nbytes: int, openers: Sequence[Opener]) -> None:
        assert len(openers) == len(paths.endpoints)
        self.nbytes = nbytes
        self._paths = paths
        self._openers = openers
        self._remotes: list[RemoteSegment | None] = [None] * len(openers)
        self._lock = threading.Lock()
        self._closed = False

    def connect(self, timeout_s: float) -> None:
        """Try all paths at once and return when the first one works. Raise the peer's refusal, or the last error when
        no path works; wait for silent paths until the timeout.
        """
        deadline = Deadline(timeout_s)
        while True:
            error = self._connect_once(min(deadline.remaining_s(), self._paths.config.slice_timeout_s))
            if error is None:
                return
            if deadline.expired() or not isinstance(error, DeadlineExceeded):
                raise error

    def read_into(self, offset: int, buffers: Sequence[Buffer], *, timeout_s: float) -> None:
        self.transfer([(offset, [as_memory(buffer, True) for buffer in buffers])], None, timeout_s)

    def write_from(self, offset: int, buffers: Sequence[Buffer], *, generation: int, timeout_s: float) -> None:
        self.transfer([(offset, [as_memory(buffer, False) for buffer in buffers])], generation, timeout_s)

    def read_many(self, items: Sequence[tuple[int, Buffer]], *, timeout_s: float) -> None:
        self.transfer([(offset, [as_memory(buffer, True)]) for offset, buffer in items], None, timeout_s)

    def write_many(self, items: Sequence[tuple[int, Buffer]], *, generation: int, timeout_s: float) -> None:
        self.transfer([(offset, [as_memory(buffer, False)]) for offset, buffer in items], generation, timeout_s)

    def transfer(
        self,
        places: Sequence[Place],
        generation: int | None,
        timeout_s: float,
        priority: Priority = Priority.PREFETCH,
    ) -> None:
        """Write the places with `generation`, or read them (None). The caller's thread carries slices, too."""
        nbytes = self._check(places)
        if places:
            self._paths.transfer(nbytes, self._mover(places, generation), self._probe, timeout_s, priority)

    def start(
        self, places: Sequence[Place], *, generation: int | None, timeout_s: float, priority: Priority
    ) -> Pending[None]:
        """As transfer(), without waiting. The memory is in use until the result is there; cancel() drops what is not
        under way. Raises at once when the places are invalid or the handle is closed.
        """
        nbytes = self._check(places)
        return self._paths.start(nbytes, self._mover(places, generation), self._probe, timeout_s, priority)

    def notify(self, message: bytes, *, timeout_s: float) -> None:
        """Try the paths one after the other, best first, until one answers. The owner has the message when this
        returns, perhaps twice: an answer may have been lost.
        """
        deadline = Deadline(timeout_s)
        report = self._paths.report()
        rank = [(path.num_failures, path.is_secondary, -path.throughput) for path in report]
        order = sorted(range(len(report)), key=rank.__getitem__)
        for tried, path in enumerate(order, 1):
            share_s = deadline.remaining_s() / 2 if tried < len(order) else deadline.remaining_s()
            error = attempt(self._notify_by, path, message, Deadline(share_s))
            if error is None:
                return
            if not is_retriable(error) or tried == len(order):
                raise error

    def report(self) -> list[PathReport]:
        """Return the state of each path, over all segments of the peer."""
        return self._paths.report()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            remotes = [remote for remote in self._remotes if remote is not None]
        for remote in remotes:
            remote.close()

    def _check(self, places: Sequence[Place]) -> int:
        if self._closed:
            raise HandleClosed("this handle is closed")
        return check_places(places, self.nbytes)

    def _mover(self, places: Sequence[Place], generation: int | None) -> Mover:
        def move_slice(path: int, start: int, nbytes: int, timeout_s: float) -> None:
            deadline = Deadline(timeout_s)
            try:
                remote = self._remote(path, deadline)
                parts = cut_places(places, start, nbytes)
                move(remote, parts, generation=generation, timeout_s=deadline.remaining_s())
            except Unavailable as error:
                if self._closed:  # not a failure of the path, which serves other segments too
                    raise HandleClosed("this handle was closed") from error
                raise

        return move_slice

    def _notify_by(self, path: int, message: bytes, deadline: Deadline) -> None:
        self._remote(path, deadline).notify(message, timeout_s=deadline.remaining_s())

    def _probe(self, path: int, timeout_s: float) -> None:
        """Make a round trip that moves no bytes."""
        deadline = Deadline(timeout_s)
        self._remote(path, deadline).read_into(0, [], timeout_s=deadline.remaining_s())

    def _remote(self, path: int, deadline: Deadline) -> RemoteSegment:
        """Return this path's handle, opening it if needed."""
        if self._closed:
            raise HandleClosed("this handle is closed")
        remote = self._remotes[path]
        if remote is not None:
            return remote
        made = self._openers[path](deadline.remaining_s())
        with self._lock:
            kept = self._remotes[path] = self._remotes[path] or made
        if kept is not made or self._closed:
            made.close()
        return kept

    def _connect_once(self, timeout_s: float) -> MoonpoolError | None:
        results: SimpleQueue[MoonpoolError | None] = SimpleQueue()

        def connect(path: int) -> None:
            error = attempt(self._remote, path, Deadline(timeout_s))
            results.put(error)
            if error is not None and is_retriable(error):
                self._paths.path_failed(path, error)

        for path in range(len(self._openers)):
            if not self._paths.threads.run(partial(connect, path)):
                return PeerLost("the transfer engine is closed")
        error: MoonpoolError | None = None
        for _ in self._openers:
            error = results.get()
            if error is None or not is_retriable(error):
                return error
        return error
