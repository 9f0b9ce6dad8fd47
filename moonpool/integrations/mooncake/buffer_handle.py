"""`BufferHandle`: a value that was read, as memory with an address."""

from __future__ import annotations

import ctypes


class BufferHandle(bytearray):
    """The bytes of one value, writable and owned by this object. It offers the buffer protocol; keep the object for as
    long as its address is used.
    """

    def ptr(self) -> int:
        """Return the address of the first byte; 0 when there is none."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self)) if self else 0

    def size(self) -> int:
        return len(self)
