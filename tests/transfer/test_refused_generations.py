"""Generations that a fence refuses wherever they write: a master has lost the record of what it granted under them."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import HANG_S

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import InvalidInput, ProtocolError, StaleGeneration
from moonpool.base.frames import FrameDecoder, FrameKind, encode_frame
from moonpool.base.rpc.protocol import decode_error
from moonpool.transfer.control import ControlHandler
from moonpool.transfer.memory.fence import NUM_REFUSED, NUM_REFUSED_CELLS, Fence
from moonpool.transfer.memory.segment import Segment, fence_offset, file_nbytes
from moonpool.transfer.transports.shm import server as shm_server
from moonpool.transfer.transports.shm.server import SegmentMemory, ShmServer
from moonpool.transfer.transports.shm.transport import ShmRemote

G = 4096
FEW, MANY = 2 * G, 20 * G  # bytes: granules that are looked at one by one, and in bulk


def made(num_granules: int = 32) -> Fence:
    return Fence(np.zeros(num_granules, dtype=np.uint64), G)


def stamps(fence: Fence) -> list[int]:
    return [fence.generation_at(at * G) for at in range(32)]


def is_refused(fence: Fence, generation: int) -> bool:
    try:
        fence.confirm(0, 0, generation)  # of no granule: only the generation counts
    except StaleGeneration:
        return True
    return False


ADMITS: dict[str, Callable[[Fence, int], Any]] = {
    "few granules": lambda fence, generation: fence.admit(0, FEW, generation),
    "many granules": lambda fence, generation: fence.admit(0, MANY, generation),
    "several spans": lambda fence, generation: fence.admit_all([(0, FEW), (FEW, MANY)], generation),
}


@pytest.mark.parametrize("admit", ADMITS.values(), ids=ADMITS)
def test_a_write_of_a_refused_generation_is_not_admitted(admit: Callable[[Fence, int], Any]) -> None:
    fence = made()
    fence.refuse(10, 20)
    for generation in (11, 15, 20):
        with pytest.raises(StaleGeneration, match="the master has lost the record of this grant"):
            admit(fence, generation)
        assert stamps(fence) == [0] * 32, "nor does it leave a mark"
    for generation in (10, 21):
        admit(fence, generation)
        assert fence.generation_at(0) == generation


def test_a_write_that_goes_on_while_its_generation_is_refused_is_not_confirmed() -> None:
    fence = made()
    for nbytes in (FEW, MANY):
        fence.admit(0, nbytes, 5)
    fence.refuse(4, 5)
    for nbytes in (FEW, MANY):
        with pytest.raises(StaleGeneration, match="lost the record"):
            fence.confirm(0, nbytes, 5)
        with pytest.raises(StaleGeneration, match="lost the record"):
            fence.confirm_all([(0, nbytes)], 5)
        fence.check(0, nbytes, 5)  # what a reader asks
    assert fence.spans_above(4) == [(0, MANY)], "and the owner finds where it writes"


def test_of_a_run_with_a_refused_generation_nothing_is_stamped() -> None:
    fence, cells = made(), np.array([7, 7, 8, 9], dtype=np.uint64)
    fence.refuse(7, 8)
    assert not fence.admit_run(0, cells)
    assert stamps(fence) == [0] * 32
    assert fence.admit_run(0, cells + np.uint64(2))


def test_generations_are_checked_as_ever_where_some_are_refused() -> None:
    fence = made()
    fence.refuse(10, 20)
    fence.admit(0, FEW, 9)
    with pytest.raises(StaleGeneration, match="belongs to generation 9"):
        fence.admit(G, FEW, 8)
    with pytest.raises(StaleGeneration, match="belongs to generation 9"):
        fence.confirm(0, FEW, 8)
    fence.limit = 30
    with pytest.raises(StaleGeneration, match="no generation above 30"):
        fence.admit(0, FEW, 31)
    for generation in (-1, 2**64):
        with pytest.raises(InvalidInput):
            fence.confirm(0, FEW, generation)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=60))
def test_what_is_refused_stays_refused_and_nothing_else(steps: list[tuple[int, int]]) -> None:
    """As masters refuse: each has granted some, and has lost some of that or all."""
    fence, refused, last, known = made(), set[int](), 0, 0
    for num_granted, num_lost in steps:
        known = last + num_granted - num_lost if num_lost < num_granted else known
        last += num_granted + 1
        fence.refuse(known, last)
        refused |= set(range(known + 1, last + 1))
    found = {generation for generation in range(last + 3) if is_refused(fence, generation)}
    assert found >= refused
    if _num_ranges(refused) <= NUM_REFUSED:
        assert found == refused


def _num_ranges(generations: set[int]) -> int:
    return sum(each - 1 not in generations for each in generations)


def test_more_ranges_than_there_is_room_for_become_one_from_the_lowest_up() -> None:
    fence = made()
    for number in range(1, NUM_REFUSED + 4):
        fence.refuse(10 * number, 10 * number + 5)
    between = [10 * number + 7 for number in range(1, NUM_REFUSED + 3)]
    assert [generation for generation in between if is_refused(fence, generation)] == between[:3]
    assert all(is_refused(fence, 10 * number + 5) for number in range(1, NUM_REFUSED + 4))
    assert not is_refused(fence, 10)


def test_masters_that_granted_nothing_take_no_room() -> None:
    fence = made()
    fence.refuse(10, 20)
    for up_to in range(40, 40 + 3 * NUM_REFUSED):
        fence.refuse(30, up_to)
    assert [generation for generation in range(35) if is_refused(fence, generation)] == [*range(11, 21), *range(31, 35)]


class Watched:
    """The cells of a fence, as others may find them after each write."""

    def __init__(self, cells: Any) -> None:
        self.cells = cells
        self.found = [cells.tolist()]

    def __getitem__(self, at: Any) -> Any:
        return self.cells[at]

    def __len__(self) -> int:
        return len(self.cells)

    def __setitem__(self, at: int, value: int) -> None:
        self.cells[at] = value
        self.found.append(self.cells.tolist())

    def read_meanwhile(self) -> Iterator[list[int]]:
        """What a reader gets that reads some cells, is stopped, and reads the others."""
        for before in range(len(self.found)):
            for after in range(before, len(self.found)):
                for at in range(0, NUM_REFUSED_CELLS, 2):
                    yield self.found[before][:at] + self.found[after][at:]


@pytest.mark.parametrize("step", ["another", "one more than there is room for", "one over two", "one over all"])
def test_others_find_each_refused_generation_at_any_moment(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fence = made()
    count = NUM_REFUSED if step == "one more than there is room for" else 3
    for number in (2, 1, *range(3, count + 1)):
        fence.refuse(10 * number, 10 * number + 5)
    refused = [generation for generation in range(500) if is_refused(fence, generation)]
    above = {"one over two": 21, "one over all": 5}.get(step, 400)
    watched = Watched(fence._refused)
    monkeypatch.setattr(fence, "_refused", watched)
    fence.refuse(above, 410)
    assert len(watched.found) > 2
    for cells in watched.read_meanwhile():
        other = Fence(fence._table, G, np.array(cells, dtype=np.uint64))
        assert all(is_refused(other, generation) for generation in refused), cells
    assert is_refused(fence, 410)


class LateLock:
    """Taken by a writer that was stopped before it, meanwhile."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self._meanwhile = meanwhile

    def __enter__(self) -> None:
        self._meanwhile()

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("nbytes", [FEW, MANY])
def test_a_writer_that_stands_still_while_the_owner_looks_finds_out(
    nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had looked before its generation was refused, and has stamped nothing: the owner could not see it."""
    with Segment.allocate("a", 32 * G, granule_nbytes=G, incarnation=1) as owner:
        assert owner.fd is not None
        with Segment.from_fd("a", os.dup(owner.fd), 32 * G, granule_nbytes=G, incarnation=1) as writer:
            assert owner.fence is not None
            assert writer.fence is not None
            found: list[tuple[int, int]] = []

            def recount(above: int) -> None:
                assert owner.fence is not None
                owner.fence.refuse(above, above + 4)
                found.extend(owner.fence.spans_above(above))

            monkeypatch.setattr(writer.fence, "_lock", LateLock(lambda: recount(5)))
            with pytest.raises(StaleGeneration, match="lost the record"):
                writer.fence.admit(0, nbytes, 7)
            monkeypatch.setattr(writer.fence, "_lock", LateLock(lambda: recount(25)))
            assert not writer.fence.admit_run(0, np.full(nbytes // G, 27, dtype=np.uint64))
            assert not found


# the memory that processes share


def test_the_layout_of_shared_memory() -> None:
    """docs/formats.md, section 6."""
    with Segment.allocate("a", 5000, granule_nbytes=G, incarnation=1) as segment:
        assert segment.fd is not None
        assert segment.fence is not None
        segment.memory[4999] = 0xAB
        segment.fence.admit(4999, 1, 0x1122334455667788)
        segment.fence.refuse(0x0A00000001, 0x0B00000000)
        segment.fence.refuse(0x0B00000005, 0x0C00000000)
        page = os.sysconf("SC_PAGE_SIZE")
        at = fence_offset(5000)
        assert at == -(-5000 // page) * page
        assert file_nbytes(5000, G) == at + 4096 + 2 * 8
        assert os.pread(segment.fd, 2, 4999) == b"\xab\0"
        assert os.pread(segment.fd, 48, at) == bytes.fromhex(
            "000000000c000000" "0200000000000000"
            "010000000a000000" "000000000b000000"
            "050000000b000000" "000000000c000000"
        )  # fmt: skip
        assert not any(os.pread(segment.fd, 4096 - 48, at + 48))
        assert os.pread(segment.fd, 16, at + 4096) == struct.pack("<QQ", 0, 0x1122334455667788)


def test_other_processes_see_at_once_what_the_owner_refuses() -> None:
    with Segment.allocate("a", 32 * G, granule_nbytes=G, incarnation=1) as owner:
        assert owner.fd is not None
        with Segment.from_fd("a", os.dup(owner.fd), 32 * G, granule_nbytes=G, incarnation=1) as peer:
            assert owner.fence is not None
            assert peer.fence is not None
            peer.fence.admit(0, FEW, 6)
            owner.fence.refuse(5, 9)
            with pytest.raises(StaleGeneration, match="lost the record"):
                peer.fence.admit(FEW, FEW, 6)
            with pytest.raises(StaleGeneration, match="lost the record"):
                peer.fence.confirm(0, FEW, 6)


def _served(tmp_path: Path, segment: Segment) -> tuple[ShmServer, str]:
    control, path = ControlHandler(), str(tmp_path / "s.sock")
    control.serve(segment)
    return ShmServer(control, path, max_connections=4), path


def test_a_process_that_knows_another_layout_is_refused(tmp_path: Path) -> None:
    """It would check no refused generation, and take them for the first granules."""
    with Segment.allocate("seg", G, granule_nbytes=G, incarnation=1) as segment:
        server, path = _served(tmp_path, segment)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(HANG_S)
                sock.connect(path)
                sock.sendall(encode_frame(FrameKind.CALL, 1, b"\x93\xaaAskSegment\xa3seg\x01"))  # as before layout 2
                data, fds, _, _ = socket.recv_fds(sock, 4096, 1)
                (frame,) = FrameDecoder().feed(data)
                assert not fds
                error = decode_error(frame.body)
            assert isinstance(error, ProtocolError)
            assert "layout 1 of shared memory, this process layout 2" in str(error)
        finally:
            server.close()


def test_an_owner_that_knows_another_layout_is_not_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Segment.allocate("seg", G, granule_nbytes=G, incarnation=1) as segment:
        server, path = _served(tmp_path, segment)
        # As before layout 2, when the answer named none.
        monkeypatch.setattr(shm_server, "SegmentMemory", lambda nbytes, granule, _: SegmentMemory(nbytes, granule))
        try:
            descriptor = SegmentDescriptor(name="seg", nbytes=G, incarnation=1, host="", endpoints=())
            with pytest.raises(ProtocolError, match="layout 1 of shared memory"):
                ShmRemote(path, descriptor, HANG_S)
        finally:
            server.close()
