"""The transfer engine: serves this process's segments, opens those of others, moves batches of bytes.

with TransferEngine(TransferConfig(run_dir="/tmp/x")) as engine:
    engine.register("kv", tensor)                          # memory of any kind; others find it by its name
    remote = engine.open("kv@10.0.0.7:4711")               # by name and peer, by name (directory), or by descriptor
    remote.read_into(0, [page], timeout_s=1.0)             # at once, on the caller's thread
    batch = engine.submit([TransferRequest(TransferOp.READ, remote, 0, [page])])
    batch.wait()                                           # or by priority, on the engine's threads

    remote = await engine.opening("kv@10.0.0.7:4711")      # the same from a coroutine
    await engine.submit([TransferRequest(TransferOp.READ, remote, 0, [page])], priority=Priority.HANDOFF)
"""

from __future__ import annotations

import contextlib
import threading
import time
from asyncio import _get_running_loop
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import AlreadyExists, InvalidInput, PeerLost, Unavailable
from moonpool.transfer.assembly import Assembly, Endpoints, Remotes
from moonpool.transfer.batch import Batch, TransferRequest
from moonpool.transfer.config import AUTO, TransferConfig
from moonpool.transfer.control import ControlHandler, Describe, Introduce, ListSegments, Notification, PeerInfo
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
from moonpool.transfer.transports.cuda.driver import Device
from moonpool.transfer.transports.cuda.pinning import Pinning
from moonpool.transfer.transports.memory import MemoryFabric

T = TypeVar("T")
_JOIN_TIMEOUT_S = 5.0
_CLOSED = "the transfer engine is closed"
_INLINE_NBYTES = 256 * 1024  # moved in less time than it takes to wake another thread a few times
_NUM_THREADS = 16  # segments being opened, messages being sent and call_on_thread() at the same time


