"""What every transport must do, whichever way the bytes travel. A new transport adds itself to WAYS."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paths_transport import PathsTransport
from waiting import HANG_S

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import AlreadyExists, InvalidInput, NotFound, Overloaded, PeerLost, StaleGeneration
from moonpool.transfer.control import MAX_MESSAGE_NBYTES, ControlHandler, Mailbox, Notification
from moonpool.transfer.memory.location import host_id
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.transports.base import RemoteSegment, Transport
from moonpool.transfer.transports.file.segment import FileSegment
from moonpool.transfer.transports.file.transport import FileTransport
from moonpool.transfer.transports.memory import MemoryFabric, MemoryTransport
from moonpool.transfer.transports.nixl.agent import installed_package
from moonpool.transfer.transports.nixl.transport import NixlTransport
from moonpool.transfer.transports.shm.transport import ShmTransport
from moonpool.transfer.transports.tcp.transport import TcpTransport

WAYS = (
    "memory",
    "shm",
    "tcp",
    "tcp-guarded",
    "paths",
    "file",
    "tcp-file",
    pytest.param(
        "nixl", marks=pytest.mark.skipif(installed_package() is None, reason="nixl is missing: pip install nixl-cu12")
    ),
)
NBYTES = 64 * 1024
GRANULE = 4096
T = 20.0


class World:
    """An owner and a peer of one kind of transport; everything made here is closed by the fixture."""

    def __init__(self, make: Callable[[], Transport], folder: Path | None = None) -> None:
        """Segments lie in files in `folder`, or in memory when there is none."""
        self._make = make
        self._folder = folder
        self._closables: list[Transport | Segment | RemoteSegment] = []
        self.owner = self.transport()
        self.peer = self.transport()

    def transport(self) -> Transport:
        made = self._make()
        self._closables.append(made)
        return made

    def segment(
        self, name: str = "seg", nbytes: int = NBYTES, *, granule_nbytes: int | None = None, incarnation: int = 1
    ) -> Segment:
        if self._folder is None:
            made = Segment.allocate(name, nbytes, granule_nbytes=granule_nbytes, incarnation=incarnation)
        else:
            made = _file_segment(self._folder / name, nbytes, granule_nbytes, incarnation)
        self._closables.append(made)
        return made

    @staticmethod
    def contents(segment: Segment, nbytes: int | None = None) -> bytes:
        """The segment's first bytes, all of them unless told."""
        nbytes = segment.nbytes if nbytes is None else nbytes
        if not isinstance(segment, FileSegment):
            return bytes(segment.memory[:nbytes])
        found = bytearray(nbytes)
        segment.read_into(0, [found], timeout_s=T)
        return bytes(found)

    def serve(self, segment: Segment) -> tuple[SegmentDescriptor, str]:
        endpoint = self.owner.serve(segment)
        descriptor = SegmentDescriptor(
            name=segment.name,
            nbytes=segment.nbytes,
            incarnation=segment.incarnation,
            host=host_id(),
            endpoints=(endpoint,),
        )
        return descriptor, endpoint

    def open(self, segment: Segment) -> RemoteSegment:
        remote = self.peer.open(*self.serve(segment), timeout_s=T)
        self._closables.append(remote)
        return remote

    def close(self) -> None:
        for made in reversed(self._closables):
            made.close()


class NixlBesideTcp(NixlTransport):
    """With the tcp port that brings questions to its control, as an engine has it."""

    def __init__(self) -> None:
        self._tcp = TcpTransport("127.0.0.1")
        self.control = self._tcp.control
        with Segment.over("probe", bytearray(1), incarnation=1) as probe:
            endpoint = self._tcp.serve(probe)
            self._tcp.unserve("probe")
        super().__init__(self.control, endpoint, self._tcp.line)

    def close(self) -> None:
        super().close()
        self._tcp.close()


def _file_segment(path: Path, nbytes: int, granule_nbytes: int | None, incarnation: int) -> FileSegment:
    """A later incarnation finds the file of the first, as a restarted owner does."""
    if incarnation > 1:
        return FileSegment.open(path, incarnation=incarnation)
    FileSegment.remove(path)
    return FileSegment.create(path, nbytes, granule_nbytes=granule_nbytes, incarnation=incarnation)


