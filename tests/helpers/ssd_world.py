"""What the tests of the SSD log share: objects whose bytes follow from key and generation, and a disk that can lose
power.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from moonpool.base.checksum import ChecksumKind, crc32c
from moonpool.base.object_header import ObjectHeader, Piece, unpack
from moonpool.node.ssd import LogItem, LogLocation, SsdConfig, SsdLog

KIB = 1024
BLOCK_NBYTES = 4 * KIB
SECTOR_NBYTES = 512
FAST_DIR = "/dev/shm" if os.path.isdir("/dev/shm") else None  # for tests with thousands of syncs
SMALL = SsdConfig(max_nbytes=8 * 64 * KIB, file_nbytes=64 * KIB, batch_nbytes=32 * KIB)


def body_of(key: bytes, generation: int, nbytes: int) -> bytes:
    seed = hashlib.blake2b(key + generation.to_bytes(8, "little")).digest()
    return (seed * (nbytes // len(seed) + 1))[:nbytes]


def parts_of(
    key: bytes, generation: int, sizes: Sequence[int] = (5000,), kind: ChecksumKind = ChecksumKind.CRC32C
) -> list[bytes]:
    """Header and pieces of an object; same arguments, same bytes."""
    body = body_of(key, generation, sum(sizes))
    pieces, at = [], 0
    for nbytes in sizes:
        pieces.append(body[at : at + nbytes])
        at += nbytes
    checksums = tuple(Piece(len(p), 0 if kind is ChecksumKind.NONE or not p else crc32c(p)) for p in pieces)
    header = ObjectHeader(key=key, generation=generation, pieces=checksums, checksum_kind=kind)
    return [header.pack(), *pieces]


def item_of(key: bytes, generation: int, sizes: Sequence[int] = (5000,)) -> LogItem:
    return LogItem(key, generation, parts_of(key, generation, sizes))


def read_object(log: SsdLog, key: bytes, generation: int, location: LogLocation | None = None) -> bytes:
    where = location or log.find(key, generation)
    assert where is not None
    buffer = bytearray(where.nbytes)
    log.read_into(where, [buffer], key=key, generation=generation)
    return bytes(buffer)


def is_object(data: bytes, parts: Sequence[bytes]) -> bool:
    """Whether these are its header's fields and pieces. The padding behind the header carries nothing."""
    size = len(parts[0])
    return unpack(data[:size]) == unpack(parts[0]) and data[size:] == b"".join(parts[1:])


def inventory(log: SsdLog) -> dict[bytes, int]:
    return {stored.key: stored.generation for stored in log.items()}


def copy_as_is(source: Path, target: Path) -> Path:
    """The folder as a killed process leaves it: nothing is sealed, nobody holds it."""
    shutil.copytree(source, target)
    return target


def log_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("log-*"))


class PowerLoss:
    """Watches what becomes durable in a folder, and makes a folder as a power loss now might leave it.

    A block that was written and not synced is then old, new, torn at a sector or garbage; names that were changed and
    not synced are the old or the new ones.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: dict[str, int] = {}
        self._durable: dict[int, bytes] = {}
        for path in folder.iterdir() if folder.exists() else ():
            self._names[path.name] = path.stat().st_ino
            self._durable[path.stat().st_ino] = path.read_bytes()

    @contextmanager
    def watching(self) -> Iterator[None]:
        with (
            mock.patch.object(os, "fsync", self._after(os.fsync)),
            mock.patch.object(os, "fdatasync", self._after(os.fdatasync)),
        ):
            yield

    def crash(self, target: Path, rng: random.Random) -> None:
        current = {path.name: path.stat().st_ino for path in self._folder.iterdir()}
        contents = {path.stat().st_ino: path.read_bytes() for path in self._folder.iterdir()}
        names = rng.choice([self._names, current])
        target.mkdir()
        for name, inode in names.items():
            old = self._durable.get(inode, b"")
            new = contents.get(inode, old)
            (target / name).write_bytes(_torn(old.ljust(len(new), b"\0"), new.ljust(len(old), b"\0"), rng))

    def _after(self, call: Callable[[int], None]) -> Callable[[int], None]:
        def synced(fd: int) -> None:
            call(fd)
            path = Path(os.readlink(f"/proc/self/fd/{fd}"))
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                if path == self._folder:
                    self._names = {entry.name: entry.stat().st_ino for entry in path.iterdir()}
            elif path.parent == self._folder:
                self._durable[os.fstat(fd).st_ino] = path.read_bytes()

        return synced


def _torn(old: bytes, new: bytes, rng: random.Random) -> bytes:
    if old == new:
        return new
    blocks = []
    for at in range(0, len(new), BLOCK_NBYTES):
        before, after = old[at : at + BLOCK_NBYTES], new[at : at + BLOCK_NBYTES]
        if before != after:
            after = rng.choice([before, after, after, _torn_block(before, after, rng), rng.randbytes(len(after))])
        blocks.append(after)
    return b"".join(blocks)


def _torn_block(before: bytes, after: bytes, rng: random.Random) -> bytes:
    sectors = range(0, len(after), SECTOR_NBYTES)
    return b"".join(rng.choice([before, after])[at : at + SECTOR_NBYTES] for at in sectors)
