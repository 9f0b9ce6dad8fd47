"""What the journal holds: the outcomes of events, absolute and in order. Pure.

The journal does not hold the events themselves: a look-up is an event too, at a million keys a second, and its only
outcome is a lease, which does not survive the master. The outcomes of one event are one entry of the journal, so a
crash leaves all of them or none. A record about an object gives its new state, independent of the state before; so
objects can be written to a snapshot in steps while they go on changing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.master.state.changes import RemovalReason
from moonpool.master.state.segments import Place
from moonpool.master.state.table import Flag, ObjectTable, Replica
from moonpool.master.state.unsynced import UnsyncedKeys
from moonpool.store.messages import Tier


class Record(msgspec.Struct, array_like=True, tag=True):
    """Base of all records. The class names are tags on disk. A field may be added at the end, with the default that
    holds for records without the field; any other change of fields needs a new class.
    """


class Began(Record):
    """First of a snapshot: numbers that must not be used again.

    With `adopts` the first master of this journal began without objects, so it accepts unknown records of SSDs; the SSD
    segments in `listed` have listed their records already.
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
    registry_address: str | None
    capacity_nbytes: int
    floor: int
    draining: bool = False


class SegmentsEnded(Record):
    """`successors` are the SSD segments that may have the objects of these segments, 0 for none."""

    numbers: list[int]
    successors: list[int]


class SegmentsAway(Record):
    numbers: list[int]


class Listed(Record):
    """The SSD segment of that name has listed all its records."""

    name: str


class Draining(Record):
    number: int
    on: bool


class Identified(Record):
    """The number of an identity digest in the columns."""

    number: int
    digest: bytes