@pytest.fixture(params=WAYS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    fabric = MemoryFabric()
    makers: dict[str, Callable[[], Transport]] = {
        "memory": lambda: MemoryTransport(fabric),
        "shm": lambda: ShmTransport(str(tmp_path_factory.mktemp("run"))),
        "tcp": lambda: TcpTransport("127.0.0.1"),
        "tcp-guarded": lambda: TcpTransport("127.0.0.1", guard=request.getfixturevalue("guard")),
        "paths": PathsTransport,
        "file": FileTransport,
        "tcp-file": lambda: TcpTransport("127.0.0.1"),  # a file, served by its owner to other machines
        "nixl": NixlBesideTcp,
    }
    made = World(makers[request.param], tmp_path_factory.mktemp("disk") if "file" in request.param else None)
    try:
        yield made
    finally:
        made.close()


class OneSegment:
    """One segment for all examples of a property: to make and to open one may cost more than the example."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._made: tuple[Segment, RemoteSegment] | None = None

    def ready(self) -> tuple[Segment, RemoteSegment]:
        """Return it and its handle. It holds zeros."""
        if self._made is None:
            segment = self._world.segment()
            self._made = segment, self._world.open(segment)
        else:
            self._made[1].write_from(0, [bytes(NBYTES)], generation=1, timeout_s=T)
        return self._made


@pytest.fixture
def one_segment(world: World) -> OneSegment:
    return OneSegment(world)


def pattern(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


# A scatter list: an offset and the sizes of the pieces, empty ones and touching ends included.
@st.composite
def scatters(draw: st.DrawFn) -> tuple[int, list[int]]:
    offset = draw(st.integers(0, NBYTES))
    sizes: list[int] = []
    for _ in range(draw(st.integers(0, 6))):
        sizes.append(draw(st.integers(0, NBYTES - offset - sum(sizes))))
    return offset, sizes


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(write=scatters(), read=scatters(), seed=st.integers(0, 2**32))
def test_round_trip_equals_a_plain_array(
    world: World, one_segment: OneSegment, write: tuple[int, list[int]], read: tuple[int, list[int]], seed: int
) -> None:
    segment, remote = one_segment.ready()
    expected = np.zeros(NBYTES, dtype=np.uint8)
    offset, sizes = write
    pieces = [pattern(size, seed + number) for number, size in enumerate(sizes)]
    expected[offset : offset + sum(sizes)] = np.concatenate([np.zeros(0, np.uint8), *pieces])
    remote.write_from(offset, pieces, generation=1, timeout_s=T)
    assert world.contents(segment) == expected.tobytes()

    offset, sizes = read
    targets = [np.full(size, 7, dtype=np.uint8) for size in sizes]
    remote.read_into(offset, targets, timeout_s=T)
    got = b"".join(target.tobytes() for target in targets)
    assert got == expected[offset : offset + sum(sizes)].tobytes()


def test_many_small_buffers_beyond_the_kernels_list_limit(world: World) -> None:
    segment = world.segment()
    remote = world.open(segment)
    data = pattern(3000 * 16)
    remote.write_from(5, [data[at : at + 16] for at in range(0, data.size, 16)], generation=1, timeout_s=T)
    back = np.zeros_like(data)
    remote.read_into(5, [back[at : at + 16] for at in range(0, back.size, 16)], timeout_s=T)
    assert (back == data).all()


def test_any_contiguous_element_type(world: World) -> None:
    remote = world.open(world.segment())
    data = np.arange(64, dtype=np.float16).reshape(8, 8)
    back = np.zeros((8, 8), dtype=np.float16)
    remote.write_from(0, [data], generation=1, timeout_s=T)
    remote.read_into(0, [back], timeout_s=T)
    assert (back == data).all()


def test_large_transfer(world: World) -> None:
    """More than any transport moves at once, has under way or holds in a socket."""
    nbytes = 24 * 1024 * 1024
    segment = world.segment(nbytes=nbytes, granule_nbytes=1024 * 1024)
    remote = world.open(segment)
    data = pattern(nbytes)
    remote.write_from(0, [data], generation=1, timeout_s=HANG_S)
    assert world.contents(segment) == data.tobytes()
    back = np.zeros(nbytes, dtype=np.uint8)
    remote.read_into(0, [back], timeout_s=HANG_S)
    assert (back == data).all()


def test_outside_the_segment_is_refused(world: World) -> None:
    remote = world.open(world.segment())
    for offset, nbytes in ((-1, 1), (0, NBYTES + 1), (NBYTES, 1), (2**63, 1), (NBYTES - 1, 2)):
        with pytest.raises(InvalidInput):
            remote.read_into(offset, [bytearray(nbytes)], timeout_s=T)
        with pytest.raises(InvalidInput):
            remote.write_from(offset, [bytes(nbytes)], generation=1, timeout_s=T)
        with pytest.raises(InvalidInput):
            remote.view(offset, nbytes)


def test_a_descriptor_that_promises_too_much_is_refused(world: World) -> None:
    """The owner's bounds count, whatever the descriptor says."""
    descriptor, endpoint = world.serve(world.segment())
    inflated = SegmentDescriptor(
        name=descriptor.name, nbytes=NBYTES * 2, incarnation=1, host=descriptor.host, endpoints=descriptor.endpoints
    )
    with pytest.raises(InvalidInput):
        world.peer.open(inflated, endpoint, timeout_s=T)


def test_no_bytes_at_the_very_end_are_fine(world: World) -> None:
    segment = world.segment(granule_nbytes=GRANULE)
    remote, before = world.open(segment), world.contents(segment)
    remote.read_into(NBYTES, [], timeout_s=T)
    remote.read_into(NBYTES, [bytearray()], timeout_s=T)
    remote.write_from(NBYTES, [b""], generation=0, timeout_s=T)
    assert world.contents(segment) == before
    with pytest.raises(InvalidInput):
        remote.read_into(NBYTES, [bytearray(1)], timeout_s=T)


def test_unusable_buffers_are_refused(world: World) -> None:
    remote = world.open(world.segment())
    with pytest.raises(InvalidInput, match="read-only"):
        remote.read_into(0, [bytes(4)], timeout_s=T)
    with pytest.raises(InvalidInput, match="contiguous"):
        remote.read_into(0, [np.zeros(8, dtype=np.uint8)[::2]], timeout_s=T)
    with pytest.raises(InvalidInput, match="buffer protocol"):
        remote.write_from(0, ["text"], generation=0, timeout_s=T)  # type: ignore[list-item]


def test_an_older_generation_is_refused_and_writes_nothing(world: World) -> None:
    segment = world.segment(granule_nbytes=GRANULE)
    remote = world.open(segment)
    remote.write_from(0, [b"new" * 1000], generation=7, timeout_s=T)
    before = world.contents(segment)
    with pytest.raises(StaleGeneration):
        remote.write_from(2000, [b"old" * 1000], generation=6, timeout_s=T)
    assert world.contents(segment) == before
    # The handle is still good, the same generation may write again, a newer one takes over.
    remote.write_from(0, [b"same"], generation=7, timeout_s=T)
    remote.write_from(0, [b"next"], generation=8, timeout_s=T)
    assert world.contents(segment, 4) == b"next"
    assert segment.fence is not None
    assert segment.fence.generation_at(0) == 8
    assert segment.fence.generation_at(GRANULE) == 0


def test_the_owner_takes_space_back(world: World) -> None:
    segment = world.segment(granule_nbytes=GRANULE)
    remote = world.open(segment)
    remote.write_from(0, [b"x"], generation=3, timeout_s=T)
    assert segment.fence is not None
    segment.fence.stamp(0, NBYTES, 4)
    with pytest.raises(StaleGeneration):
        remote.write_from(0, [b"y"], generation=3, timeout_s=T)
    assert world.contents(segment, 1) == b"x"


def test_an_unfenced_segment_ignores_generations(world: World) -> None:
    segment = world.segment()
    remote = world.open(segment)
    remote.write_from(0, [b"a"], generation=9, timeout_s=T)
    remote.write_from(0, [b"b"], generation=1, timeout_s=T)
    assert world.contents(segment, 1) == b"b"


def test_views_show_the_owners_memory_and_cannot_write(world: World) -> None:
    segment = world.segment()
    remote = world.open(segment)
    view = remote.view(10, 20)
    if remote.transport in ("tcp", "paths", "file", "nixl"):
        assert view is None
        return
    assert view is not None
    assert view.readonly
    segment.memory[10:15] = b"hello"
    assert bytes(view[:5]) == b"hello"
    world.close()
    assert bytes(view[:5]) == b"hello"  # borrowed memory outlives its owner's close()


def test_an_unknown_segment_is_not_found(world: World) -> None:
    segment = world.segment()
    descriptor, endpoint = world.serve(segment)
    other = SegmentDescriptor(name="other", nbytes=1, incarnation=1, host=host_id(), endpoints=(endpoint,))
    with pytest.raises(NotFound, match="other"):
        world.peer.open(other, endpoint, timeout_s=T)
    world.peer.open(descriptor, endpoint, timeout_s=T).close()


def test_a_taken_name_is_refused(world: World) -> None:
    world.serve(world.segment())
    with pytest.raises(AlreadyExists):
        world.serve(world.segment())


def test_a_new_incarnation_voids_old_handles(world: World) -> None:
    old = world.segment(incarnation=1)
    remote = world.open(old)
    world.owner.unserve("seg")
    new = world.segment(incarnation=2)
    fresh = world.open(new)
    with pytest.raises(NotFound, match="incarnation"):
        remote.read_into(0, [bytearray(4)], timeout_s=T)
    with pytest.raises(NotFound, match="incarnation"):
        remote.write_from(0, [b"late"], generation=1, timeout_s=T)
    assert world.contents(new, 4) == bytes(4)
    fresh.write_from(0, [b"good"], generation=1, timeout_s=T)
    assert world.contents(new, 4) == b"good"


def test_a_withdrawn_segment_is_not_found_and_may_return(world: World) -> None:
    segment = world.segment()
    remote = world.open(segment)
    world.owner.unserve("seg")
    world.owner.unserve("seg")
    with pytest.raises(NotFound):
        remote.read_into(0, [bytearray(1)], timeout_s=T)
    world.serve(segment)
    remote.read_into(0, [bytearray(1)], timeout_s=T)


def test_a_closed_owner_is_lost(world: World) -> None:
    segment = world.segment()
    descriptor, endpoint = world.serve(segment)
    remote = world.peer.open(descriptor, endpoint, timeout_s=T)
    world.owner.close()
    world.owner.close()
    started = time.monotonic()
    with pytest.raises(PeerLost):
        remote.read_into(0, [bytearray(1)], timeout_s=5 * HANG_S)
    with pytest.raises(PeerLost):
        remote.write_from(0, [b"x"], generation=1, timeout_s=5 * HANG_S)
    with pytest.raises(PeerLost):
        world.peer.open(descriptor, endpoint, timeout_s=5 * HANG_S)
    assert time.monotonic() - started < HANG_S / 2
    remote.close()


def test_a_closed_handle_says_so(world: World) -> None:
    remote = world.open(world.segment())
    remote.close()
    remote.close()
    with pytest.raises(PeerLost):
        remote.read_into(0, [bytearray(1)], timeout_s=T)


@pytest.mark.parametrize("num_turns", [5, pytest.param(20, marks=pytest.mark.soak)])
def test_parallel_callers_do_not_mix(world: World, num_turns: int) -> None:
    segment = world.segment(nbytes=16 * NBYTES, granule_nbytes=GRANULE)
    remote = world.open(segment)

    def work(lane: int) -> bool:
        ok = True
        for turn in range(num_turns):
            data = pattern(NBYTES, seed=lane * 1000 + turn)
            remote.write_from(lane * NBYTES, [data[:100], data[100:]], generation=turn + 1, timeout_s=T)
            back = np.zeros(NBYTES, dtype=np.uint8)
            remote.read_into(lane * NBYTES, [back[:999], back[999:]], timeout_s=T)
            ok = ok and bool((back == data).all())
        return ok

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(16)))


