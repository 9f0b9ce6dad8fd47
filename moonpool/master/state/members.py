"""Members of the pool: segments and client processes that come, send heartbeats, fall silent, leave and return. Pure.

Also what a node reports after a restart of the master. A journal loses its last moments when the machine loses power:
grants of that time are unknown, and so are the objects that were evicted for them. But nodes have stamped the memory
that was written.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import InvalidInput, NotFound, StaleGeneration
from moonpool.master.rules import PoolRules
from moonpool.master.state.allocator import OffsetAllocator
from moonpool.master.state.changes import RemovalReason
from moonpool.master.state.index import ObjectIndex
from moonpool.master.state.objects import FIRST_SESSION
from moonpool.master.state.orders import OrderBook
from moonpool.master.state.puts import Puts
from moonpool.master.state.records import Listed, Mounted, SegmentsAway, SegmentsEnded, SessionsEnded
from moonpool.master.state.segments import MountedSegment, SegmentTable
from moonpool.master.state.space import Generations, PoolSpace
from moonpool.master.state.ssd_tier import SsdTier
from moonpool.master.state.table import ObjectTable, Replica
from moonpool.store.messages import (
    GRANULE_NBYTES,
    MAX_GENERATION,
    SESSIONS_ALONE,
    HeartbeatReply,
    HeldItem,
    MountReply,
    Tier,
    num_granules,
)

_MAX_ENDED_SESSIONS = 16_384
_MAX_SPANS = 256  # of one FenceAhead; the node asks again for the rest


class Members:
    def __init__(
        self,
        rules: PoolRules,
        epoch: int,
        index: ObjectIndex,
        segments: SegmentTable,
        space: PoolSpace,
        puts: Puts,
        orders: OrderBook,
        ssd: SsdTier,
        generations: Generations,
    ) -> None:
        self._rules = rules
        self._epoch = epoch
        self._index = index
        self._segments = segments
        self._space = space
        self._puts = puts
        self._orders = orders
        self._ssd = ssd
        self._generations = generations
        self.adopts = False  # this master began without a journal, so it accepts unknown records of SSDs
        self.listed: set[str] = set()  # SSD segments that have listed all their records, now or before a restart
        # Sessions from before a restart, or that a lost node knew: ended unless they, or their nodes, report.
        self.unseen_sessions: set[int] = set()
        self._known_sessions: set[int] = set()  # reported by a node since a node was last lost
        self._doubtful_sessions: set[int] = set()  # seen in a call, but maybe no node would report their end
        self.ended_sessions: OrderedDict[int, None] = OrderedDict()  # the latest; they must not be used again

    # segments

    def mount(
        self,
        node: str,
        descriptor: SegmentDescriptor,
        tier: Tier,
        desk: str | None,
        capacity_nbytes: int | None,
        now_s: float,
    ) -> MountReply:
        """Mount a segment, empty; it is used after its first heartbeat. A repeated call changes nothing."""
        known = self._segments.find(descriptor.name, descriptor.incarnation)
        if known is None:
            known = self._mount(node, descriptor, tier, desk, capacity_nbytes, now_s)
        return MountReply(self._epoch, self._rules.heartbeat_s, known.floor, self._generations.limit)

    def _mount(
        self,
        node: str,
        descriptor: SegmentDescriptor,
        tier: Tier,
        desk: str | None,
        capacity_nbytes: int | None,
        now_s: float,
    ) -> MountedSegment:
        if tier is Tier.SSD and capacity_nbytes is None:
            raise InvalidInput("an SSD segment needs its capacity in bytes", param="capacity_nbytes")
        self._segments.check_mount(descriptor, tier, self._rules.heartbeat_s, now_s)
        before = self._segments.get(descriptor.name)
        made = self._segments.mount(node, descriptor, tier, desk, capacity_nbytes or 0)
        made.floor, made.heard_s = self._generations.last, now_s
        capacity, floor = made.capacity_nbytes, made.floor
        self._index.outcomes.add(Mounted(made.number, node, descriptor, tier, desk, capacity, floor))
        if before is not None and before.tier is Tier.DRAM:
            self._end([before], now_s)
        elif before is not None:
            self._mark_away([before])
        if tier is Tier.SSD:
            self._ssd.on_mounted(made)
        return made

    def heartbeat(
        self, name: str, incarnation: int, now_s: float, generation_limit: int = MAX_GENERATION
    ) -> HeartbeatReply:
        segment = self._segments.find(name, incarnation)
        if segment is None or segment.is_away:
            return HeartbeatReply(known=False, epoch=self._epoch)
        segment.heard_s, segment.gone_since_s = now_s, None
        generations = self._generations
        segment.is_behind = not generations.are_admitted_up_to(generation_limit)
        if segment.recount_above in (None, SESSIONS_ALONE) and segment.tier is Tier.DRAM:
            segment.acknowledged = not segment.is_behind
        return HeartbeatReply(True, self._epoch, segment.recount_above, generations.limit, generations.last)

    def recount(
        self, name: str, incarnation: int, spans: Sequence[tuple[int, int]], sessions: Iterable[int], now_s: float
    ) -> None:
        """Apply what a node reports of the time that the journal may have lost. Then its segment takes new objects
        again.
        """
        segment = self._segments.find(name, incarnation)
        if segment is None or segment.recount_above is None:
            return
        if spans and segment.allocator is not None:
            self._reserve_unknown(segment, segment.allocator, spans, now_s)
        segment.recount_above = None
        segment.acknowledged = segment.tier is Tier.DRAM
        known = set(sessions)
        self._known_sessions |= known
        self.unseen_sessions -= known
        self._doubtful_sessions -= known
        self._forget_unseen_sessions(now_s)

    def fence_ahead(
        self, name: str, incarnation: int, spans: Sequence[tuple[int, int, int]]
    ) -> list[tuple[int, int, int, int]]:
        """Return what a node has to stamp in place of generations that were never issued; see FenceAhead.

        Free space gets a generation that no writer has, so that late writes are refused; the space of an object gets
        the object's generation.
        """
        segment = self._segments.find(name, incarnation)
        if segment is None or segment.allocator is None or not segment.acknowledged:
            return []
        spans = [span for span in spans if span[2] > self._generations.last][:_MAX_SPANS]
        if not spans:
            return []
        fresh = self._generations.issue()
        lowered = [
            (*free, stamp, fresh)
            for offset, nbytes, stamp in spans
            for free in unowned(segment.allocator, [(offset, nbytes)])
        ]
        table = self._index.table
        for slot, replicas in overwritten(table, segment.number, [span[:2] for span in spans]):
            nbytes = num_granules(table.nbytes[slot]) * GRANULE_NBYTES
            for each in replicas:
                shared = ((common((each.offset, nbytes), span[:2]), span[2]) for span in spans)
                lowered += [(*span, stamp, each.generation) for span, stamp in shared if span[1] > 0]
        return lowered

    def disconnected(self, name: str, incarnation: int, now_s: float) -> None:
        """The node's connection has ended: another process may mount the name at once."""
        segment = self._segments.find(name, incarnation)
        if segment is not None:
            segment.gone_since_s = now_s

    def unmount(self, name: str, incarnation: int, now_s: float) -> None:
        segment = self._segments.find(name, incarnation)
        if segment is None:
            return
        if segment.tier is Tier.SSD:
            self._mark_away([segment])
        else:
            self._end([segment], now_s)

    def expire(self, now_s: float) -> None:
        """End the memory of silent nodes. Mark their SSDs as away, and end these after a long time."""
        silent_s, forgotten_s = now_s - self._rules.segment_ttl_s, now_s - self._rules.away_ttl_s
        known = list(self._segments.by_number.values())
        silent = [each for each in known if each.heard_s <= silent_s and not each.is_away]
        if silent:
            self._mark_away([each for each in silent if each.tier is Tier.SSD])
            self._end([each for each in silent if each.tier is Tier.DRAM], now_s)
        self._end([each for each in known if each.is_away and each.heard_s <= forgotten_s], now_s)
        self._forget_unseen_sessions(now_s)

    def _end(
        self, ended: Sequence[MountedSegment], now_s: float, reason: RemovalReason = RemovalReason.NODE_GONE
    ) -> None:
        if not ended:
            return
        ssds = [self._backing_ssd(segment) for segment in ended]
        for segment in ended:
            self._segments.end(segment)
            if segment.tier is Tier.SSD:
                self._ssd.on_ended(segment)
        numbers = [segment.number for segment in ended]
        self._index.outcomes.add(SegmentsEnded(numbers, ssds))
        self._index.losses.start_sweep(numbers, reason)
        for segment in ended:
            if segment.tier is Tier.DRAM:
                self._orders.node_gone(segment.node, now_s)
        if any(segment.tier is Tier.DRAM for segment in ended):
            self._known_sessions.clear()
            pinning = {owner for owner in self._index.pins.owners() if owner >= FIRST_SESSION}
            self._ask_nodes_about(pinning | self._puts.sessions())

    def _backing_ssd(self, segment: MountedSegment) -> int:
        """Return the number of the SSD that may have objects of this memory without having reported them, 0 if there is
        none. The SSD's node is asked for its records.
        """
        ssd = self._segments.ssd_of(segment.node) if segment.tier is Tier.DRAM else None
        if ssd is None:
            return 0
        ssd.recount_above = 0
        self._index.losses.backing_ssds[segment.number] = ssd.number
        return ssd.number

    def _mark_away(self, segments: Sequence[MountedSegment]) -> None:
        if not segments:
            return
        for segment in segments:
            segment.is_away, segment.acknowledged = True, False
        numbers = [segment.number for segment in segments]
        self._index.outcomes.add(SegmentsAway(numbers))
        self._index.losses.start_sweep(numbers)

    def _reserve_unknown(
        self, segment: MountedSegment, allocator: OffsetAllocator, spans: Sequence[tuple[int, int]], now_s: float
    ) -> None:
        """Reserve spans written under grants that the journal lost, because their writers may still write.

        Replicas that the journal has in these spans are overwritten, so they are lost.
        """
        free_s = now_s + self._rules.put_release_s
        for slot, lost in list(overwritten(self._index.table, segment.number, spans)):
            self._index.lose_replicas(slot, lost, RemovalReason.NOT_RECOVERED, free_s, now_s)
        new = unowned(allocator, spans)
        segment.allocator = with_taken(allocator, new)
        self._segments.count_totals()
        segment.num_replicas += len(new)
        for offset, nbytes in new:
            self._space.free_at(free_s, [(segment.number, offset)], nbytes, now_s)

    # SSDs that come back

    def inventory(
        self,
        name: str,
        incarnation: int,
        items: Sequence[HeldItem],
        last: bool,
        now_s: float,
        *,
        is_damaged: bool = False,
    ) -> list[bool]:
        """Return for each record whether the node should keep it. `is_damaged`: missing records were lost with a
        damaged part of the log.
        """
        segment = self._ssd_segment(name, incarnation)
        wanted = self._ssd.adopt(segment, items, self.adopts and name not in self.listed, now_s)
        if items:
            self._raise_generations(max(item.generation for item in items))
        if last:
            self._on_listed(segment, now_s, RemovalReason.LOG_DAMAGED if is_damaged else RemovalReason.NOT_RECOVERED)
        return wanted

    def _raise_generations(self, known: int) -> None:
        """Issue only generations above `known`. Memory whose node would refuse these takes no new objects until the
        node has learned the new limit.
        """
        before, self._generations.last = self._generations.limit, max(self._generations.last, known)
        if not self._generations.are_admitted_up_to(before):
            for each in self._segments.of_tier(Tier.DRAM):
                each.is_behind, each.acknowledged = True, False

    def _on_listed(self, segment: MountedSegment, now_s: float, reason: RemovalReason) -> None:
        """The node has listed all its records: other records that were expected there are lost."""
        segment.acknowledged, segment.recount_above = True, None
        known = self._segments.by_number.values()
        earlier = [each for each in known if each.name == segment.name and each is not segment]
        self._end(earlier, now_s, reason)
        self._ssd.on_listed(segment)
        self._index.losses.start_sweep([segment.number], reason)
        if segment.name not in self.listed:
            self.listed.add(segment.name)
            self._index.outcomes.add(Listed(segment.name))

    def relocated(self, name: str, incarnation: int, items: Sequence[tuple[bytes, int, int]]) -> list[bool]:
        return self._ssd.relocated(self._ssd_segment(name, incarnation), items)

    def _ssd_segment(self, name: str, incarnation: int) -> MountedSegment:
        segment = self._segments.find(name, incarnation)
        if segment is None or segment.is_away or segment.tier is not Tier.SSD:
            raise NotFound(f"this incarnation of SSD segment {name!r} is not mounted; mount it first")
        return segment

    # processes

    def sessions_gone(self, sessions: Iterable[int], now_s: float) -> None:
        """End the pins, the unfinished puts and the held space of processes that have ended."""
        gone = list(sessions)
        self._known_sessions.difference_update(gone)
        self.remember_ended(gone)
        for session in gone:
            self._index.unpin_all(session, now_s)
            self._puts.on_session_gone(session, now_s)
        self._index.outcomes.add(SessionsEnded(gone))

    def remember_ended(self, sessions: Iterable[int]) -> None:
        self.ended_sessions.update(dict.fromkeys(sessions))
        while len(self.ended_sessions) > _MAX_ENDED_SESSIONS:
            self.ended_sessions.popitem(last=False)

    def check_session(self, session: int) -> None:
        """Handle a call of a session. If no node has reported this session, ask the nodes, because no node might report
        its end.

        Raise StaleGeneration if the session was ended: its pins are gone, so the process must start a new session.
        """
        if session in self.ended_sessions:
            raise StaleGeneration("this session is over: its process was taken for gone, or has ended the session")
        if session >= FIRST_SESSION and session not in self._known_sessions:
            self.unseen_sessions.discard(session)
            self._doubtful_sessions.add(session)

    def _ask_nodes_about(self, sessions: set[int]) -> None:
        """Ask every node for its sessions, to learn whether these sessions live."""
        if sessions:
            self.unseen_sessions |= sessions
            for each in self._segments.of_tier(Tier.DRAM):
                if each.recount_above is None:
                    each.recount_above = SESSIONS_ALONE

    def _forget_unseen_sessions(self, now_s: float) -> None:
        """End the sessions that no node has reported, after every node has answered or is gone."""
        waiting = any(each.recount_above is not None for each in self._segments.of_tier(Tier.DRAM))
        if waiting or not (self.unseen_sessions or self._doubtful_sessions):
            return
        unseen, self.unseen_sessions = sorted(self.unseen_sessions), set()
        doubtful, self._doubtful_sessions = self._doubtful_sessions, set()
        if unseen:
            self.sessions_gone(unseen, now_s)
        self._ask_nodes_about(doubtful)


