"""What clients, nodes, the master and listeners say to each other. The service is called "store".

Batches first: answers are positional, one per item, so one bad key never fails its neighbours.
"""

from __future__ import annotations

import msgspec

from moonpool.base.rpc import Call, StreamCall
from moonpool.transfer.descriptor import SegmentDescriptor

SERVICE = "store"


class Placement(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where one replica lies: `offset` bytes into a segment, in this incarnation of it and in no other."""

    segment: str
    offset: int
    incarnation: int


class ObjectInfo(msgspec.Struct, frozen=True, array_like=True):
    """A readable object. `nbytes` counts header and pieces; the lease runs until `lease_s` from the answer."""

    key: bytes
    generation: int
    nbytes: int
    replicas: tuple[Placement, ...]
    lease_s: float


class PutItem(msgspec.Struct, frozen=True, array_like=True):
    """A wish to store `nbytes` (header included) under `key`."""

    key: bytes
    nbytes: int
    num_replicas: int = 1
    preferred_segment: str | None = None
    pinned: bool = False


class PutGrant(msgspec.Struct, frozen=True, array_like=True):
    """Space to write to. Every write and the PutEnd carry `generation`."""

    key: bytes
    generation: int
    replicas: tuple[Placement, ...]


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """Why one item of a batch was not done: an error code of base/errors.py and a sentence."""

    code: str
    message: str


class PutOutcome(msgspec.Struct, frozen=True, array_like=True):
    """Exactly one of the two is set."""

    grant: PutGrant | None = None
    refusal: Refusal | None = None


class Written(msgspec.Struct, frozen=True, array_like=True):
    """A grant whose bytes are all in place (PutEnd) or never will be (PutRevoke).

    `failed_segments` names the replicas that could not be written; the object becomes visible without them.
    """

    key: bytes
    generation: int
    failed_segments: tuple[str, ...] = ()


class MountReply(msgspec.Struct, frozen=True):
    """`epoch` is the master's; `heartbeat_s` is how often it wants to hear from the node.

    Every grant on this mount has a generation above `generation_floor`. The node fences off all up to it and only
    then sends its first Heartbeat; nothing is placed on the segment before.
    """

    epoch: int
    heartbeat_s: float
    generation_floor: int


class EventBatch(msgspec.Struct, frozen=True):
    """Changes in order; a key is in one batch at most once, with what became of it last.

    `sequence` counts the batches of this subscription from 0. The first has `snapshot` set: whatever the listener
    knew is void. What is stored then comes as `stored`, in as many batches as it needs, then the changes.
    """

    sequence: int
    snapshot: bool = False
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


class SegmentStats(msgspec.Struct, frozen=True):
    name: str
    node: str
    capacity_nbytes: int
    used_nbytes: int
    num_objects: int


class StoreStats(msgspec.Struct, frozen=True):
    num_objects: int
    capacity_nbytes: int
    used_nbytes: int
    segments: tuple[SegmentStats, ...]
    counters: dict[str, int]


class MountSegment(Call[MountReply]):
    """A node offers memory. A new incarnation of a known name voids what the earlier one held."""

    node: str
    descriptor: SegmentDescriptor


class UnmountSegment(Call[None]):
    """A node takes its memory back; objects that lived only there are gone."""

    segment: str
    incarnation: int


class Heartbeat(Call[bool]):
    """False means that the master does not know this segment: mount it again."""

    segment: str
    incarnation: int


class Segments(Call[list[SegmentDescriptor]]):
    """All mounted segments."""


class Announce(Call[None]):
    """An engine's own segment, not offered to the pool, for others to find; forgotten after `ttl_s` unless renewed."""

    descriptor: SegmentDescriptor
    ttl_s: float


class Retract(Call[None]):
    name: str
    incarnation: int


class FindSegment(Call[SegmentDescriptor | None]):
    """An announced segment, or one of the pool's."""

    name: str


class PutStart(Call[list[PutOutcome]]):
    items: list[PutItem]


class PutEnd(Call[list[Refusal | None]]):
    """Makes the objects visible. A late one (space taken back meanwhile) is refused as stale_generation."""

    items: list[Written]


class PutRevoke(Call[None]):
    """Gives the space of unfinished puts back. Unknown ones are ignored.

    `settled` says that no write of the caller can still be under way; otherwise the space rests before it is reused.
    """

    items: list[Written]
    settled: bool = True


class Lookup(Call[list[ObjectInfo | None]]):
    """Where the objects are, each leased for reading. With `prefix` all behind the first missing key is None."""

    keys: list[bytes]
    prefix: bool = False


class Exist(Call[list[bool]]):
    keys: list[bytes]


class Remove(Call[list[bool]]):
    """True where no object is under the key now; leased or pinned ones stay unless `force`."""

    keys: list[bytes]
    force: bool = False


class Pin(Call[list[bool]]):
    """Held by this connection: pins end when it does. True where the object exists."""

    keys: list[bytes]


class Unpin(Call[None]):
    keys: list[bytes]


class ReportCorrupt(Call[bool]):
    """A reader found wrong bytes: this replica is quarantined and never handed out again.

    False when the object is not of that generation any more, so the reader was late and nothing is corrupt.
    """

    key: bytes
    generation: int
    segment: str


class Why(Call[str]):
    """In words: what became of a key."""

    key: bytes


class Stats(Call[StoreStats]):
    pass


class Subscribe(StreamCall[EventBatch]):
    """Snapshot first, then changes. A listener that reads too slowly is refused with Overloaded; it asks again."""


CALLS = (
    MountSegment,
    UnmountSegment,
    Heartbeat,
    Segments,
    PutStart,
    PutEnd,
    PutRevoke,
    Lookup,
    Exist,
    Remove,
    Pin,
    Unpin,
    ReportCorrupt,
    Why,
    Stats,
    Subscribe,
)
