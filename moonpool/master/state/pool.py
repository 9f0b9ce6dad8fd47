"""The master's whole state: objects, puts, leases, pins, segments, orders. Pure: no clock, no I/O, no randomness.

Every method is an event with its moment, `now_s`, which never runs backwards; the same events give the same state.
Batches are positional: one bad item never fails its neighbours. What it promises:

- An object is visible from put_end to its end, and its bytes are not reused while it is leased or pinned.
- A key has at most one object and at most one unfinished put; the latter frees the key after put_discard_s.
- Space is granted with a generation that is higher than any before it, across restarts too (epoch << 32). Space that a
  process may write in place is not granted again before that process has said that it stopped, or is gone.
- No event does work in proportion to the number of objects: eviction, sweeps, snapshots and drains go in steps.
- After every event take_records() has what must be in the journal before the event is answered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import InvalidInput
from moonpool.master.policies import make_policy
from moonpool.master.policies.base import EvictionPolicy
from moonpool.master.rules import PoolRules
from moonpool.master.state import recovery, snapshot
from moonpool.master.state.changes import Changes
from moonpool.master.state.evictor import Evictor
from moonpool.master.state.index import FIRST_SESSION, ObjectIndex
from moonpool.master.state.integrity import check_pool, object_spans
from moonpool.master.state.listing import ObjectListing, remove
from moonpool.master.state.members import Members
from moonpool.master.state.orders import Copies, OrderBook
from moonpool.master.state.puts import Puts
from moonpool.master.state.reads import HotKeys, ReadState
from moonpool.master.state.records import Outcomes
from moonpool.master.state.segments import Place, SegmentTable
from moonpool.master.state.space import EPOCH_BITS, Generations, PoolSpace
from moonpool.master.state.ssd_tier import SsdTier
from moonpool.master.state.table import Flag
from moonpool.master.state.tasks import Tasks
from moonpool.master.state.unfinished_puts import Identities, check_pairs
from moonpool.store import messages as m


class PoolState:
    """See the module. `epoch` must be higher than in every earlier life of this master."""

    def __init__(
        self, rules: PoolRules, epoch: int, policy: EvictionPolicy | None = None, *, journalled: bool = False
    ) -> None:
        self.rules = rules
        self.epoch = epoch
        order = make_policy(rules.eviction) if policy is None else policy
        first_id = (epoch << EPOCH_BITS) + 1
        self.outcomes = Outcomes(enabled=journalled)
        self.generations = Generations(epoch)
        self.table_of_segments = SegmentTable()
        self.space = PoolSpace(self.table_of_segments, self.generations, self.outcomes)
        self.index = ObjectIndex(rules, self.table_of_segments, self.space, order, self.outcomes)
        self.identities = Identities(self.outcomes)
        self.orders = OrderBook(first_id, rules.order_timeout_s)
        segments, index = self.table_of_segments, self.index
        self._evictor = Evictor(rules, index, segments)
        self.puts = Puts(rules, index, segments, self.space, self._evictor, self.generations, self.identities)
        self.copies = Copies(rules, index, segments, self.space, self.orders)
        self.ssd = SsdTier(rules, index, segments, self.orders, self.copies)
        self._hot = HotKeys(rules, index, segments, self.copies)
        self._reads = ReadState(rules, index, self.ssd, self._hot)
        self._listing = ObjectListing(index)
        self._tasks = Tasks(rules, first_id, index, segments, self.copies)
        self.members = Members(
            rules, epoch, index, segments, self.space, self.puts, self.orders, self.ssd, self.generations
        )

    # putting

    def put_start(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        options: m.PutOptions,
        now_s: float,
        *,
        session: int = 0,
        parents: Sequence[bytes] | None = None,
        groups: Sequence[bytes] | None = None,
        settled_up_to: int = 0,
    ) -> m.PutReply:
        """Space for each item, on up to num_replicas distinct segments and at least one; or why not."""
        self._evictor.begin_event()
        if session:
            self.members.heard_of(session)
            self.puts.on_session_stopped(keys, session, settled_up_to, now_s)
        return self.puts.start(keys, sizes, options, session, parents, groups, now_s)

    def put_end(
        self, keys: Sequence[bytes], generations: Sequence[int], failed: Mapping[int, tuple[str, ...]], now_s: float
    ) -> dict[int, m.Refusal]:
        """Makes the objects visible; refusals by position. Said twice it is no error; too late: StaleGeneration."""
        check_pairs(keys, generations)
        refusals, slots = self.puts.end(keys, generations, failed, now_s)
        if self.ssd.is_used:
            self.ssd.on_stored(slots)
            self.ssd.pump(now_s)
        return refusals

    def put_renew(self, keys: Sequence[bytes], generations: Sequence[int], now_s: float) -> list[bool]:
        """Unfinished puts that go on: their time starts anew. True where there is one."""
        check_pairs(keys, generations)
        return self.puts.renew(keys, generations, now_s)

    def put_revoke(self, keys: Sequence[bytes], generations: Sequence[int], settled: bool, now_s: float) -> None:
        """Ends unfinished puts. The space rests unless no write can still be under way (`settled`)."""
        check_pairs(keys, generations)
        self.puts.revoke(keys, generations, settled, now_s)

    # reading and removing

    def lookup(
        self,
        keys: Sequence[bytes],
        now_s: float,
        *,
        prefix: bool = False,
        lease: bool = True,
        session: int = 0,
        reads: bool = True,
    ) -> list[m.ObjectInfo | None]:
        """Where the objects are, each leased; with `prefix` everything behind the first missing key is None."""
        if session and session < FIRST_SESSION:
            raise InvalidInput(f"a session is 0 or at least {FIRST_SESSION}", param="session")
        self.members.heard_of(session)
        return self._reads.lookup(keys, prefix, lease, session, now_s, reads)

    def exist(self, keys: Sequence[bytes], now_s: float, without: Sequence[tuple[str, int]] = ()) -> list[bool]:
        """As lookup, leases included, without the places. `without` are segments that the caller cannot read."""
        return self._reads.exist_outside(keys, without, now_s) if without else self._reads.exist(keys, now_s)

    def report_corrupt(self, key: bytes, generation: int, segment: str, offset: int, now_s: float) -> bool:
        """Quarantines one replica. False when it is gone, replaced or moved: the reader was only late."""
        return self.copies.quarantine(key, generation, segment, offset, now_s)

    def remove(self, keys: Sequence[bytes], force: bool, now_s: float) -> list[bool]:
        """True where no object is under the key now. Leased and pinned ones stay unless `force`.

        Objects on an SSD that is away are removed too, and do not come back with it.
        """
        found = (self.index.find_any(key, now_s) for key in keys)
        return [slot is None or remove(self.index, slot, force, now_s) for slot in found]

    def remove_matching(self, pattern: str | None, force: bool, cursor: int, now_s: float) -> m.RemovedCount:
        return self._listing.remove(pattern, force, cursor, now_s)

    def list_objects(self, pattern: str | None, cursor: int, limit: int, now_s: float) -> m.ObjectPage:
        return self._listing.page(pattern, cursor, limit, now_s)

    # pins

    def pin(self, holder: int, keys: Sequence[bytes], now_s: float) -> list[bool]:
        """Keeps the objects until unpin or until the holder is gone; pins count. True where there is an object."""
        self.members.heard_of(holder)
        slots = self.index.find_many(keys, now_s)
        for slot in slots:
            if slot is not None:
                self.index.pin(holder, slot)
        return [slot is not None for slot in slots]

    def unpin(self, holder: int, keys: Sequence[bytes], now_s: float) -> None:
        for key in keys:
            self.index.unpin(holder, key, now_s)

    def connection_closed(self, connection: int, now_s: float) -> None:
        """The pins of that connection end."""
        self.index.unpin_all(connection, now_s)

    def sessions_gone(self, sessions: Sequence[int], now_s: float) -> None:
        """These processes have ended: what they held in place is free."""
        self.members.sessions_gone(sessions, now_s)

    # segments

    def mount(
        self,
        node: str,
        descriptor: SegmentDescriptor,
        now_s: float,
        *,
        tier: m.Tier = m.Tier.DRAM,
        desk: str | None = None,
        capacity_nbytes: int | None = None,
    ) -> m.MountReply:
        """Takes a segment in, empty; used from its first heartbeat on. AlreadyExists when another has the name."""
        return self.members.mount(node, descriptor, tier, desk, capacity_nbytes, now_s)

    def unmount(self, segment: str, incarnation: int, now_s: float) -> None:
        self.members.unmount(segment, incarnation, now_s)

    def heartbeat(
        self, segment: str, incarnation: int, now_s: float, generation_limit: int = m.MAX_GENERATION
    ) -> m.HeartbeatReply:
        return self.members.heartbeat(segment, incarnation, now_s, generation_limit)

    def segments(self) -> list[m.SegmentInfo]:
        """Those that can be read from."""
        return [each.info() for each in self.table_of_segments.all() if not each.is_away]

    # orders and tasks

    def orders_done(self, results: Sequence[m.OrderResult], now_s: float) -> None:
        self.orders.done(results, now_s)
        self.ssd.pump(now_s)

    def copy(self, key: bytes, targets: Sequence[str], now_s: float) -> int:
        return self._tasks.copy(key, targets, now_s)

    def move(self, key: bytes, source: str, target: str, now_s: float) -> int:
        return self._tasks.move(key, source, target, now_s)

    def drain(self, segment: str, now_s: float) -> int:
        return self._tasks.drain(segment, now_s)

    def task(self, task_id: int) -> m.TaskInfo | None:
        return self._tasks.query(task_id)

    def tasks(self, finished: bool = False) -> list[m.TaskInfo]:
        """Those that run; with `finished` also those that ended lately."""
        return self._tasks.listed(finished)

    def cancel_task(self, task_id: int) -> bool:
        return self._tasks.cancel(task_id)

    # time

    def tick(self, now_s: float) -> bool:
        """One bounded step of everything that time brings. True: call again soon, there is more to do."""
        limit = self.rules.step_objects
        self.members.expire(now_s)
        late = self.puts.discard_late(now_s, limit)
        freeing = self.space.free_due(now_s, limit)
        late = self.orders.expire(now_s, limit) or late
        sweeping = self.index.losses.sweep(now_s, limit)
        evicting = self._evictor.by_watermark(now_s, limit)
        if self.ssd.is_used:
            evicting = self.ssd.evict(now_s, limit) or evicting
            self.ssd.pump(now_s)
        moving = self._tasks.step(now_s, limit)
        return late or freeing or sweeping or evicting or moving

    # questions

    def why(self, key: bytes, now_s: float, identity: bytes = b"") -> str:
        """What became of a key, in a sentence."""
        slot, table = self.index.table.find(key), self.index.table
        if slot is not None and table.flags[slot] & Flag.DORMANT:
            return "this object is on an SSD whose node is away; it can be read when the node is back"
        slot = self.index.find(key, now_s)
        if slot is not None:
            mine = self.identities.digest(table.identity[slot])
            if identity and mine and mine != identity:
                return f"this object is stored with another identity ({mine.hex()[:16]}): its bytes are not for you"
            places = ", ".join(each.segment for each in self.index.placements(slot))
            return f"this object is stored: {table.nbytes[slot]} bytes on {places}{self._kept_by(slot, now_s)}"
        put = self.puts.pending.get(key)
        if put is not None:
            return f"this object is being written since {now_s - put.renewed_s:.1f} s"
        return self.index.removals.explain(key, now_s)

    def _kept_by(self, slot: int, now_s: float) -> str:
        """What keeps the object from being removed or evicted, as the end of a sentence; empty if nothing does."""
        table = self.index.table
        flags, left_s = table.flags[slot], table.lease_until_s[slot] - now_s
        pins = {Flag.PINNED: "a process has it open", Flag.HARD_PIN: "it is pinned"}
        reasons = [text for flag, text in pins.items() if flags & flag]
        if left_s > 0:
            reasons.append(f"the lease of its last reader ends in {left_s:.1f} s")
        return "; " + " and ".join(reasons) if reasons else ""

    def stats(self) -> m.StoreStats:
        counters = {
            **self._reads.counters,
            **self.puts.counters,
            **self.index.counters,
            **self.ssd.counters,
            **self._hot.counters,
            **self.orders.counters,
            "puts_in_progress": len(self.puts.pending),
            "orders_in_progress": len(self.orders),
            "objects_away": self.index.table.num_dormant,
        }
        return m.StoreStats(
            num_objects=len(self.index),
            capacity_nbytes=self.table_of_segments.capacity_nbytes,
            used_nbytes=self.table_of_segments.used_nbytes,
            segments=tuple(each.stats() for each in self.table_of_segments.all()),
            counters=counters,
        )

    # listeners, journal, tests

    def take_changes(self) -> Changes | None:
        """Keys that changed since the last call; None when nothing did."""
        return self.index.changes.take(self.index.tiers_of)

    def snapshot(self) -> Iterator[list[tuple[bytes, m.Tier]]]:
        """All readable keys in parts. With the changes taken after the first part was asked for, it is whole."""
        return snapshot.keys(self.index)

    def take_records(self) -> Sequence[bytes]:
        """What the journal must hold before the last event is answered."""
        return self.outcomes.take()

    def snapshot_records(self, now_s: float) -> Iterator[list[bytes]]:
        """The state in steps, as records. With those taken after the first step was asked for, it is whole."""
        return snapshot.records(self, now_s)

    def restore(self, records: Iterator[bytes], now_s: float) -> int:
        """Before anything else: what an earlier life wrote down; how many records there were."""
        return recovery.restore(self, records, now_s)

    def spans(self) -> Iterator[tuple[Place, int]]:
        """All space in DRAM that belongs to somebody."""
        yield from object_spans(self.index.table)
        yield from self.puts.spans()
        yield from self.space.spans()
        yield from self.index.pins.spans()
        yield from self.copies.spans()

    def check_integrity(self) -> None:
        """Raises AssertionError when table, allocators, eviction order, pins and byte counts disagree."""
        check_pool(self.table_of_segments, self.index, self.spans())
