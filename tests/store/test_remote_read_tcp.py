"""Objects that come over tcp: the owner says whether each was its own until the last byte, so nothing is read twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from store_pool import MIB, LocalPool
from waiting import HANG_S

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import InvalidInput
from moonpool.store import Store
from moonpool.store.client import Put
from moonpool.transfer.memory.fence import Fence
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.transports.tcp.lanes import LanePool
from moonpool.transfer.transports.tcp.read_runs import GATHER_NBYTES
from moonpool.transfer.transports.tcp.transport import TcpRemote, TcpTransport

SIZES = [1, 4000, GATHER_NBYTES + 1, MIB, 100]


@pytest.fixture
def pool(tmp_path: Any) -> Iterator[LocalPool]:
    made = LocalPool(tmp_path, dram_nbytes=16 * MIB)
    yield made
    made.close()


@pytest.fixture
def client(pool: LocalPool) -> Store:
    return pool.client(shm=False)


def put_all(client: Store) -> dict[bytes, bytes]:
    values = {b"k%d" % at: bytes([at + 1]) * size for at, size in enumerate(SIZES)}
    assert client.put_objects([Put(key, [value]) for key, value in values.items()]) == [None] * len(values)
    return values


def test_no_header_is_read_a_second_time(client: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    values = put_all(client)

    def no_more(*_: object, **__: object) -> None:
        raise AssertionError("one way there and back is enough")

    for way in ("read_into", "read_many", "read_in_turn"):
        monkeypatch.setattr(TcpRemote, way, no_more)
    assert client.get_many(list(values)) == list(values.values())
    for key, value in values.items():
        assert client.get(key) == value


def test_a_batch_of_small_objects_keeps_its_connection(client: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {b"s%d" % at: bytes([at]) * 100 for at in range(20)}
    assert client.put_objects([Put(key, [value]) for key, value in values.items()]) == [None] * len(values)
    assert client.get_many(list(values)) == list(values.values())

    def no_more(*_: object) -> None:
        raise AssertionError("there is a connection")

    monkeypatch.setattr(LanePool, "_connect", no_more)
    assert client.get_many(list(values)) == list(values.values())


@pytest.mark.parametrize("nbytes", [100, 2 * GATHER_NBYTES], ids=["gathered", "sent from where it lies"])
@pytest.mark.parametrize("lost_at", [1, 2], ids=["before", "meanwhile"])
def test_space_that_was_given_away_is_told(nbytes: int, lost_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first byte is taken, or while they are taken; what comes behind it is not affected."""
    transport = TcpTransport()
    with Segment.allocate("s", MIB, granule_nbytes=4096, incarnation=1) as segment:
        fence = segment.fence
        assert fence is not None
        descriptor = _descriptor(segment, transport.serve(segment))
        fence.stamp(0, MIB, 7)
        check, num_asked = Fence.check, 0

        def check_once(self: Fence, offset: int, nbytes: int, generation: int) -> None:
            nonlocal num_asked
            num_asked += 1
            if num_asked == lost_at:  # at this very moment another writer gets the first granule
                self.stamp(0, 1, 8)
            check(self, offset, nbytes, generation)

        monkeypatch.setattr(Fence, "check", check_once)
        remote = transport.open(descriptor, descriptor.endpoints[0], timeout_s=HANG_S)
        assert remote.checks_generation
        first, second = bytearray(nbytes), bytearray(nbytes)
        items = [(0, first, 7), (MIB // 2, second, 7)]
        assert list(remote.read_expecting([items, [(MIB // 2, second, 7)]], timeout_s=HANG_S)) == [{0}, set()]
        transport.close()


def test_an_unfenced_segment_is_read_without_generations() -> None:
    transport = TcpTransport()
    with Segment.allocate("s", MIB, incarnation=1) as segment:
        descriptor = _descriptor(segment, transport.serve(segment))
        remote = transport.open(descriptor, descriptor.endpoints[0], timeout_s=HANG_S)
        assert not remote.checks_generation
        with pytest.raises(InvalidInput, match="no generations"):
            list(remote.read_expecting([[(0, bytearray(10), 7)]], timeout_s=HANG_S))
        remote.read_into(0, [bytearray(10)], timeout_s=HANG_S)
        transport.close()


def _descriptor(segment: Segment, endpoint: str) -> SegmentDescriptor:
    return SegmentDescriptor(
        name=segment.name,
        nbytes=segment.nbytes,
        incarnation=segment.incarnation,
        host="h",
        endpoints=(endpoint,),
        granule_nbytes=None if segment.fence is None else segment.fence.granule_nbytes,
    )
