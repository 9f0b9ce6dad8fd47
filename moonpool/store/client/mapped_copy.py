"""Copies of whole objects from mapped memory, each checksummed while its bytes are in the processor's cache.

Two threads share large copies, also those of one object: they take runs of its pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from moonpool.base.checksum import crc32c
from moonpool.base.object_header import HeaderFields
from moonpool.store.client.cuts import scatter
from moonpool.store.client.small_read import SLICED_NBYTES
from moonpool.store.client.transfer_window import for_each
from moonpool.store.client.verified_read import CopyAndSum, are_right, sum_arrived
from moonpool.store.messages import Placement
from moonpool.transfer import TransferEngine

_RUN_NBYTES = 1024 * 1024  # of an object, copied by one thread
_BYTE = np.uint8
_bytes_of = np.frombuffer

# position, the replica, its header, and the memory for each of its pieces (None: new bytes)
PlannedCopy: TypeAlias = tuple[int, Placement, HeaderFields, list[list[memoryview]] | None]
# number of the plan, the header with the pieces of the run alone, their memory, and where they start
_Run: TypeAlias = tuple[int, HeaderFields, list[list[memoryview]], int]


def copy_planned(
    memory: memoryview, plans: Sequence[PlannedCopy], engine: TransferEngine
) -> list[tuple[int, Placement, int | bytes]]:
    """Copy the objects. Return position and replica of each whose checksums match, with its bytes or their number."""
    copy_and_sum = _copier(memory)
    runs = [run for number, plan in enumerate(plans) for run in _runs(number, plan)]
    wrong: set[int] = set()

    def copy(run: _Run) -> None:
        number, header, pieces, start = run
        if not are_right(header, pieces, copy_and_sum, start):
            wrong.add(number)

    for_each(engine, runs, sum([sum(header.sizes) for _, header, _, _ in runs]), copy)
    copied: list[tuple[int, Placement, int | bytes]] = []
    for number, (position, place, header, pieces) in enumerate(plans):
        got = _new_bytes(memory, place, header) if pieces is None else sum(header.sizes)
        if got is not None and number not in wrong:
            copied.append((position, place, got))
    return copied


def _copier(memory: memoryview) -> CopyAndSum[memoryview]:
    array = _bytes_of(memory, _BYTE)

    def copy_and_sum(at: int, view: memoryview, found: int) -> int:
        end = at + view.nbytes
        if end - at <= SLICED_NBYTES:
            view[:] = memory[at:end]
        else:
            _bytes_of(view, _BYTE)[...] = array[at:end]
        return crc32c(view, found)

    return copy_and_sum


def _runs(number: int, plan: PlannedCopy) -> Iterator[_Run]:
    """Yield the pieces that go to the caller's memory, in runs of a MiB or more."""
    _, place, header, pieces = plan
    if pieces is None:
        return
    first, nbytes, start = 0, 0, place.offset + header.nbytes
    for end, size in enumerate(header.sizes, start=1):
        nbytes += size
        if nbytes >= _RUN_NBYTES or end == len(header.sizes):
            part = header._replace(sizes=header.sizes[first:end], checksums=header.checksums[first:end])
            yield number, part, pieces[first:end], start
            first, nbytes, start = end, 0, start + nbytes


def _new_bytes(memory: memoryview, place: Placement, header: HeaderFields) -> bytes | None:
    """Return the object's bytes; None when a checksum does not match. They are made under Python's lock, so a second
    thread would not help.
    """
    start = place.offset + header.nbytes
    data = bytes(memory[start : start + sum(header.sizes)])
    return data if are_right(header, scatter(header.sizes, [memoryview(data)]), sum_arrived) else None
