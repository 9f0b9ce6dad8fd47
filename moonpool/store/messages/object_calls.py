"""Calls from clients to the master: put, find, pin and remove objects; questions about the pool; its change events."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from moonpool.base.ranges import Positive, Whole
from moonpool.base.rpc import Call, StreamCall
from moonpool.store.messages.values import (
    BlockPage,
    EventBatch,
    ObjectInfo,
    ObjectPage,
    PutAtReply,
    PutOptions,
    PutReply,
    Refusal,
    RemovedCount,
    RenewedLeases,
    StoreStats,
)


class PutStart(Call[PutReply]):
    """Ask for space to store `sizes[i]` bytes (header included) under `keys[i]`.

    `session` is set by a writer that may write to mapped memory of its own machine: such space is not reused before the
    writer ends the put, or the node reports that the writer is gone. `parents[i]` is the key of the block that block i
    continues. The members of a group (`groups[i]`, b"" for none) are evicted together.

    `settled_up_to`: the session has no open put with a generation up to this one. It has ended them, or it does not
    know of them because an answer was lost.

    `number` is issued once, by the client, and another one if the call is sent again; 0: none. See PutDrop.
    """

    keys: list[bytes]
    sizes: list[Whole]
    options: PutOptions
    session: Whole = 0
    parents: list[bytes] | None = None
    groups: list[bytes] | None = None
    settled_up_to: Whole = 0
    number: Whole = 0


class PutDrop(Call[None]):
    """The caller of the PutStart of that number and of these keys has given up: it has not got the answer and will not
    take it. What that call was granted is free at once, since no process knows where to write. If the call comes later,
    over a connection that its client has given up, it is refused. May be repeated.
    """

    outlives_caller: ClassVar[bool] = True

    number: Whole
    keys: list[bytes]


class GrantAhead(Call[PutReply]):
    """Ask for space for up to `count` puts to come, of objects with as many granules as `nbytes`. The reply has as many
    as the pool can spare. PutRenew and PutRevoke take such space under its ahead_key(); PutRenew answers False where
    the space has to be given back.

    `known` is all space granted ahead that this session has, up to generation `known_up_to`: what else the master holds
    for it was granted by calls whose answers were lost, and is free.
    """

    nbytes: Positive
    count: Whole
    preferred: tuple[str, ...] = ()
    session: Whole = 0
    known: tuple[Whole, ...] = ()
    known_up_to: Whole = 0


class PutAt(Call[PutAtReply]):
    """Make the object visible that was written to space granted ahead: PutStart and PutEnd in one. Raise NotSettled as
    PutEnd. If the key is taken, the caller keeps the space and uses it with the next `turn`, so that a copy of this
    call on a broken connection does nothing when it arrives late.
    """

    key: bytes
    generation: Whole
    nbytes: Positive
    options: PutOptions
    turn: Whole = 0


class PutEnd(Call[dict[int, Refusal]]):
    """Make the objects visible. A put whose space was taken back meanwhile is refused as stale_generation. Raise
    NotSettled, and end nothing, while a reader may still read an older value where it remembers it to be: call again.

    `failed` lists, by position, the segments whose replicas could not be written; the objects become visible without
    these replicas.
    """

    keys: list[bytes]
    generations: list[Whole]
    failed: dict[Whole, tuple[str, ...]] = msgspec.field(default_factory=dict)


class PutRenew(Call[list[bool]]):
    """Restart the time after which these unfinished puts are discarded. False where there is no such put."""

    outlives_caller: ClassVar[bool] = True
    keys: list[bytes]
    generations: list[Whole]


class PutRevoke(Call[None]):
    """Give the space of unfinished puts back. Unknown ones are ignored.

    `settled`: no write of the caller can still arrive. Otherwise the space is not reused for a while.
    """

    outlives_caller: ClassVar[bool] = True
    keys: list[bytes]
    generations: list[Whole]
    settled: bool = True


class Lookup(Call[list[ObjectInfo | None]]):
    """Return where the objects are, each leased for reading unless `lease` is False.

    With `prefix`, all after the first missing key is None. With a `session`, each object found is pinned for that
    process, as by Pin. Raise NotSettled, and pin none, if one of them lies in memory whose node has not reported to a
    restarted master yet: it must not be viewed there. `reads` False: the caller will look the objects up again before
    it reads them. They are leased now, and the second look-up counts as the use, so that a use counts once for hit
    rates, hot keys and promotion. Misses count now.
    """

    keys: list[bytes]
    prefix: bool = False
    lease: bool = True
    session: Whole = 0
    reads: bool = True


class Exist(Call[list[bool]]):
    """Return which objects exist, and lease them. Counts neither hits nor misses nor a use of the key.

    Objects that are only on the segments `without` (name and incarnation), which the caller cannot read, count as
    missing and are not leased.
    """

    keys: list[bytes]
    without: tuple[tuple[str, Whole], ...] = ()


class Locate(Call[list[ObjectInfo | None]]):
    """As Exist, and return where the objects are."""

    keys: list[bytes]


class Promote(Call[int]):
    """The caller will read these objects soon, though not now: copy those that are only on SSD to memory, in this
    order, and lease all. Return how many copies were ordered: copies that were asked for and have not ended take a
    bounded part of the pool's memory, and what exceeds it stays on SSD. Counts no use.
    """

    keys: list[bytes]


class RenewLeases(Call[RenewedLeases]):
    """The caller has read these objects where it remembered them to be: in memory, in `num_replicas` places (empty: in
    one), the last of which was granted with the generation in `generations`. Count these uses, and lease the objects
    that are still there.

    An object that has got a replica since, or lost one, counts as not there. The caller looks it up again: it must not
    go on to remember a replica that is not the object's any more, since an upsert would not have that one voided.
    """

    keys: list[bytes]
    generations: list[Whole]
    num_replicas: tuple[Whole, ...] = ()


class Remove(Call[list[bool]]):
    """Remove objects. True where no object is under the key now; leased or pinned ones stay unless `force`.

    Raise NotSettled while a reader may still read a removed object where it remembers it to be: call again.

    A repeated call with the same `idempotency_key` (0: none) gets the first answer and removes nothing: a late copy of
    the call must not remove what was stored since.
    """

    keys: list[bytes]
    force: bool = False
    idempotency_key: Whole = 0


class RemoveReplicas(Call[list[bool]]):
    """Remove the replicas in memory of the segments, and objects that have no other replica. True where a replica was
    removed; leased and pinned objects keep all of theirs. `idempotency_key` as in Remove.
    """

    keys: list[bytes]
    segments: tuple[str, ...]
    idempotency_key: Whole = 0


class RemoveMatching(Call[RemovedCount]):
    """Remove the objects whose key matches the regular expression (None: all), in steps: call again with the cursor.

    Only keys that begin with `prefix` count. The pattern is searched for in the rest of the key, so its ^ matches after
    the prefix. Each step has its own `idempotency_key`, as in Remove.
    """

    pattern: str | None = None
    force: bool = False
    cursor: Whole = 0
    idempotency_key: Whole = 0
    prefix: bytes = b""


class ListObjects(Call[ObjectPage]):
    """Return the objects whose key matches the regular expression (None: all), in pages, without leases.

    A page has at most `limit` objects, and never more than 10,000.
    """

    pattern: str | None = None
    cursor: Whole = 0
    limit: Positive = 1000


class ListBlocks(Call[BlockPage]):
    """Return objects with their places in the tree of prefixes and in the order of eviction, in pages, unleased."""

    cursor: Whole = 0
    limit: Positive = 1000


class Pin(Call[list[bool]]):
    """Pin the objects; pins are counted. True where the object exists.

    Without a session the pin ends with this connection; with one it ends with that process (SessionsGone).
    """

    keys: list[bytes]
    session: Whole = 0


class Unpin(Call[None]):
    outlives_caller: ClassVar[bool] = True
    keys: list[bytes]
    session: Whole = 0


class ReportCorrupt(Call[bool]):
    """Report wrong bytes. The master quarantines this replica and never returns it again.

    False when the object no longer has a replica of that generation at that offset, so the reader was late: the object
    was removed or replaced, or compaction of the node's log has moved it.
    """

    outlives_caller: ClassVar[bool] = True
    key: bytes
    generation: Whole
    segment: str
    offset: Whole


class Why(Call[str]):
    """Return a sentence that explains what happened to a key; with `identity`, for a reader of that identity."""

    key: bytes
    identity: bytes = b""


class Stats(Call[StoreStats]):
    pass


class Subscribe(StreamCall[EventBatch]):
    """Stream all changes after batch `since` if the master still has them, else a snapshot and then the changes.

    A listener that reads too slowly is refused with Overloaded and subscribes again.
    """

    since: Whole | None = None