Span = tuple[int, int]  # (offset, nbytes) in one segment, in whole granules


def overwritten(table: ObjectTable, number: int, spans: Sequence[Span]) -> Iterable[tuple[int, list[Replica]]]:
    """Yield each slot with its replicas on the segment that overlap one of the spans."""
    bounds = sorted((offset, offset + nbytes) for offset, nbytes in spans)
    starts, ends = np.array([start for start, _ in bounds]), np.array([end for _, end in bounds])

    def touched(offsets: NDArray[Any], sizes: NDArray[Any]) -> NDArray[np.bool_]:
        before = np.searchsorted(starts, (offsets + sizes).astype(np.int64), side="left")
        hit: NDArray[np.bool_] = (before > 0) & (ends[before - 1] > offsets.astype(np.int64))
        return hit

    firsts = np.flatnonzero(table.dram_segments[: table.end] == number)
    hit = {*firsts[touched(table.dram_offsets[firsts], table.sizes[firsts])].tolist(), *table.extras}
    for slot in sorted(hit):
        here = [each for each in table.dram_replicas(slot) if each.segment == number]
        nbytes = np.array([table.nbytes[slot]])
        lost = [each for each in here if touched(np.array([each.offset]), nbytes)[0]]
        if lost:
            yield slot, lost


