"""Stores in a dict, for tests of structured objects."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np


class DictStore:
    """Only what every store has."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def put(self, key: str, value: Any, config: Any = None) -> int:
        self.objects[key] = bytes(value)
        return 0

    def get(self, key: str) -> bytes:
        return self.objects.get(key, b"")

    def remove(self, key: str, force: bool = False) -> int:
        return 0 if self.objects.pop(key, None) is not None else -704


class PointerStore(DictStore):
    """A store that reads memory by pointer, and fails at one call."""

    def __init__(self, fails_at: int = -1) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.fails_at = fails_at

    def batch_put_from(self, keys: list[str], pointers: list[int], sizes: list[int], config: Any = None) -> list[int]:
        self.calls += keys
        if len(self.calls) == self.fails_at:
            return [-800] * len(keys)
        for key, pointer, size in zip(keys, pointers, sizes, strict=True):
            self.put(key, ctypes.string_at(pointer, size))
        return [0] * len(keys)


class Leases:
    """A pool of ordinary memory that counts."""

    def __init__(self) -> None:
        self.num_out = 0

    def acquire(self, size: int) -> Lease:
        self.num_out += 1
        return Lease(self, size)


class Lease:
    def __init__(self, pool: Leases, size: int) -> None:
        self._pool = pool
        self.buffer = memoryview(bytearray(size))
        self.ptr = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))

    def release(self) -> None:
        self._pool.num_out -= 1


def column(*values: Any) -> np.ndarray[Any, Any]:
    rows = np.empty(len(values), dtype=object)
    for at, value in enumerate(values):
        rows[at] = value
    return rows
