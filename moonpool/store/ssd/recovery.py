"""Which records a log file holds, after whatever happened to it. No I/O of its own: `read` fetches bytes.

A sealed file says it in its index; everything in it was durable before that was written. Any other file is searched
batch by batch, and an object counts only if all of it is there and right. What lies behind a damaged header is found by
its own header: the search goes on at every 4 KiB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from moonpool.base.errors import InvalidInput, Refused
from moonpool.store.ssd.checks import check_object
from moonpool.store.ssd.layout import (
    BATCH_MAGIC,
    UNIT_NBYTES,
    Entry,
    FileHeader,
    parse_batch,
    parse_index,
    parse_trailer,
    peek_batch,
)

Reader: TypeAlias = Callable[[int, int], memoryview]  # (offset, nbytes): valid until the next call
_SEARCH_NBYTES = 4 * 1024 * 1024
_MAGIC = np.frombuffer(BATCH_MAGIC, np.uint8)


class Found(NamedTuple):
    entries: list[Entry]
    num_torn: int  # objects that are not whole
    sealed: bool


def recover(read: Reader, header: FileHeader) -> Found:
    entries = _read_index(read, header)
    return Found(entries, 0, sealed=True) if entries is not None else _scan(read, header)


def _read_index(read: Reader, header: FileHeader) -> list[Entry] | None:
    trailer = parse_trailer(read(header.file_nbytes - UNIT_NBYTES, UNIT_NBYTES), header)
    if trailer is None:
        return None
    return parse_index(read(trailer.index_offset, trailer.index_nbytes), trailer, header)


def _scan(read: Reader, header: FileHeader) -> Found:
    found: list[Entry] = []
    num_torn = 0
    at = _next_batch(read, UNIT_NBYTES, header)
    while at is not None:
        entries, end = _read_batch(read, at, header)
        whole = [entry for entry in entries if _is_whole(read, entry)]
        found += whole
        num_torn += len(entries) - len(whole)
        at = _next_batch(read, end, header)
    return Found(found, num_torn, sealed=False)


def _next_batch(read: Reader, start: int, header: FileHeader) -> int | None:
    """Where, from `start` on, the next thing lies that looks like a batch."""
    at, nbytes = start, UNIT_NBYTES  # mostly it follows at once
    while at < header.file_nbytes:
        nbytes = min(nbytes, header.file_nbytes - at)
        blocks = np.frombuffer(read(at, nbytes), np.uint8).reshape(-1, UNIT_NBYTES)
        for block in np.flatnonzero((blocks[:, : len(_MAGIC)] == _MAGIC).all(axis=1)):
            if peek_batch(blocks[block].data, at + int(block) * UNIT_NBYTES, header) is not None:
                return at + int(block) * UNIT_NBYTES
        at, nbytes = at + nbytes, _SEARCH_NBYTES
    return None


def _read_batch(read: Reader, at: int, header: FileHeader) -> tuple[list[Entry], int]:
    """The entries and where to look next."""
    head = peek_batch(read(at, UNIT_NBYTES), at, header)
    entries = None if head is None else parse_batch(read(at, head.header_nbytes), at, header)
    if head is None or entries is None:
        return [], at + UNIT_NBYTES
    return entries, at + head.batch_nbytes


def _is_whole(read: Reader, entry: Entry) -> bool:
    if entry.nbytes is None:
        return True
    try:
        check_object([read(entry.offset, entry.nbytes)], entry.key, entry.generation, entry.crc)
    except (Refused, InvalidInput):
        return False
    return True
