"""A remote segment that is reached by all paths of its peer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from queue import SimpleQueue

from moonpool.base.clock import Deadline
from moonpool.base.errors import DeadlineExceeded, HandleClosed, MoonpoolError, PeerLost, Unavailable
from moonpool.transfer.batch import Batch, TransferOp, TransferRequest
from moonpool.transfer.memory.buffers import Buffer, as_memory, total_nbytes
from moonpool.transfer.paths.path_load import is_retriable
from moonpool.transfer.paths.peer_paths import PathReport, PeerPaths
from moonpool.transfer.paths.slice_queue import SliceQueue
from moonpool.transfer.pending import attempt
from moonpool.transfer.transports.base import RemoteSegment, T, check_bounds

Opener = Callable[[float], RemoteSegment]  # takes a timeout_s


class MultiPathRemote(RemoteSegment):
    """Opens the handle of each path when it is first used. Every call is a batch in the engine's queue, of which the
    caller's thread moves slices, too.
    """

    transport = "paths"

    def __init__(
        self, queue: SliceQueue[Batch], paths: PeerPaths[Batch], nbytes: int, openers: Sequence[Opener]
    ) -> None:
        assert len(openers) == len(paths.endpoints)
        self.nbytes = nbytes
        self.num_paths = len(openers)
        self._queue = queue
        self._paths = paths
        self._openers = openers
        self._remotes: list[RemoteSegment | None] = [None] * len(openers)
        self._lock = threading.Lock()
        self._closed = False
        paths.probers.add(self)

    @property
    def peer(self) -> Hashable:
        return self._paths

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
        self._transfer(TransferOp.READ, [(offset, buffers)], 0, timeout_s)

    def write_from(self, offset: int, buffers: Sequence[Buffer], *, generation: int, timeout_s: float) -> None:
        self._transfer(TransferOp.WRITE, [(offset, buffers)], generation, timeout_s)

    def read_many(self, items: Sequence[tuple[int, Buffer]], *, timeout_s: float) -> None:
        self._transfer(TransferOp.READ, ((offset, [buffer]) for offset, buffer in items), 0, timeout_s)

    def write_many(self, items: Sequence[tuple[int, Buffer]], *, generation: int, timeout_s: float) -> None:
        self._transfer(TransferOp.WRITE, ((offset, [buffer]) for offset, buffer in items), generation, timeout_s)

    def on_path(self, path: int | None, act: Callable[[RemoteSegment, float], T], timeout_s: float) -> T:
        assert path is not None
        deadline = Deadline(timeout_s)
        try:
            return act(self._remote(path, deadline), deadline.remaining_s())
        except Unavailable as error:
            if self._closed:  # not a failure of the path, which serves other segments too
                raise HandleClosed("this handle was closed") from error
            raise

    def probe(self, path: int, timeout_s: float) -> None:
        """Make a round trip that moves no bytes."""
        deadline = Deadline(timeout_s)
        self._remote(path, deadline).read_into(0, [], timeout_s=deadline.remaining_s())

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
            self._paths.probers.discard(self)
            remotes = [remote for remote in self._remotes if remote is not None]
        for remote in remotes:
            remote.close()

    def _transfer(
        self, op: TransferOp, items: Iterable[tuple[int, Sequence[Buffer]]], generation: int, timeout_s: float
    ) -> None:
        """Raise InvalidInput, with nothing moved, when an item cannot be used."""
        if self._closed:
            raise HandleClosed("this handle is closed")
        requests: list[TransferRequest] = []
        for offset, buffers in items:
            memories = [as_memory(buffer, op is TransferOp.READ) for buffer in buffers]
            check_bounds(offset, total_nbytes(memories), self.nbytes)
            requests.append(TransferRequest(op, self, offset, memories, generation))
        slice_nbytes = self._paths.config.max_slice_nbytes
        batch = Batch(requests, timeout_s=timeout_s, slice_nbytes=slice_nbytes, stop_at_error=True)
        batch.start(self._queue, None, carry=True)
        batch.wait()

    def _notify_by(self, path: int, message: bytes, deadline: Deadline) -> None:
        self._remote(path, deadline).notify(message, timeout_s=deadline.remaining_s())

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
                self._queue.path_failed(self._paths, path, error)

        for path in range(len(self._openers)):
            if not self._queue.threads.run(partial(connect, path)):
                return PeerLost("the transfer engine is closed")
        error: MoonpoolError | None = None
        for _ in self._openers:
            error = results.get()
            if error is None or not is_retriable(error):
                return error
        return error
