"""The transfer engine: serves this process's segments, opens those of others, moves batches of bytes.

with TransferEngine(TransferConfig(run_dir="/tmp/x")) as engine:
    engine.register("kv", tensor)                          # memory of any kind; others find it by its name
    remote = engine.open("kv@10.0.0.7:4711")               # by name and peer, by name (directory), or by descriptor
    remote.read_into(0, [page], timeout_s=1.0)             # here and now, on the caller's thread
    batch = engine.submit([TransferRequest(TransferOp.READ, remote, 0, [page])])
    batch.wait()                                           # or on the engine's threads

    remote = await engine.opening("kv@10.0.0.7:4711")      # the same from a coroutine
    await engine.submit([TransferRequest(TransferOp.READ, remote, 0, [page])], priority=Priority.HANDOFF)
"""

from __future__ import annotations

import contextlib
import threading
import time
from asyncio import _get_running_loop
from collections import Counter
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import AlreadyExists, InvalidInput, PeerLost, Unavailable
from moonpool.transfer.assembly import Assembly, Endpoints, Remotes
from moonpool.transfer.batch import Batch, TransferRequest
from moonpool.transfer.config import AUTO, TransferConfig
from moonpool.transfer.control import ControlHandler, Describe, Introduce, Notification, PeerInfo
from moonpool.transfer.directory import Directory, parse_target
from moonpool.transfer.memory.buffers import Buffer
from moonpool.transfer.memory.location import host_id
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.paths.priority import Priority
from moonpool.transfer.paths.slice_queue import SliceOrder, SliceQueue
from moonpool.transfer.pending import Pending, ThreadPool
from moonpool.transfer.register import make_segment
from moonpool.transfer.topology import Topology, read_topology
from moonpool.transfer.transports.base import RemoteSegment
from moonpool.transfer.transports.memory import MemoryFabric

_JOIN_TIMEOUT_S = 5.0
_CLOSED = "the transfer engine is closed"
_INLINE_NBYTES = 256 * 1024  # moved in less time than it takes to wake another thread a few times
_CREW_SIZE = 16  # segments being opened and messages being sent at once


