"""The simulated transfer engine: the pool's memory and disks, reached by a mapping or over the simulated network.

Copies are cut in two, with a moment between in which others run (or the copier is stopped for an hour). On one machine
the production class MappedRemote does the copying and asks the fence itself; over the network the owner does what
transports/tcp/connection.py does: look up, admit, take in part by part with the fence asked before each, confirm.
Every byte written is watched: nobody writes where a newer generation has begun.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonpool.base.clock import Deadline
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import DeadlineExceeded, MoonpoolError, NotFound, PeerLost
from moonpool.transfer.batch import Batch, TransferRequest
from moonpool.transfer.memory.buffers import address_of, as_bytes_views, total_nbytes
from moonpool.transfer.memory.fence import Fence
from moonpool.transfer.memory.segment import Borrowed, Segment
from moonpool.transfer.transports.base import RemoteSegment, check_bounds
from moonpool.transfer.transports.file.folder import FOLDER_NBYTES, MAX_FILE_NBYTES
from moonpool.transfer.transports.mapped import MappedRemote

from .sim_disk import SimOs
from .sim_loop import SimEvent, SimFuture
from .sim_net import Link, Side
from .sim_scheduler import Process


def stamps_of(fence: Fence) -> NDArray[np.uint64]:
    """The generations of all granules, as they are now and as they become."""
    return fence._table


class SimFolder(Segment):
    """A log's folder as its owner serves it."""

    in_memory = False

    def __init__(self, name: str, path: str, disks: SimOs, incarnation: int) -> None:
        super().__init__(name, memoryview(b""), incarnation=incarnation, location=f"ssd:{path}")
        self.nbytes = FOLDER_NBYTES
        self._path, self._disks = path, disks

    def read_into(self, offset: int, buffers: Sequence[Any], *, timeout_s: float) -> None:
        number, at = divmod(offset, MAX_FILE_NBYTES)
        disk, _ = self._disks.find(self._path)
        file = disk.log_files().get(number)
        if file is None:
            raise NotFound(f"file {number} of {self._path} is gone")
        for view in as_bytes_views(buffers, writable=True):
            part = file.data[at : at + view.nbytes]
            if len(part) < view.nbytes:
                raise NotFound(f"file {number} of {self._path} ends before byte {at + view.nbytes}")
            view[:] = part
            at += view.nbytes


class SimEngine:
    """Of TransferEngine what clients and nodes use. One per process."""

    addresses = ()

    def __init__(self, world: Any, process: Process) -> None:
        self.world, self.process = world, process
        self.served: dict[str, Segment] = {}
        self._remotes: dict[tuple[str, int], RemoteSegment] = {}
        world.engines[process.name] = self

    def connections(self) -> tuple[int, Counter[str]]:
        return 0, Counter()

    def serve(self, segment: Segment) -> SegmentDescriptor:
        self.served[segment.name] = segment
        return SegmentDescriptor(
            name=segment.name,
            nbytes=segment.nbytes,
            incarnation=segment.incarnation,
            host=self.process.host,
            endpoints=(f"sim:{self.process.name}",),
            granule_nbytes=None if segment.fence is None else segment.fence.granule_nbytes,
            location=segment.location,
        )

    def unserve(self, name: str) -> None:
        self.served.pop(name, None)

    def find(self, name: str, incarnation: int) -> Segment:
        segment = self.served.get(name)
        if segment is None or segment.incarnation != incarnation:
            raise NotFound(f"incarnation {incarnation} of segment {name!r} is not served any more")
        return segment

    def open(self, descriptor: SegmentDescriptor, *, timeout_s: float | None = None) -> RemoteSegment:
        known = self._remotes.get((descriptor.name, descriptor.incarnation))
        if known is None:
            known = self._open(descriptor)
            self._remotes[descriptor.name, descriptor.incarnation] = known
        return known

    def _open(self, descriptor: SegmentDescriptor) -> RemoteSegment:
        is_local = descriptor.host == self.process.host
        if is_local and descriptor.granule_nbytes is not None:
            return SimMapped(self, descriptor)
        return SimFar(self, descriptor, is_local)

    def submit(self, requests: Sequence[TransferRequest], *, timeout_s: float, **_: Any) -> Batch:
        """Moves the only request at once, on the caller's thread."""
        batch = Batch(requests, timeout_s=timeout_s, slice_nbytes=1 << 30)
        assert batch.run_inline(1 << 60)
        return batch

    def call_on_thread(self, act: Callable[[], Any]) -> Any:
        return SimpleNamespace(wait=SimFuture(self.world.scheduler, act, ()).result)

    def forget(self, descriptor: SegmentDescriptor) -> None:
        self._remotes.pop((descriptor.name, descriptor.incarnation), None)

    def close(self) -> None:
        """Idempotent."""
        self.served.clear()

    def owner(self, descriptor: SegmentDescriptor) -> SimEngine:
        """PeerLost when the process is gone."""
        engine: SimEngine | None = self.world.engines.get(descriptor.endpoints[0][4:])
        if engine is None or not engine.process.is_alive:
            raise PeerLost(f"the owner of segment {descriptor.name!r} is gone")
        return engine


