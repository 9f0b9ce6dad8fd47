"""Promise 1 of the store: a read never returns a wrong byte. Every way to read an object goes through this module.

A reader uses an object's bytes only after these checks, in this order:

1. check_header(): the header in front of the bytes has the right checksum; it states the key, the identity and the
   generation that the reader asked for, and pieces that fill the object's space exactly. For small objects
   read_plain() of object_header.py makes the same checks of headers of the usual kind.
2. are_right() or are_whole(): every piece, as it lies in the reader's own memory, has the checksum that the header
   states.
3. has_generation() or is_unchanged(), after the last byte was read: the header still stands there, so the space was
   not given to another object meanwhile. Two kinds of remote segments do not need it: one whose owner checks the
   generation of what it sends (`checks_generation`), and one whose bytes are written once (`written_once`).

Bytes that fail a check may lie in the caller's memory; they are never reported as read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias, TypeVar

from moonpool.base.checksum import crc32c
from moonpool.base.errors import Corrupt
from moonpool.base.object_header import (
    GENERATION,
    GENERATION_AT,
    HeaderFields,
    has_void_mark,
    is_void,
    read_fields,
)
from moonpool.store.messages import ObjectInfo, Placement

PREFIX_NBYTES = 64  # enough of the header to see whose it is: magic to identity

_generation_at = GENERATION.unpack_from


class Sized(Protocol):
    """Memory of any kind: a memoryview, an array, a tensor."""

    @property
    def nbytes(self) -> int: ...


M = TypeVar("M", bound=Sized)
# Copier and checksummer for one kind of memory: fill the memory with the bytes from this offset of the segment on, and
# return their crc32c, continued from the value given.
CopyAndSum: TypeAlias = Callable[[int, M, int], int]


def check_header(
    memory: bytes | bytearray | memoryview, offset: int, info: ObjectInfo, place: Placement, identity: bytes | None
) -> HeaderFields:
    """Return the header at `offset`, for the object `info` at the replica `place`; `identity` None accepts any.

    Raise Corrupt when it is damaged or its pieces do not fill the object's space, StaleGeneration when it is of another
    object or allocation, IdentityMismatch when it is of another identity.
    """
    fields = read_fields(memory, offset)
    if fields.generation != place.generation or fields.key != info.key or identity not in (None, fields.identity):
        fields.check(info.key, place.generation, identity)
    if fields.nbytes + sum(fields.sizes) != info.nbytes:
        raise Corrupt(f"the pieces of {info.key.hex()[:16]} do not fit its space")
    return fields


def sum_arrived(_at: int, view: memoryview, found: int) -> int:
    """CopyAndSum for bytes that are in the reader's memory already."""
    return crc32c(view, found)


def are_right(header: HeaderFields, pieces: Iterable[Sequence[M]], copy_and_sum: CopyAndSum[M], at: int = 0) -> bool:
    """Fill the memory of each piece and compare its checksum with the header's. False at the first that differs.

    `at` is where the first piece lies, for the copier.
    """
    for views, checksum in zip(pieces, header.checksums, strict=True):
        found = 0
        for view in views:
            found = copy_and_sum(at, view, found)
            at += view.nbytes
        if found != checksum and header.checksum_kind:
            return False
    return True


def are_whole(header: HeaderFields, data: bytes | memoryview) -> bool:
    """are_right() for all pieces in one memory, one behind the other."""
    if not header.checksum_kind:
        return True
    if len(header.sizes) == 1:  # mostly
        return crc32c(data) == header.checksums[0]
    at = 0
    for nbytes, checksum in zip(header.sizes, header.checksums, strict=True):
        if crc32c(data[at : at + nbytes]) != checksum:
            return False
        at += nbytes
    return True


def check_piece(header: HeaderFields, index: int, views: Sequence[memoryview]) -> None:
    """Raise Corrupt unless the bytes in `views` are piece `index`."""
    found = 0
    for view in views:
        found = sum_arrived(0, view, found)
    if found != header.checksums[index] and header.checksum_kind:
        raise Corrupt(f"checksum of piece {index} of {header.key.hex()[:16]} does not match")


def may_be_remembered(memory: bytes | bytearray | memoryview, offset: int, header: HeaderFields) -> bool:
    """Return whether a reader that has not asked the master may use the object whose header is at `offset`."""
    return has_void_mark(len(header.key), len(header.sizes)) and not is_void(memory, offset, header.generation)


def has_generation(memory: memoryview, offset: int, generation: int) -> bool:
    """Whether the header at `offset` of mapped memory still states the generation."""
    (found,) = _generation_at(memory, offset + GENERATION_AT)
    return found == generation  # type: ignore[no-any-return]


def is_unchanged(before: bytes | bytearray | memoryview, after: bytes | bytearray | memoryview) -> bool:
    """Whether two reads of a header, of which the second may have its first PREFIX_NBYTES only, are of one object."""
    return bytes(before[:PREFIX_NBYTES]) == bytes(after[:PREFIX_NBYTES])
