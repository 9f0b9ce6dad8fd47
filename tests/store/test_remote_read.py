"""Objects that come over a network, by two streams: whole, checked, and with the same header before and after."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from moonpool.base.checksum import crc32c
from moonpool.base.errors import DeadlineExceeded, MoonpoolError, NotFound, PeerLost, Unauthorized
from moonpool.base.object_header import ALIGN_NBYTES, pack_header
from moonpool.store.client.remote_read import RemoteObject, RemoteRead
from moonpool.store.client.transfer_window import BUNDLE_NBYTES
from moonpool.store.client.verified_read import PREFIX_NBYTES
from moonpool.store.messages import ObjectInfo, Placement
from moonpool.transfer import TransferConfig, TransferEngine
from moonpool.transfer.memory.buffers import Buffer, as_bytes_views
from moonpool.transfer.transports.base import RemoteSegment

MIB = 1 << 20
NUM = 24


class Far(RemoteSegment):
    """Memory that is not mapped. `before` sees the offset and size of each read, and may change the memory or raise."""

    transport = "tcp"

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.memory = memoryview(bytearray(nbytes))
        self.before: Callable[[int, int], None] = lambda offset, nbytes: None

    def read_into(self, offset: int, buffers: Sequence[Buffer], *, timeout_s: float) -> None:
        views = as_bytes_views(buffers, writable=True)
        self.before(offset, sum(view.nbytes for view in views))
        for view in views:
            view[:] = self.memory[offset : offset + view.nbytes]
            offset += view.nbytes

    def write_from(self, offset: int, buffers: Sequence[Buffer], *, generation: int, timeout_s: float) -> None:
        for view in as_bytes_views(buffers, writable=False):
            self.memory[offset : offset + view.nbytes] = view
            offset += view.nbytes

    def close(self) -> None:
        pass


class World:
    def __init__(self, engine: TransferEngine, sizes: Sequence[int]) -> None:
        self.remote = Far(sum(sizes) + ALIGN_NBYTES * len(sizes))
        self.values = [random.Random(number).randbytes(size) for number, size in enumerate(sizes)]
        self.objects: list[RemoteObject] = []
        at = 0
        for number, value in enumerate(self.values):
            header = pack_header(b"k%d" % number, number + 1, [len(value)], [crc32c(value)])
            self.remote.write_from(at, [header, value], generation=0, timeout_s=1.0)
            place = Placement("s", at, 1, number + 1)
            info = ObjectInfo(key=b"k%d" % number, nbytes=len(header) + len(value), replicas=(place,), lease_s=10.0)
            self.objects.append(RemoteObject(number, info, place, None))
            at += info.nbytes
        self.far = RemoteRead(self.remote, engine, None, lambda nbytes: 5.0)

    def run(self) -> list[int]:
        """Which came; each is what was put."""
        good = self.far.run(self.objects)
        assert all(each.got() == self.values[each.position] for each in good)
        return [each.position for each in good]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[TransferEngine]:
    with TransferEngine(TransferConfig(run_dir=str(tmp_path), shm=False, tcp_host=None)) as made:
        yield made


MIXED = [*[MIB] * NUM, 3 * BUNDLE_NBYTES + 5, 0, 1, *[300] * 400, BUNDLE_NBYTES]


@pytest.mark.parametrize(
    "sizes", [[MIB] * NUM, MIXED, [5 * BUNDLE_NBYTES], [100], [100] * 3], ids=["equal", "mixed", "large", "one", "few"]
)
def test_all_come(engine: TransferEngine, sizes: list[int]) -> None:
    world = World(engine, sizes)
    assert world.run() == list(range(len(sizes)))
    assert world.far.failure is None


@pytest.mark.parametrize("at", [0, 3, NUM - 1, NUM], ids=str)
def test_a_damaged_one_is_left_out(engine: TransferEngine, at: int) -> None:
    sizes = MIXED
    world = World(engine, sizes)
    world.remote.memory[world.objects[at].place.offset + ALIGN_NBYTES + sizes[at] - 1] ^= 1
    assert world.run() == [number for number in range(len(sizes)) if number != at]
    assert world.far.failure is None


@pytest.mark.parametrize("at", [0, 7, 24], ids=str)
def test_a_header_that_changed_after_the_bytes_came_is_noticed(engine: TransferEngine, at: int) -> None:
    """Also that of a large object, whose parts come by both streams."""
    world = World(engine, MIXED)
    place = world.objects[at].place

    def before(offset: int, nbytes: int) -> None:
        if (offset, nbytes) == (place.offset, PREFIX_NBYTES):
            world.remote.memory[offset + 24] ^= 1  # its generation

    world.remote.before = before
    assert world.run() == [number for number in range(len(MIXED)) if number != at]


def test_what_failed_alone_costs_no_more_than_its_stream(engine: TransferEngine) -> None:
    world = World(engine, [MIB] * 40)
    bad = world.objects[20].place.offset

    def before(offset: int, nbytes: int) -> None:
        if offset <= bad < offset + nbytes and nbytes > PREFIX_NBYTES:
            raise NotFound("not here")

    world.remote.before = before
    came = world.run()
    assert world.far.failure is None
    assert 20 not in came
    assert len(came) >= 40 - 2 * BUNDLE_NBYTES // MIB


@pytest.mark.parametrize(
    "error", [PeerLost("gone"), DeadlineExceeded("slow"), Unauthorized("who are you")], ids=lambda error: error.code
)
def test_an_owner_out_of_reach_is_a_failure(engine: TransferEngine, error: MoonpoolError) -> None:
    world = World(engine, [MIB] * NUM)

    def before(offset: int, nbytes: int) -> None:
        raise error

    world.remote.before = before
    assert world.run() == []
    assert world.far.failure is error


def test_a_refusal_before_anything_was_taken_ends_it(engine: TransferEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(engine, [MIB] * NUM)

    def refuse(*_: object, **__: object) -> Iterator[int]:
        raise NotFound("no such segment")

    monkeypatch.setattr(world.remote, "read_in_turn", refuse)
    assert world.run() == []
    assert isinstance(world.far.failure, NotFound)


def test_memory_is_the_callers_again_when_it_is_interrupted(engine: TransferEngine) -> None:
    world = World(engine, [MIB] * NUM)
    under_way: list[int] = []

    def before(offset: int, nbytes: int) -> None:
        under_way.append(offset)
        if len(under_way) == 2:
            raise KeyboardInterrupt

    world.remote.before = before
    with pytest.raises(KeyboardInterrupt):
        world.run()
    num_reads = len(under_way)
    engine.close()  # waits for its threads
    assert len(under_way) == num_reads, "nobody reads any more"
