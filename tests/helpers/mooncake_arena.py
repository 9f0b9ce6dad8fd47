"""Registered memory for tests of Mooncake's API."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from moonpool.integrations.mooncake import MooncakeDistributedStore


class Arena:
    """Registered memory, with pointers into it."""

    def __init__(self, store: MooncakeDistributedStore, nbytes: int = 256 * 1024) -> None:
        self.bytes = np.zeros(nbytes, dtype=np.uint8)
        self.address = int(self.bytes.ctypes.data)
        assert store.register_buffer(self.address, nbytes) == 0

    def pointers(self, sizes: Sequence[int], at: int = 0) -> list[int]:
        """Consecutive buffers of these sizes, with a gap of 7 bytes behind each."""
        starts = [at]
        for size in sizes[:-1]:
            starts.append(starts[-1] + size + 7)
        return [self.address + start for start in starts]

    def write(self, pointers: Sequence[int], sizes: Sequence[int], value: bytes) -> None:
        at = 0
        for pointer, size in zip(pointers, sizes, strict=True):
            start = pointer - self.address
            self.bytes[start : start + size] = np.frombuffer(value[at : at + size], np.uint8)
            at += size

    def read(self, pointers: Sequence[int], sizes: Sequence[int]) -> bytes:
        starts = [pointer - self.address for pointer in pointers]
        return b"".join(self.bytes[start : start + size].tobytes() for start, size in zip(starts, sizes, strict=True))


def value_of(nbytes: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(nbytes)
