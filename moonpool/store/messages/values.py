"""The types that the messages consist of."""

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
    """The kind of memory of a replica; a set of them for all replicas of an object."""

    DRAM = 1
    SSD = 2


MAX_GENERATION = 2**64 - 1


class Placement(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The place of one replica: `offset` in this incarnation of the segment, and in no other.

    `generation` is that of the allocation; the replica's header states it too. If the header states another one, the
    replica is not there.
    """

    segment: str
    offset: int
    incarnation: int
    generation: int


class ObjectInfo(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A readable object. `nbytes` is the size of header and pieces; the lease ends `lease_s` after the answer.

    Replicas in memory come before those on disk. For `remember_s` after the question was sent, a reader may read the
    replicas in memory again without asking (client/remembered.py).
    """

    key: bytes
    nbytes: int
    replicas: tuple[Placement, ...]
    lease_s: float
    remember_s: float = 0.0


class RenewedLeases(msgspec.Struct, frozen=True, array_like=True):
    """By position whether the object is still where the reader found it; those are leased again."""

    is_there: list[bool]
    remember_s: float


class PutOptions(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What all items of one PutStart have in common."""

    num_replicas: Annotated[int, msgspec.Meta(ge=1, le=MAX_REPLICAS)] = (
        1  # on distinct nodes first; fewer if there is no room
    )
    preferred: tuple[str, ...] = ()  # segments to try first
    hard_pin: bool = False  # never evicted, until it is removed
    soft_pin_s: Seconds = 0.0  # for this long after the put, evicted only when nothing else is left
    replace: bool = False  # an upsert: the old value stays readable until the new one is complete
    all_replicas: bool = False  # refuse the put instead of storing fewer replicas
    identity: bytes = b""  # digest of model, dtype and layout, for `why`
    keep_pins: bool = False  # an upsert takes over the pins and the group of the old value, where it asks for none


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """Why one item of a batch was not done: an error code of base/errors.py and a sentence."""

    code: str
    message: str


MAX_AHEAD = 64  # places in one GrantAhead
MAX_AHEAD_NBYTES = 4 * 1024 * 1024 + GRANULE_NBYTES  # writing a larger object takes longer than several calls


def ahead_key(generation: int) -> bytes:
    """Return the key under which space granted ahead is an unfinished put."""
    return b"\0ahead" + generation.to_bytes(8, "big")


class PutAtReply(msgspec.Struct, frozen=True, array_like=True):
    """`refusal` as in PutReply. With `may_hold` False the caller gives the space back that it holds."""

    refusal: Refusal | None
    may_hold: bool = True


class PutReply(msgspec.Struct, frozen=True, array_like=True):
    """By position the generation, which every write and the PutEnd carry, and the replicas; 0 and () where refused."""

    generations: list[int]
    replicas: list[tuple[Placement, ...]]
    refusals: dict[int, Refusal]  # by position in the batch
    last_generation: int = 0  # granted to any client so far


class MountReply(msgspec.Struct, frozen=True):
    """`epoch` is the master's; the node sends a Heartbeat every `heartbeat_s`.

    Every grant on this mount has a generation above `generation_floor`. The node fences off all generations up to it
    and only then sends its first Heartbeat; the master places nothing on the segment before. The node refuses writes of
    generations above `generation_limit`, which this master has not granted.
    """

    epoch: int
    heartbeat_s: float
    generation_floor: int
    generation_limit: int = MAX_GENERATION


# As `recount_above`: no generation is above it, so the node reports only its registered sessions.
SESSIONS_ALONE = 2**64 - 1


class HeartbeatReply(msgspec.Struct, frozen=True, array_like=True):
    """`known` False: mount the segment again, as a new incarnation.

    A restarted master sets `recount_above`: it waits for a Recount of the segment's space above that generation before
    it places anything there. It does not know what earlier masters granted above that, up to `refuse_up_to`: before the
    node looks at the space, it refuses writes of these generations for good. `generation_limit` as in MountReply; no
    generation above `last_generation` was granted before this reply.
    """

    known: bool
    epoch: int = 0
    recount_above: int | None = None
    generation_limit: int = MAX_GENERATION
    last_generation: int = MAX_GENERATION
    refuse_up_to: int = 0


class SegmentInfo(msgspec.Struct, frozen=True, array_like=True):
    """A mounted segment. `registry_address` is the address of its node's session registry (session_calls.py)."""

    descriptor: SegmentDescriptor
    node: str
    tier: Tier
    registry_address: str | None


class EventBatch(msgspec.Struct, frozen=True):
    """Changes in order. A key is in a batch at most once, with its last change.

    `sequence` grows by one per batch. A batch with `snapshot` set replaces all that the listener knew: the stored keys
    follow in `stored`, in several batches with the same sequence, then the changes. `tiers` lists the stored keys that
    are not in DRAM alone, and keys whose tiers changed. `nodes` says where the stored keys are, in their order: (node,
    number of keys) for each run of keys whose first replica in memory is on one node, "" for keys without one.
    """

    sequence: int
    snapshot: bool = False
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    moved: tuple[bytes, ...] = ()
    tiers: tuple[tuple[bytes, Tier], ...] = ()
    nodes: tuple[tuple[str, int], ...] = ()


class SegmentStats(msgspec.Struct, frozen=True):
    name: str
    node: str
    capacity_nbytes: int
    used_nbytes: int
    num_objects: int
    tier: Tier = Tier.DRAM
    status: str = "ok"  # ok, away (its node is silent), waiting (for the node's report), draining, drained


class StoreStats(msgspec.Struct, frozen=True):
    """`capacity_nbytes` and `used_nbytes` are those of DRAM; `segments` has all tiers."""

    num_objects: int
    capacity_nbytes: int
    used_nbytes: int
    segments: tuple[SegmentStats, ...]
    counters: dict[str, int]
    high_watermark: float = 1.0  # eviction from DRAM begins above this part of the capacity
    ssd_high_watermark: float = 1.0  # the same for each SSD segment
    journal_error: str | None = None  # why a restarted master may not know what this one knows; None: it will


# orders: work that the master gives to nodes


class OrderKind(IntEnum):
    COPY = 1  # read `source`, write `target` in this node's DRAM with the target's generation, verify every piece
    OFFLOAD = 2  # append `source`, in this node's DRAM, to its SSD log; the result has the offset
    DROP = 3  # remove the record of `source` from this node's SSD log
    VOID = 4  # set the void mark of `source`, a replica in this node's DRAM that left its object


class Order(msgspec.Struct, frozen=True, array_like=True):
    """One order. `nbytes` is the object's size; `target` is set for COPY."""

    order_id: int
    kind: OrderKind
    key: bytes
    nbytes: int
    source: Placement
    target: Placement | None = None


class OrderResult(msgspec.Struct, frozen=True, array_like=True):
    """`refusal` None: done. `offset` is the record's after an OFFLOAD. A Corrupt refusal quarantines the source."""

    order_id: Whole
    refusal: Refusal | None = None
    offset: Whole | None = None


class Doubt(IntEnum):
    """What may be wrong with a record of a damaged SSD log. The master keeps such a record only if it knows it."""

    NONE = 0
    REMOVED = 1  # its tombstone may have been lost with the damaged part
    SALVAGED = 2  # it is in the damaged part; valid only at the offset that the master knows


class HeldItem(msgspec.Struct, frozen=True, array_like=True):
    """A record that a node found in its SSD log."""

    key: bytes
    generation: Whole
    nbytes: Whole
    offset: Whole
    doubt: Doubt = Doubt.NONE


class TaskInfo(msgspec.Struct, frozen=True):
    """A copy, move or drain that a client requested. `state`: running, done, failed or cancelled."""

    task_id: int
    kind: str
    state: str
    message: str
    num_done: int
    num_total: int
    nbytes_moved: int
    segment: str = ""  # the segment that is drained, or the target of the copies
    age_s: float = 0.0  # since it was requested
    idle_s: float = 0.0  # since its last object was done, or its end


class ListedObject(msgspec.Struct, frozen=True, array_like=True):
    key: bytes
    nbytes: int
    tier: Tier
    num_replicas: int
    is_leased: bool
    is_pinned: bool


class ObjectPage(msgspec.Struct, frozen=True, array_like=True):
    """`cursor` is the argument for the next page; None after the last one."""

    objects: list[ListedObject]
    cursor: int | None


class StoredBlock(msgspec.Struct, frozen=True, array_like=True):
    """An object and its place in the tree of prefixes. `uses` is how often it was found again, counted up to 5, as far
    as the eviction policy knows; among objects without a stored continuation, the lowest `rank` is evicted first."""

    key: bytes
    parent: bytes  # key of the block that it continues; b"" if that is not known or not stored
    nbytes: int
    segments: tuple[str, ...]  # of its replicas, memory first
    uses: int
    rank: float | None  # None: the policy has no ranks, or the object is not in its order
    is_kept: bool  # leased or pinned: it is not evicted now


class BlockPage(msgspec.Struct, frozen=True, array_like=True):
    """`cursor` as in ObjectPage."""

    blocks: list[StoredBlock]
    cursor: int | None


class RemovedCount(msgspec.Struct, frozen=True, array_like=True):
    """`num_kept` objects matched and stayed, because they are leased or pinned."""

    num_removed: int
    num_kept: int
    cursor: int | None
