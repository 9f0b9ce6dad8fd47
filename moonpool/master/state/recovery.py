"""The restart of a master: records become state again. Pure.

While records are replayed, segments have no allocators and nothing is counted; both are made at the end from the space
that is in use. Leases are not in the journal, so every object gets a new lease: a restart interrupts no reader. Nothing
is placed on a segment before its node has reported about the time that the journal may have lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from moonpool import __version__
from moonpool.base.errors import Corrupt, InvalidInput
from moonpool.master.state import records as r
from moonpool.master.state.allocator import OffsetAllocator
from moonpool.master.state.changes import RemovalReason
from moonpool.master.state.pool import PoolState
from moonpool.master.state.replay import RecoveredOrder, RecoveredPins
from moonpool.master.state.segments import MountedSegment, Place
from moonpool.master.state.table import UNKNOWN_OFFSET, Flag
from moonpool.master.state.unfinished_puts import AHEAD, PendingPut, PutTerms
from moonpool.store.messages import GRANULE_NBYTES, Tier, ahead_key


def restore(state: PoolState, entries: Iterable[bytes], now_s: float) -> int:
    """Replay the journal entries of earlier masters into a new state, before any other event. Return their number.

    Raise Corrupt if an entry is not of this version, or entries contradict each other.
    """
    work = _Recovery(state, now_s)
    count = 0
    for data in entries:
        try:
            records = r.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Corrupt(
                f"entry {count} of the journal is not one that Moonpool {__version__} can read ({error}): start the "
                "version that wrote it, or start with --forget-journal, which sets the files aside and begins with an "
                "empty pool"
            ) from error
        for record in records:
            work.apply(record)
        count += 1
    work.finish(knows_nothing=count == 0)
    return count


class _Recovery:
    def __init__(self, state: PoolState, now_s: float) -> None:
        self._state = state
        self._index = state.index
        self._now_s = now_s
        self._journalled = state.outcomes.enabled
        state.outcomes.enabled = False
        state.index.changes.enabled = False
        # Nodes list all their records to a restarted master, so no record is dropped by order during the replay.
        self._on_record_unwanted = state.index.on_record_unwanted
        state.index.on_record_unwanted = lambda key, nbytes, replica, now_s: None
        self._pins = RecoveredPins()
        self._order = RecoveredOrder(state.index)
        self._last_generation = 0
        self._unsettled: dict[bytes, None] = {}
        self._handlers: dict[type[r.Record], Callable[[Any], None]] = {
            r.Began: self._began,
            r.Mounted: self._mounted,
            r.SegmentsEnded: self._ended,
            r.SegmentsAway: self._away,
            r.Listed: lambda record: state.members.listed.add(record.name),
            r.Draining: self._draining,
            r.Identified: lambda record: state.identities.restore(record.number, record.digest),
            r.Granted: self._granted,
            r.PutsEnded: self._puts_ended,
            r.PutsAbandoned: self._puts_abandoned,
            r.Freed: self._freed,
            r.LetGo: lambda record: self._session_stopped(record.session, record.up_to),
            r.Dropped: self._dropped,
            r.Placed: self._placed,
            r.Pinned: lambda record: self._pins.pinned(record.session, record.keys),
            r.Unpinned: lambda record: self._pins.unpinned(record.session, record.keys),
            r.Viewed: lambda record: self._pins.viewed(record.key, record.places, record.nbytes, record.ended),
            r.SessionsEnded: self._sessions_ended,
            r.HeldPut: self._held_put,
            r.Fated: self._fated,
            r.Named: self._named,
            r.Recounting: self._recounting,
            r.Answered: state.answers.restore,
            r.Unsettled: lambda record: self._unsettled.update(dict.fromkeys(record.keys)),
        }

    def apply(self, record: r.Record) -> None:
        self._handlers[type(record)](record)

    # segments

    def _began(self, record: r.Began) -> None:
        segments = self._state.table_of_segments
        segments.last_number = max(segments.last_number, record.last_segment_number)
        self._takes(record.last_generation)
        self._state.members.adopts = record.adopts
        self._state.members.listed.update(record.listed)

    def _mounted(self, record: r.Mounted) -> None:
        segments = self._state.table_of_segments
        made = segments.mount(
            record.node, record.descriptor, record.tier, record.registry_address, record.capacity_nbytes, record.number
        )
        made.allocator, made.heard_s, made.draining = None, self._now_s, record.draining
        made.floor = record.floor if self._takes(record.floor) else 0

    def _ended(self, record: r.SegmentsEnded) -> None:
        segments = self._state.table_of_segments
        for number, ssd in zip(record.numbers, record.successors, strict=True):
            if ssd:
                self._index.losses.backing_ssds[number] = ssd
            segment = segments.by_number.get(number)
            if segment is not None:
                segments.end(segment)

    def _away(self, record: r.SegmentsAway) -> None:
        for number in record.numbers:
            segment = self._state.table_of_segments.by_number.get(number)
            if segment is not None:
                segment.is_away = True

    def _draining(self, record: r.Draining) -> None:
        segment = self._state.table_of_segments.by_number.get(record.number)
        if segment is not None:
            segment.draining = record.on

    def _recounting(self, record: r.Recounting) -> None:
        for number, above in zip(record.numbers, record.above, strict=True):
            segment = self._state.table_of_segments.by_number.get(number)
            if segment is not None and (above is None or self._takes(above)):
                segment.recount_above = above

    # puts

    def _granted(self, record: r.Granted) -> None:
        terms = PutTerms(
            record.session, record.flags, record.identity, record.soft_pin_s, record.replace, record.number
        )
        parents = None if record.parents is None else r.lengthened(record.parents, record.keys)
        for at, key in enumerate(record.keys):
            if not self._takes(record.generations[at]):
                continue
            put = PendingPut(key, record.sizes[at], record.generations[at], record.places[at], terms, self._now_s)
            if record.groups is not None:
                put.group = record.groups[at]
            if parents is not None:
                put.parent = parents[at]
            self._state.puts.pending.pop(key, None)
            self._state.puts.pending[key] = put
            self._state.puts.ahead_nbytes += put.nbytes if terms.flags & AHEAD else 0
        self._session_stopped(record.session, record.let_go)

    def _named(self, record: r.Named) -> None:
        held = self._state.puts.pending.get(ahead_key(record.generation))
        if held is not None and held.generation == record.generation:
            terms = PutTerms(held.terms.session, record.flags, record.identity, record.soft_pin_s, False)
            self._state.ahead.name(held, record.key, record.nbytes, terms)

    def _puts_ended(self, record: r.PutsEnded) -> None:
        for at, key in enumerate(record.keys):
            put = self._take_put(key, record.generations[at])
            if put is not None:
                put.places = record.left.get(at, put.places)
                self._state.puts.store(put, self._now_s)

    def _puts_abandoned(self, record: r.PutsAbandoned) -> None:
        for at, key in enumerate(record.keys):
            put = self._take_put(key, record.generations[at])
            if put is None:
                continue
            if record.kept[at]:
                reason = RemovalReason(record.fates[at])
                self._state.puts.keep_space(put, self._now_s, self._now_s, reason)
            if put.terms.flags & AHEAD:
                self._state.puts.ahead_nbytes -= put.nbytes
            else:
                self._index.removals.record(key, RemovalReason(record.fates[at]), self._now_s)

    def _take_put(self, key: bytes, generation: int) -> PendingPut | None:
        put = self._state.puts.pending.get(key)
        if put is None or put.generation != generation:
            return None
        return self._state.puts.pending.pop(key)

    def _freed(self, record: r.Freed) -> None:
        self._state.space.free_puts(record.generations)

    def _session_stopped(self, session: int, up_to: int) -> None:
        if up_to:
            self._state.space.on_session_stopped(session, up_to, self._now_s + self._state.rules.put_release_s)

    def _held_put(self, record: r.HeldPut) -> None:
        if not self._takes(record.generation):
            return
        space, generation, where = self._state.space, record.generation, (record.places, record.nbytes)
        if record.session:
            space.hold_put(generation, *where, record.session, record.ahead, record.number)
        else:
            free_s = self._now_s + self._state.rules.put_release_s
            space.free_put_at(free_s, generation, *where, record.number)

    # objects

    def _dropped(self, record: r.Dropped) -> None:
        for key, reason in zip(record.keys, record.fates, strict=True):
            slot = self._index.table.find(key)
            if slot is not None:
                self._index.drop(slot, RemovalReason(reason), self._now_s)
            else:
                self._index.removals.record(key, RemovalReason(reason), self._now_s)

    def _placed(self, record: r.Placed) -> None:
        index, table = self._index, self._index.table
        for at, key in enumerate(record.keys):
            dram, ssd = record.dram[at], record.ssd[at]
            slot = table.find(key)
            if slot is not None and table.version[slot] != record.versions[at]:
                index.drop(slot, RemovalReason.REPLACED, self._now_s)
                slot = None
            taken = [self._takes(each.generation) for each in (*dram, *((ssd,) if ssd is not None else ()))]
            if not all(taken):
                self._leave_out(key, slot)
                continue
            if slot is None:
                slot = self._insert(record, at)
            else:
                index.set_dram(slot, dram)
            table.set_hot(slot, record.hot.get(at, ()))
            table.set_ssd(slot, ssd)

    def _leave_out(self, key: bytes, slot: int | None) -> None:
        if slot is not None:
            self._index.drop(slot, RemovalReason.NOT_RECOVERED, self._now_s)
        else:
            self._index.removals.record(key, RemovalReason.NOT_RECOVERED, self._now_s)

    def _insert(self, record: r.Placed, at: int) -> int:
        table = self._index.table
        slot = self._index.insert(
            record.keys[at],
            record.sizes[at],
            record.dram[at],
            record.versions[at],
            record.flags[at],
            record.identities[at],
        )
        if at in record.groups:
            table.join_group(slot, record.groups[at])
        parent = record.parent(at)
        if parent is not None:
            self._order.add_parent(slot, parent)
        if at in record.soft_pins_s:
            table.soft_pins[slot] = self._now_s + record.soft_pins_s[at]
            table.flags[slot] |= Flag.SOFT_PIN
        return slot

    def _takes(self, generation: int) -> bool:
        """Issue only generations above this one. Return False if no master can have issued it: then the caller leaves
        out what has it, because no higher generation would be left."""
        if generation <= self._last_generation:
            return True
        if not self._state.generations.is_possible(generation):
            return False
        self._last_generation = generation
        return True

    def _fated(self, record: r.Fated) -> None:
        for key, reason, age_s in zip(record.keys, record.fates, record.ages_s, strict=True):
            self._index.removals.record(key, RemovalReason(reason), self._now_s - age_s)

    # processes

    def _sessions_ended(self, record: r.SessionsEnded) -> None:
        self._pins.ended(record.sessions)
        self._state.members.remember_ended(record.sessions)
        for session in record.sessions:
            self._state.space.on_session_gone(session)

    # the end

    def finish(self, knows_nothing: bool) -> None:
        state, index = self._state, self._index
        self._pins.restore(index)
        self._order.restore()
        state.generations.last = max(state.generations.last, self._last_generation)
        state.members.lost_up_to = state.generations.last
        self._finish_segments()
        table = index.table
        used = (table.dram_segments[: table.end] != 0) | (table.ssd_segments[: table.end] != 0)
        state.table_of_segments.count_totals()
        table.leases[: table.end][used] = self._now_s + state.rules.lease_s
        state.voids.wait_for(self._unsettled, self._now_s + state.rules.lease_s)
        state.answers.finish_restore(state.voids.last_number)
        state.ssd.restore()
        state.hot.begin(self._now_s)
        self._start_sweep()
        state.members.unseen_sessions = self._pins.sessions() | state.puts.sessions()
        index.counters.update(dict.fromkeys(index.counters, 0))
        state.puts.counters.update(dict.fromkeys(state.puts.counters, 0))
        index.on_record_unwanted = self._on_record_unwanted
        state.outcomes.enabled = self._journalled
        index.changes.enabled = True
        if knows_nothing:
            state.members.adopts = True
            state.outcomes.add(r.Began(state.epoch, 0, state.generations.last, True, []))
        else:  # before the first grant: it raises the last generation also for nodes that have not answered
            state.outcomes.add(state.members.recounting())

    def _finish_segments(self) -> None:
        """Rebuild the allocators and counts, ask each node for a report, and continue drains."""
        state, spans = self._state, self._other_spans()
        for segment in state.table_of_segments.by_number.values():
            if segment.tier is Tier.DRAM:
                self._make_allocator(segment, spans.get(segment.number, []))
                if segment.recount_above is None:  # else it has not answered an earlier master, and is asked the same
                    segment.recount_above = self._last_generation
                state.members.uncounted.add(segment.number)
            else:
                self._count_records(segment)
                segment.recount_above = 0
        for segment in state.table_of_segments.all():
            if segment.draining:
                state.drain(segment.name, self._now_s)

    def _start_sweep(self) -> None:
        """Check the objects of segments that are not mounted."""
        table, losses, segments = self._index.table, self._index.losses, self._state.table_of_segments
        named = set(np.unique(table.dram_segments[: table.end]).tolist())
        named.update(np.unique(table.ssd_segments[: table.end]).tolist())
        named.update(replica.segment for extras in table.extras.values() for replica in extras)
        lost = {number for number in named if number and not segments.is_live(number)}
        expected = table.ssd_offsets[: table.end] == UNKNOWN_OFFSET
        lost.update(np.unique(table.ssd_segments[: table.end][expected]).tolist())
        losses.backing_ssds = {number: ssd for number, ssd in losses.backing_ssds.items() if number in lost}
        losses.start_sweep(sorted(lost - {0}))

    def _make_allocator(self, segment: MountedSegment, others: list[tuple[int, int]]) -> None:
        table = self._index.table
        slots = np.flatnonzero(table.dram_segments[: table.end] == segment.number)
        more = np.array(others, dtype=np.int64).reshape(-1, 2)
        offsets = np.concatenate((table.dram_offsets[slots].astype(np.int64), more[:, 0]))
        sizes = np.concatenate((table.sizes[slots].astype(np.int64), more[:, 1]))
        try:
            segment.allocator = OffsetAllocator.rebuilt(segment.descriptor.nbytes, offsets, sizes)
        except InvalidInput as error:
            raise Corrupt(f"the journal contradicts itself about segment {segment.name!r}: {error}") from error
        segment.num_replicas = len(offsets)

    def _other_spans(self) -> dict[int, list[tuple[int, int]]]:
        """Return (offset, nbytes) of all used space except first replicas, which are many and come from the columns."""
        state, table = self._state, self._index.table
        found: dict[int, list[tuple[int, int]]] = {}
        extras: Iterable[tuple[Place, int]] = (
            ((each.segment, each.offset), table.nbytes[slot]) for slot, more in table.extras.items() for each in more
        )
        for (number, offset), nbytes in chain(
            extras, state.puts.spans(), state.space.spans(), self._index.pins.spans()
        ):
            found.setdefault(number, []).append((offset, nbytes))
        return found

    def _count_records(self, segment: MountedSegment) -> None:
        table = self._index.table
        sizes = table.sizes[: table.end][table.ssd_segments[: table.end] == segment.number].astype(np.int64)
        segment.num_replicas = len(sizes)
        segment.ssd_used_nbytes = int((-(-sizes // GRANULE_NBYTES)).sum()) * GRANULE_NBYTES
