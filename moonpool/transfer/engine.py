"""The transfer engine: serves this process's segments, opens those of others, moves batches of bytes.

with TransferEngine(TransferConfig(run_dir="/tmp/x")) as engine:
    remote = engine.open(descriptor)                       # the fastest way there is
    remote.read_into(0, [page], timeout_s=1.0)             # here and now, on the caller's thread
    batch = engine.submit([TransferRequest(TransferOp.READ, remote, 0, [page])])
    batch.wait()                                           # or on the engine's threads
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakValueDictionary

from moonpool.base.clock import Deadline
from moonpool.base.errors import ConfigError, Internal, NotFound, Overloaded, PeerLost, Unavailable
from moonpool.transfer.batch import Batch, TransferRequest
from moonpool.transfer.descriptor import SegmentDescriptor
from moonpool.transfer.host import host_id
from moonpool.transfer.path_load import PlanConfig
from moonpool.transfer.paths import MultiPathRemote, PeerPaths
from moonpool.transfer.plan import DEFAULT_SLICE_NBYTES, Slice, take_run
from moonpool.transfer.segment import Segment
from moonpool.transfer.transports.base import RemoteSegment, Transport
from moonpool.transfer.transports.file import FileTransport
from moonpool.transfer.transports.memory import MemoryFabric, MemoryTransport
from moonpool.transfer.transports.shm import ShmTransport
from moonpool.transfer.transports.tcp import TcpTransport

_JOIN_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class TransferConfig:
    """`run_dir` holds the shm socket; `tcp_host` None means not to listen. Nothing here is secret: whoever reaches
    the tcp port can read and write the segments served, so it is the loopback interface unless told otherwise.
    `tcp_hosts` are further addresses of this machine, one per rail; peers use all of them together.
    """

    run_dir: str
    shm: bool = True
    tcp_host: str | None = "127.0.0.1"
    tcp_hosts: tuple[str, ...] = ()
    tcp_port: int = 0
    tcp_advertise_host: str | None = None  # what others should connect to, if not tcp_host
    lanes: int = 2  # connections per peer and path
    timeout_s: float = 10.0
    num_threads: int = 2
    slice_nbytes: int = DEFAULT_SLICE_NBYTES
    max_queued_slices: int = 65_536


class TransferEngine:
    """Thread-safe. Owns its transports, its threads and the remote segments it opened; never the segments served."""

    def __init__(self, config: TransferConfig, *, fabric: MemoryFabric | None = None) -> None:
        if config.lanes < 1 or config.num_threads < 1 or config.slice_nbytes < 1:
            raise ConfigError("lanes, num_threads and slice_nbytes must be at least 1")
        if config.tcp_hosts and config.tcp_host is None:
            raise ConfigError("tcp_hosts are addresses beside tcp_host, which is missing")
        self._config = config
        self._lock = threading.Lock()
        self._remotes: dict[tuple[str, int], RemoteSegment] = {}
        self._peers: WeakValueDictionary[tuple[str, ...], PeerPaths] = WeakValueDictionary()  # held by their remotes
        self._closed = False
        self._queue = _SliceQueue(config.max_queued_slices, config.slice_nbytes)
        self._transports = _make_transports(config, fabric)  # fastest first
        self._threads: list[threading.Thread] = []
        self._grow_threads(config.num_threads)

    def serve(self, segment: Segment) -> SegmentDescriptor:
        """Offers the segment to others, by every transport that can, until unserve() or close().

        AlreadyExists when the name is taken. The segment stays the caller's and must outlive this.
        """
        endpoints = tuple(t.serve(segment) for t in self._transports if t.can_serve(segment))
        return SegmentDescriptor(
            name=segment.name,
            nbytes=segment.nbytes,
            incarnation=segment.incarnation,
            host=host_id(),
            endpoints=endpoints,
            granule_nbytes=segment.fence.granule_nbytes if segment.fence is not None else None,
        )

    def unserve(self, name: str) -> None:
        """Withdraws a segment; unknown names are ignored."""
        for transport in self._transports:
            transport.unserve(name)

    def open(self, descriptor: SegmentDescriptor) -> RemoteSegment:
        """A handle by the fastest transport that works, the same one each time for a name and incarnation. Several
        tcp endpoints are used together.

        Owned by the engine: close() of the handle is for those who know that nobody else uses it.
        """
        key = (descriptor.name, descriptor.incarnation)
        with self._lock:
            remote = self._remotes.get(key)
        return remote if remote is not None else self._keep(key, self._connect(descriptor))

    def forget(self, descriptor: SegmentDescriptor) -> None:
        """Closes the handle of a segment that is gone for good."""
        with self._lock:
            remote = self._remotes.pop((descriptor.name, descriptor.incarnation), None)
        if remote is not None:
            remote.close()

    def submit(self, requests: Sequence[TransferRequest], *, timeout_s: float | None = None) -> Batch:
        """Starts the requests on the engine's threads, all under one deadline. Slices of large ones run in
        parallel; there is no order between requests. Overloaded when the queue stays full until the deadline.
        """
        timeout_s = self._config.timeout_s if timeout_s is None else timeout_s
        batch = Batch(requests, timeout_s=timeout_s, slice_nbytes=self._config.slice_nbytes)
        self._queue.put(batch, Deadline(timeout_s))
        return batch

    def close(self) -> None:
        """Idempotent. Unfinished transfers fail with PeerLost; all threads, sockets and mappings go."""
        for batch, part in self._queue.close():
            batch.settle(part, PeerLost("the transfer engine was closed"))
        with self._lock:
            self._closed = True
            remotes, self._remotes = list(self._remotes.values()), {}
            peers = list(self._peers.values())
        for peer in peers:
            peer.close()
        for remote in remotes:
            remote.close()
        for transport in self._transports:
            transport.close()
        for thread in self._threads:
            thread.join(_JOIN_TIMEOUT_S)
        for peer in peers:
            peer.join(_JOIN_TIMEOUT_S)

    def __enter__(self) -> TransferEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keep(self, key: tuple[str, int], remote: RemoteSegment) -> RemoteSegment:
        """The handle to use from now on: this one, or one that another thread opened first."""
        with self._lock:
            kept = None if self._closed else self._remotes.setdefault(key, remote)
        if kept is not remote:
            remote.close()
        if kept is None:
            raise PeerLost("the transfer engine is closed")
        return kept

    def _connect(self, descriptor: SegmentDescriptor) -> RemoteSegment:
        failure: Unavailable | None = None
        for transport, endpoints in self._ways_to(descriptor):
            try:
                if transport.scheme == TcpTransport.scheme and len(endpoints) > 1:
                    return self._connect_paths(transport, descriptor, endpoints)
                return self._connect_first(transport, descriptor, endpoints)
            except Unavailable as error:
                failure = error
        raise failure or NotFound(f"segment {descriptor.name!r} has no endpoint that can be reached from here")

    def _connect_first(
        self, transport: Transport, descriptor: SegmentDescriptor, endpoints: Sequence[str]
    ) -> RemoteSegment:
        failure: Unavailable | None = None
        for endpoint in endpoints:
            try:
                return transport.open(descriptor, endpoint, timeout_s=self._config.timeout_s)
            except Unavailable as error:
                failure = error
        assert failure is not None
        raise failure

    def _connect_paths(
        self, transport: Transport, descriptor: SegmentDescriptor, endpoints: Sequence[str]
    ) -> MultiPathRemote:
        openers = [
            partial(_open_for, transport, descriptor, endpoint)  # takes the timeout
            for endpoint in endpoints
        ]
        paths = self._paths_to(tuple(endpoints))
        remote = MultiPathRemote(paths, descriptor.nbytes, openers)
        remote.connect(self._config.timeout_s)
        self._grow_threads(self._config.lanes * len(endpoints))
        return remote

    def _paths_to(self, endpoints: tuple[str, ...]) -> PeerPaths:
        with self._lock:
            if self._closed:
                raise PeerLost("the transfer engine is closed")
            config = PlanConfig(max_slice_nbytes=self._config.slice_nbytes, slices_per_path=self._config.lanes)
            paths = self._peers.get(endpoints) or PeerPaths(endpoints, config)
            self._peers[endpoints] = paths
            return paths

    def _ways_to(self, descriptor: SegmentDescriptor) -> list[tuple[Transport, list[str]]]:
        """Usable endpoints by transport, fastest first. Of several listeners of one scheme the first opens for all."""
        by_scheme: dict[str, tuple[Transport, list[str]]] = {}
        for transport in self._transports:
            own = [e for e in descriptor.endpoints if e.partition(":")[0] == transport.scheme]
            usable = [endpoint for endpoint in own if transport.usable(descriptor, endpoint)]
            if usable:
                by_scheme.setdefault(transport.scheme, (transport, usable))
        return list(by_scheme.values())

    def _grow_threads(self, num_threads: int) -> None:
        """At least so many; a batch on several paths needs one for each lane to keep all of them busy."""
        with self._lock:
            while len(self._threads) < num_threads and not self._closed:
                name = f"transfer-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()

    def _work(self) -> None:
        while self._work_once():
            pass

    def _work_once(self) -> bool:
        """One run of slices. A function of its own, so that an idle thread keeps no caller's buffers alive."""
        run = self._queue.take()
        if run is None:
            return False
        batch, parts = run
        for part in parts:
            try:
                batch.run(part)
            except Exception as error:  # noqa: BLE001 - a bug must fail its batch, not hang it
                batch.settle(part, Internal(f"{type(error).__name__}: {error}"))
        return True


