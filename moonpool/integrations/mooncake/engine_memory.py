"""The memory of this process that a `mooncake.engine` TransferEngine serves, by address.

Every registered range is a segment of the transfer engine; its name carries the address (range_name()). A pointer is an
int, so register() checks that the process has the memory mapped, or that it is a GPU's. Managed buffers are cut from
shared memory, which other processes of this machine reach without tcp.
"""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections.abc import Sequence
from pathlib import Path

from moonpool.base.errors import AlreadyExists, InvalidInput, NotFound, Unavailable
from moonpool.integrations.mooncake.engine_slabs import SlabAllocator
from moonpool.integrations.mooncake.registered_memory import is_mapped
from moonpool.transfer.engine import TransferEngine
from moonpool.transfer.memory.buffers import DeviceSpan, Memory, RawMemory, address_of, as_memory
from moonpool.transfer.memory.location import parse_location
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.transports.cuda.driver import Device, driver

RANGE_PREFIX = "mooncake-"
ANYWHERE = "*"  # upstream's location of memory that its caller says nothing about
_MAPS = Path("/proc/self/maps")


def range_name(address: int) -> str:
    """Return the segment's name of the range that begins there. Names sort as their addresses do."""
    return f"{RANGE_PREFIX}{address:016x}"


def range_start(name: str) -> int:
    """Return the address in the name of a range; InvalidInput when it is no such name."""
    digits = name.removeprefix(RANGE_PREFIX)
    if digits == name or len(digits) != 16:
        raise InvalidInput(f"{name!r} is no range of memory")
    try:
        return int(digits, 16)
    except ValueError as error:
        raise InvalidInput(f"{name!r} is no range of memory") from error


class EngineMemory:
    """Thread-safe. Borrows the transfer engine, which serves the ranges until unregister() or its close()."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._starts: list[int] = []  # sorted
        self._ranges: dict[int, Memory] = {}  # by start
        self._arenas: dict[int, Segment] = {}  # those that hold managed buffers
        self._slabs = SlabAllocator(self._add_arena, self._drop_arena)

    def register(self, address: int, nbytes: int, location: str = ANYWHERE) -> None:
        """Serve the range. InvalidInput when it is no memory of this process, AlreadyExists when a part of it is
        registered.
        """
        memory = find_memory(address, nbytes, location)
        with self._lock:
            self._check_free(address, nbytes)
            self._engine.register(range_name(address), memory)
            self._keep(address, as_memory(memory, writable=True))

    def unregister(self, address: int) -> None:
        """Withdraw the range. NotFound when none begins exactly there; managed memory is freed, not unregistered."""
        with self._lock:
            if address not in self._ranges or address in self._arenas:
                raise NotFound(f"nothing is registered at {address:#x}")
            self._engine.unregister(range_name(address))
            self._forget(address)

    def allocate(self, nbytes: int) -> int:
        """Return the address of a managed buffer, which is registered. NoSpace when there is no memory left."""
        if nbytes < 0:
            raise InvalidInput(f"a buffer cannot have {nbytes} bytes")
        with self._lock:
            return self._slabs.allocate(nbytes)

    def free(self, address: int) -> None:
        """Free a managed buffer. NotFound when none begins there."""
        with self._lock:
            if not self._slabs.free(address):
                raise NotFound(f"no managed buffer begins at {address:#x}")

    def views(self, addresses: Sequence[int], sizes: Sequence[int]) -> list[Memory]:
        """Return the memory at each address: inside one registered range, or main memory that the process has mapped.
        InvalidInput for any other.
        """
        maps: str | None = None
        found: list[Memory] = []
        for address, nbytes in zip(addresses, sizes, strict=True):
            memory = self._registered(address, nbytes)
            if memory is None:
                maps = _MAPS.read_text() if maps is None else maps
                memory = _mapped(address, nbytes, maps)
            found.append(memory)
        return found

    def close(self) -> None:
        """Release the managed buffers, after the engine was closed. Idempotent."""
        with self._lock:
            arenas, self._arenas = list(self._arenas.values()), {}
            self._starts.clear()
            self._ranges.clear()
        for segment in arenas:
            segment.close()

    def _registered(self, address: int, nbytes: int) -> Memory | None:
        with self._lock:
            at = bisect_right(self._starts, address)
            start = self._starts[at - 1] if at else 0
            whole = self._ranges.get(start)
        if whole is None or nbytes < 0 or address + nbytes > start + whole.nbytes:
            return None
        return whole[address - start : address - start + nbytes]

    def _check_free(self, address: int, nbytes: int) -> None:
        after = bisect_right(self._starts, address + nbytes - 1)
        before = self._starts[after - 1] if after else None
        if before is not None and before + self._ranges[before].nbytes > address:
            raise AlreadyExists(f"{nbytes} bytes at {address:#x} overlap registered memory")

    def _keep(self, address: int, memory: Memory) -> None:
        insort(self._starts, address)
        self._ranges[address] = memory

    def _forget(self, address: int) -> None:
        self._starts.remove(address)
        del self._ranges[address]

    def _add_arena(self, nbytes: int) -> int:
        segment = Segment.allocate(f"{RANGE_PREFIX}arena", nbytes, incarnation=self._engine.incarnation)
        try:
            memory = segment.memory
            address = address_of(memory)
            segment.name = range_name(address)  # which the kernel has chosen only now
            self._engine.serve(segment)
        except BaseException:
            segment.close()
            raise
        self._arenas[address] = segment
        self._keep(address, memory)
        return address

    def _drop_arena(self, address: int) -> None:
        self._engine.unserve(range_name(address))
        self._forget(address)
        self._arenas.pop(address).close()


def find_memory(address: int, nbytes: int, location: str) -> RawMemory:
    """Return the memory at a pointer: a GPU's, or main memory that this process can read and write. `location` is
    upstream's ("*", "cpu:0", "cuda:1"). InvalidInput when there is no such memory.
    """
    claim = "cpu" if location in ("", ANYWHERE) else str(parse_location(location))
    device = gpu_of(address)
    if device is not None:
        return RawMemory(address, nbytes, f"cuda:{device.index}")
    if claim.startswith("cuda"):
        raise InvalidInput(f"{address:#x} is not memory of a GPU, although {location} is stated")
    memory = RawMemory(address, nbytes, claim)
    _check_mapped(address, nbytes, _MAPS.read_text())
    return memory


def gpu_of(address: int) -> Device | None:
    """Return the GPU whose memory this is; None for other memory, and where there is no GPU."""
    try:
        return driver().device_of(address) if address > 0 else None
    except (InvalidInput, Unavailable):
        return None


def _mapped(address: int, nbytes: int, maps: str) -> Memory:
    if gpu_of(address) is not None:
        return DeviceSpan(address, nbytes)
    _check_mapped(address, nbytes, maps)
    return as_memory(RawMemory(address, nbytes), writable=True)


def _check_mapped(address: int, nbytes: int, maps: str) -> None:
    if nbytes <= 0 or address <= 0 or not is_mapped(address, nbytes, maps):
        raise InvalidInput(f"{nbytes} bytes at {address:#x} are no memory that this process can read and write")
