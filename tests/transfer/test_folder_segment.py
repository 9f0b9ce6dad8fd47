"""A folder of files as one segment: read by its own machine's processes from the disk, by others through its owner."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from file_world import T, fd_count
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moonpool.base.errors import AlreadyExists, InvalidInput, MoonpoolError, NotFound, PeerLost
from moonpool.transfer import SegmentDescriptor, TransferConfig, TransferEngine, TransferOp, TransferRequest
from moonpool.transfer.transports.base import RemoteSegment
from moonpool.transfer.transports.file import folder as folder_module
from moonpool.transfer.transports.file.folder import FolderSegment, address_of_byte, file_name

FILE_NBYTES = 256 * 1024


def content(number: int) -> bytes:
    return np.random.default_rng(number).integers(0, 256, FILE_NBYTES, dtype=np.uint8).tobytes()


def add_file(folder: Path, number: int) -> None:
    (folder / file_name(number)).write_bytes(content(number))


def engine(folder: Path, *, tcp: bool) -> TransferEngine:
    hosts = {"tcp_host": "127.0.0.1"} if tcp else {"tcp_host": None}
    return TransferEngine(TransferConfig(run_dir=str(folder), shm=False, **hosts))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "disk"
    made.mkdir()
    for number in (1, 2, 70_000):
        add_file(made, number)
    return made


@pytest.fixture
def segment(folder: Path) -> Iterator[FolderSegment]:
    with FolderSegment.open("n.ssd", folder, incarnation=5) as made:
        yield made


@pytest.fixture(params=["file", "tcp", "paths"])
def world(
    request: pytest.FixtureRequest, tmp_path: Path, segment: FolderSegment
) -> Iterator[tuple[TransferEngine, SegmentDescriptor, RemoteSegment]]:
    """The owner's engine, what it published, and a peer's handle."""
    hosts = ("127.0.0.2",) if request.param == "paths" else ()
    config = TransferConfig(run_dir=str(tmp_path / "o"), shm=False, tcp_hosts=hosts)
    with TransferEngine(config) as owner, engine(tmp_path / "p", tcp=False) as peer:
        descriptor = owner.serve(segment)
        seen = descriptor if request.param == "file" else elsewhere(descriptor)
        remote = peer.open(seen)
        assert remote.transport == request.param
        yield owner, seen, remote


def elsewhere(descriptor: SegmentDescriptor) -> SegmentDescriptor:
    """As a process of another machine sees it: its files are out of reach."""
    values = {name: getattr(descriptor, name) for name in descriptor.__struct_fields__}
    return SegmentDescriptor(**{**values, "host": "another-machine"})


def read(remote: RemoteSegment, number: int, at: int, nbytes: int) -> bytes:
    found = bytearray(nbytes)
    remote.read_into(address_of_byte(number, at), [found], timeout_s=T)
    return bytes(found)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([1, 2, 70_000]), st.integers(0, FILE_NBYTES), st.lists(st.integers(0, 9000), max_size=4))
def test_bytes_of_every_file(
    world: tuple[object, object, RemoteSegment], number: int, at: int, sizes: list[int]
) -> None:
    buffers = [bytearray(size) for size in sizes]
    at = min(at, FILE_NBYTES - sum(sizes))
    world[2].read_into(address_of_byte(number, at), buffers, timeout_s=T)
    assert b"".join(buffers) == content(number)[at : at + sum(sizes)]


def test_large_reads_by_submit(tmp_path: Path, segment: FolderSegment) -> None:
    with engine(tmp_path / "o", tcp=True) as owner, engine(tmp_path / "p", tcp=False) as peer:
        remote = peer.open(elsewhere(owner.serve(segment)))
        found = [bytearray(FILE_NBYTES) for _ in (1, 2)]
        requests = [
            TransferRequest(TransferOp.READ, remote, address_of_byte(number, 0), [buffer])
            for number, buffer in zip((1, 2), found, strict=True)
        ]
        peer.submit(requests).wait()
        assert found == [content(1), content(2)]


def test_it_tells_of_its_addresses(world: tuple[TransferEngine, SegmentDescriptor, RemoteSegment]) -> None:
    _, descriptor, remote = world
    assert descriptor.location.startswith("ssd:/")
    assert remote.nbytes == descriptor.nbytes > address_of_byte(70_000, 0)


def test_nobody_writes_to_it(world: tuple[object, object, RemoteSegment], segment: FolderSegment) -> None:
    with pytest.raises(InvalidInput, match="owner"):
        world[2].write_from(address_of_byte(1, 0), [b"x"], generation=1, timeout_s=T)
    with pytest.raises(InvalidInput, match="no memory"):
        _ = segment.memory
    assert read(world[2], 1, 0, 4) == content(1)[:4]


@pytest.mark.parametrize("place", [(1, 2**32 - 1), (2**31 - 1, 2**32 - 1)])
def test_a_read_stays_within_one_file(world: tuple[object, object, RemoteSegment], place: tuple[int, int]) -> None:
    with pytest.raises(InvalidInput):
        read(world[2], *place, 2)
    read(world[2], *place, 0)


def test_files_come_and_go(world: tuple[object, object, RemoteSegment], folder: Path) -> None:
    remote = world[2]
    with pytest.raises(NotFound):
        read(remote, 3, 0, 10)
    add_file(folder, 3)
    assert read(remote, 3, 0, 10) == content(3)[:10]
    (folder / file_name(3)).unlink()
    with pytest.raises(NotFound):
        read(remote, 3, 0, 10)
    assert read(remote, 2, 7, 10) == content(2)[7:17]


def test_a_file_that_is_too_short_is_an_error(world: tuple[object, object, RemoteSegment]) -> None:
    with pytest.raises(MoonpoolError):
        read(world[2], 1, FILE_NBYTES - 4, 8)
    assert read(world[2], 1, FILE_NBYTES - 4, 4) == content(1)[-4:]


def test_a_withdrawn_folder_is_not_found_and_a_later_one_is_another(
    world: tuple[TransferEngine, SegmentDescriptor, RemoteSegment], segment: FolderSegment
) -> None:
    owner, _, remote = world
    owner.unserve(segment.name)
    with pytest.raises(NotFound):
        read(remote, 1, 0, 1)
    segment.incarnation = 6
    owner.serve(segment)
    with pytest.raises(NotFound, match="incarnation 6"):
        read(remote, 1, 0, 1)


def test_an_owner_that_is_gone(world: tuple[TransferEngine, SegmentDescriptor, RemoteSegment]) -> None:
    owner, _, remote = world
    owner.close()
    with pytest.raises(PeerLost):
        read(remote, 1, 0, 1)


def test_one_owner_at_a_time(tmp_path: Path, folder: Path, segment: FolderSegment) -> None:
    with (
        engine(tmp_path / "o", tcp=False) as owner,
        engine(tmp_path / "p", tcp=False) as late,
        FolderSegment.open("other", folder, incarnation=6) as other,
    ):
        owner.serve(segment)
        with pytest.raises(AlreadyExists):
            late.serve(other)
        owner.close()
        late.serve(other)


def test_a_file_that_is_written_anew_under_another_name_is_gone(
    world: tuple[object, object, RemoteSegment], folder: Path
) -> None:
    remote = world[2]
    assert read(remote, 1, 0, 10) == content(1)[:10]
    os.rename(folder / file_name(1), folder / file_name(9))
    with open(folder / file_name(9), "r+b") as file:
        file.write(content(9))
    with pytest.raises(NotFound):
        read(remote, 1, 0, 10)
    assert read(remote, 9, 0, 10) == content(9)[:10]


def test_a_closed_handle_says_so(world: tuple[object, object, RemoteSegment]) -> None:
    world[2].close()
    with pytest.raises(PeerLost):
        read(world[2], 1, 0, 1)


def test_few_files_are_open_and_none_that_was_removed(
    folder: Path, segment: FolderSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "_MAX_OPEN_FILES", 4)
    before = fd_count()
    for number in range(10, 30):
        add_file(folder, number)
        segment.read_into(address_of_byte(number, 0), [bytearray(1)], timeout_s=T)
    assert fd_count() - before == 4
    for number in range(10, 29):
        os.unlink(folder / file_name(number))
    segment.read_into(address_of_byte(1, 0), [bytearray(1)], timeout_s=T)
    assert fd_count() - before == 2
    segment.close()


def test_threads_share_more_files_than_are_open(
    folder: Path, segment: FolderSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "_MAX_OPEN_FILES", 1)
    wrong: list[object] = []

    def read_all(seed: int) -> None:
        for number in np.random.default_rng(seed).choice([1, 2, 70_000], 150).tolist():
            found = bytearray(100)
            try:
                segment.read_into(address_of_byte(number, 50), [found], timeout_s=T)
            except MoonpoolError as error:
                wrong.append(error)
            if found != content_of[number][50:150]:
                wrong.append(number)

    content_of = {number: content(number) for number in (1, 2, 70_000)}
    threads = [threading.Thread(target=read_all, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
