"""Copies between a GPU's memory and any other memory.

Pageable main memory is copied through two pinned slots in turn, so that the bus and the processor work at the same
time. Pinned main memory and GPU memory are copied directly. Pieces that follow each other on the GPU are packed into
one copy, however small they are. Large transfers are divided among several threads, because one thread copies main
memory slower than the bus carries it. How a transfer is cut is pure.

Every call returns when the bytes are in place. A copy that was started is always waited for: the driver cannot cancel
it, and the caller's memory is the caller's again afterwards.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import pairwise
from queue import SimpleQueue
from typing import NamedTuple, TypeAlias

import numpy as np

from moonpool.base.clock import Deadline
from moonpool.base.errors import DeadlineExceeded, Internal, MoonpoolError
from moonpool.transfer.memory.buffers import DeviceSpan, Memory, address_of, copy_bytes
from moonpool.transfer.pending import ThreadPool
from moonpool.transfer.transports.cuda.driver import Device, driver


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


SLOT_NBYTES = 4 * 1024 * 1024
_MIN_SHARE_NBYTES = 4 * 1024 * 1024  # less is not worth waking another thread
_MIN_DIRECT_NBYTES = 32 * 1024  # below, the slot costs less than asking the driver
MAX_LANES = 4

Placed: TypeAlias = tuple[int, Memory]  # address on the GPU, and the other memory
_Direct: TypeAlias = tuple[int, DeviceSpan | int, int]  # address on the GPU, other memory or its address, nbytes


class _Slot(NamedTuple):
    address: int
    memory: memoryview
    event: int


class _Lane:
    """A stream and its two slots, for one thread at a time."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.stream()
        self._slots = [_Slot(*device.pinned(SLOT_NBYTES), device.event()) for _ in range(2)]

    @contextmanager
    def open(self) -> Iterator[_Lane]:
        """Copies of the block are over when it ends."""
        with self._device.current():
            try:
                yield self
            finally:
                self._device.wait_stream(self._stream)

    def start_read(self, address: int, target: DeviceSpan | int, nbytes: int) -> None:
        if isinstance(target, int):
            self._device.copy(target, address, nbytes, self._stream)
        else:
            self._between(target.address, driver().device_of(target.address), address, self._device, nbytes)

    def start_write(self, address: int, source: DeviceSpan | int, nbytes: int) -> None:
        if isinstance(source, int):
            self._device.copy(address, source, nbytes, self._stream)
        else:
            self._between(address, self._device, source.address, driver().device_of(source.address), nbytes)

    def start_batch(self, direct: Sequence[_Direct], *, is_read: bool) -> list[_Direct]:
        """Start copies between this GPU and main memory, or within the GPU, with one call. Return the others."""
        is_here: dict[int, bool] = {}  # by the owner of the memory
        near: list[tuple[int, int, int]] = []
        rest: list[_Direct] = []
        for each in direct:
            address, other, nbytes = each
            if isinstance(other, int):
                near.append((address, other, nbytes))
                continue
            known = is_here.get(id(other.owner)) if other.owner is not None else None
            if known is None:
                known = is_here[id(other.owner)] = driver().device_of(other.address).index == self._device.index
            if known:
                near.append((address, other.address, nbytes))
            else:
                rest.append(each)
        if near:
            here, there, sizes = np.array(near, np.uint64).T
            self._device.copy_batch(*((there, here) if is_read else (here, there)), sizes, self._stream)
        return rest

    def read(self, pieces: Sequence[DevicePiece], deadline: Deadline) -> None:
        full: tuple[_Slot, SlotLoad] | None = None
        for number, load in enumerate(cut_loads(pieces, SLOT_NBYTES)):
            _check_time(deadline)
            slot = self._slots[number % 2]
            for address, start, nbytes in load.runs:
                self._device.copy(slot.address + start, address, nbytes, self._stream)
            self._device.record(slot.event, self._stream)
            if full is not None:
                self._empty(*full)
            full = slot, load
        if full is not None:
            self._empty(*full)

    def write(self, pieces: Sequence[DevicePiece], deadline: Deadline) -> None:
        for number, load in enumerate(cut_loads(pieces, SLOT_NBYTES)):
            _check_time(deadline)
            slot = self._slots[number % 2]
            if number >= len(self._slots):
                self._device.wait_event(slot.event)
            for start, view in load.parts:
                copy_bytes(slot.memory[start : start + view.nbytes], view)
            for address, start, nbytes in load.runs:
                self._device.copy(address, slot.address + start, nbytes, self._stream)
            self._device.record(slot.event, self._stream)

    def _empty(self, slot: _Slot, load: SlotLoad) -> None:
        self._device.wait_event(slot.event)
        for start, view in load.parts:
            copy_bytes(view, slot.memory[start : start + view.nbytes])

    def _between(self, target: int, target_device: Device, source: int, source_device: Device, nbytes: int) -> None:
        if target_device.index == source_device.index:
            self._device.copy(target, source, nbytes, self._stream)
        else:
            self._device.copy_between(target, target_device, source, source_device, nbytes, self._stream)


_Stage: TypeAlias = Callable[[_Lane, Sequence[DevicePiece], Deadline], None]
_Start: TypeAlias = Callable[[_Lane, int, DeviceSpan | int, int], None]