def common(one: Span, other: Span) -> Span:
    """Return the intersection of two spans; 0 bytes if they do not overlap."""
    begin, end = max(one[0], other[0]), min(sum(one), sum(other))
    return begin, max(end - begin, 0)


def unowned(allocator: OffsetAllocator, spans: Sequence[Span]) -> list[Span]:
    """Return the parts of the spans that are free."""
    free, found = allocator.free_ranges(), []
    for offset, nbytes in spans:
        # Start at the last range that begins at the span's offset or before.
        at = max(bisect_right(free, (offset, allocator.capacity_nbytes)) - 1, 0)
        while at < len(free) and free[at][0] < offset + nbytes:
            start, size = free[at]
            begin, end = max(start, offset), min(start + size, offset + nbytes)
            if begin < end:
                found.append((begin, end - begin))
            at += 1
    return found


def with_taken(allocator: OffsetAllocator, spans: Sequence[Span]) -> OffsetAllocator:
    """Return an allocator in which these free spans are allocated too."""
    free = np.array(allocator.free_ranges(), dtype=np.int64).reshape(-1, 2)
    begins, ends = np.append(0, free.sum(axis=1)), np.append(free[:, 0], allocator.capacity_nbytes)
    owned = ends > begins
    more = np.array(spans, dtype=np.int64).reshape(-1, 2)
    offsets = np.concatenate((begins[owned], more[:, 0]))
    sizes = np.concatenate(((ends - begins)[owned], more[:, 1]))
    return OffsetAllocator.rebuilt(allocator.num_granules * GRANULE_NBYTES, offsets, sizes)
