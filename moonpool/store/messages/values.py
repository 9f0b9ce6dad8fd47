"""What the messages are made of."""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Annotated

import msgspec

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.ranges import Seconds, Whole

MAX_REPLICAS = 16  # of one object
GRANULE_NBYTES = 4096  # the unit in which space of a segment is granted and fenced


def num_granules(nbytes: int) -> int:
    """Return how many granules hold `nbytes`."""
    return -(-nbytes // GRANULE_NBYTES)


class Tier(IntFlag):
    """Where replicas lie; a set of them says where an object lies."""

    DRAM = 1
    SSD = 2


MAX_GENERATION = 2**64 - 1


class Placement(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where one replica lies: `offset` bytes into a segment, in this incarnation of it and in no other.

    `generation` is that of the allocation, and stands in the replica's header: whoever finds another one there has
    found nothing.
    """

    segment: str
    offset: int
    incarnation: int
    generation: int


class ObjectInfo(msgspec.Struct, frozen=True, array_like=True):
    """A readable object. `nbytes` counts header and pieces; the lease runs until `lease_s` from the answer.

    Replicas in memory come before those on disk.
    """

    key: bytes
    nbytes: int
    replicas: tuple[Placement, ...]
    lease_s: float


class PutOptions(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What all items of one PutStart have in common."""

    num_replicas: Annotated[int, msgspec.Meta(ge=1, le=MAX_REPLICAS)] = (
        1  # on distinct nodes first; fewer are taken when there is no more room
    )
    preferred: tuple[str, ...] = ()  # segments to try first
    hard_pin: bool = False  # never evicted, until it is removed
    soft_pin_s: Seconds = 0.0  # evicted only when nothing else is left, for this long after it was stored
    replace: bool = False  # an upsert: the old value stays readable until the new one is whole
    all_replicas: bool = False  # refuse instead of taking fewer
    identity: bytes = b""  # digest of what makes the bytes usable, for `why`


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """Why one item of a batch was not done: an error code of base/errors.py and a sentence."""

    code: str
    message: str


class PutReply(msgspec.Struct, frozen=True, array_like=True):
    """Per item a generation, which every write and the PutEnd carry, and where to write; 0 and () where refused."""

    generations: list[int]
    replicas: list[tuple[Placement, ...]]
    refusals: dict[int, Refusal]  # by position in the batch
    last_generation: int = 0  # that was given to anybody


class MountReply(msgspec.Struct, frozen=True):
    """`epoch` is the master's; `heartbeat_s` is how often it wants to hear from the node.

    Every grant on this mount has a generation above `generation_floor`. The node fences off all up to it and only
    then sends its first Heartbeat; nothing is placed on the segment before. It refuses writes of generations above
    `generation_limit`, which this master has not given out.
    """

    epoch: int
    heartbeat_s: float
    generation_floor: int
    generation_limit: int = MAX_GENERATION


# As `recount_above`: nothing is above it, so the node tells of its desk's sessions alone.
SESSIONS_ALONE = 2**64 - 1


class HeartbeatReply(msgspec.Struct, frozen=True, array_like=True):
    """`known` False: mount the segment again, as a new incarnation.

    `recount_above` is set by a master that came back: it waits for a Recount of what the segment has above that
    generation before it places anything there. `generation_limit` as in MountReply; no generation above
    `last_generation` was given out before this reply.
    """

    known: bool
    epoch: int = 0
    recount_above: int | None = None
    generation_limit: int = MAX_GENERATION
    last_generation: int = MAX_GENERATION


class SegmentInfo(msgspec.Struct, frozen=True, array_like=True):
    """A mounted segment. `desk` is the address where processes of its machine say that they are there (node.py)."""

    descriptor: SegmentDescriptor
    node: str
    tier: Tier
    desk: str | None


class EventBatch(msgspec.Struct, frozen=True):
    """Changes in order; a key is in one batch at most once, with what became of it last.

    `sequence` grows by one from batch to batch. A batch with `snapshot` set voids whatever the listener knew; what is
    stored then comes as `stored`, in as many batches as it needs, all with the sequence that it stands for, then the
    changes. `tiers` lists those of the stored keys that are not in DRAM alone, and keys whose tiers changed.
    """

    sequence: int
    snapshot: bool = False
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    moved: tuple[bytes, ...] = ()
    tiers: tuple[tuple[bytes, Tier], ...] = ()


class SegmentStats(msgspec.Struct, frozen=True):
    name: str
    node: str
    capacity_nbytes: int
    used_nbytes: int
    num_objects: int
    tier: Tier = Tier.DRAM
    status: str = "ok"  # ok, away (its node is silent), waiting (for the node's word), draining, drained


class StoreStats(msgspec.Struct, frozen=True):
    """`capacity_nbytes` and `used_nbytes` count DRAM; the segments tell of every tier."""

    num_objects: int
    capacity_nbytes: int
    used_nbytes: int
    segments: tuple[SegmentStats, ...]
    counters: dict[str, int]


# orders: what the master asks nodes to do


class OrderKind(IntEnum):
    COPY = 1  # read `source`, write `target` in this node's DRAM with the target's generation, verify every piece
    OFFLOAD = 2  # append `source`, in this node's DRAM, to its SSD log; the result says where
    DROP = 3  # forget the record of `source` in this node's SSD log


class Order(msgspec.Struct, frozen=True, array_like=True):
    """One thing to do. `nbytes` is the object's; `target` is set for COPY."""

    order_id: int
    kind: OrderKind
    key: bytes
    nbytes: int
    source: Placement
    target: Placement | None = None


class OrderResult(msgspec.Struct, frozen=True, array_like=True):
    """`refusal` None: done. `offset` is where an OFFLOAD went. A Corrupt refusal quarantines the source."""

    order_id: Whole
    refusal: Refusal | None = None
    offset: Whole | None = None


class Doubt(IntEnum):
    """What may be wrong with a record of a damaged SSD log. The master keeps one in doubt only if it knows it."""

    NONE = 0
    REMOVED = 1  # its tombstone may have been lost with the damaged part
    SALVAGED = 2  # it lies in the damaged part; good only at the place that the master knows


class HeldItem(msgspec.Struct, frozen=True, array_like=True):
    """A record that a node found in its SSD log."""

    key: bytes
    generation: Whole
    nbytes: Whole
    offset: Whole
    doubt: Doubt = Doubt.NONE


class TaskInfo(msgspec.Struct, frozen=True):
    """A copy, move or drain that somebody asked for. `state`: running, done, failed or cancelled."""

    task_id: int
    kind: str
    state: str
    message: str
    num_done: int
    num_total: int
    nbytes_moved: int
    segment: str = ""  # that is drained, or where the copies go


class ListedObject(msgspec.Struct, frozen=True, array_like=True):
    key: bytes
    nbytes: int
    tier: Tier
    num_replicas: int
    is_leased: bool
    is_pinned: bool


class ObjectPage(msgspec.Struct, frozen=True, array_like=True):
    """`cursor` is what to ask with for the next page; None behind the last one."""

    objects: list[ListedObject]
    cursor: int | None


class RemovedCount(msgspec.Struct, frozen=True, array_like=True):
    """`num_kept` matched and stayed, because they are leased or pinned."""

    num_removed: int
    num_kept: int
    cursor: int | None