class TransferEngine:
    """Thread-safe. Owns its transports, its threads, the remote segments it opened and those it registered; borrows
    the segments given to serve(), and the directory.
    """

    def __init__(
        self, config: TransferConfig, *, directory: Directory | None = None, fabric: MemoryFabric | None = None
    ) -> None:
        self._config = config
        self._directory = directory
        self.incarnation = time.time_ns()  # of the segments registered here: a later start has a greater one
        self._desk = ControlHandler(self.incarnation, lambda: self.topology)
        wanted = config.tcp_host == AUTO or config.topology_file is not None
        self._assembly = Assembly(config, self._desk, self.topology if wanted else None, fabric)
        self._remotes = Remotes(self._assembly.transports, config.plan, config.timeout_s)
        self._crew = ThreadPool("transfer-crew", _CREW_SIZE)
        order: SliceOrder[Batch] = SliceOrder(
            config.max_queued_slices,
            config.slice_nbytes,
            config.promote_after_s,
            threads_per_peer=config.num_threads,
        )
        self._queue = SliceQueue(order)
        self._lock = threading.Lock()
        self._closed = False
        self._served: dict[str, SegmentDescriptor] = {}
        self._registered: dict[str, Segment] = {}

    @cached_property
    def topology(self) -> Topology:
        """This machine's, with the overrides of `topology_file`; looked at when first asked for."""
        return read_topology(Path(self._config.topology_file) if self._config.topology_file is not None else None)

    @property
    def addresses(self) -> tuple[str, ...]:
        """`host:port` of its tcp ports: what others write behind the @ of a segment's name."""
        return self._assembly.addresses

    def connections(self) -> tuple[int, Counter[str]]:
        """Return how many connections others have to its tcp ports, and how many have ended, by reason."""
        return self._assembly.connections()

    # -- what this process offers ------------------------------------------------------------------------------

    def register(
        self,
        name: str,
        memory: Buffer | None = None,
        *,
        nbytes: int | None = None,
        location: str | None = None,
        granule_nbytes: int | None = None,
    ) -> SegmentDescriptor:
        """Offers memory: any writable buffer, a tensor, a RawMemory pointer, or `nbytes` of new memory at `location`
        ("cpu:0", "cuda:0", "ssd:/path"). See register.make_segment() for what is refused, serve() for the rest.
        """
        segment = make_segment(
            name,
            memory,
            nbytes=nbytes,
            location=location,
            granule_nbytes=granule_nbytes,
            incarnation=self.incarnation,
        )
        try:
            descriptor = self.serve(segment)
        except BaseException:
            segment.close()
            raise
        with self._lock:
            if not self._closed:
                self._registered[name] = segment
                return descriptor
        segment.close()
        raise PeerLost(_CLOSED)

    def segment(self, name: str) -> Segment:
        """What register() made."""
        with self._lock:
            return self._registered[name]

    def unregister(self, name: str) -> None:
        """Withdraws the memory and lets it go; unknown names are ignored."""
        try:
            self.unserve(name)
        finally:
            with self._lock:
                segment = self._registered.pop(name, None)
            if segment is not None:
                segment.close()

    def serve(self, segment: Segment) -> SegmentDescriptor:
        """Offers the segment to others, by every transport that can, until unserve() or close().

        AlreadyExists when the name is taken; Unavailable when the directory cannot be told. Nothing is offered then.
        The segment stays the caller's and must outlive this.
        """
        with self._lock:
            if self._closed:
                raise PeerLost(_CLOSED)
            if segment.name in self._served:
                raise AlreadyExists(f"segment {segment.name!r} is already served")
            descriptor = self._served[segment.name] = _describe(segment, self._assembly.serve(segment))
            self._desk.publish(descriptor)
        if self._directory is not None:
            try:
                self._directory.publish(descriptor)
            except BaseException:
                self._unserve_here(segment.name)
                raise
            if self._served.get(segment.name) is not descriptor:  # unserve() or close() came between
                self._withdraw(descriptor)
        return descriptor

    def unserve(self, name: str) -> None:
        """Withdraws a segment; unknown names are ignored. A directory out of reach forgets it by itself."""
        descriptor = self._unserve_here(name)
        if descriptor is not None:
            self._withdraw(descriptor)

    def notifications(self, timeout_s: float = 0.0) -> list[Notification]:
        """Takes the messages that peers left, waiting at most so long for the first."""
        return self._desk.mailbox.take(timeout_s)

    def notified(self) -> Pending[None]:
        """Over when notifications() has something to take, or the engine is closed."""
        return self._desk.mailbox.arrival()

    # -- what others offer -------------------------------------------------------------------------------------

    def introduce(self, peer: str) -> PeerInfo:
        """Asks the engine at `host:port` who it is: its machine, its start, its topology."""
        return self._assembly.line_to(f"tcp:{peer}").ask(Introduce(), self._config.timeout_s)

    def find(self, target: str) -> SegmentDescriptor:
        """What `name@host:port` (asked of the peer itself) or `name` (of the directory) stands for; NotFound."""
        name, peer = parse_target(target)
        if peer is not None:
            return self._assembly.line_to(peer).ask(Describe(name), self._config.timeout_s)
        if self._directory is None:
            raise InvalidInput(f"without a directory {name!r} says too little; write {name}@host:port")
        return self._directory.find(name)

    def open(self, target: SegmentDescriptor | str) -> RemoteSegment:
        """A handle by the fastest transport that works, the same one each time for a descriptor. Several tcp endpoints
        are used together. A text is looked up by find() each time, so a restarted owner is found anew.

        Owned by the engine: close() of the handle is for those who know that nobody else uses it.
        """
        return self._remotes.open(self.find(target) if isinstance(target, str) else target)

    def opening(self, target: SegmentDescriptor | str) -> Pending[RemoteSegment]:
        """open() without waiting, to be awaited or waited for."""
        remote = None if isinstance(target, str) else self._remotes.find(target)
        if remote is None:
            return self._crew.call(partial(self.open, target))
        found: Pending[RemoteSegment] = Pending()
        found.resolve(remote)
        return found

    def forget(self, descriptor: SegmentDescriptor) -> None:
        """Closes the handle of a segment that is gone for good."""
        self._remotes.forget(descriptor)

    def submit(
        self,
        requests: Sequence[TransferRequest],
        *,
        timeout_s: float | None = None,
        priority: Priority = Priority.PREFETCH,
        notify: bytes | None = None,
        room_timeout_s: float | None = None,
    ) -> Batch:
        """Start the requests under one deadline, and return the batch to wait for. Slices of large requests run in
        parallel on the engine's threads, small ones go together; there is no order between requests.

        A single request of at most 256 KiB is moved on the caller's thread before this returns, unless `room_timeout_s`
        is 0 or an event loop runs in this thread. To have several requests under way at once put them into one batch.

        `notify` is left with the owner of each segment once all requests have succeeded, and before the batch is done;
        the batch fails if that fails. Overloaded, with nothing begun, when the queue of this priority stays full for
        `room_timeout_s` (None: until the deadline); on an event loop make it 0.
        """
        timeout_s = self._config.timeout_s if timeout_s is None else timeout_s
        batch = Batch(
            requests,
            timeout_s=timeout_s,
            slice_nbytes=self._config.slice_nbytes,
            priority=priority,
            notify=notify,
        )
        may_wait = room_timeout_s != 0 and _get_running_loop() is None
        if may_wait and not self._closed and batch.run_inline(min(_INLINE_NBYTES, self._config.slice_nbytes)):
            return batch
        room_timeout_s = timeout_s if room_timeout_s is None else min(room_timeout_s, timeout_s)
        batch.start(self._queue, self._crew, room_timeout_s)
        return batch

    def close(self) -> None:
        """Idempotent. Unfinished transfers fail with PeerLost; all threads, sockets and mappings go."""
        self._withdraw_all()
        self._queue.close()
        self._remotes.close()
        self._assembly.close()
        self._desk.close()
        self._crew.close()
        self._queue.join(_JOIN_TIMEOUT_S)
        self._remotes.join(_JOIN_TIMEOUT_S)
        self._crew.join(_JOIN_TIMEOUT_S)
        with self._lock:
            registered, self._registered = list(self._registered.values()), {}
        for segment in registered:
            segment.close()

    def _unserve_here(self, name: str) -> SegmentDescriptor | None:
        with self._lock:
            self._assembly.unserve(name)
            self._desk.withdraw(name)
            return self._served.pop(name, None)

    def _withdraw(self, descriptor: SegmentDescriptor) -> None:
        if self._directory is not None:
            with contextlib.suppress(Unavailable):
                self._directory.withdraw(descriptor)

    def _withdraw_all(self) -> None:
        with self._lock:
            self._closed = True
            served, self._served = list(self._served.values()), {}
        for descriptor in served:
            self._withdraw(descriptor)

    def __enter__(self) -> TransferEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _describe(segment: Segment, endpoints: Endpoints) -> SegmentDescriptor:
    return SegmentDescriptor(
        name=segment.name,
        nbytes=segment.nbytes,
        incarnation=segment.incarnation,
        host=host_id(),
        endpoints=endpoints.preferred,
        secondary=endpoints.secondary,
        granule_nbytes=segment.fence.granule_nbytes if segment.fence is not None else None,
        location=segment.location,
    )