class Mover:
    """The lanes of one GPU, shared by everything in this process. Use mover_of(). Thread-safe."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._changed = threading.Condition()
        self._idle: list[_Lane] = []
        self._num_lanes = 0
        self._crew = ThreadPool(f"cuda-copy-{device.index}", MAX_LANES)
        self._max_shares = max(1, min(MAX_LANES, (os.cpu_count() or 1) // 2))

    def read(self, placed: Sequence[Placed], deadline: Deadline) -> None:
        """From the GPU. Bounds are the caller's business."""
        self._move(placed, deadline, _Lane.read, _Lane.start_read)

    def write(self, placed: Sequence[Placed], deadline: Deadline) -> None:
        """To the GPU."""
        self._move(placed, deadline, _Lane.write, _Lane.start_write)

    def _move(self, placed: Sequence[Placed], deadline: Deadline, stage: _Stage, start: _Start) -> None:
        direct, staged = _sort_out(placed)
        shares = share_out(staged, self._max_shares, _MIN_SHARE_NBYTES)
        ended: SimpleQueue[MoonpoolError | None] = SimpleQueue()
        for share in shares[1:]:
            self._crew.run(partial(self._carry, share, deadline, stage, ended))
        error = _attempt(partial(self._carry_own, shares[0], direct, deadline, stage, start))
        others = [ended.get() for _ in shares[1:]]  # all of them: the caller's memory is in use until then
        error = error or next((other for other in others if other is not None), None)
        try:
            if error is not None:
                raise error
        finally:
            del error, others  # else error and frame keep each other, and the caller's memory, alive

    def _carry(
        self,
        share: Sequence[DevicePiece],
        deadline: Deadline,
        stage: _Stage,
        ended: SimpleQueue[MoonpoolError | None],
    ) -> None:
        def carry() -> None:
            with self._lane(deadline) as lane:
                stage(lane, share, deadline)

        ended.put(_attempt(carry))

    def _carry_own(
        self,
        share: Sequence[DevicePiece],
        direct: Sequence[_Direct],
        deadline: Deadline,
        stage: _Stage,
        start: _Start,
    ) -> None:
        if not share and not direct:
            return
        with self._lane(deadline) as lane:
            rest = lane.start_batch(direct, is_read=start is _Lane.start_read) if len(direct) > 1 else direct
            for address, other, nbytes in rest:
                start(lane, address, other, nbytes)
            stage(lane, share, deadline)

    @contextmanager
    def _lane(self, deadline: Deadline) -> Iterator[_Lane]:
        lane = self._take(deadline)
        try:
            with lane.open():
                yield lane
        finally:
            with self._changed:
                self._idle.append(lane)
                self._changed.notify()

    def _take(self, deadline: Deadline) -> _Lane:
        with self._changed:
            while not self._idle:
                if self._num_lanes < MAX_LANES:
                    made = _Lane(self.device)
                    self._num_lanes += 1
                    return made
                if not self._changed.wait(deadline.remaining_s()):
                    raise DeadlineExceeded(f"all copies of {self.device} were busy")
            return self._idle.pop()


@cache
def mover_of(device: Device) -> Mover:
    return Mover(device)


def in_main_memory(memories: Sequence[Memory], timeout_s: float) -> list[memoryview]:
    """Return the memories, those of a GPU (all of one) copied to main memory: for transports that reach no GPU."""
    views = [memoryview(bytearray(each.nbytes)) if isinstance(each, DeviceSpan) else each for each in memories]
    placed: list[Placed] = [
        (each.address, view) for each, view in zip(memories, views, strict=True) if isinstance(each, DeviceSpan)
    ]
    if placed:
        mover_of(driver().device_of(placed[0][0])).read(placed, Deadline(timeout_s))
    return views


def _sort_out(placed: Sequence[Placed]) -> tuple[list[_Direct], list[DevicePiece]]:
    """(address on the GPU, other memory, nbytes) of what can be copied directly, and what goes through slots."""
    direct: list[_Direct] = []
    staged: list[DevicePiece] = []
    for address, memory in placed:
        if isinstance(memory, DeviceSpan):
            if memory.nbytes:
                direct.append((address, memory, memory.nbytes))
        elif memory.nbytes >= _MIN_DIRECT_NBYTES and _is_pinned(memory):
            direct += _in_one_registration(address, address_of(memory), memory.nbytes)
        else:
            staged.append(DevicePiece(address, memory))
    return direct, staged


def _in_one_registration(address: int, other: int, nbytes: int) -> list[tuple[int, DeviceSpan | int, int]]:
    """Cut a copy where separately page-locked parts of main memory meet (pinning.py)."""
    edges = [other, *driver().registrations_between(other, other + nbytes), other + nbytes]
    return [(address + start - other, start, end - start) for start, end in pairwise(edges)]


def _is_pinned(view: memoryview) -> bool:
    start = address_of(view)
    return driver().is_pinned(start) and driver().is_pinned(start + view.nbytes - 1)


def _check_time(deadline: Deadline) -> None:
    if deadline.expired():
        raise DeadlineExceeded("the copy to or from the GPU was not done in time")


def _attempt(act: Callable[[], None]) -> MoonpoolError | None:
    """Why it failed; None when it did not."""
    try:
        act()
    except MoonpoolError as error:
        return error
    except Exception as error:  # noqa: BLE001 - a bug must fail its call, not hang it
        return Internal(f"{type(error).__name__}: {error}")
    return None
