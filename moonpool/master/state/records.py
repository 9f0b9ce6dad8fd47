"""What the journal holds: the outcomes of events, absolute and in order. Pure.

Not the events themselves: a look-up is an event too, at a million keys a second, and its only outcome is a lease,
which does not outlive the master. What one event brought is one entry of the journal, so that a crash leaves all of it
or nothing. A record about an object says what is so from now on, whatever was so before; that is what allows the
objects to be written to a snapshot in steps while they go on changing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.master.state.changes import RemovalReason
from moonpool.master.state.segments import Place
from moonpool.master.state.table import Replica
from moonpool.store.messages import Tier


class Record(msgspec.Struct, array_like=True, tag=True):
    """Base of all. The class names are tags on disk. A field may be added at the end, with a default that is what the
    records had in mind that lack it; any other change of fields is a new class.
    """


class Began(Record):
    """First of a snapshot: numbers that must not be used again.

    With `adopts` set this master's first life began with nothing, so it takes what SSDs have; it has asked `listed`.
    """

    epoch: int
    last_segment_number: int
    last_generation: int
    adopts: bool
    listed: list[str]


class Mounted(Record):
    number: int
    node: str
    descriptor: SegmentDescriptor
    tier: Tier
    desk: str | None
    capacity_nbytes: int
    floor: int
    draining: bool = False


class SegmentsEnded(Record):
    """`heirs` are the SSD segments that may have their objects, 0 for none."""

    numbers: list[int]
    heirs: list[int]


class SegmentsAway(Record):
    numbers: list[int]


class Listed(Record):
    """The SSD segment of that name has shown all it holds."""

    name: str


class Draining(Record):
    number: int
    on: bool


class Identified(Record):
    """An identity digest has that number in the columns."""

    number: int
    digest: bytes


class Granted(Record):
    """Puts were begun. `flags` as in the table; `soft_pin_s` counts from the moment they are stored.

    `parents` are keys, b"" for none; None stands for the key before it in this record, whose successor most blocks are.
    """

    keys: list[bytes]
    sizes: list[int]
    generations: list[int]
    places: list[list[Place]]
    session: int
    flags: int
    identity: int
    soft_pin_s: float
    replace: bool
    groups: list[bytes] | None
    parents: list[bytes | None] | None = None
    let_go: int = 0  # of the session, as LetGo


def shortened(parents: Sequence[bytes], keys: Sequence[bytes]) -> list[bytes | None]:
    """As in Granted."""
    before = (b"", *keys)
    return [None if parent == last else parent for parent, last in zip(parents, before, strict=False)]


def lengthened(parents: Sequence[bytes | None], keys: Sequence[bytes]) -> list[bytes]:
    before = (b"", *keys)
    return [last if parent is None else parent for parent, last in zip(parents, before, strict=False)]


class PutsEnded(Record):
    """Those puts are objects now. `left` has, by position, the places that remain where some could not be written."""

    keys: list[bytes]
    generations: list[int]
    left: dict[int, list[Place]]


class PutsAbandoned(Record):
    """Those puts ended without an object. `kept` says for which the space is still to be freed (Freed)."""

    keys: list[bytes]
    generations: list[int]
    fates: list[int]
    kept: list[bool]


class Freed(Record):
    """The space of abandoned puts is free."""

    generations: list[int]


class LetGo(Record):
    """The process has none of its puts in its hands whose generation is up to that one."""

    session: int
    up_to: int


class Dropped(Record):
    keys: list[bytes]
    fates: list[int]


class Placed(Record):
    """Objects as they are now: columns, one entry per object. Those that replaced others have another version."""

    keys: list[bytes]
    versions: list[int]
    sizes: list[int]
    flags: list[int]
    identities: list[int]
    dram: list[list[Replica]]
    ssd: list[Replica | None]
    groups: dict[int, bytes]  # by position
    soft_pins_s: dict[int, float]  # by position, for how long from now on; in snapshots only
    parents: dict[int, bytes] = {}  # by position: keys of those that are still there; b"" is the key before it here

    def tell_parent(self, parent: bytes) -> None:
        """Of the object that is added next."""
        is_last = bool(self.keys) and self.keys[-1] == parent
        self.parents[len(self.keys)] = b"" if is_last else parent

    def parent(self, at: int) -> bytes | None:
        told = self.parents.get(at)
        return self.keys[at - 1] if told == b"" else told


class Pinned(Record):
    session: int
    keys: list[bytes]


class Unpinned(Record):
    session: int
    keys: list[bytes]


class SessionsEnded(Record):
    sessions: list[int]


class HeldPut(Record):
    """In snapshots: space of an abandoned put that is not free yet."""

    generation: int
    session: int
    places: list[Place]
    nbytes: int


class Viewed(Record):
    """Space that a pinned object gave up: it belongs to the object's pins, until the last of them ends.

    With `ended` the object is gone, and whoever pins the key from here on pins another one.
    """

    key: bytes
    places: list[Place]
    nbytes: int
    ended: bool


class Fated(Record):
    """In snapshots: what became of keys, `ages_s` ago."""

    keys: list[bytes]
    fates: list[int]
    ages_s: list[float]


AnyRecord = (
    Began
    | Mounted
    | SegmentsEnded
    | SegmentsAway
    | Listed
    | Draining
    | Identified
    | Granted
    | PutsEnded
    | PutsAbandoned
    | Freed
    | LetGo
    | Dropped
    | Placed
    | Pinned
    | Unpinned
    | SessionsEnded
    | HeldPut
    | Viewed
    | Fated
)

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[list[AnyRecord]] = msgspec.msgpack.Decoder(list[AnyRecord])


def encode(records: Sequence[Record]) -> bytes:
    """One entry of the journal."""
    return _ENCODER.encode(records)


def decode(entry: bytes) -> list[AnyRecord]:
    """msgspec.DecodeError when it is none of ours."""
    return _DECODER.decode(entry)


class Outcomes:
    """Collects records between two moments at which the shell writes them down. Off, it collects nothing."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._records: list[Record] = []

    def add(self, record: Record) -> None:
        if self.enabled:
            self._records.append(record)

    def dropped(self, key: bytes, fate: RemovalReason) -> None:
        """Many in a row are one record."""
        if not self.enabled:
            return
        last = self._records[-1] if self._records else None
        if isinstance(last, Dropped):
            last.keys.append(key)
            last.fates.append(int(fate))
        else:
            self._records.append(Dropped([key], [int(fate)]))

    def placed(
        self,
        key: bytes,
        version: int,
        nbytes: int,
        flags: int,
        identity: int,
        dram: list[Replica],
        ssd: Replica | None,
        group: bytes | None,
        parent: bytes | None,
    ) -> None:
        if not self.enabled:
            return
        last = self._records[-1] if self._records else None
        if not isinstance(last, Placed):
            last = Placed([], [], [], [], [], [], [], {}, {})
            self._records.append(last)
        if group is not None:
            last.groups[len(last.keys)] = group
        if parent is not None:
            last.tell_parent(parent)
        last.keys.append(key)
        last.versions.append(version)
        last.sizes.append(nbytes)
        last.flags.append(flags)
        last.identities.append(identity)
        last.dram.append(dram)
        last.ssd.append(ssd)

    def take(self) -> Sequence[bytes]:
        if not self._records:
            return ()
        records, self._records = self._records, []
        return [encode(records)]
