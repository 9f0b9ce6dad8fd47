"""Clients to the master: putting, finding, keeping and removing objects."""

from __future__ import annotations

import msgspec

from moonpool.base.ranges import Positive, Whole
from moonpool.base.rpc import Call
from moonpool.store.messages.values import ObjectInfo, ObjectPage, PutOptions, PutReply, Refusal, RemovedCount


class PutStart(Call[PutReply]):
    """A wish to store `sizes[i]` bytes (header included) under `keys[i]`.

    `session` is the writer's, when it may write in place on its own machine: such space is not used again before the
    writer says that it has stopped or its node's desk says that it is gone. `parents[i]` is the key of the block that
    block i continues; the members of a group (`groups[i]`, b"" for none) are evicted together.

    With `settled_up_to` the session says that it has none of its puts in its hands whose generation is up to that one:
    it has ended them, or has never heard of them because an answer was lost.
    """

    keys: list[bytes]
    sizes: list[Whole]
    options: PutOptions
    session: Whole = 0
    parents: list[bytes] | None = None
    groups: list[bytes] | None = None
    settled_up_to: Whole = 0


class PutEnd(Call[dict[int, Refusal]]):
    """Makes the objects visible. A late one (space taken back meanwhile) is refused as stale_generation.

    `failed` names, by position, the segments whose replicas could not be written; the objects become visible without.
    """

    keys: list[bytes]
    generations: list[Whole]
    failed: dict[Whole, tuple[str, ...]] = msgspec.field(default_factory=dict)


class PutRenew(Call[list[bool]]):
    """Unfinished puts that go on: the time after which they are discarded starts anew. False where there is none."""

    keys: list[bytes]
    generations: list[Whole]


class PutRevoke(Call[None]):
    """Gives the space of unfinished puts back. Unknown ones are ignored.

    `settled` says that no write of the caller can still be under way; otherwise the space rests before it is reused.
    """

    keys: list[bytes]
    generations: list[Whole]
    settled: bool = True


class Lookup(Call[list[ObjectInfo | None]]):
    """Where the objects are, each leased for reading unless `lease` is False (then nobody promises anything).

    With `prefix` all behind the first missing key is None. With a `session` each one found is pinned for that
    process, as Pin does. `reads` False: what is found will be looked up again to be read. It is leased, and the second
    look-up counts its use, so that a use counts once for hit rates, hot keys and promotion; misses count now.
    """

    keys: list[bytes]
    prefix: bool = False
    lease: bool = True
    session: Whole = 0
    reads: bool = True


class Exist(Call[list[bool]]):
    """As Lookup, leases included, without the places; it counts neither hits nor misses, nor a use of the key.

    Objects that lie only on the segments `without` (name and incarnation), which the caller cannot read, are not there
    for it, and not leased.
    """

    keys: list[bytes]
    without: tuple[tuple[str, Whole], ...] = ()


class Remove(Call[list[bool]]):
    """True where no object is under the key now; leased or pinned ones stay unless `force`.

    Said again under the same number (`errand`, 0 for none) it is not done again, only answered: a copy that comes late
    must not take what was stored since.
    """

    keys: list[bytes]
    force: bool = False
    errand: Whole = 0


class RemoveMatching(Call[RemovedCount]):
    """Removes what the regular expression finds (None: everything), in steps: ask again with the cursor.

    Each step has its own `errand`, as in Remove.
    """

    pattern: str | None = None
    force: bool = False
    cursor: Whole = 0
    errand: Whole = 0


class ListObjects(Call[ObjectPage]):
    """Objects whose key the regular expression finds (None: all), in steps; grants no lease.

    A page has at most `limit` objects, and never more than 10,000.
    """

    pattern: str | None = None
    cursor: Whole = 0
    limit: Positive = 1000


class Pin(Call[list[bool]]):
    """Keeps the objects; pins count. True where the object exists.

    Without a session the pin ends with this connection; with one it ends with that process (SessionsGone).
    """

    keys: list[bytes]
    session: Whole = 0


class Unpin(Call[None]):
    keys: list[bytes]
    session: Whole = 0


class ReportCorrupt(Call[bool]):
    """A reader found wrong bytes: this replica is quarantined and never handed out again.

    False when the object has no replica of that generation at that offset any more, so the reader was late: it was
    removed or replaced, or the node's log was tidied and has it elsewhere.
    """

    key: bytes
    generation: Whole
    segment: str
    offset: Whole