def _open_for(transport: Transport, descriptor: SegmentDescriptor, endpoint: str, timeout_s: float) -> RemoteSegment:
    return transport.open(descriptor, endpoint, timeout_s=timeout_s)


def _make_transports(config: TransferConfig, fabric: MemoryFabric | None) -> list[Transport]:
    transports: list[Transport] = [FileTransport()]
    try:
        if fabric is not None:
            transports.append(MemoryTransport(fabric))
        if config.shm:
            transports.append(ShmTransport(config.run_dir))
        for number, host in enumerate((config.tcp_host, *config.tcp_hosts)):
            advertise_host = config.tcp_advertise_host if number == 0 else None
            transports.append(
                TcpTransport(
                    host,
                    config.tcp_port,
                    lanes=config.lanes,
                    advertise_host=advertise_host,
                    stall_timeout_s=config.timeout_s,
                )
            )
    except BaseException:
        for transport in transports:
            transport.close()
        raise
    return transports


class _SliceQueue:
    """Batches in order of arrival, handed out in runs of slices. Holds a bounded number of slices."""

    def __init__(self, max_slices: int, slice_nbytes: int) -> None:
        self._max_slices = max_slices
        self._slice_nbytes = slice_nbytes
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Batch, int]] = deque()  # batch and the index of its next slice
        self._num_slices = 0
        self._closed = False

    def put(self, batch: Batch, deadline: Deadline) -> None:
        """Waits for room; a batch larger than the queue is taken when the queue is empty."""
        if not batch.slices:
            return
        with self._changed:
            while self._num_slices and self._num_slices + len(batch.slices) > self._max_slices and not self._closed:
                if not self._changed.wait(deadline.remaining_s()):
                    raise Overloaded("too many transfers are waiting")
            if self._closed:
                raise PeerLost("the transfer engine is closed")
            self._waiting.append((batch, 0))
            self._num_slices += len(batch.slices)
            self._changed.notify_all()

    def take(self) -> tuple[Batch, list[Slice]] | None:
        """The next run of slices; waits for one. None when the queue is closed."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            batch, start = self._waiting.popleft()
            end = take_run(batch.slices, start, self._slice_nbytes)
            if end < len(batch.slices):
                self._waiting.appendleft((batch, end))
            self._num_slices -= end - start
            self._changed.notify_all()
            return batch, batch.slices[start:end]

    def close(self) -> list[tuple[Batch, Slice]]:
        """Idempotent; what was not handed out."""
        with self._changed:
            self._closed = True
            left = [(batch, part) for batch, start in self._waiting for part in batch.slices[start:]]
            self._waiting.clear()
            self._changed.notify_all()
            return left
