"""The main memory that the caller registered, by address. No other memory of the caller is read or written.

A pointer is an int here, so nothing keeps the memory alive or describes it. register() therefore checks that the
process has it mapped for reading and writing (GPU memory is not: device_memory.py is for that), and view() returns only
memory inside one registered range. The caller promises that it stays mapped until unregister().
"""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections.abc import Sequence
from operator import add
from pathlib import Path

from moonpool.base.errors import InvalidInput
from moonpool.transfer.memory.buffers import RawMemory, as_bytes_view

_MAPS = Path("/proc/self/maps")
_NOTHING = memoryview(b"")
_NO_RANGE = (_NOTHING, 0, -1)  # a range as _range_of() returns it, in which nothing is


class RegisteredMemory:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []  # sorted
        self._views: dict[int, memoryview] = {}  # by start
        self._last = _NO_RANGE  # the range that was used last: mostly the next one, too

    def register(self, address: int, nbytes: int) -> None:
        """InvalidInput when it is no main memory of this process or overlaps what is registered."""
        memory = RawMemory(address, nbytes)
        if not is_mapped(address, nbytes, _MAPS.read_text()):
            raise InvalidInput(f"{nbytes} bytes at {address:#x} are no main memory that this process can write")
        with self._lock:
            after = bisect_right(self._starts, address + nbytes - 1)
            before = self._starts[after - 1] if after else None
            if before is not None and before + self._views[before].nbytes > address:
                raise InvalidInput(f"{nbytes} bytes at {address:#x} overlap registered memory")
            insort(self._starts, address)
            self._views[address] = as_bytes_view(memory, writable=True)

    def unregister(self, address: int) -> None:
        """InvalidInput when nothing was registered at exactly that address."""
        with self._lock:
            if self._views.pop(address, None) is None:
                raise InvalidInput(f"nothing is registered at {address:#x}")
            self._starts.remove(address)
            self._last = _NO_RANGE

    def view(self, address: int, nbytes: int) -> memoryview:
        """Return the bytes. InvalidInput unless they are inside one registered range."""
        return self.views((address,), (nbytes,))[0]

    def find(self, address: int, nbytes: int) -> memoryview | None:
        """view(), or None where it raises or there are no bytes: for a single value, without a list."""
        whole, start, end = self._last
        if not (start <= address and address + nbytes <= end):
            try:
                whole, start, end = self._range_of(address, nbytes)
            except InvalidInput:
                return None
        return whole[address - start : address - start + nbytes] if nbytes > 0 else None

    def views(self, addresses: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        """view() of each, of as many sizes as addresses. Batches of a thousand are made here: most of their memory is
        in one range, which is looked up once.
        """
        whole, start, end = self._last
        if addresses and min(addresses) >= start and min(sizes) >= 0 and max(map(add, addresses, sizes)) <= end:
            return [whole[at - start : at - start + nbytes] for at, nbytes in zip(addresses, sizes, strict=True)]
        found: list[memoryview] = []
        for address, nbytes in zip(addresses, sizes, strict=True):
            if not (start <= address and nbytes >= 0 and address + nbytes <= end):
                whole, start, end = self._range_of(address, nbytes)
            found.append(whole[address - start : address - start + nbytes])
        return found

    def _range_of(self, address: int, nbytes: int) -> tuple[memoryview, int, int]:
        """Return the registered range that the bytes are in, with its start and end."""
        with self._lock:
            at = bisect_right(self._starts, address)
            start = self._starts[at - 1] if at else 0
            whole = self._views.get(start)
            if whole is None or nbytes < 0 or address + nbytes > start + whole.nbytes:
                raise InvalidInput(f"{nbytes} bytes at {address:#x} are not registered")
            found = self._last = whole, start, start + whole.nbytes
        return found

    def clear(self) -> None:
        with self._lock:
            self._starts.clear()
            self._views.clear()
            self._last = _NO_RANGE


def is_mapped(address: int, nbytes: int, maps: str) -> bool:
    """Return whether all of it is readable and writable. `maps` is the text of /proc/self/maps, sorted by address."""
    at, end = address, address + nbytes
    for line in maps.splitlines():
        span, _, rest = line.partition(" ")
        low, _, high = span.partition("-")
        if int(high, 16) <= at:
            continue
        if int(low, 16) > at or not rest.startswith("rw"):
            return False
        at = int(high, 16)
        if at >= end:
            return True
    return False
