"""Calls of nodes to the master (segments, client sessions, orders), announced segments of transfer engines, and the
copies, moves and drains that clients request.
"""

from __future__ import annotations

from typing import ClassVar

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
    TaskInfo,
    Tier,
)


class MountSegment(Call[MountReply]):
    """Offer memory or disk. A new incarnation of a known name drops the objects of the earlier one; an SSD segment
    reports its objects again by Inventory.
    """

    node: str
    descriptor: SegmentDescriptor
    tier: Tier = Tier.DRAM
    registry_address: str | None = None
    capacity_nbytes: Whole | None = None  # of an SSD segment: the size in its descriptor is that of its address space


class UnmountSegment(Call[None]):
    """Withdraw a segment. Objects that were only there are lost (those on SSD until the segment is mounted again)."""

    outlives_caller: ClassVar[bool] = True
    segment: str
    incarnation: Whole


class Heartbeat(Call[HeartbeatReply]):
    """`generation_limit`: the node refuses writes of higher generations. While it is lower than the master's, the
    master places nothing on the segment.
    """

    outlives_caller: ClassVar[bool] = True
    segment: str
    incarnation: Whole
    generation_limit: int = MAX_GENERATION


class FenceAhead(Call[list[tuple[int, int, int, int]]]):
    """Report spans (offset, nbytes, stamp) whose stamps are generations that were never granted: no writer can pass
    them.

    The answer lists (offset, nbytes, stamp, generation): the generation to stamp instead, if the stamp is still the one
    found. Space with an open grant is left out until the grant has ended.
    """

    segment: str
    incarnation: Whole
    spans: list[tuple[Whole, Whole, int]]


class Recount(Call[None]):
    """Answer `recount_above`: spans (offset, nbytes) stamped with higher generations, and the client sessions that are
    registered at the node. The master does not reuse these spans for a while. The node refuses further writes of the
    generations that are lost (HeartbeatReply).
    """

    segment: str
    incarnation: Whole
    spans: list[tuple[Whole, Whole]]
    sessions: list[Whole]


class SessionsGone(Call[None]):
    """Report that client sessions have ended, or that clients have given them up. The space of their views and
    unfinished puts is free.
    """

    outlives_caller: ClassVar[bool] = True
    sessions: list[Whole]


class Inventory(Call[list[bool]]):
    """Report the records of an SSD segment that was mounted again, in parts. False: the node drops the record.

    `last` ends the report; records that the master expected and that were not reported are lost. `damaged_nbytes` is
    how much of the log could not be read.
    """

    segment: str
    incarnation: Whole
    items: list[HeldItem]
    last: bool
    damaged_nbytes: Whole = 0


class Relocated(Call[list[bool]]):
    """Report records that compaction moved: (key, generation, new offset). False: the record is no longer needed."""

    segment: str
    incarnation: Whole
    items: list[tuple[bytes, Whole, Whole]]


class Orders(StreamCall[list[Order]]):
    """Stream the orders for this node. A node that subscribes again gets the orders that it has not answered."""

    node: str


class OrdersDone(Call[None]):
    outlives_caller: ClassVar[bool] = True
    results: list[OrderResult]


class Segments(Call[list[SegmentInfo]]):
    """Return all mounted segments."""


class Announce(Call[None]):
    """Publish a transfer engine's own segment, which is not part of the pool. It expires `ttl_s` after a renewal."""

    descriptor: SegmentDescriptor
    ttl_s: Seconds


class Retract(Call[None]):
    outlives_caller: ClassVar[bool] = True
    name: str
    incarnation: Whole


class FindSegment(Call[SegmentDescriptor | None]):
    """Return an announced segment, or one of the pool's."""

    name: str


class AcquireLease(Call[int]):
    """Get the right of that name, or renew it, for `ttl_s` seconds. Return the lease's number: the same while it is
    renewed in time, otherwise higher than every number before, also across a restart of the master. Return 0 while
    another holder has the right.
    """

    name: str
    holder: str
    ttl_s: Seconds


class CopyObject(Call[int]):
    """Make one more replica on each target segment. Return the task's number. With `missing_only`, targets that have a
    replica already are left out instead of refused.
    """

    key: bytes
    targets: tuple[str, ...]
    missing_only: bool = False


class MoveObject(Call[int]):
    key: bytes
    source: str
    target: str


class DrainSegment(Call[int]):
    """Move all objects away from the segment and place no new ones there. Return the task's number."""

    segment: str


class QueryTask(Call[TaskInfo | None]):
    task_id: Whole


class ListTasks(Call[list[TaskInfo]]):
    """Return the running tasks, the oldest first; with `finished` also those that ended recently."""

    finished: bool = False


class CancelTask(Call[bool]):
    task_id: Whole
