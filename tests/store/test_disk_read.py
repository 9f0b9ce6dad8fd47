"""Objects read from this machine's disk: by few requests, every byte checked, errors kept to those they concern."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ssd_world import KIB, body_of, item_of

from moonpool.base.errors import MoonpoolError, PeerLost
from moonpool.node.ssd import SsdConfig, SsdLog
from moonpool.node.ssd_tier import offset_of
from moonpool.store.client.remote_read import _MAX_NBYTES, DiskRead, RemoteObject, _neighbours
from moonpool.store.messages import ObjectInfo, Placement
from moonpool.transfer import TransferConfig, TransferEngine, aligned_buffer
from moonpool.transfer.transports.base import RemoteSegment
from moonpool.transfer.transports.file.folder import FolderSegment

CONFIG = SsdConfig(max_nbytes=16 * 512 * KIB, file_nbytes=512 * KIB)
TIMEOUT_S = 10.0


@pytest.fixture
def log(tmp_path: Path) -> Iterator[SsdLog]:
    with SsdLog.open(tmp_path / "disk", CONFIG) as made:
        yield made


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[TransferEngine]:
    with TransferEngine(TransferConfig(run_dir=str(tmp_path / "o"), shm=False, tcp_host=None)) as made:
        yield made


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[TransferEngine]:
    with TransferEngine(TransferConfig(run_dir=str(tmp_path / "p"), shm=False, tcp_host=None)) as made:
        yield made


@pytest.fixture
def remote(tmp_path: Path, log: SsdLog, owner: TransferEngine, peer: TransferEngine) -> Iterator[RemoteSegment]:
    with FolderSegment.open("n.ssd", tmp_path / "disk", incarnation=5) as segment:
        yield peer.open(owner.serve(segment))


def add(log: SsdLog, count: int, sizes: Sequence[int]) -> list[tuple[bytes, Placement, int]]:
    keys = [b"key-%d" % number for number in range(count)]
    found = log.append_many([item_of(key, 7, sizes) for key in keys])
    placed = []
    for key, location in zip(keys, found, strict=True):
        assert not isinstance(location, MoonpoolError)
        placed.append((key, Placement("n.ssd", offset_of(location), 5, 7), location.nbytes))
    return placed


def wanted(placed: Sequence[tuple[bytes, Placement, int]], *, aligned: bool = True) -> list[RemoteObject]:
    made = []
    for position, (key, place, nbytes) in enumerate(placed):
        room = aligned_buffer(nbytes) if aligned else memoryview(bytearray(nbytes + 1))[1:]
        made.append(RemoteObject(position, ObjectInfo(key, nbytes, (place,), 10.0), place, [room]))
    return made


def read(
    remote: RemoteSegment, peer: TransferEngine, objects: Sequence[RemoteObject]
) -> tuple[DiskRead, dict[int, bytes]]:
    """The reader, and the bytes of what it thinks is right."""
    reader = DiskRead(remote, peer, None, lambda nbytes: TIMEOUT_S)
    good = reader.run(objects)
    return reader, {each.position: b"".join(bytes(view) for view in each.views) for each in good}


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("sizes", [(4096,), (5000, 300), (64 * KIB,)])
def test_every_byte(
    log: SsdLog, remote: RemoteSegment, peer: TransferEngine, sizes: tuple[int, ...], aligned: bool
) -> None:
    placed = add(log, 40, sizes)  # over several files
    reader, found = read(remote, peer, wanted(placed, aligned=aligned)[::-1])
    assert reader.failure is None
    assert found == {number: body_of(key, 7, sum(sizes)) for number, (key, _, _) in enumerate(placed)}


def test_neighbours_come_by_one_request(
    log: SsdLog, remote: RemoteSegment, peer: TransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = wanted(add(log, 8, (8 * KIB,)))
    requests: list[int] = []
    preadv = os.preadv

    def counting(fd: int, views: list[Any], offset: int) -> int:
        requests.append(offset)
        return preadv(fd, views, offset)

    monkeypatch.setattr(os, "preadv", counting)
    _, found = read(remote, peer, objects)
    assert len(found) == 8
    assert len(requests) == 1


def test_wrong_bytes_are_left_out_alone(log: SsdLog, remote: RemoteSegment, peer: TransferEngine) -> None:
    placed = add(log, 8, (8 * KIB,))
    file_number, at = divmod(placed[3][1].offset, 1 << 32)
    with open(log.path_of(file_number), "r+b") as file:
        file.seek(at + 4096 + 100)
        byte = file.read(1)[0]
        file.seek(at + 4096 + 100)
        file.write(bytes([byte ^ 1]))
        file.flush()
        os.fsync(file.fileno())
    reader, found = read(remote, peer, wanted(placed))
    assert reader.failure is None
    assert sorted(found) == [0, 1, 2, 4, 5, 6, 7]


def test_another_object_is_left_out(log: SsdLog, remote: RemoteSegment, peer: TransferEngine) -> None:
    (one, other) = add(log, 2, (8 * KIB,))
    mistaken = (one[0], other[1], one[2])
    assert read(remote, peer, wanted([mistaken]))[1] == {}


def test_a_file_that_is_gone_takes_its_own_objects_alone(
    log: SsdLog, remote: RemoteSegment, peer: TransferEngine
) -> None:
    placed = add(log, 12, (64 * KIB,))
    numbers = [place.offset >> 32 for _, place, _ in placed]
    assert numbers[0] != numbers[-1]
    os.rename(log.path_of(numbers[0]), f"{log.path_of(numbers[0])}.gone")
    reader, found = read(remote, peer, wanted(placed))
    os.rename(f"{log.path_of(numbers[0])}.gone", log.path_of(numbers[0]))
    assert reader.failure is None
    assert sorted(found) == [at for at, number in enumerate(numbers) if number != numbers[0]]


def test_an_owner_that_is_gone_is_a_failure(
    log: SsdLog, remote: RemoteSegment, owner: TransferEngine, peer: TransferEngine
) -> None:
    objects = wanted(add(log, 12, (64 * KIB,)))
    owner.close()
    reader, found = read(remote, peer, objects)
    assert isinstance(reader.failure, PeerLost)
    assert found == {}


@given(st.lists(st.tuples(st.integers(1, 3 * 256), st.booleans()), max_size=40))
def test_groups_are_all_and_without_gaps(sizes: list[tuple[int, bool]]) -> None:
    objects: list[RemoteObject] = []
    at = 0
    for num_pages, has_gap in sizes:
        at += 4096 if has_gap else 0
        nbytes = (1 + num_pages) * 4096
        place = Placement("n.ssd", at, 5, 7)
        room = memoryview(_PAGES)[: nbytes - 4096]
        objects.append(RemoteObject(len(objects), ObjectInfo(b"k", nbytes, (place,), 1.0), place, [room]))
        at += nbytes
    groups = list(_neighbours(objects))
    assert [each for group in groups for each in group] == objects
    for group in groups:
        assert len(group) == 1 or sum(each.nbytes for each in group) <= _MAX_NBYTES
        for one, other in pairwise(group):
            assert one.place.offset + one.nbytes == other.place.offset


_PAGES = bytearray(3 * 256 * 4096)
