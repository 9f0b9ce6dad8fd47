"""How a transfer between a GPU and main memory is cut. Pure.

Bytes go through slots of pinned memory, packed one after the other: pieces that follow each other on the GPU are one
copy of the GPU's, however small they are. Large transfers are cut into shares for several threads, because one thread
copies main memory slower than the bus carries it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class DevicePiece(NamedTuple):
    """Bytes at `address` on the GPU and their place in main memory."""

    address: int
    view: memoryview


class DeviceCopy(NamedTuple):
    """One copy of the GPU's, from or to `start` in the slot."""

    address: int
    start: int
    nbytes: int


class SlotLoad(NamedTuple):
    """What goes through a slot at once; `parts` are (start in the slot, place in main memory)."""

    runs: list[DeviceCopy]
    parts: list[tuple[int, memoryview]]


def cut_loads(pieces: Sequence[DevicePiece], slot_nbytes: int) -> Iterator[SlotLoad]:
    load, used = SlotLoad([], []), 0
    for address, view in pieces:
        done = 0
        while done < view.nbytes:
            if used == slot_nbytes:
                yield load
                load, used = SlotLoad([], []), 0
            nbytes = min(view.nbytes - done, slot_nbytes - used)
            _add_run(load.runs, DeviceCopy(address + done, used, nbytes))
            load.parts.append((used, view[done : done + nbytes]))
            done += nbytes
            used += nbytes
    if used:
        yield load


def share_out(pieces: Sequence[DevicePiece], max_shares: int, min_share_nbytes: int) -> list[list[DevicePiece]]:
    """The pieces in shares of about one size, at least `min_share_nbytes` unless there is but one share."""
    total = sum(view.nbytes for _, view in pieces)
    num_shares = max(1, min(max_shares, total // min_share_nbytes))
    limit = -(-total // num_shares)
    shares: list[list[DevicePiece]] = [[]]
    room = limit
    for address, view in pieces:
        done = 0
        while done < view.nbytes:
            if room == 0:
                shares.append([])
                room = limit
            nbytes = min(view.nbytes - done, room)
            shares[-1].append(DevicePiece(address + done, view[done : done + nbytes]))
            done += nbytes
            room -= nbytes
    return shares


def _add_run(runs: list[DeviceCopy], new: DeviceCopy) -> None:
    """The slot is filled without gaps, so what follows on the GPU follows in the slot too."""
    if runs and runs[-1].address + runs[-1].nbytes == new.address:
        last = runs.pop()
        new = DeviceCopy(last.address, last.start, last.nbytes + new.nbytes)
    runs.append(new)
