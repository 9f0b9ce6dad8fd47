"""Objects to store, as callers describe them, and the PutStart calls made of them.

PutSettings are the keyword arguments of every put of moonpool.store.Store; their defaults are those of PutOptions.
Store.put_objects() takes Puts, PiecePuts.begin() takes PutRequests. Those with the same options and identity share one
PutStart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

import msgspec

from moonpool.base.errors import AlreadyExists, FewerReplicas, InvalidInput, MoonpoolError
from moonpool.base.object_header import NO_IDENTITY, ObjectKind, header_nbytes, pack_header, pack_single
from moonpool.store.keys_text import Key, key_bytes
from moonpool.store.messages import PutOptions, PutStart
from moonpool.transfer.memory.buffers import Buffer

V = TypeVar("V")


class PutSettings(TypedDict, total=False):
    num_replicas: int  # on distinct nodes first; fewer are taken when there is no more room
    all_replicas: bool  # refuse instead of taking fewer
    preferred: tuple[str, ...]  # segments to try first; default: memory of this machine
    pinned: bool  # never evicted, until it is removed
    soft_pin_s: float  # evicted only when nothing else is left, for this long
    replace: bool  # the old value stays readable until the new one is whole
    group: Key  # objects of one group are evicted together
    parent: Key  # the key of the block that this one continues
    identity: bytes  # digest of what makes the bytes usable; readers may insist on it


_OPTIONS = {
    "num_replicas": "num_replicas",
    "all_replicas": "all_replicas",
    "preferred": "preferred",
    "pinned": "hard_pin",
    "soft_pin_s": "soft_pin_s",
    "replace": "replace",
}


def put_fields(settings: PutSettings) -> dict[str, Any]:
    """Return the fields of a Put or PutRequest other than its key and bytes. InvalidInput for an unknown setting, and
    for an identity that is no digest.
    """
    if not settings:
        return {}
    given: dict[str, Any] = dict(settings)
    unknown = given.keys() - PutSettings.__annotations__.keys()
    if unknown:
        raise InvalidInput(f"a put has no setting {', '.join(sorted(unknown))}")
    fields: dict[str, Any] = {name: key_bytes(given[name]) for name in ("group", "parent") if name in given}
    if "identity" in given:
        fields["identity"] = given["identity"]
        if len(given["identity"]) != len(NO_IDENTITY):
            raise InvalidInput(f"an identity is a digest of {len(NO_IDENTITY)} bytes, not of {len(given['identity'])}")
    options = {field: given[name] for name, field in _OPTIONS.items() if name in given}
    if "preferred" in options:
        options["preferred"] = tuple(options["preferred"])
    if options:
        fields["options"] = PutOptions(**options)
    return fields


def key_value_pairs(items: Mapping[Any, V] | Iterable[tuple[Key, V]]) -> Iterable[tuple[Key, V]]:
    """Return the objects of a put, which a caller gives as a mapping or as pairs."""
    return items.items() if isinstance(items, Mapping) else items


def is_new(outcome: MoonpoolError | None) -> bool:
    """Return whether the put stored the object; False when the key was taken. Raise other errors."""
    if outcome is None or isinstance(outcome, FewerReplicas):
        return True
    if isinstance(outcome, AlreadyExists):
        return False
    raise outcome


MAX_BATCH_OBJECTS = 1000
MAX_BATCH_NBYTES = 256 * 1024 * 1024  # written within a fraction of the time after which a put is discarded
DEFAULT_OPTIONS = PutOptions()


class PutSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What Put and PutRequest have in common. `parent` is the key of the block that this one continues;
    objects of one `group` are evicted together.
    """

    kind: ObjectKind = ObjectKind.OPAQUE
    identity: bytes = NO_IDENTITY
    valid_tokens: int = 0
    options: PutOptions = DEFAULT_OPTIONS
    parent: bytes = b""
    group: bytes = b""


class Put(PutSpec, frozen=True):
    """An object with its bytes. Each buffer is a piece; large buffers of opaque objects are cut into several pieces."""

    key: bytes
    buffers: Sequence[Buffer]


def object_views(put: Put, generation: int, parts: Sequence[memoryview], checksums: Sequence[int]) -> list[memoryview]:
    """Return the object as it is written: its header, then its pieces, which have these checksums."""
    if len(parts) == 1:  # mostly
        nbytes, (checksum,) = parts[0].nbytes, checksums
        head, padding = pack_single(put.key, generation, nbytes, checksum, put.kind, put.identity, put.valid_tokens)
        return [memoryview(head + padding), parts[0]]
    header = pack_header(
        put.key,
        generation,
        [part.nbytes for part in parts],
        checksums,
        kind=put.kind,
        identity=put.identity,
        valid_tokens=put.valid_tokens,
    )
    return [memoryview(header), *parts]


class PutRequest(PutSpec, frozen=True):
    """An object whose pieces will be written one by one."""

    key: bytes
    piece_nbytes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of header and pieces together."""
        return header_nbytes(len(self.key), len(self.piece_nbytes)) + sum(self.piece_nbytes)


W = TypeVar("W", Put, PutRequest)


def bundle_puts(
    requests: Sequence[W], sizes: Sequence[int], positions: Sequence[int], max_nbytes: int = MAX_BATCH_NBYTES
) -> Iterator[list[int]]:
    """Yield the positions in bundles for one PutStart each: same options, same identity, at most `max_nbytes`."""
    if positions and len(positions) == len(requests) <= MAX_BATCH_OBJECTS and sum(sizes) <= max_nbytes:
        options, identity = requests[0].options, requests[0].identity
        if all([each.options is options and each.identity is identity for each in requests]):  # noqa: C419 - quicker
            yield list(positions)
            return
    alike: dict[tuple[PutOptions, bytes], list[int]] = {}
    last: W | None = None
    members: list[int] = []
    for position in positions:
        request = requests[position]
        if last is None or request.options is not last.options or request.identity is not last.identity:
            last, members = request, alike.setdefault((request.options, request.identity), [])
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
    requests: Sequence[W], sizes: Sequence[int], session: int, local_segment: str | None, settled_up_to: int = 0
) -> PutStart:
    """Return the call for the requests of one bundle."""
    options = requests[0].options
    identity = b"" if requests[0].identity == NO_IDENTITY else requests[0].identity
    if not options.preferred and local_segment is not None:
        options = msgspec.structs.replace(options, preferred=(local_segment,))
    if identity and not options.identity:
        options = msgspec.structs.replace(options, identity=identity)
    parents, groups = [each.parent for each in requests], [each.group for each in requests]
    return PutStart(
        keys=[each.key for each in requests],
        sizes=list(sizes),
        options=options,
        session=session,
        parents=parents if any(parents) else None,
        groups=groups if any(groups) else None,
        settled_up_to=settled_up_to,
    )
