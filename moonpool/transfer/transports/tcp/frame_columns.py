"""Requests of one connection by the dozen: packed and taken apart by columns, as frames.py does it one by one.

What all requests of a run have in common is compared or written once. One checksum per request remains.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moonpool.base.checksum import crc32c
from moonpool.transfer.transports.tcp.frames import (
    MAX_DATA_NBYTES,
    REQUEST_NBYTES,
    FrameOp,
    Request,
    RequestPacker,
    pack_start,
)

_CRC_NBYTES = 4
_HEAD_NBYTES = REQUEST_NBYTES - _CRC_NBYTES  # what the checksum is of
_LEAST_REQUESTS = 16  # for fewer, one by one is faster
_MOST_REQUESTS = 128  # taken apart together
LEAST_RUN_NBYTES = _LEAST_REQUESTS * REQUEST_NBYTES  # in fewer bytes read_run() finds none
_U64 = np.dtype("<u8")
_MAX_OFFSET = (1 << 63) - 1 - MAX_DATA_NBYTES


class ReadRun(NamedTuple):
    """READs that follow each other on the wire, about one incarnation of one segment."""

    request_ids: list[int]
    offsets: NDArray[np.uint64]
    sizes: NDArray[np.uint64]
    generations: NDArray[np.uint64]

    def part(self, start: int, end: int) -> ReadRun:
        """Return the READs at the positions `start` to `end` - 1."""
        at = slice(start, end)
        return ReadRun(self.request_ids[at], self.offsets[at], self.sizes[at], self.generations[at])


@lru_cache(maxsize=64)
def _layout(name_nbytes: int) -> np.dtype[np.void]:
    """A request, as frames.py describes it, with the name behind it."""
    return np.dtype(
        [
            ("start", np.uint8, 8),  # magic, version, op, name_nbytes
            ("request_id", _U64),
            ("incarnation", _U64),
            ("offset", _U64),
            ("nbytes", _U64),
            ("generation", _U64),
            ("name_crc", "<u4"),
            ("crc", "<u4"),
            ("name", np.uint8, name_nbytes),
        ]
    )


def pack_run(
    packer: RequestPacker,
    op: FrameOp,
    first_id: int,
    offsets: Sequence[int],
    sizes: Sequence[int],
    generations: Sequence[int],
) -> bytes:
    """Return the requests, one behind the other, numbered from `first_id` on. InvalidInput when a value does not fit
    its field.
    """
    numbers = (offsets, sizes, generations)
    if len(offsets) < _LEAST_REQUESTS or min(map(min, numbers)) < 0 or max(map(max, numbers)) > _MAX_OFFSET:
        orders = enumerate(zip(*numbers, strict=True), first_id)
        return b"".join([packer.pack(op, number, *order) for number, order in orders])
    one = packer.pack(op, first_id, 0, max(sizes), 0)
    raw = bytearray(one * len(offsets))
    rows = np.frombuffer(raw, _layout(len(one) - REQUEST_NBYTES))
    rows["request_id"] = np.arange(first_id, first_id + len(offsets))
    rows["offset"], rows["nbytes"], rows["generation"] = offsets, sizes, generations
    rows["crc"] = [crc32c(raw[at : at + _HEAD_NBYTES]) for at in range(0, len(raw), len(one))]
    return bytes(raw)


def read_run(frames: memoryview, first: Request) -> ReadRun | None:
    """Return the READs at the start of `frames` that differ from `first`, a READ that was checked, only in number,
    place and generation. None when there are few requests. Only heads of READs that are returned are checksummed, and
    the first one that is damaged.
    """
    name = first.name.encode()
    size = REQUEST_NBYTES + len(name)
    count = min(frames.nbytes // size, _MOST_REQUESTS)
    if count < _LEAST_REQUESTS:
        return None
    raw = bytes(frames[: count * size])
    rows = np.frombuffer(raw, _layout(len(name)))
    is_alike = (rows["nbytes"] <= MAX_DATA_NBYTES) & (rows["offset"] <= _MAX_OFFSET)
    is_alike &= (rows["incarnation"] == first.incarnation) & (rows["name_crc"] == first.checksum)
    for field, common in (("start", pack_start(FrameOp.READ, len(name))), ("name", name)):
        is_alike &= (rows[field] == np.frombuffer(common, np.uint8)).all(axis=1)
    if not is_alike.all():
        rows = rows[: int(is_alike.argmin())]
    starts = range(0, len(rows) * size, size)
    is_whole = rows["crc"] == [crc32c(raw[at : at + _HEAD_NBYTES]) for at in starts]
    if not is_whole.all():
        rows = rows[: int(is_whole.argmin())]
    return ReadRun(rows["request_id"].tolist(), rows["offset"], rows["nbytes"], rows["generation"])