class Granted(Record):
    """Puts were begun. `flags` as in the table; `soft_pin_s` counts from the time the object is stored.

    `parents` are keys, b"" for none; None stands for the key before it in this record, which is the parent of most
    blocks.
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
    number: int = 0  # of the PutStart


def shortened(parents: Sequence[bytes], keys: Sequence[bytes]) -> list[bytes | None]:
    """Return the parents in the short form of Granted."""
    before = (b"", *keys)
    return [None if parent == last else parent for parent, last in zip(parents, before, strict=False)]


def lengthened(parents: Sequence[bytes | None], keys: Sequence[bytes]) -> list[bytes]:
    """Undo shortened()."""
    before = (b"", *keys)
    return [last if parent is None else parent for parent, last in zip(parents, before, strict=False)]


class PutsEnded(Record):
    """These puts are objects now. `left` has, by position, the remaining places of puts that lost some."""

    keys: list[bytes]
    generations: list[int]
    left: dict[int, list[Place]]


class PutsAbandoned(Record):
    """These puts ended without an object. Where `kept` is True, the space is freed later (Freed)."""

    keys: list[bytes]
    generations: list[int]
    fates: list[int]
    kept: list[bool]


class Freed(Record):
    """The space of abandoned puts is free."""

    generations: list[int]


class LetGo(Record):
    """The process no longer writes puts up to that generation."""

    session: int
    up_to: int


class Dropped(Record):
    keys: list[bytes]
    fates: list[int]


class Placed(Record):
    """The present state of objects: columns, one entry per object. An object that replaced another
    has a new version.
    """

    keys: list[bytes]
    versions: list[int]
    sizes: list[int]
    flags: list[int]
    identities: list[int]
    dram: list[list[Replica]]
    ssd: list[Replica | None]
    groups: dict[int, bytes]  # by position
    soft_pins_s: dict[int, float]  # by position, seconds from now; in snapshots only
    parents: dict[int, bytes] = {}  # by position: key of the parent, if it exists; b"": the key before
    hot: dict[int, list[int]] = {}  # by position: generations of the replicas that are there for readers alone

    def add(self, table: ObjectTable, slot: int) -> None:
        """Append the object in that slot."""
        flags, parent, at = table.flags[slot], table.parent_key(slot), len(self.keys)
        if flags & Flag.GROUPED:
            self.groups[at] = table.group_of[slot]
        if parent is not None:
            self.parents[at] = b"" if at and self.keys[-1] == parent else parent
        if slot in table.hot:
            self.hot[at] = sorted(table.hot[slot].generations)
        self.keys.append(table.key(slot))
        self.versions.append(table.version[slot])
        self.sizes.append(table.nbytes[slot])
        self.flags.append(flags & Flag.HARD_PIN)
        self.identities.append(table.identity[slot])
        self.dram.append(table.dram_replicas(slot))
        self.ssd.append(table.ssd_replica(slot))

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
    """Space of an abandoned put that is not free yet; with session 0 it is freed after a while. `number` is that of its
    PutStart.
    """

    generation: int
    session: int
    places: list[Place]
    nbytes: int
    ahead: bool = False
    number: int = 0


class Viewed(Record):
    """Space that a pinned object lost. It is freed when the last pin of the object ends.

    With `ended` the object is removed, and later pins of the key belong to another object.
    """

    key: bytes
    places: list[Place]
    nbytes: int
    ended: bool


class Fated(Record):
    """In snapshots: why keys were removed, and how long ago."""

    keys: list[bytes]
    fates: list[int]
    ages_s: list[float]


class Named(Record):
    """Space that was granted ahead, under this generation, is an unfinished put of this key now."""

    generation: int
    key: bytes
    nbytes: int
    flags: int
    identity: int
    soft_pin_s: float


class Unsettled(Record):
    """Replicas of these keys left their objects while readers could remember them, and may not be void yet."""

    keys: list[bytes]


class Answered(Record):
    """The master has carried out these numbered calls. An answer is the kind of the call, and the values that its
    caller gets."""

    numbers: list[int]
    answers: list[list[int]]


class Recounting(Record):
    """The nodes of these segments have not reported yet what is stamped above these generations: earlier masters may
    have granted it in a time that the journal lost. None: the node has reported it.
    """

    numbers: list[int]
    above: list[int | None]


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
    | Unsettled
    | Named
    | Recounting
    | Answered
)

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[list[AnyRecord]] = msgspec.msgpack.Decoder(list[AnyRecord])


def encode(records: Sequence[Record]) -> bytes:
    """Return one entry of the journal."""
    return _ENCODER.encode(records)


def decode(entry: bytes) -> list[AnyRecord]:
    """Raise msgspec.DecodeError if it is not an entry of a journal."""
    return _DECODER.decode(entry)


class Outcomes:
    """Collects the records of an event until the service writes them to the journal. If not `enabled`, does nothing."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.records: list[Record] = []
        self.unsynced = UnsyncedKeys()

    def add(self, record: Record) -> None:
        if self.enabled:
            self.records.append(record)

    def ended(self, keys: list[bytes], generations: list[int], left: dict[int, list[Place]]) -> None:
        """Record puts that are objects now; see PutsEnded."""
        if self.enabled:
            self.records.append(PutsEnded(keys, generations, left))
            self.unsynced.add(keys)

    def dropped(self, key: bytes, reason: RemovalReason) -> None:
        """Record a removed object. Consecutive ones share one record."""
        if not self.enabled:
            return
        last = self.records[-1] if self.records else None
        if isinstance(last, Dropped):
            last.keys.append(key)
            last.fates.append(int(reason))
        else:
            self.records.append(Dropped([key], [int(reason)]))

    def placed(self, table: ObjectTable, slot: int) -> None:
        """Record the present state of an object. Consecutive ones share one record."""
        if not self.enabled:
            return
        last = self.records[-1] if self.records else None
        if not isinstance(last, Placed):
            last = Placed([], [], [], [], [], [], [], {}, {})
            self.records.append(last)
        last.add(table, slot)
        self.unsynced.add((table.key(slot),))

    def take(self) -> Sequence[bytes]:
        if not self.records:
            return ()
        records, self.records = self.records, []
        self.unsynced.num_entries += 1
        return [encode(records)]
