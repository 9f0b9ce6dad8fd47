"""What tests of a node's parts share: memory with objects in it, a log, and orders about them."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

from moonpool.base.checksum import crc32c
from moonpool.base.object_header import ObjectHeader, Piece, unpack
from moonpool.node.config import NodeConfig
from moonpool.node.ssd import SsdLog
from moonpool.node.ssd_tier import NodeSsd
from moonpool.store.messages import GRANULE_NBYTES, Order, OrderKind, Placement
from moonpool.transfer.memory.segment import Segment

MIB = 1 << 20
LOG_FILE_NBYTES = 4 * MIB
_ids = itertools.count(1)


def config(tmp_path: Path, *, name: str = "n0", ssd_nbytes: int = 16 * LOG_FILE_NBYTES, **more: object) -> NodeConfig:
    """A node with a disk, unless `ssd_nbytes` is 0."""
    ssd = {"ssd_dir": str(tmp_path / f"{name}.disk"), "ssd_nbytes": ssd_nbytes} if ssd_nbytes else {}
    return NodeConfig(
        name=name,
        master_address=f"unix:{tmp_path}/m.sock",
        run_dir=str(tmp_path / "run"),
        **{"dram_nbytes": 8 * MIB, "ssd_file_nbytes": LOG_FILE_NBYTES, "retry_s": 0.02, **ssd, **more},  # type: ignore[arg-type]
    )


def seal(log: SsdLog) -> None:
    """What comes next goes to another file."""
    log._writer.seal()


def open_ssd(tmp_path: Path) -> NodeSsd:
    made = NodeSsd(config(tmp_path))
    made.segment.incarnation = 3
    return made


def allocate(name: str = "n0.dram", nbytes: int = 8 * MIB, incarnation: int = 1) -> Segment:
    return Segment.allocate(name, nbytes, granule_nbytes=GRANULE_NBYTES, incarnation=incarnation)


def body_of(key: bytes, nbytes: int) -> bytes:
    return random.Random(key).randbytes(nbytes)


def object_of(key: bytes, generation: int, sizes: tuple[int, ...]) -> bytes:
    """Header and pieces as they lie in memory."""
    body = body_of(key, sum(sizes))
    ends = list(itertools.accumulate(sizes, initial=0))
    pieces = tuple(Piece(size, crc32c(body[at : at + size])) for at, size in zip(ends, sizes, strict=False))
    return ObjectHeader(key=key, generation=generation, pieces=pieces).pack() + body


def store(segment: Segment, offset: int, key: bytes, generation: int, sizes: tuple[int, ...] = (5000, 70_000)) -> int:
    """Puts an object there, as a writer would; its size."""
    data = object_of(key, generation, sizes)
    assert segment.fence is not None
    segment.fence.admit(offset, len(data), generation)
    segment.memory[offset : offset + len(data)] = data
    return len(data)


def header_at(segment: Segment, offset: int) -> ObjectHeader:
    return unpack(segment.memory[offset : offset + 4096])


def place(segment: Segment, offset: int, generation: int) -> Placement:
    return Placement(segment.name, offset, segment.incarnation, generation)


def order(kind: OrderKind, key: bytes, nbytes: int, source: Placement, target: Placement | None = None) -> Order:
    return Order(next(_ids), kind, key, nbytes, source, target)