def test_callers_end_when_the_owner_closes_in_the_middle(world: World) -> None:
    nbytes = 8 * 1024 * 1024
    remote = world.open(world.segment(nbytes=nbytes))
    started = threading.Barrier(5)

    def read_until_lost(_: int) -> type[Exception]:
        buffer = bytearray(nbytes)
        started.wait()
        while True:
            try:
                remote.read_into(0, [buffer], timeout_s=5 * HANG_S)
            except (PeerLost, NotFound) as error:
                return type(error)

    with ThreadPoolExecutor(4) as pool:
        ends = [pool.submit(read_until_lost, lane) for lane in range(4)]
        started.wait()
        closed_at = time.monotonic()
        world.owner.close()
        assert {end.result(timeout=HANG_S) for end in ends} <= {PeerLost, NotFound}
    assert time.monotonic() - closed_at < HANG_S / 2


SIZES = (0, 1, 4096, 100, 70_000, 4095, 300_000)


@functools.cache
def scattered(count: int) -> tuple[list[tuple[int, np.ndarray]], int]:
    """Items of all sizes, none touching another, and the size of a segment that holds them."""
    items, at = [], 3
    for number in range(count):
        # The largest ones are in two whole runs of a pipeline; more of them would only be more bytes.
        sizes = SIZES if number < 128 else SIZES[:-1]
        items.append((at, pattern(sizes[number % len(sizes)], number)))
        items[-1][1].flags.writeable = False  # all tests share it
        at += items[-1][1].size + 5
    return items, at


