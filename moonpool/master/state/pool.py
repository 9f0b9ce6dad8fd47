"""The master's whole state: objects, puts, leases, pins, segments, orders. Pure: no clock, no I/O, no randomness.

Every method is an event at the time `now_s`, which never decreases; the same events give the same state. Batches are
positional: a bad item does not fail the others. What it promises:

- An object is visible from put_end until it is removed, and its bytes are not reused while it is leased or pinned.
- A key has at most one object and at most one unfinished put, which is discarded after put_discard_s.
- Space is granted with a generation that is higher than any before it, across restarts too (epoch << 32). Space that a
  process may write in place is not granted again before that process has reported that it stopped, or has ended.
- No event does work in proportion to the number of objects: eviction, sweeps, snapshots and drains work in steps.
- After every event take_records() returns what must be in the journal before the event is answered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import Cancelled, InvalidInput, NotSettled
from moonpool.master.policies import make_policy
from moonpool.master.policies.base import EvictionPolicy
from moonpool.master.rules import PoolRules
from moonpool.master.state.ahead import SpaceAhead
from moonpool.master.state.answers import Answers
from moonpool.master.state.changes import Changes
from moonpool.master.state.evictor import Evictor
from moonpool.master.state.hot_replicas import HotReplicas
from moonpool.master.state.index import ObjectIndex
from moonpool.master.state.integrity import check_pool, object_spans
from moonpool.master.state.listing import ObjectListing, remove, remove_replicas
from moonpool.master.state.members import Members
from moonpool.master.state.objects import FIRST_SESSION
from moonpool.master.state.orders import Copies, OrderBook
from moonpool.master.state.promotions import AskedPromotions
from moonpool.master.state.puts import Puts
from moonpool.master.state.reads import ReadState
from moonpool.master.state.records import Outcomes
from moonpool.master.state.segments import Place, SegmentTable
from moonpool.master.state.space import EPOCH_BITS, Generations, PoolSpace
from moonpool.master.state.ssd_tier import SsdTier
from moonpool.master.state.table import Flag
from moonpool.master.state.tasks import Tasks
from moonpool.master.state.unfinished_puts import Identities, check_pairs
from moonpool.master.state.voids import Voids
from moonpool.store import messages as m


class PoolState:
    """See the module. `epoch` must be higher than that of every earlier master on this journal; `epoch_now` as in
    Generations."""

    def __init__(
        self,
        rules: PoolRules,
        epoch: int,
        policy: EvictionPolicy | None = None,
        *,
        journalled: bool = False,
        epoch_now: Callable[[], int] = lambda: 0,
    ) -> None:
        self.rules = rules
        self.epoch = epoch
        order = make_policy(rules.eviction) if policy is None else policy
        first_id = (epoch << EPOCH_BITS) + 1
        self.outcomes = Outcomes(enabled=journalled)
        self.generations = Generations(epoch, epoch_now)
        self.table_of_segments = SegmentTable()
        self.space = PoolSpace(self.table_of_segments, self.generations, self.outcomes)
        self.index = ObjectIndex(rules, self.table_of_segments, self.space, order, self.outcomes)
        self.identities = Identities(self.outcomes)
        self.answers = Answers(self.outcomes)
        self.orders = OrderBook(first_id, rules.order_timeout_s)
        segments, index = self.table_of_segments, self.index
        self._evictor = Evictor(rules, index, segments)
        self.puts = Puts(rules, index, segments, self.space, self._evictor, self.generations, self.identities)
        self.ahead = SpaceAhead(rules, index, segments, self.space, self.puts, self.generations, self.identities)
        self.copies = Copies(rules, index, segments, self.space, self.orders)
        self.ssd = SsdTier(rules, index, segments, self.orders, self.copies, self.generations)
        self.promotions = AskedPromotions(index, segments, self.ssd)
        self.hot = HotReplicas(rules, index, segments, self.space, self.copies, self._evictor)
        self.voids = Voids(rules, segments, self.orders, self.outcomes, self.puts.pending)
        index.on_replicas_left = self.voids.on_replicas_left
        self._reads = ReadState(rules, index, self.ssd, self.hot, self.voids)
        self._listing = ObjectListing(index)
        self._tasks = Tasks(rules, first_id, index, segments, self.space, self.copies)
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
        number: int = 0,
    ) -> m.PutReply:
        """Grant space to each item, on one to num_replicas distinct segments; refuse it if there is none. Raise
        Cancelled if the client has given up the call of that number."""
        if number and self.puts.is_dropped(number):
            raise Cancelled("the client has given up this call")
        if session:
            self.members.check_session(session)
            self.puts.on_session_stopped(keys, session, settled_up_to, now_s)
        reply = self.puts.start(keys, sizes, options, session, parents, groups, now_s, number)
        if options.replace:
            self._begin_upserts(
                [key for key, generation in zip(keys, reply.generations, strict=True) if generation], now_s
            )
        return reply

    def put_end(
        self, keys: Sequence[bytes], generations: Sequence[int], failed: Mapping[int, tuple[str, ...]], now_s: float
    ) -> dict[int, m.Refusal]:
        """Make the objects visible. Return refusals by position. A repeated call is no error; a late one is
        StaleGeneration. Call it when check_can_end() passes.
        """
        check_pairs(keys, generations)
        refusals, slots = self.puts.end(keys, generations, failed, now_s)
        if self.ssd.queues:
            self.ssd.on_stored(slots)
            self.ssd.start_offloads(now_s)
        return refusals

    def grant_ahead(self, wanted: m.GrantAhead, now_s: float) -> m.PutReply:
        """Grant space for puts to come; see SpaceAhead.grant."""
        if wanted.session:
            self.members.check_session(wanted.session)
        return self.ahead.grant(wanted, now_s)

    def put_at(self, put: m.PutAt, now_s: float) -> m.PutAtReply:
        """Make the object visible that was written to space granted ahead. Raise NotSettled as check_settled()."""
        self.check_settled([put.key], now_s)
        reply = self.ahead.put_at(put, now_s)
        if self.ssd.queues and reply.refusal is None:
            self.ssd.on_stored([slot for slot in [self.index.table.find(put.key)] if slot is not None])
            self.ssd.start_offloads(now_s)
        return reply

    def check_can_end(self, keys: Sequence[bytes], generations: Sequence[int], now_s: float) -> None:
        """Raise NotSettled while a reader that has not asked may find the values that these puts replace, or older
        ones: put_end has to wait.
        """
        pending = self.puts.pending
        found = [(pending.get(key), generation) for key, generation in zip(keys, generations, strict=False)]
        upserts = [put for put, generation in found if put and put.terms.replace and put.generation == generation]
        self._begin_upserts([put.key for put in upserts if put.voiding is None], now_s)
        if any(put.voiding is not None and not put.voiding.is_over(now_s) for put in upserts):
            raise NotSettled("a reader may still find the old value of this key; ask again")
        self.check_settled(keys, now_s)

    def _begin_upserts(self, keys: Sequence[bytes], now_s: float) -> None:
        """Order the nodes to void what the unfinished puts of these keys replace."""
        table = self.index.table
        for key in keys:
            slot, put = table.find(key), self.puts.pending[key]
            if slot is not None and table.dram_segment[slot]:
                replicas, until_s = table.dram_replicas(slot), table.lease_until_s[slot]
                self.voids.begin_upsert(put, table.nbytes[slot], replicas, until_s, now_s)

    def check_settled(self, keys: Iterable[bytes], now_s: float, up_to: int | None = None) -> None:
        """Raise NotSettled while a reader may find an older value of one of these keys; see Voids.are_settled."""
        if not self.voids.are_settled(keys, now_s, up_to):
            raise NotSettled("a reader may still find an older value of this key; ask again")

    def put_renew(self, keys: Sequence[bytes], generations: Sequence[int], now_s: float) -> list[bool]:
        """Restart the time of unfinished puts. Return for each whether it is still unfinished; see SpaceAhead.renew."""
        check_pairs(keys, generations)
        return self.ahead.renew(keys, generations, now_s)

    def put_revoke(self, keys: Sequence[bytes], generations: Sequence[int], settled: bool, now_s: float) -> None:
        """End unfinished puts. Free their space now if no write can still be under way (`settled`), otherwise later."""
        check_pairs(keys, generations)
        self.puts.revoke(keys, generations, settled, now_s)

    def put_drop(self, number: int, keys: Sequence[bytes], now_s: float) -> None:
        """Free what the PutStart of that number was granted: its client has given it up; see UnfinishedPuts.drop."""
        self.puts.drop(number, keys, now_s)

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
        """Return where the objects are, and lease them. With `prefix`, every item after the first
        missing key is None. With a session, raise NotSettled as Members.check_counted().
        """
        if session and session < FIRST_SESSION:
            raise InvalidInput(f"a session is 0 or at least {FIRST_SESSION}", param="session")
        if session:
            self.members.check_session(session)
            self.members.check_counted(keys, now_s)
        return self._reads.lookup(keys, prefix, lease, session, now_s, reads)

    def exist(self, keys: Sequence[bytes], now_s: float, without: Sequence[tuple[str, int]] = ()) -> list[bool]:
        """Return which keys have an object, and lease these. `without` are segments that the caller cannot read."""
        return self._reads.exist_outside(keys, without, now_s) if without else self._reads.exist(keys, now_s)

    def locate(self, keys: Sequence[bytes], now_s: float) -> list[m.ObjectInfo | None]:
        return self._reads.locate(keys, now_s)

    def renew_leases(
        self, keys: Sequence[bytes], generations: Sequence[int], now_s: float, num_replicas: Sequence[int] = ()
    ) -> m.RenewedLeases:
        check_pairs(keys, generations)
        if num_replicas:
            check_pairs(keys, num_replicas)
        return self._reads.renew(keys, generations, now_s, num_replicas)

    def report_corrupt(self, key: bytes, generation: int, segment: str, offset: int, now_s: float) -> bool:
        """Remove one corrupt replica. Return False if it is gone, replaced or moved: then the reader was only late."""
        return self.copies.quarantine(key, generation, segment, offset, now_s)

    def remove(self, keys: Sequence[bytes], force: bool, now_s: float) -> list[bool]:
        """Remove objects. Return for each key whether it has no object now. Leased and pinned objects stay unless
        `force`. The removal is done when check_settled() passes.

        Objects on an SSD that is away are removed too, and do not come back with it.
        """
        found = (self.index.find_any(key, now_s) for key in keys)
        return [slot is None or remove(self.index, slot, force, now_s) for slot in found]

    def remove_replicas(self, keys: Sequence[bytes], segments: Sequence[str], now_s: float) -> list[bool]:
        """Remove the replicas in memory of these segments, unless the object is leased or pinned. Return for each key
        whether a replica was removed.
        """
        known = (self.table_of_segments.get(name) for name in segments)
        numbers = {each.number for each in known if each is not None}
        found = (self.index.find(key, now_s) for key in keys)
        return [slot is not None and remove_replicas(self.index, slot, numbers, now_s) for slot in found]

    def remove_matching(
        self, pattern: str | None, force: bool, cursor: int, now_s: float, prefix: bytes = b""
    ) -> m.RemovedCount:
        return self._listing.remove(pattern, force, cursor, now_s, prefix)

    def list_objects(self, pattern: str | None, cursor: int, limit: int, now_s: float) -> m.ObjectPage:
        return self._listing.page(pattern, cursor, limit, now_s)

    # pins

    def pin(self, owner: int, keys: Sequence[bytes], now_s: float) -> list[bool]:
        """Keep the objects until unpin, or until the owner is gone. Pins are counted. Return for each key whether it
        has an object.
        """
        self.members.check_session(owner)
        slots = self.index.find_many(keys, now_s)
        for slot in slots:
            if slot is not None:
                self.index.pin(owner, slot)
        return [slot is not None for slot in slots]

    def unpin(self, owner: int, keys: Sequence[bytes], now_s: float) -> None:
        for key in keys:
            self.index.unpin(owner, key, now_s)

    def connection_closed(self, connection: int, now_s: float) -> None:
        """End the pins of that connection."""
        self.index.unpin_all(connection, now_s)

    def sessions_gone(self, sessions: Sequence[int], now_s: float) -> None:
        """End the pins and puts of processes that have ended."""
        self.members.sessions_gone(sessions, now_s)

    # segments

    def mount(
        self,
        node: str,
        descriptor: SegmentDescriptor,
        now_s: float,
        *,
        tier: m.Tier = m.Tier.DRAM,
        registry_address: str | None = None,
        capacity_nbytes: int | None = None,
    ) -> m.MountReply:
        """Mount a segment, empty; it is used after its first heartbeat. Raise AlreadyExists if another one has the
        name.
        """
        before = self.table_of_segments.get(descriptor.name)
        reply = self.members.mount(node, descriptor, tier, registry_address, capacity_nbytes, now_s)
        if before is not None and before is not self.table_of_segments.get(descriptor.name):
            self.voids.on_taken_over(before, now_s)
        return reply

    def unmount(self, segment: str, incarnation: int, now_s: float) -> None:
        self.members.unmount(segment, incarnation, now_s)

    def heartbeat(
        self, segment: str, incarnation: int, now_s: float, generation_limit: int = m.MAX_GENERATION
    ) -> m.HeartbeatReply:
        return self.members.heartbeat(segment, incarnation, now_s, generation_limit)

    def segments(self) -> list[m.SegmentInfo]:
        """Return the segments that can be read."""
        return [each.info() for each in self.table_of_segments.all() if not each.is_away]

    # orders and tasks

    def orders_done(self, results: Sequence[m.OrderResult], now_s: float) -> None:
        self.orders.on_results(results, now_s)
        self.ssd.start_offloads(now_s)

    def copy(self, key: bytes, targets: Sequence[str], now_s: float, missing_only: bool = False) -> int:
        return self._tasks.copy(key, targets, now_s, missing_only)

    def move(self, key: bytes, source: str, target: str, now_s: float) -> int:
        return self._tasks.move(key, source, target, now_s)

    def drain(self, segment: str, now_s: float) -> int:
        return self._tasks.drain(segment, now_s)

    def task(self, task_id: int, now_s: float) -> m.TaskInfo | None:
        return self._tasks.query(task_id, now_s)

    def tasks(self, now_s: float, finished: bool = False) -> list[m.TaskInfo]:
        """Return the running tasks; with `finished` also the latest finished ones."""
        return self._tasks.listed(finished, now_s)

    def cancel_task(self, task_id: int, now_s: float) -> bool:
        return self._tasks.cancel(task_id, now_s)

    # time

    def tick(self, now_s: float) -> bool:
        """Do one bounded step of all that depends on time. Return whether there is more to do soon."""
        limit = self.rules.step_objects
        self.table_of_segments.ramp.advance(now_s)
        self.members.expire(now_s)
        self.voids.expire(now_s)
        late = self.puts.discard_late(now_s, limit)
        freeing = self.space.free_due(now_s, limit)
        late = self.orders.expire(now_s, limit) or late
        sweeping = self.index.losses.sweep(now_s, limit)
        cooling = self.hot.step(now_s, limit)
        evicting = self._evictor.evict_to_watermark(now_s, limit)
        if self.ssd.queues:
            evicting = self.ssd.evict(now_s, limit) or evicting
            self.ssd.start_offloads(now_s)
        moving = self._tasks.step(now_s, limit)
        return late or freeing or sweeping or cooling or evicting or moving

    # questions

    def why(self, key: bytes, now_s: float, identity: bytes = b"") -> str:
        """Return a sentence about the state of a key."""
        slot, table = self.index.table.find(key), self.index.table
        if slot is not None and table.flags[slot] & Flag.DORMANT:
            return "this object is on an SSD whose node is away; it can be read when the node is back"
        slot = self.index.find(key, now_s)
        if slot is not None:
            mine = self.identities.digest(table.identity[slot])
            if identity and mine and mine != identity:
                return f"this object is stored with another identity ({mine.hex()[:16]}): its bytes are not for you"
            places = ", ".join(each.segment for each in self.index.placements(slot))
            return f"this object is stored: {table.nbytes[slot]} bytes on {places}{self._more_about(slot, now_s)}"
        put = self.puts.pending.get(key)
        if put is not None:
            return f"this object is being written since {now_s - put.renewed_s:.1f} s"
        return self.index.removals.explain(key, now_s)

    def _more_about(self, slot: int, now_s: float) -> str:
        """Return why the object has extra replicas, and what keeps it from removal and eviction, as the end of a
        sentence; empty if there is nothing to say.
        """
        table = self.index.table
        flags, left_s = table.flags[slot], table.lease_until_s[slot] - now_s
        pins = {Flag.PINNED: "a process has it open", Flag.HARD_PIN: "it is pinned"}
        reasons = [text for flag, text in pins.items() if flags & flag]
        if left_s > 0:
            reasons.append(f"the lease of its last reader ends in {left_s:.1f} s")
        return "".join(f"; {each}" for each in (*self.hot.explain(slot, now_s), " and ".join(reasons)) if each)

    def stats(self) -> m.StoreStats:
        counters = {
            **self._reads.counters,
            **self.puts.counters,
            **self.index.counters,
            **self.ssd.counters,
            **self.hot.counters,
            **self.orders.counters,
            **self.generations.counters,
            "puts_in_progress": len(self.puts.pending),
            "ahead_bytes": self.puts.ahead_nbytes,
            "orders_in_progress": len(self.orders),
            "objects_away": self.index.table.num_dormant,
            "hot_objects": len(self.index.table.hot),
            "hot_bytes": self.index.table.hot_nbytes,
        }
        no_objects = Counter(number for (number, _), _ in self._spans_of_no_object())
        return m.StoreStats(
            num_objects=len(self.index),
            capacity_nbytes=self.table_of_segments.capacity_nbytes,
            used_nbytes=self.table_of_segments.used_nbytes,
            segments=tuple(each.stats(no_objects[each.number]) for each in self.table_of_segments.all()),
            counters=counters,
            high_watermark=self.rules.high_watermark,
            ssd_high_watermark=self.rules.ssd_high_watermark,
        )

    # listeners, journal, tests

    def take_changes(self) -> Changes | None:
        """Return the keys that changed since the last call, None if there are none."""
        return self.index.changes.take(self.index.tiers_of, self.index.nodes_of)

    def take_records(self) -> Sequence[bytes]:
        """Return what must be in the journal before the last event is answered."""
        return self.outcomes.take()

    def spans(self) -> Iterator[tuple[Place, int]]:
        """Yield all space in DRAM that is in use."""
        yield from object_spans(self.index.table)
        yield from self._spans_of_no_object()

    def _spans_of_no_object(self) -> Iterator[tuple[Place, int]]:
        """Yield the space of unfinished and ended puts, of copies under way, and of what is gone but for its views."""
        yield from self.puts.spans()
        yield from self.space.spans()
        yield from self.index.pins.spans()
        yield from self.copies.spans()

    def check_integrity(self) -> None:
        """Raise AssertionError if table, allocators, eviction order, pins and byte counts disagree."""
        check_pool(self.table_of_segments, self.index, self.spans())
