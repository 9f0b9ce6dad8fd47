"""Page-locking of mapped segments with a registrar that only records: growth, owners that leave, copies under way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import HANG_S, wait_until

from moonpool.base.errors import NoSpace, PeerLost
from moonpool.transfer import SegmentDescriptor, host_id
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.transports.cuda.pinning import DeviceCopies, PinnedSegment, Pinning, cut_copies
from moonpool.transfer.transports.shm.transport import ShmRemote, ShmTransport

CHUNK = 64 * 1024
NBYTES = 5 * CHUNK + 4096


class Registrar:
    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.room_nbytes = 1 << 40

    def register(self, address: int, nbytes: int) -> None:
        if sum(self.locked.values()) + nbytes > self.room_nbytes:
            raise NoSpace("no more")
        assert address not in self.locked
        self.locked[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.locked[address]


class Bench:
    def __init__(self, folder: Path) -> None:
        self.segment = Segment.allocate("s", NBYTES, granule_nbytes=4096, incarnation=1)
        self.owner = ShmTransport(str(folder))
        endpoint = self.owner.serve(self.segment)
        descriptor = SegmentDescriptor(name="s", nbytes=NBYTES, incarnation=1, host=host_id(), endpoints=(endpoint,))
        self.peer = ShmTransport(str(folder))
        self.remote: ShmRemote = self.peer.open(descriptor, endpoint, timeout_s=2)
        self.registrar = Registrar()
        self.pinning = Pinning(self.registrar, chunk_nbytes=CHUNK)

    def close(self) -> None:
        self.pinning.close()
        self.remote.close()
        self.peer.close()
        self.owner.close()
        self.segment.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


def locked(bench: Bench) -> PinnedSegment:
    segment = bench.pinning.add(bench.remote, 1)
    wait_until(lambda: segment.pinned_nbytes == NBYTES, "all is locked")
    return segment


def test_a_segment_is_locked_chunk_by_chunk_to_its_end(bench: Bench) -> None:
    segment = locked(bench)
    assert bench.registrar.locked == {segment.address + at: min(CHUNK, NBYTES - at) for at in range(0, NBYTES, CHUNK)}
    assert bench.pinning.add(bench.remote, 1) is segment
    bench.pinning.close()
    assert bench.registrar.locked == {}
    with pytest.raises(PeerLost):
        bench.pinning.add(bench.remote, 1)


def test_what_cannot_be_locked_stays_as_it_is(bench: Bench) -> None:
    bench.registrar.room_nbytes = 2 * CHUNK
    segment = bench.pinning.add(bench.remote, 1)
    wait_until(lambda: segment.is_refused, "the lock is refused")
    assert segment.pinned_nbytes == 2 * CHUNK


def test_the_memory_of_an_owner_that_is_gone_is_unlocked_and_unmapped(bench: Bench) -> None:
    segment = locked(bench)
    bench.owner.close()
    wait_until(lambda: not bench.registrar.locked, "the lock is given back")
    with pytest.raises(PeerLost):
        segment.begin_copies()
    assert bench.remote._attachment is None, "nothing keeps the mapping"
    assert bench.remote.guard is None


def test_copies_under_way_keep_the_memory_locked(bench: Bench) -> None:
    segment = locked(bench)
    segment.begin_copies()
    bench.owner.close()
    wait_until(lambda: segment.is_ending, "the owner's end is noticed")
    assert bench.registrar.locked
    with pytest.raises(PeerLost):
        segment.begin_copies()
    segment.end_copies()
    wait_until(lambda: not bench.registrar.locked, "the lock is given back")


def test_closing_waits_for_copies(bench: Bench) -> None:
    segment = locked(bench)
    with segment.copying():
        closing = threading.Thread(target=bench.pinning.close)
        closing.start()
        wait_until(lambda: segment.is_ending, "the owner's end is noticed")
        assert bench.registrar.locked
    closing.join(HANG_S)
    assert bench.registrar.locked == {}


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 90)), max_size=8), st.integers(1, 64))
def test_no_copy_crosses_a_chunk_and_every_byte_is_copied_once(places: list[tuple[int, int]], chunk: int) -> None:
    offsets = np.array([offset for offset, _ in places], np.int64)
    sizes = np.array([nbytes for _, nbytes in places], np.int64)
    addresses = np.arange(len(places), dtype=np.uint64) * np.uint64(1000)
    cut = cut_copies(DeviceCopies(offsets, addresses, sizes), chunk)
    wanted = [(int(offset) + at, n * 1000 + at) for n, (offset, nbytes) in enumerate(places) for at in range(nbytes)]
    found = [(int(o) + at, int(a) + at) for o, a, n in zip(*cut, strict=True) for at in range(int(n))]
    assert found == wanted
    assert all(
        int(o) // chunk == (int(o) + int(n) - 1) // chunk for o, n in zip(cut.offsets, cut.sizes, strict=True) if n
    )


def test_locking_in_a_hurry_returns_when_all_is_locked_or_refused(bench: Bench) -> None:
    bench.pinning.hurry(60)  # nothing is there
    segment = bench.pinning.add(bench.remote, 1)
    bench.pinning.hurry(60)
    assert segment.pinned_nbytes == NBYTES
    bench.pinning.hurry(60)
