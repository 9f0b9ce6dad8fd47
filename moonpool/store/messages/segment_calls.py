"""Nodes to the master: segments, processes, orders. And segments that engines announce."""

from __future__ import annotations

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.ranges import Seconds, Whole
from moonpool.base.rpc import Call, StreamCall
from moonpool.store.messages.values import (
    MAX_GENERATION,
    HeartbeatReply,
    HeldItem,
    MountReply,
    Order,
    OrderResult,
    SegmentInfo,
    Tier,
)


class MountSegment(Call[MountReply]):
    """A node offers memory or disk. A new incarnation of a known name voids what the earlier one held, except that
    what an SSD segment holds is told to the master again by Inventory.
    """

    node: str
    descriptor: SegmentDescriptor
    tier: Tier = Tier.DRAM
    desk: str | None = None
    capacity_nbytes: Whole | None = None  # of an SSD segment, whose descriptor spans its address space


class UnmountSegment(Call[None]):
    """A node takes its memory back; objects that lived only there are gone (those on SSD until it comes back)."""

    segment: str
    incarnation: Whole


class Heartbeat(Call[HeartbeatReply]):
    """`generation_limit`: the node refuses writes of higher generations. Where that is behind the master's, nothing is
    placed until the node has heard of it.
    """

    segment: str
    incarnation: Whole
    generation_limit: int = MAX_GENERATION


class FenceAhead(Call[list[tuple[int, int, int, int]]]):
    """The node found (offset, nbytes, stamp) with generations that were never given out: they keep every writer out.

    The answer lists (offset, nbytes, stamp, generation): what to stamp instead, where the stamp is still the one found.
    Space with an open grant is left out until the grant has ended.
    """

    segment: str
    incarnation: Whole
    spans: list[tuple[Whole, Whole, int]]


class Recount(Call[None]):
    """The node's answer to `recount_above`: spans (offset, nbytes) stamped with higher generations, and which client
    sessions its desk knows. Those spans are not used before they have rested.
    """

    segment: str
    incarnation: Whole
    spans: list[tuple[Whole, Whole]]
    sessions: list[Whole]


class SessionsGone(Call[None]):
    """These processes have ended, or say so of a session of theirs: what they held in place (views, unfinished puts)
    is free.
    """

    sessions: list[Whole]


class Inventory(Call[list[bool]]):
    """Records of an SSD segment that was mounted anew, in parts. False where a record is not wanted: drop it.

    With `last` nothing more follows, and what the master expected and did not hear of is lost; `damaged_nbytes` is how
    much of the log could not be read.
    """

    segment: str
    incarnation: Whole
    items: list[HeldItem]
    last: bool
    damaged_nbytes: Whole = 0


class Relocated(Call[list[bool]]):
    """Compaction moved records: (key, generation, new offset). False where the record is not wanted any more."""

    segment: str
    incarnation: Whole
    items: list[tuple[bytes, Whole, Whole]]


class Orders(StreamCall[list[Order]]):
    """What this node shall do, as it comes up. Unanswered ones are sent again to a node that asks anew."""

    node: str


class OrdersDone(Call[None]):
    results: list[OrderResult]


class Segments(Call[list[SegmentInfo]]):
    """All mounted segments."""


class Announce(Call[None]):
    """An engine's own segment, not offered to the pool, for others to find; forgotten after `ttl_s` unless renewed."""

    descriptor: SegmentDescriptor
    ttl_s: Seconds


class Retract(Call[None]):
    name: str
    incarnation: Whole


class FindSegment(Call[SegmentDescriptor | None]):
    """An announced segment, or one of the pool's."""

    name: str