class SimMapped(MappedRemote):
    """Memory of a process on the same host. The mapping outlives its owner, as a memfd's does."""

    transport = "shm"

    def __init__(self, engine: SimEngine, descriptor: SegmentDescriptor) -> None:
        self.nbytes = descriptor.nbytes
        self._engine, self._descriptor = engine, descriptor
        self._borrow(1.0)

    def _borrow(self, timeout_s: float) -> Borrowed:
        owner = self._engine.owner(self._descriptor)
        return owner.find(self._descriptor.name, self._descriptor.incarnation).borrow()

    def close(self) -> None:
        """Idempotent."""


class SimFar(RemoteSegment):
    """A segment whose owner is asked over the network, or a disk of this host."""

    transport = "tcp"

    def __init__(self, engine: SimEngine, descriptor: SegmentDescriptor, is_local: bool) -> None:
        self.nbytes = descriptor.nbytes
        self._engine, self._descriptor, self._is_local = engine, descriptor, is_local
        engine.owner(descriptor).find(descriptor.name, descriptor.incarnation)

    def read_into(self, offset: int, buffers: Sequence[Any], *, timeout_s: float) -> None:
        views = as_bytes_views(buffers, writable=True)
        nbytes = total_nbytes(views)
        check_bounds(offset, nbytes, self.nbytes)
        half = nbytes // 2
        fenced = [self._engine.world.watch.fence_of(view) for view in views]
        call = _FarCall(self._engine, self._descriptor, self._is_local, timeout_s)
        first = call.ask(lambda owner: _read(owner, self._descriptor, offset, half))
        second = call.ask(lambda owner: _read(owner, self._descriptor, offset + half, nbytes - half))
        call.close()
        data = memoryview(first + second)
        for view, before in zip(views, fenced, strict=True):
            self._engine.world.watch.check_unchanged(view, before)
            view[:] = data[: view.nbytes]
            data = data[view.nbytes :]

    def write_from(self, offset: int, buffers: Sequence[Any], *, generation: int, timeout_s: float) -> None:
        data = b"".join(bytes(view) for view in as_bytes_views(buffers, writable=False))
        check_bounds(offset, len(data), self.nbytes)
        half, descriptor = len(data) // 2, self._descriptor
        call = _FarCall(self._engine, descriptor, self._is_local, timeout_s)

        def begin(owner: SimEngine) -> None:
            _admit(owner, descriptor, offset, len(data), generation)
            _take_in(owner, descriptor, offset, data[:half], offset, len(data), generation)

        def end(owner: SimEngine) -> None:
            _take_in(owner, descriptor, offset + half, data[half:], offset, len(data), generation)
            _confirm(owner, descriptor, offset, len(data), generation)

        call.say(begin)
        self._engine.world.pause()
        call.ask(end)
        call.close()

    def close(self) -> None:
        """Idempotent."""


def _memory(owner: SimEngine, descriptor: SegmentDescriptor) -> Borrowed:
    return owner.find(descriptor.name, descriptor.incarnation).borrow()


def _read(owner: SimEngine, descriptor: SegmentDescriptor, offset: int, nbytes: int) -> bytes:
    segment = owner.find(descriptor.name, descriptor.incarnation)
    if segment.in_memory:
        return bytes(segment.memory[offset : offset + nbytes])
    data = bytearray(nbytes)
    segment.read_into(offset, [data], timeout_s=1.0)  # type: ignore[attr-defined]
    return bytes(data)


def _admit(owner: SimEngine, descriptor: SegmentDescriptor, offset: int, nbytes: int, generation: int) -> None:
    fence = _memory(owner, descriptor).fence
    assert fence is not None
    fence.admit(offset, nbytes, generation)