class TransferEngine:
    """Thread-safe. Owns its transports, its threads, the remote segments it opened and the segments it registered;
    borrows the segments given to serve(), and the directory.
    """

    def __init__(
        self, config: TransferConfig, *, directory: Directory | None = None, fabric: MemoryFabric | None = None
    ) -> None:
        self._config = config
        self._directory = directory
        self.incarnation = time.time_ns()  # of the segments registered here; a later start has a greater one
        self._control = ControlHandler(self.incarnation, lambda: self.topology)
        wanted = config.tcp_host == AUTO or config.topology_file is not None
        self._assembly = Assembly(config, self._control, self.topology if wanted else None, fabric)
        self._threads = ThreadPool("transfer-control", _NUM_THREADS)
        order: SliceOrder[Batch] = SliceOrder(
            config.max_queued_slices,
            config.promote_after_s,
            threads_per_peer=config.num_threads,
        )
        self._queue = SliceQueue(order)
        self._remotes = Remotes(self._assembly.transports, self._queue, config.plan, config.timeout_s)
        self._lock = threading.Lock()
        self._closed = False
        self._served: dict[str, SegmentDescriptor] = {}
        self._registered: dict[str, Segment] = {}
        self.pinning: Pinning | None = None  # see use_gpu()

    def use_gpu(self, device: Device) -> Pinning:
        """Return what page-locks segments of others for copies of this GPU; made by the first call, and closed with
        the engine.
        """
        with self._lock:
            if self._closed:
                raise PeerLost(_CLOSED)
            self.pinning = self.pinning or Pinning(device)
            return self.pinning

    @cached_property
    def topology(self) -> Topology:
        """This machine's topology, with the overrides of `topology_file`; discovered at the first use."""
        return read_topology(Path(self._config.topology_file) if self._config.topology_file is not None else None)

    @property
    def addresses(self) -> tuple[str, ...]:
        """`host:port` of each tcp port: what others write behind the @ of a segment's name."""
        return self._assembly.addresses

    def connections(self) -> tuple[int, Counter[str]]:
        """Return the number of connections of others to the tcp ports, and how many have ended, by reason."""
        return self._assembly.connections()

    # -- segments of this process ------------------------------------------------------------------------------

    def register(
        self,
        name: str,
        memory: Buffer | None = None,
        *,
        nbytes: int | None = None,
        location: str | None = None,
        granule_nbytes: int | None = None,
    ) -> SegmentDescriptor:
        """Offer memory to others: any writable buffer, a tensor, a RawMemory pointer, or `nbytes` of new memory at
        `location` ("cpu:0", "cuda:0", "ssd:/path"). Raises what make_segment() and serve() raise.
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
        """Return the segment that register() made."""
        with self._lock:
            return self._registered[name]

    def unregister(self, name: str) -> None:
        """Withdraw the memory and release it; unknown names are ignored."""
        try:
            self.unserve(name)
        finally:
            with self._lock:
                segment = self._registered.pop(name, None)
            if segment is not None:
                segment.close()

    def serve(self, segment: Segment) -> SegmentDescriptor:
        """Offer the segment to others, by every transport that can, until unserve() or close().

        AlreadyExists when the name is taken; Unavailable when the directory cannot be reached. Nothing is offered then.
        The caller keeps the segment and must not close it while it is served.
        """
        with self._lock:
            if self._closed:
                raise PeerLost(_CLOSED)
            if segment.name in self._served:
                raise AlreadyExists(f"segment {segment.name!r} is already served")
            descriptor = self._served[segment.name] = _describe(segment, self._assembly.serve(segment))
            self._control.publish(descriptor)
        if self._directory is not None:
            try:
                self._directory.publish(descriptor)
            except BaseException:
                self._unserve_here(segment.name)
                raise
            if self._served.get(segment.name) is not descriptor:  # unserve() or close() ran meanwhile
                self._withdraw(descriptor)
        return descriptor

    def unserve(self, name: str) -> None:
        """Withdraw a segment; unknown names are ignored. A directory that cannot be reached drops it by itself."""
        descriptor = self._unserve_here(name)
        if descriptor is not None:
            self._withdraw(descriptor)

    def notifications(self, timeout_s: float = 0.0) -> list[Notification]:
        """Return and remove the messages that peers left, waiting at most `timeout_s` for the first."""
        return self._control.mailbox.take_all(timeout_s)

    def notified(self) -> Pending[None]:
        """Return a Pending that is done when there are notifications(), or the engine is closed."""
        return self._control.mailbox.next_arrival()

    # -- segments of others -------------------------------------------------------------------------------------

    def introduce(self, peer: str) -> PeerInfo:
        """Ask the engine at `host:port` for its machine, its incarnation and its topology."""
        return self._assembly.control_client(f"tcp:{peer}").ask(Introduce(), self._config.timeout_s)

    def find(self, target: str) -> SegmentDescriptor:
        """Return the descriptor of `name@host:port` (asks the peer itself) or `name` (asks the directory); NotFound."""
        name, peer = parse_target(target)
        if peer is not None:
            return self._assembly.control_client(peer).ask(Describe(name), self._config.timeout_s)
        if self._directory is None:
            raise InvalidInput(f"without a directory {name!r} cannot be found; write {name}@host:port")
        return self._directory.find(name)

    def list_segments(self, peer: str, prefix: str = "") -> list[SegmentDescriptor]:
        """Ask the engine at `host:port` for the segments whose names begin with `prefix`, sorted by name. Segments that
        it serves or withdraws meanwhile may be missing or listed.
        """
        client, found = self._assembly.control_client(f"tcp:{peer}"), list[SegmentDescriptor]()
        while True:
            after = found[-1].name if found else ""
            page = client.ask(ListSegments(prefix, after), self._config.timeout_s)
            if not page:
                return found
            found += page

    def open(self, target: SegmentDescriptor | str, *, timeout_s: float | None = None) -> RemoteSegment:
        """Return a handle by the fastest transport that works, the same one each time for a descriptor. Several tcp
        endpoints are used together. A text is looked up by find() each time, so a restarted owner is found again. Each
        transport that is tried has `timeout_s` (None: the engine's own) to reach the owner.

        The engine owns the handle: close it only if nothing else uses it.
        """
        return self._remotes.open(self.find(target) if isinstance(target, str) else target, timeout_s)

    def opening(self, target: SegmentDescriptor | str) -> Pending[RemoteSegment]:
        """As open(), without waiting: return a Pending of the handle."""
        remote = None if isinstance(target, str) else self._remotes.find(target)
        if remote is None:
            return self._threads.call(partial(self.open, target))
        found: Pending[RemoteSegment] = Pending()
        found.resolve(remote)
        return found

    def forget(self, descriptor: SegmentDescriptor) -> None:
        """Close the handle of a segment that is gone."""
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

        The owner of each segment gets `notify` once all requests have succeeded, and before the batch is done; the
        batch fails if that fails. Overloaded, with nothing begun, when the queue of this priority stays full for
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
        max_nbytes = min(_INLINE_NBYTES, self._config.slice_nbytes)
        if may_wait and not self._closed and batch.run_inline(max_nbytes):
            return batch
        room_timeout_s = timeout_s if room_timeout_s is None else min(room_timeout_s, timeout_s)
        carry = may_wait and batch.is_small(max_nbytes)
        batch.start(self._queue, room_timeout_s, threads=self._threads, carry=carry)
        return batch

    def call_on_thread(self, act: Callable[[], T]) -> Pending[T]:
        """Call `act` on a thread of the engine as soon as one is free, and return its Pending result. An `act` that
        uses memory of the caller must not be cancelled: cancel() does not wait for its end.
        """
        return self._threads.call(act)

    def close(self) -> None:
        """Idempotent. Unfinished transfers fail with PeerLost; all threads, sockets and mappings end."""
        self._withdraw_all()
        self._queue.close()
        if self.pinning is not None:
            self.pinning.close()  # while its segments are mapped
        self._remotes.close()
        self._assembly.close()
        self._control.close()
        self._threads.close()
        self._queue.join(_JOIN_TIMEOUT_S)
        self._threads.join(_JOIN_TIMEOUT_S)
        with self._lock:
            registered, self._registered = list(self._registered.values()), {}
        for segment in registered:
            segment.close()

    def _unserve_here(self, name: str) -> SegmentDescriptor | None:
        with self._lock:
            self._assembly.unserve(name)
            self._control.withdraw(name)
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
