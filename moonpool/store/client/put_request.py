"""What a caller wants stored, and how such wishes are bundled into calls to the master."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from moonpool.base.object_header import NO_IDENTITY, ObjectKind, header_nbytes
from moonpool.store.messages import PutOptions, PutStart
from moonpool.transfer.memory.buffers import Buffer

MAX_BATCH_OBJECTS = 1000
MAX_BATCH_NBYTES = 256 * 1024 * 1024  # written within a fraction of the time after which a put is discarded
DEFAULT_OPTIONS = PutOptions()


class PutSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What every object to store has beside its bytes. `parent` is the key of the block that this one continues;
    objects of one `group` are evicted together.
    """

    kind: ObjectKind = ObjectKind.OPAQUE
    identity: bytes = NO_IDENTITY
    valid_tokens: int = 0
    options: PutOptions = DEFAULT_OPTIONS
    parent: bytes = b""
    group: bytes = b""


class Put(PutSpec, frozen=True):
    """An object with its bytes. Its buffers are its pieces; those of opaque objects are cut where they are large."""

    key: bytes
    buffers: Sequence[Buffer]


class PutRequest(PutSpec, frozen=True):
    """An object whose pieces are going to be written one by one."""

    key: bytes
    piece_nbytes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Header and pieces."""
        return header_nbytes(len(self.key), len(self.piece_nbytes)) + sum(self.piece_nbytes)


W = TypeVar("W", Put, PutRequest)


def bundle(
    wishes: Sequence[W], sizes: Sequence[int], positions: Sequence[int], max_nbytes: int = MAX_BATCH_NBYTES
) -> Iterator[list[int]]:
    """The positions in bundles whose wishes have their options and identity in common, none too large."""
    alike: dict[tuple[PutOptions, bytes], list[int]] = {}
    last: W | None = None
    members: list[int] = []
    for position in positions:
        wish = wishes[position]
        if last is None or wish.options is not last.options or wish.identity is not last.identity:
            last, members = wish, alike.setdefault((wish.options, wish.identity), [])
        members.append(position)
    for members in alike.values():
        yield from _cut_bundle(members, sizes, max_nbytes)


def _cut_bundle(members: list[int], sizes: Sequence[int], max_nbytes: int) -> Iterator[list[int]]:
    taken: list[int] = []
    nbytes = 0
    for position in members:
        if taken and (len(taken) == MAX_BATCH_OBJECTS or nbytes + sizes[position] > max_nbytes):
            yield taken
            taken, nbytes = [], 0
        taken.append(position)
        nbytes += sizes[position]
    if taken:
        yield taken


def put_start(
    wishes: Sequence[W], sizes: Sequence[int], session: int, local_segment: str | None, settled_up_to: int = 0
) -> PutStart:
    """The call for wishes of one bundle."""
    options = wishes[0].options
    identity = b"" if wishes[0].identity == NO_IDENTITY else wishes[0].identity
    if not options.preferred and local_segment is not None:
        options = msgspec.structs.replace(options, preferred=(local_segment,))
    if identity and not options.identity:
        options = msgspec.structs.replace(options, identity=identity)
    parents, groups = [wish.parent for wish in wishes], [wish.group for wish in wishes]
    return PutStart(
        keys=[wish.key for wish in wishes],
        sizes=list(sizes),
        options=options,
        session=session,
        parents=parents if any(parents) else None,
        groups=groups if any(groups) else None,
        settled_up_to=settled_up_to,
    )