def _take_in(
    owner: SimEngine, descriptor: SegmentDescriptor, at: int, data: bytes, offset: int, nbytes: int, generation: int
) -> None:
    memory, fence = _memory(owner, descriptor)
    assert fence is not None
    fence.confirm(offset, nbytes, generation)
    memory[at : at + len(data)] = data


def _confirm(owner: SimEngine, descriptor: SegmentDescriptor, offset: int, nbytes: int, generation: int) -> None:
    fence = _memory(owner, descriptor).fence
    assert fence is not None
    fence.confirm(offset, nbytes, generation)


class _FarCall:
    """One connection to a segment's owner, for one transfer. Requests are carried out in order; the first error
    answers all that follow.
    """

    def __init__(self, engine: SimEngine, descriptor: SegmentDescriptor, is_local: bool, timeout_s: float) -> None:
        self._engine = engine
        self._descriptor = descriptor
        self._deadline = Deadline(timeout_s)
        self._answered = SimEvent(engine.world.scheduler)
        self._answers: list[Any] = []
        self._failure: MoonpoolError | None = None
        self._is_lost = False
        owner = engine.owner(descriptor)
        network = engine.world.network
        if not is_local and network.is_partitioned(engine.process.host, owner.process.host):
            engine.world.scheduler.sleep(timeout_s)
            raise DeadlineExceeded("the owner did not answer in time")
        link = Link(network, engine.process, owner.process, is_local)
        network.links[link] = None
        self._side: Side = link.client
        self._side.end = self
        link.server.end = _OwnerEnd(owner, link.server, self)

    def say(self, work: Callable[[SimEngine], Any]) -> None:
        self._side.send((work, False))

    def ask(self, work: Callable[[SimEngine], Any]) -> Any:
        self._side.send((work, True))
        while not self._answers:
            if self._is_lost:
                raise PeerLost("the owner closed the connection")
            if self._deadline.expired():
                self.close()
                raise DeadlineExceeded("the owner did not answer in time")
            self._answered.clear()
            self._answered.wait(self._deadline.remaining_s())
        answer = self._answers.pop(0)
        if isinstance(answer, MoonpoolError):
            self.close()
            raise answer
        return answer

    def close(self) -> None:
        self._side.close()
        self._side.link.network.forget(self._side.link)

    def arrived(self, data: Any) -> None:
        self._answers.append(data)
        self._answered.set()

    def ended(self) -> None:
        self._is_lost = True
        self._answered.set()


class _OwnerEnd:
    """The owner's thread for that connection."""

    def __init__(self, owner: SimEngine, side: Side, call: _FarCall) -> None:
        self._owner, self._side = owner, side
        self._failure: MoonpoolError | None = None

    def arrived(self, data: Any) -> None:
        work, wants_answer = data
        answer: Any = self._failure
        if answer is None:
            try:
                answer = work(self._owner)
            except MoonpoolError as error:
                answer = self._failure = error
        if wants_answer:
            self._side.send(answer)

    def ended(self) -> None:
        """Nothing is left to do."""


class MemoryWatch:
    """Sees every byte that is copied into the pool's memory: never where another generation has begun meanwhile."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._segments: list[tuple[int, int, Borrowed]] = []  # address, end, memory

    def add(self, segment: Segment) -> None:
        borrowed = segment.borrow()
        start = address_of(borrowed.memory)
        self._segments.append((start, start + segment.nbytes, borrowed))

    def copy(self, target: memoryview, source: memoryview) -> None:
        """copy_bytes() in two halves, with a moment between."""
        if not self._world.scheduler.may_block or not source.nbytes:
            target[:] = source
            return
        before, half = self.fence_of(target), source.nbytes // 2
        target[:half] = source[:half]
        self._world.pause()
        self.check_unchanged(target, before)
        target[half:] = source[half:]

    def fence_of(self, view: memoryview) -> list[int] | None:
        """The generations of the pool's memory that a view shows, if it shows some."""
        at = address_of(view)
        for start, end, (_, fence) in self._segments:
            if start <= at < end:
                assert fence is not None
                first, last = at - start, at - start + view.nbytes - 1
                found: list[int] = stamps_of(fence)[
                    first // fence.granule_nbytes : last // fence.granule_nbytes + 1
                ].tolist()
                return found
        return None

    def check_unchanged(self, view: memoryview, before: list[int] | None) -> None:
        if before is not None and self.fence_of(view) != before:
            self._world.violated(f"a late copy is written over what was granted to somebody else: {before}")