@pytest.mark.parametrize("granule_nbytes", [None, GRANULE])
def test_many_at_once_equal_one_by_one(world: World, granule_nbytes: int | None) -> None:
    for count in (0, 1, 64, 65, 300):
        items, nbytes = scattered(count)
        segment = world.segment(f"seg-{count}", nbytes, granule_nbytes=granule_nbytes)
        remote = world.open(segment)
        expected = np.zeros(nbytes, dtype=np.uint8)
        for offset, data in items:
            expected[offset : offset + data.size] = data
        remote.write_many(items, generation=2, timeout_s=HANG_S)
        assert world.contents(segment) == expected.tobytes(), f"{count} at once"
        back = [(offset, np.zeros_like(data)) for offset, data in items]
        remote.read_many(back, timeout_s=HANG_S)
        assert all((got == data).all() for (_, got), (_, data) in zip(back, items, strict=True)), f"{count} at once"


def test_many_with_one_outside_move_nothing(world: World) -> None:
    segment = world.segment()
    remote = world.open(segment)
    for offset in (-1, NBYTES - 3):
        with pytest.raises(InvalidInput):
            remote.write_many([(0, b"good"), (offset, b"long")], generation=1, timeout_s=T)
        with pytest.raises(InvalidInput):
            remote.read_many([(0, bytearray(4)), (offset, bytearray(4))], timeout_s=T)
    with pytest.raises(InvalidInput, match="read-only"):
        remote.read_many([(0, bytearray(4)), (4, bytes(4))], timeout_s=T)
    assert world.contents(segment, 4) == bytes(4)


