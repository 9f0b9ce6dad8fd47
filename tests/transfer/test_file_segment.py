"""Files and devices that are new, full, strange, gone or not files at all."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from file_world import MIB, T, describe, fd_count, read
from small_disk import mounted, remount, small_disk

from moonpool.base.clock import Deadline
from moonpool.base.errors import (
    AlreadyExists,
    Corrupt,
    InvalidInput,
    NoSpace,
    NotFound,
    PeerLost,
    StaleGeneration,
    Unavailable,
)
from moonpool.transfer import FileSegment, aligned_buffer
from moonpool.transfer.disk import alignment as file_alignment
from moonpool.transfer.disk.alignment import BUFFERED, Alignment, find_alignment
from moonpool.transfer.disk.handle import SharedFd, own_errors
from moonpool.transfer.transports.file import segment as file_dax
from moonpool.transfer.transports.file.transport import FileRemote, FileTransport


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[FileSegment]:
    with FileSegment.create(tmp_path / "seg", MIB, granule_nbytes=65536, incarnation=1) as made:
        yield made


# --- creating, opening, failing ---------------------------------------------------------------------------------------


def test_a_new_file_is_zeroed_private_and_fully_there(segment: FileSegment) -> None:
    status = os.stat(segment.path)
    assert status.st_blocks * 512 >= MIB
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert read(segment) == bytes(MIB)
    assert (segment.name, segment.nbytes, segment.incarnation) == ("seg", MIB, 1)
    with pytest.raises(InvalidInput, match="no memory"):
        _ = segment.memory


def test_bytes_and_generations_outlive_the_owner(tmp_path: Path) -> None:
    with FileSegment.create(tmp_path / "seg", 70_000, granule_nbytes=4096, incarnation=1) as first:
        first.write_from(69_990, [b"0123456789"], generation=5, timeout_s=T)
        with pytest.raises(AlreadyExists):
            FileSegment.create(tmp_path / "seg", 70_000, incarnation=1)
    with FileSegment.open(tmp_path / "seg", name="again", incarnation=2) as second:
        assert (second.name, second.nbytes, second.incarnation) == ("again", 70_000, 2)
        assert read(second, 69_990) == b"0123456789"
        with pytest.raises(StaleGeneration):
            second.write_from(69_999, [b"x"], generation=4, timeout_s=T)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        FileSegment.open(tmp_path / "none", incarnation=1)
    with pytest.raises(NotFound):
        FileSegment.create(tmp_path / "no" / "folder", 1, incarnation=1)
    FileSegment.remove(tmp_path / "none")
    FileSegment.create(tmp_path / "seg", 1, incarnation=1).close()
    os.unlink(tmp_path / "seg")
    with pytest.raises(NotFound):
        FileSegment.open(tmp_path / "seg", incarnation=1)


@pytest.mark.parametrize(
    ("nbytes", "granule", "incarnation"), [(0, None, 1), (-5, None, 1), (1, 0, 1), (1, None, 2**64)]
)
def test_bad_numbers_leave_nothing_behind(tmp_path: Path, nbytes: int, granule: int | None, incarnation: int) -> None:
    before = fd_count()
    with pytest.raises(InvalidInput):
        FileSegment.create(tmp_path / "seg", nbytes, granule_nbytes=granule, incarnation=incarnation)
    assert list(tmp_path.iterdir()) == []
    assert fd_count() <= before


def test_a_removed_or_truncated_file_is_an_error_never_garbage(tmp_path: Path) -> None:
    for harm in (os.unlink, lambda path: os.truncate(path, 65536)):
        segment = FileSegment.create(tmp_path / "seg", MIB, incarnation=1)
        harm(segment.path)
        with segment:
            with pytest.raises(Unavailable, match="seg"):
                read(segment, 0, 10)
            with pytest.raises(Unavailable, match="seg"):
                segment.write_from(MIB - 10, [b"x"], generation=0, timeout_s=T)
        if harm is not os.unlink:
            assert os.path.getsize(tmp_path / "seg") == 65536
            with pytest.raises(Unavailable, match="65536 bytes"):
                FileSegment.open(tmp_path / "seg", incarnation=1)
        FileSegment.remove(tmp_path / "seg")


def test_a_file_cut_during_a_read_is_an_error(segment: FileSegment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment._file.disk, "_check_whole", lambda fd: None)  # it was whole when we looked
    os.truncate(segment.path, 65536)
    for offset in (0, MIB - 4096, 3):
        with pytest.raises(Unavailable, match="truncated"):
            segment.read_into(offset, [aligned_buffer(MIB - 5 if offset < 4 else 4096)], timeout_s=T)


@pytest.mark.parametrize("content", [b"", b"x" * 4095, b"x" * 5000])
def test_a_strange_sidecar_is_refused(segment: FileSegment, content: bytes) -> None:
    segment.close()
    Path(f"{segment.path}.fence").write_bytes(content)
    before = fd_count()
    with pytest.raises(Corrupt):
        FileSegment.open(segment.path, incarnation=1)
    assert fd_count() <= before


def test_closing_is_idempotent_and_leaks_nothing(tmp_path: Path) -> None:
    before = fd_count()
    transport = FileTransport()
    segment = FileSegment.create(tmp_path / "seg", MIB, granule_nbytes=4096, incarnation=1)
    endpoint = transport.serve(segment)
    remote = transport.open(describe(segment, endpoint), endpoint, timeout_s=T)
    remote.write_from(1, [b"abc"], generation=1, timeout_s=T)
    segment.close()
    with pytest.raises(PeerLost):
        remote.read_into(0, [bytearray(1)], timeout_s=T)
    for closable in (segment, remote, transport, transport):
        closable.close()
    with pytest.raises(Unavailable):
        read(segment, 0, 1)
    transport.unserve("seg")
    with pytest.raises(PeerLost):
        transport.serve(segment)
    assert fd_count() <= before


def test_a_descriptor_in_use_is_closed_by_its_last_user(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    shared = SharedFd(fd, str(tmp_path))
    with shared as used:
        shared.close()
        os.fstat(used)
        with pytest.raises(PeerLost), shared:
            pass
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, NoSpace),
        (errno.EDQUOT, NoSpace),
        (errno.EIO, Unavailable),
        (errno.ENODEV, Unavailable),
        (errno.EROFS, InvalidInput),
        (errno.ENOENT, NotFound),
    ],
)
def test_system_errors_carry_the_path(number: int, expected: type[Exception]) -> None:
    with pytest.raises(expected, match="/disk/x: "), own_errors("/disk/x"):
        raise OSError(number, os.strerror(number))


# --- small and foreign disks (need root) ------------------------------------------------------------------------------


@contextmanager
def loop_device(image: Path) -> Iterator[str]:
    with image.open("wb") as file:
        file.truncate(4 * MIB)
    found = subprocess.run(["losetup", "--find", "--show", str(image)], capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"NOT TESTED, loop devices are not allowed here: {found.stderr.strip()}")
    device = found.stdout.strip()
    try:
        yield device
    finally:
        FileSegment.remove(device)
        subprocess.run(["losetup", "--detach", device], check=True)


def test_a_full_disk_is_refused_at_once_and_left_as_it_was(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", MIB) as folder:
        before = fd_count()
        with pytest.raises(NoSpace, match="seg"):
            FileSegment.create(folder / "seg", 2 * MIB, incarnation=1)
        assert list(folder.iterdir()) == []
        # Room for the data and not for its generations.
        with pytest.raises(NoSpace, match="fence"):
            FileSegment.create(folder / "seg", MIB, granule_nbytes=8, incarnation=1)
        assert list(folder.iterdir()) == []
        assert fd_count() <= before
        FileSegment.create(folder / "seg", MIB // 2, granule_nbytes=4096, incarnation=1).close()


def test_a_disk_that_became_full_is_no_space(tmp_path: Path) -> None:
    """A file with holes, as a careless copy leaves it, on a disk without room for them."""
    with small_disk(tmp_path / "small", MIB) as folder:
        with FileSegment.create(folder / "seg", 512 * 1024, incarnation=1) as segment:
            os.truncate(segment.path, 0)
            os.truncate(segment.path, 512 * 1024)
            filler = folder / "filler"
            with pytest.raises(OSError, match="No space"):
                filler.write_bytes(bytes(2 * MIB))
            with pytest.raises(NoSpace, match="seg"):
                segment.write_from(0, [bytes(512 * 1024)], generation=0, timeout_s=T)


def test_a_read_only_disk_is_invalid(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", MIB) as folder:
        FileSegment.create(folder / "seg", 4096, incarnation=1).close()
        assert remount(folder, "ro")
        with pytest.raises(InvalidInput, match="Read-only"):
            FileSegment.create(folder / "new", 4096, incarnation=1)
        with pytest.raises(InvalidInput, match="Read-only"):
            FileSegment.open(folder / "seg", incarnation=1)


def test_a_block_device(tmp_path: Path) -> None:
    with loop_device(tmp_path / "image") as device:
        with pytest.raises(NoSpace, match="not 5"):
            FileSegment.create(device, 5 * MIB, incarnation=1)
        with FileSegment.create(device, 4 * MIB, name="nvme", granule_nbytes=65536, incarnation=1) as segment:
            assert segment.direct
            data = np.random.default_rng(3).bytes(100_000)
            segment.write_from(77, [data], generation=1, timeout_s=T)
            transport = FileTransport()
            endpoint = transport.serve(segment)
            with pytest.raises(AlreadyExists, match="serves"):
                FileSegment.create(device, MIB, incarnation=2)
            remote = transport.open(describe(segment, endpoint), endpoint, timeout_s=T)
            assert isinstance(remote, FileRemote)
            assert read(remote, 77, 100_000) == data
            remote.close()
            transport.close()
        FileSegment.remove(device)
        assert stat.S_ISBLK(os.stat(device).st_mode)


def test_a_mounted_device_is_refused(tmp_path: Path) -> None:
    mkfs = shutil.which("mkfs.ext4", path=f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin")
    if mkfs is None:
        pytest.skip("NOT TESTED, no mkfs.ext4 here")
    with loop_device(tmp_path / "image") as device:
        subprocess.run([mkfs, "-q", device], check=True)
        with mounted(tmp_path / "fs", device) as _:
            with pytest.raises(InvalidInput, match="busy"):
                FileSegment.create(device, MIB, incarnation=1)


# --- finding the alignment --------------------------------------------------------------------------------------------


@contextmanager
def opened(path: str | Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def test_alignment_where_the_kernel_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_alignment, "_statx_alignment", lambda fd: None)
    with opened("/dev/shm") as fd:
        assert find_alignment(fd) == BUFFERED
    with loop_device(tmp_path / "image") as device, opened(device) as fd:
        assert find_alignment(fd) == Alignment(True, 512, 512)


def test_alignment_of_a_file_on_a_disk_that_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_alignment, "_statx_alignment", lambda fd: None)
    monkeypatch.setattr(file_alignment, "_filesystem_magic", lambda fd: 0xEF53)  # ext4, wherever the tests run
    with opened(tmp_path) as fd:
        assert find_alignment(fd) == Alignment(True, 4096, 4096)


# --- DAX, with a file for the device ----------------------------------------------------------------------------------


def test_a_dax_device_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dax0.0").write_bytes(bytes(2 * MIB))
    monkeypatch.setattr(file_dax, "dax_geometry", lambda path: (2 * MIB, 2 * MIB))
    with pytest.raises(InvalidInput, match="not 3"):
        file_dax.DaxDisk(str(tmp_path / "dax0.0"), 3 * MIB)
    before = fd_count()
    disk = file_dax.DaxDisk(str(tmp_path / "dax0.0"), MIB + 5)
    disk.write(3, [memoryview(b"abc"), memoryview(b"defg")], Deadline(T))
    disk.sync()
    assert (tmp_path / "dax0.0").read_bytes()[:12] == b"\0\0\0abcdefg\0\0"
    first, second = bytearray(2), bytearray(5)
    disk.read(3, [memoryview(first), memoryview(second)], Deadline(T))
    assert first + second == b"abcdefg"
    view = disk.view(3, 3)
    assert view.readonly
    disk.close()
    disk.close()
    assert bytes(view) == b"abc"
    with pytest.raises(PeerLost):
        disk.read(0, [], Deadline(T))
    with pytest.raises(PeerLost):
        disk.sync()
    del view, disk
    assert fd_count() <= before


def test_dax_sizes_come_from_sysfs_and_other_devices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no DAX"):
        file_dax.dax_geometry("/dev/null")
    with pytest.raises(InvalidInput, match="no DAX"):
        FileSegment.create("/dev/null", 4096, incarnation=1)
    device = tmp_path / "1:3"
    device.mkdir()
    (device / "size").write_text("4194304\n")
    assert file_dax.dax_geometry("/dev/null", tmp_path) == (4 * MIB, 2 * MIB)
    (device / "align").write_text("4096\n")
    assert file_dax.dax_geometry("/dev/null", tmp_path) == (4 * MIB, 4096)
