from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from file_world import MIB, T, describe, read
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moonpool.base.clock import Deadline
from moonpool.base.errors import (
    AlreadyExists,
    DeadlineExceeded,
    InvalidInput,
    NotFound,
    PeerLost,
)
from moonpool.transfer import FileSegment, Segment, SegmentDescriptor, TransferConfig, TransferEngine, aligned_buffer
from moonpool.transfer.disk.alignment import Alignment
from moonpool.transfer.disk.disk import Cursor, plan_spans
from moonpool.transfer.disk.handle import lock, try_lock, unlock
from moonpool.transfer.memory.buffers import address_of, cut
from moonpool.transfer.transports.file.transport import FileRemote, FileTransport

USER = str(Path(__file__).with_name("file_user.py"))
CONFIG = TransferConfig(run_dir="/nonexistent", shm=False, tcp_host=None)


def flags_of_open(path: str) -> list[int]:
    """The open flags of all descriptors this process has on a file."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}") == path:
                found.append(fcntl.fcntl(int(fd), fcntl.F_GETFL))
        except OSError:
            continue  # the descriptor of the listing itself
    return found


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[FileSegment]:
    with FileSegment.create(tmp_path / "seg", MIB, granule_nbytes=65536, incarnation=1) as made:
        yield made


@pytest.fixture(params=["disk", "tmpfs"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FileSegment]:
    """The same on a filesystem without direct I/O."""
    path = tmp_path / "seg" if request.param == "disk" else Path(f"/dev/shm/moonpool-{os.getpid()}-{tmp_path.name}")
    try:
        with FileSegment.create(path, 5 * 65536 + 123, granule_nbytes=65536, incarnation=1) as made:
            yield made
    finally:
        FileSegment.remove(path)


Vectored = Callable[[int, Sequence[Any], int], int]  # os.preadv and os.pwritev


def needs_direct(segment: FileSegment) -> None:
    if not segment.direct:
        pytest.skip(f"{segment.path} lies on a filesystem without direct I/O")


# --- planning ---------------------------------------------------------------------------------------------------------


@given(
    st.integers(0, 5000),
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 3000)), max_size=6),
    st.sampled_from([(512, 512), (512, 4), (4096, 4096), (1, 1)]),
)
def test_spans_cover_the_request_in_order_and_direct_ones_are_aligned(
    offset: int, pieces: list[tuple[int, int]], units: tuple[int, int]
) -> None:
    alignment = Alignment(True, *units)
    memory = aligned_buffer(64 * 1024)
    views, at = [], 0
    for skip, nbytes in pieces:
        at += skip * 16
        views.append(memory[at : at + nbytes])
        at += nbytes
    spans = plan_spans(offset, views, alignment)
    position = offset
    for before, span in zip([None, *spans], spans, strict=False):
        assert span.offset == position
        assert span.nbytes == sum(view.nbytes for view in span.views) > 0
        assert before is None or before.direct is not span.direct
        position += span.nbytes
        if span.direct:
            assert span.offset % alignment.block_nbytes == span.nbytes % alignment.block_nbytes == 0
            assert all(address_of(view) % alignment.memory_nbytes == 0 for view in span.views)
            assert all(view.nbytes % alignment.block_nbytes == 0 for view in span.views)
    assert position == offset + sum(view.nbytes for view in views)
    got = [address_of(view) for span in spans for view in span.views]
    assert {address_of(view) for view in views} <= set(got)


@given(
    st.lists(st.binary(min_size=1, max_size=9), max_size=8), st.lists(st.tuples(st.integers(0, 20), st.integers(1, 4)))
)
def test_a_cursor_takes_everything_once(pieces: list[bytes], takes: list[tuple[int, int]]) -> None:
    cursor = Cursor([memoryview(piece) for piece in pieces])
    got = b""
    for nbytes, max_views in takes:
        taken = cursor.take(nbytes, max_views)
        assert len(taken) <= max_views
        assert sum(view.nbytes for view in taken) <= nbytes
        got += b"".join(taken)
    got += b"".join(cursor.take(1000))
    assert got == b"".join(pieces)


# --- reading and writing ----------------------------------------------------------------------------------------------


@st.composite
def requests(draw: st.DrawFn, total: int = 5 * 65536 + 123) -> tuple[int, list[tuple[int, int]]]:
    """An offset and, for each piece, how far its memory is from alignment and its size."""
    offset = draw(st.one_of(st.integers(0, total), st.integers(0, 80).map(lambda n: n * 4096)))
    left, pieces = total - offset, []
    for _ in range(draw(st.integers(1, 5))):
        nbytes = draw(st.one_of(st.integers(0, 9000), st.integers(0, 40).map(lambda n: n * 512), st.just(2 * 65536)))
        pieces.append((draw(st.sampled_from([0, 0, 1, 16, 512])), min(nbytes, left)))
        left -= pieces[-1][1]
    return offset, pieces


def buffers_for(pieces: Sequence[tuple[int, int]]) -> list[memoryview]:
    return [aligned_buffer(shift + nbytes)[shift:] for shift, nbytes in pieces]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.booleans(), requests()), max_size=6), st.integers(0, 2**32))
def test_any_scatter_and_gather_equals_a_bytearray(
    either: FileSegment, steps: list[tuple[bool, tuple[int, list[tuple[int, int]]]]], seed: int
) -> None:
    model = bytearray(read(either))
    random = np.random.default_rng(seed)
    for is_write, (offset, pieces) in steps:
        buffers = buffers_for(pieces)
        nbytes = sum(buffer.nbytes for buffer in buffers)
        if is_write:
            for buffer in buffers:
                buffer[:] = random.bytes(buffer.nbytes)
            either.write_from(offset, buffers, generation=1, timeout_s=T)
            model[offset : offset + nbytes] = b"".join(buffers)
        else:
            either.read_into(offset, buffers, timeout_s=T)
            assert b"".join(buffers) == model[offset : offset + nbytes]
    assert read(either) == model


def test_direct_means_past_the_page_cache_and_without_a_copy(segment: FileSegment) -> None:
    needs_direct(segment)
    assert any(flags & os.O_DIRECT for flags in flags_of_open(segment.path))
    pages = [aligned_buffer(4096 * count) for count in (1, 5, 16)]
    for number, page in enumerate(pages):
        page[:] = bytes([number + 1]) * page.nbytes
    segment.write_from(8192, pages, generation=1, timeout_s=T)
    back = [aligned_buffer(page.nbytes) for page in pages]
    segment.read_into(8192, back, timeout_s=T)
    assert [bytes(page) for page in back] == [bytes(page) for page in pages]
    assert segment.num_bounces == 0
    segment.read_into(8193, [back[0]], timeout_s=T)
    assert segment.num_bounces == 1
    assert bytes(back[0]) == bytes(pages[0][1:]) + b"\x02"


def test_without_direct_io_it_says_so_and_never_copies(either: FileSegment) -> None:
    on_tmpfs = either.path.startswith("/dev/shm")
    if on_tmpfs:
        assert not either.direct
        assert not any(flags & os.O_DIRECT for flags in flags_of_open(either.path))
        either.write_from(1, [b"abc"], generation=1, timeout_s=T)
        assert either.num_bounces == 0
    assert either.location == f"ssd:{either.path}"


def test_a_large_unaligned_request_uses_a_bounded_number_of_buffers(segment: FileSegment) -> None:
    data = np.random.default_rng(1).bytes(MIB - 7)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: segment.write_from(3, [data], generation=1, timeout_s=T), range(8)))
        assert all(pool.map(lambda _: read(segment, 3, len(data)) == data, range(8)))
    assert len(segment._file.disk._bounces._free) <= 4  # type: ignore[attr-defined]
    assert read(segment, 0, 3) == bytes(3)
    assert read(segment, MIB - 4) == bytes(4)


def test_neighbours_in_one_block_do_not_lose_each_others_bytes(segment: FileSegment) -> None:
    """16 threads on two handles, all in the same few blocks."""
    transport = FileTransport()
    endpoint = transport.serve(segment)
    remote = transport.open(describe(segment, endpoint), endpoint, timeout_s=T)

    def work(lane: int) -> None:
        handle = segment if lane % 2 else remote
        for turn in range(30):
            handle.write_from(1000 + lane * 100, [bytes([lane]) * (turn + 1)], generation=1, timeout_s=T)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))
    expected = bytearray(3000)
    for lane in range(16):
        expected[1000 + lane * 100 : 1030 + lane * 100] = bytes([lane]) * 30
    assert read(segment, 0, 3000) == expected
    remote.close()
    transport.close()


def test_a_held_block_is_waited_for_until_the_deadline(segment: FileSegment) -> None:
    needs_direct(segment)
    other = os.open(segment.path, os.O_RDWR)
    try:
        assert try_lock(other, 0, 10)
        with pytest.raises(DeadlineExceeded):
            segment.write_from(1, [b"x"], generation=1, timeout_s=0.05)
        segment.write_from(0, [aligned_buffer(4096)], generation=1, timeout_s=T)  # whole blocks wait for nobody
        releasing = threading.Timer(0.05, unlock, (other, 0, 10))
        releasing.start()
        segment.write_from(1, [b"x"], generation=1, timeout_s=T)
        releasing.join()
    finally:
        os.close(other)
    assert read(segment, 0, 3) == b"\0x\0"


def test_sync_and_a_deadline_already_over(segment: FileSegment) -> None:
    segment.write_from(0, [b"durable"], generation=1, timeout_s=T)
    segment.sync()
    with pytest.raises(DeadlineExceeded):
        segment.read_into(0, [bytearray(10)], timeout_s=0.0)


@pytest.mark.parametrize("limit", [4096, 12288])
def test_short_transfers_are_continued(segment: FileSegment, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """The kernel may do less than asked; here it is made to."""
    needs_direct(segment)

    def shortened(operation: Vectored) -> Vectored:
        return lambda fd, views, offset: operation(fd, cut(views, 0, limit), offset)

    monkeypatch.setattr(os, "preadv", shortened(os.preadv))
    monkeypatch.setattr(os, "pwritev", shortened(os.pwritev))
    data = aligned_buffer(65536)
    data[:] = np.random.default_rng(2).bytes(data.nbytes)
    segment.write_from(4096, [data[:4096], data[4096:]], generation=1, timeout_s=T)
    back = aligned_buffer(65536)
    segment.read_into(4096, [back[:8192], back[8192:]], timeout_s=T)
    assert back == data


# --- owners and peers -------------------------------------------------------------------------------------------------


@contextmanager
def user(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process of file_user.py and the first line it prints."""
    process = subprocess.Popen(
        [sys.executable, USER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline()
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_the_engine_serves_files_by_file_and_memory_by_memory(segment: FileSegment) -> None:
    with TransferEngine(TransferConfig(run_dir="/nonexistent", shm=False)) as engine:
        descriptor = engine.serve(segment)
        local, distant = descriptor.endpoints
        assert local == f"file:{segment.path}"
        assert distant.startswith("tcp:")  # other machines read it through its owner
        assert descriptor.granule_nbytes == 65536
        [endpoint] = engine.serve(Segment.over("m", bytearray(10), incarnation=1)).endpoints
        assert endpoint.startswith("tcp:")
        remote = engine.open(descriptor)
        assert remote.transport == "file"
        remote.write_from(5, [b"hello"], generation=1, timeout_s=T)
        assert read(segment, 5, 5) == b"hello"
        engine.unserve("seg")
        with pytest.raises(NotFound):
            remote.read_into(0, [bytearray(1)], timeout_s=T)


def test_a_file_is_served_once(segment: FileSegment) -> None:
    first, second = FileTransport(), FileTransport()
    first.serve(segment)
    with pytest.raises(AlreadyExists), FileSegment.open(segment.path, name="alias", incarnation=9) as alias:
        second.serve(alias)
    with pytest.raises(AlreadyExists):
        second.serve(segment)
    first.close()
    second.serve(segment)
    second.close()
    with pytest.raises(InvalidInput, match="memory"):
        FileTransport().serve(Segment.over("m", bytearray(1), incarnation=1))


def test_an_owner_killed_and_restarted(segment: FileSegment) -> None:
    segment.write_from(0, [b"kept"], generation=1, timeout_s=T)
    segment.close()
    with TransferEngine(CONFIG) as engine:
        with user("serve", segment.path) as (process, line):
            remote = engine.open(msgspec.json.decode(line, type=SegmentDescriptor))
            assert isinstance(remote, FileRemote)
            assert read(remote, 0, 4) == b"kept"
            process.kill()
            process.wait()
            with pytest.raises(PeerLost):
                read(remote, 0, 4)
            with pytest.raises(PeerLost):
                remote.write_from(0, [b"lost"], generation=1, timeout_s=T)
        with user("serve", segment.path):
            assert read(remote, 0, 4) == b"kept"  # the same incarnation came back


def test_two_processes_write_into_the_same_blocks(segment: FileSegment) -> None:
    """This one the even pieces, again and again, until the other has written the odd ones."""
    count, piece, stop = 200, 100, threading.Event()

    def write_until_told() -> int:
        turn = 0
        while not stop.is_set():
            turn += 1
            for number in range(count):
                segment.write_from(2 * number * piece, [bytes([turn % 200]) * piece], generation=1, timeout_s=T)
        return turn

    with TransferEngine(CONFIG) as engine, ThreadPoolExecutor(1) as pool:
        descriptor = msgspec.json.encode(engine.serve(segment)).decode()
        writing = pool.submit(write_until_told)
        try:
            with user("patch", descriptor, str(count)) as (_, line):
                assert line == "done\n"
        finally:
            stop.set()
        last = writing.result()
    expected = (bytes([last % 200]) * piece + b"\xee" * piece) * count
    assert read(segment, 0, len(expected)) == expected


def test_locks_are_between_handles(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(100))
    one, two = (os.open(tmp_path / "f", os.O_RDWR) for _ in range(2))
    try:
        lock(one, 10, 10, Deadline(T))
        assert try_lock(two, 20, 10)
        assert not try_lock(two, 19, 1)
        with pytest.raises(DeadlineExceeded):
            lock(two, 0, 11, Deadline(0.01))
        os.close(one)
        assert try_lock(two, 0, 100)
    finally:
        os.close(two)


def test_aligned_buffers() -> None:
    for nbytes, alignment in ((1, 1), (10, 512), (4096, 4096), (5, 1 << 21)):
        buffer = aligned_buffer(nbytes, alignment)
        assert (buffer.nbytes, buffer.readonly, bytes(buffer)) == (nbytes, False, bytes(nbytes))
        assert address_of(buffer) % alignment == 0
    assert aligned_buffer(0).nbytes == 0
    for nbytes, alignment in ((-1, 1), (1, 0), (1, 3)):
        with pytest.raises(InvalidInput):
            aligned_buffer(nbytes, alignment)