def test_many_with_one_refused_keep_the_handle_in_step(world: World) -> None:
    for stale in (0, 7, 99):
        segment = world.segment(f"seg-{stale}", nbytes=100 * GRANULE, granule_nbytes=GRANULE)
        remote = world.open(segment)
        assert segment.fence is not None
        segment.fence.stamp(stale * GRANULE, 1, 9)
        for _ in range(3):
            with pytest.raises(StaleGeneration):
                remote.write_many([(n * GRANULE, pattern(GRANULE, n)) for n in range(100)], generation=5, timeout_s=T)
            assert world.contents(segment)[stale * GRANULE : (stale + 1) * GRANULE] == bytes(GRANULE)
            fresh = pattern(100 * GRANULE, 77)
            fresh[stale * GRANULE : (stale + 1) * GRANULE] = 0
            remote.write_many(
                [(n * GRANULE, fresh[n * GRANULE : (n + 1) * GRANULE]) for n in range(100) if n != stale],
                generation=5,
                timeout_s=T,
            )
            back = np.ones(100 * GRANULE, dtype=np.uint8)
            remote.read_many([(n * GRANULE, back[n * GRANULE : (n + 1) * GRANULE]) for n in range(100)], timeout_s=T)
            assert (back == fresh).all()


def test_many_of_a_withdrawn_segment_are_not_found(world: World) -> None:
    segment = world.segment()
    remote = world.open(segment)
    world.owner.unserve("seg")
    with pytest.raises(NotFound):
        remote.read_many([(n, bytearray(1)) for n in range(200)], timeout_s=T)
    with pytest.raises(NotFound):
        remote.write_many([(n, b"x") for n in range(200)], generation=1, timeout_s=T)
    world.serve(segment)
    remote.read_many([(n, bytearray(1)) for n in range(200)], timeout_s=T)
    world.owner.close()
    with pytest.raises(PeerLost):
        remote.read_many([(n, bytearray(1)) for n in range(200)], timeout_s=HANG_S)
    remote.close()
    with pytest.raises(PeerLost):
        remote.write_many([(0, b"x")], generation=1, timeout_s=HANG_S)


