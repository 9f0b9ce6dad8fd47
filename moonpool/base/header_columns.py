"""Headers of many objects, checked at once: read_plain() of object_header.py for a whole batch.

The headers are copied side by side, so that the fields and their checksum are of the same moment's bytes. What they
must be is written, field by field for all of them, over a second copy; a header is right if the two copies are the
same. One slice and one checksum per header remain.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import add

import numpy as np
from numpy.typing import NDArray

from moonpool.base.checksum import ChecksumKind, crc32c
from moonpool.base.object_header import ALIGN_NBYTES, GENERATION_AT, KINDS, MAGIC, NO_IDENTITY, VERSION, VOID_AT

_WORD_NBYTES = 8
_CRC_NBYTES = 4
_U64, _BYTE = np.dtype("<u8"), np.dtype(np.uint8)
_START = np.frombuffer(MAGIC + VERSION.to_bytes(2, "little") + bytes([ChecksumKind.CRC32C]), _BYTE)
_SIZES = ALIGN_NBYTES + (1 << 32)  # header_nbytes and num_pieces
_IS_KIND = np.isin(np.arange(256), list(KINDS))


class _Layout:
    """Headers with one piece and a key of one length. The names of the fields are those of object_header.py."""

    def __init__(self, key_nbytes: int) -> None:
        self.fields = np.dtype(
            [
                ("start", _BYTE, len(_START)),  # magic, version, checksum kind
                ("kind", _BYTE),
                ("any", _U64),  # reserved, valid_tokens
                ("sizes", _U64),  # header_nbytes, num_pieces
                ("generation", _U64),
                ("identity", _BYTE, 32),
                ("key_nbytes", "<u2"),
                ("key", _BYTE, key_nbytes),
                ("piece_nbytes", _U64),
                ("checksum", "<u4"),
                ("crc", "<u4"),
            ]
        )
        self.nbytes = self.fields.itemsize


_layout = lru_cache(maxsize=1024)(_Layout)


class PlainHeaders:
    """Headers of objects in one memory, at these offsets and expected to have these generations."""

    def __init__(self, memory: memoryview, offsets: Sequence[int], generations: Sequence[int]) -> None:
        """OverflowError when a number does not fit 64 bits."""
        self._memory, self._offsets = memory, offsets
        self._at = np.array(offsets, np.int64)
        self._generations = np.array(generations, _U64)
        self._words = np.frombuffer(memory, _U64, memory.nbytes // _WORD_NBYTES)

    def are_inside(self, sizes: Sequence[int]) -> bool:
        """Return whether all objects, of a page and a piece of this size, are in the memory, at multiples of 8."""
        is_inside = min(self._offsets) >= 0 and max(map(add, self._offsets, sizes)) + ALIGN_NBYTES <= len(self._memory)
        return is_inside and not int(np.bitwise_or.reduce(self._at)) % _WORD_NBYTES

    def read(
        self, keys: Sequence[bytes], sizes: Sequence[int], identity: bytes | None
    ) -> tuple[NDArray[np.bool_], NDArray[np.uint32]]:
        """Return which of the headers read_plain() would accept, and the checksum of each one's piece. The keys are of
        one length, and the headers of such objects leave room for the void mark.
        """
        assert identity is None or len(identity) == len(NO_IDENTITY), "an identity digest is 32 bytes"
        memory, layout = self._memory, _layout(len(keys[0]))
        used, fields = layout.nbytes, layout.fields
        raw = b"".join([memory[at : at + used] for at in self._offsets])
        expected = bytearray(raw)
        found, right = np.frombuffer(raw, fields), np.frombuffer(expected, fields)
        right["start"], right["sizes"], right["key_nbytes"] = _START, _SIZES, len(keys[0])
        right["generation"], right["piece_nbytes"] = self._generations, sizes
        right["key"] = np.frombuffer(b"".join(keys), _BYTE).reshape(len(keys), len(keys[0]))
        if identity is not None:
            right["identity"] = np.frombuffer(identity, _BYTE)
        right["crc"] = [crc32c(raw[at : at + used - _CRC_NBYTES]) for at in range(0, len(raw), used)]
        is_plain = _IS_KIND[found["kind"]]
        if expected != raw:  # seldom: which of them is it?
            rows = np.frombuffer(raw, _BYTE) == np.frombuffer(expected, _BYTE)
            is_plain &= rows.reshape(-1, used).all(axis=1)
        return is_plain, found["checksum"]

    def are_void(self) -> NDArray[np.bool_]:
        """is_void() of each."""
        return self._have_generation_at(VOID_AT)

    def have_generation(self) -> NDArray[np.bool_]:
        """Return whether each header in the memory states its generation now."""
        return self._have_generation_at(GENERATION_AT)

    def _have_generation_at(self, position: int) -> NDArray[np.bool_]:
        """Return for each header whether the word at this byte of it is its generation."""
        are_equal: NDArray[np.bool_] = self._words[(self._at + position) // _WORD_NBYTES] == self._generations
        return are_equal