@pytest.mark.parametrize("num_turns", [3, pytest.param(10, marks=pytest.mark.soak)])
def test_parallel_callers_of_many_do_not_mix(world: World, num_turns: int) -> None:
    segment = world.segment(nbytes=8 * NBYTES)
    remote = world.open(segment)

    def work(lane: int) -> bool:
        ok = True
        for turn in range(num_turns):
            data, back = pattern(NBYTES, lane * 100 + turn), np.zeros(NBYTES, dtype=np.uint8)
            cuts = [slice(at, at + 512) for at in range(0, NBYTES, 512)]
            remote.write_many([(lane * NBYTES + c.start, data[c]) for c in cuts], generation=1, timeout_s=HANG_S)
            remote.read_many([(lane * NBYTES + c.start, back[c]) for c in reversed(cuts)], timeout_s=HANG_S)
            ok = ok and bool((back == data).all())
        return ok

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def _refused_after(act: Callable[[], None]) -> int:
    """How often it worked before it was Overloaded."""
    for count in range(10_000):
        try:
            act()
        except Overloaded:
            return count
    raise AssertionError("it never ended")


def mailbox_of(owner: Transport) -> Mailbox:
    control: ControlHandler = owner.control  # type: ignore[attr-defined]  # all that take messages have it
    return control.mailbox


def test_messages_reach_the_owner_in_order(world: World) -> None:
    segment = world.segment()
    remote = world.open(segment)
    if remote.transport == "file":
        with pytest.raises(InvalidInput):
            remote.notify(b"hello", timeout_s=T)
        return
    for number in range(5):
        remote.notify(b"%d" % number, timeout_s=T)
    remote.notify(bytes(MAX_MESSAGE_NBYTES), timeout_s=T)
    assert mailbox_of(world.owner).take_all() == [
        *(Notification("seg", b"%d" % number) for number in range(5)),
        Notification("seg", bytes(MAX_MESSAGE_NBYTES)),
    ]
    with pytest.raises(InvalidInput, match="at most"):
        remote.notify(bytes(MAX_MESSAGE_NBYTES + 1), timeout_s=T)
    assert _refused_after(lambda: remote.notify(bytes(MAX_MESSAGE_NBYTES), timeout_s=T)) > 100
    assert mailbox_of(world.owner).take_all()
    world.owner.unserve("seg")
    with pytest.raises(NotFound):
        remote.notify(b"late", timeout_s=T)
    world.owner.close()
    with pytest.raises(PeerLost):
        remote.notify(b"later", timeout_s=T)
    remote.close()
    with pytest.raises(PeerLost):
        remote.notify(b"never", timeout_s=T)


def test_memory_of_any_kind_where_the_transport_can(world: World) -> None:
    buffer = bytearray(100)
    segment = Segment.over("own", buffer, incarnation=1)
    assert world.owner.can_serve(segment) == (world.owner.scheme in ("memory", "tcp", "paths", "nixl"))
    if world.owner.can_serve(segment):
        remote = world.open(segment)
        remote.write_from(0, [b"abc"], generation=0, timeout_s=T)
        assert buffer[:3] == b"abc"
    segment.close()
