"""Members of the pool: segments and client processes that join, send heartbeats, fall silent, leave, return. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import InvalidInput, NotFound, NotSettled, StaleGeneration
from moonpool.master.rules import PoolRules
from moonpool.master.state.changes import RemovalReason
from moonpool.master.state.index import ObjectIndex
from moonpool.master.state.objects import FIRST_SESSION
from moonpool.master.state.orders import OrderBook
from moonpool.master.state.puts import Puts
from moonpool.master.state.records import Listed, Mounted, Recounting, SegmentsAway, SegmentsEnded, SessionsEnded
from moonpool.master.state.recount import lowered_stamps, reserve_unknown
from moonpool.master.state.segments import MAX_CAPACITY_NBYTES, MountedSegment, SegmentTable
from moonpool.master.state.space import Generations, PoolSpace
from moonpool.master.state.ssd_tier import SsdTier
from moonpool.store.messages import (
    MAX_GENERATION,
    SESSIONS_ALONE,
    HeartbeatReply,
    HeldItem,
    MountReply,
    Tier,
)

_MAX_ENDED_SESSIONS = 16_384


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
        self.uncounted: set[int] = set()  # memory whose nodes have not told what the journal may have lost
        self.lost_up_to = 0  # what was granted up to here, and is not in the journal, is lost
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
        registry_address: str | None,
        capacity_nbytes: int | None,
        now_s: float,
    ) -> MountReply:
        """Mount a segment, empty; it is used after its first heartbeat. A repeated call changes nothing."""
        segments, heartbeat_s, limit = self._segments, self._rules.heartbeat_s, self._generations.limit
        known = segments.find(descriptor.name, descriptor.incarnation)
        if known is not None:
            return MountReply(self._epoch, heartbeat_s, known.floor, limit)
        if tier is Tier.SSD and capacity_nbytes is None:
            raise InvalidInput("an SSD segment needs its capacity in bytes", param="capacity_nbytes")
        if capacity_nbytes is not None and capacity_nbytes > MAX_CAPACITY_NBYTES:
            raise InvalidInput(f"an SSD has at most {MAX_CAPACITY_NBYTES} bytes", param="capacity_nbytes")
        segments.check_mount(descriptor, tier, heartbeat_s, now_s)
        before = segments.get(descriptor.name)
        segments.ramp.advance(now_s)
        made = segments.mount(node, descriptor, tier, registry_address, capacity_nbytes or 0)
        made.floor, made.heard_s = self._generations.last, now_s
        capacity, floor = made.capacity_nbytes, made.floor
        self._index.outcomes.add(Mounted(made.number, node, descriptor, tier, registry_address, capacity, floor))
        if before is not None and before.tier is Tier.DRAM:
            self._end([before], now_s)
        elif before is not None:
            self._mark_away([before])
        if tier is Tier.SSD:
            self._ssd.on_mounted(made)
        return MountReply(self._epoch, heartbeat_s, floor, limit)

    def heartbeat(
        self, name: str, incarnation: int, now_s: float, generation_limit: int = MAX_GENERATION
    ) -> HeartbeatReply:
        segment = self._segments.find(name, incarnation)
        if segment is None or segment.is_away:
            return HeartbeatReply(known=False, epoch=self._epoch)
        segment.heard_s, segment.gone_since_s = now_s, None
        generations = self._generations
        segment.is_behind = not generations.are_admitted_up_to(generation_limit)
        above, is_counted = segment.recount_above, segment.number not in self.uncounted
        if is_counted and segment.tier is Tier.DRAM:
            segment.acknowledged = not segment.is_behind
        refuse_up_to = 0 if is_counted else self.lost_up_to
        return HeartbeatReply(True, self._epoch, above, generations.limit, generations.last, refuse_up_to)

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
            free_s = now_s + self._rules.put_release_s  # the writers may still write
            new = reserve_unknown(segment, spans, self._index, free_s, now_s)
            self._segments.count_totals()
            for offset, nbytes in new:
                self._space.keep_unknown(free_s, [(segment.number, offset)], nbytes)
        if segment.number in self.uncounted:
            self.uncounted.remove(segment.number)
            self._index.outcomes.add(Recounting([segment.number], [None]))
        segment.recount_above = None
        segment.acknowledged = segment.tier is Tier.DRAM
        known = set(sessions)
        self._known_sessions |= known
        self.unseen_sessions -= known
        self._doubtful_sessions -= known
        self._forget_unseen_sessions(now_s)

    def recounting(self) -> Recounting:
        """Return which memory is still to be recounted, for the journal."""
        waiting = [each for each in self._segments.of_tier(Tier.DRAM) if each.number in self.uncounted]
        return Recounting([each.number for each in waiting], [each.recount_above for each in waiting])

    def check_counted(self, keys: Sequence[bytes], now_s: float) -> None:
        """Raise NotSettled if one of these objects lies in memory that is still to be recounted: a client whose grant
        the journal has lost may write there, so the object must not be viewed in place.
        """
        if not self.uncounted:
            return
        table = self._index.table
        found = [slot for slot in self._index.find_many(keys, now_s) if slot is not None]
        if any(each.segment in self.uncounted for slot in found for each in table.dram_replicas(slot)):
            raise NotSettled("a node has not reported to the restarted master yet; read a copy of the object")

    def fence_ahead(
        self, name: str, incarnation: int, spans: Sequence[tuple[int, int, int]]
    ) -> list[tuple[int, int, int, int]]:
        """Return what a node has to stamp in place of generations that were never issued; see FenceAhead."""
        segment = self._segments.find(name, incarnation)
        if segment is None or not segment.acknowledged:
            return []
        return lowered_stamps(segment, spans, self._index.table, self._generations)

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
        self.uncounted.difference_update(numbers)
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
        adopts = self.adopts and name not in self.listed
        possible = [self._generations.is_possible(item.generation) for item in items]
        known = [item.generation for item, is_possible in zip(items, possible, strict=True) if is_possible]
        if known:
            self._raise_generations(max(known))
        wanted = [
            is_possible and self._ssd.adopt(segment, item, adopts, now_s)
            for item, is_possible in zip(items, possible, strict=True)
        ]
        if last:
            self._on_listed(segment, now_s, RemovalReason.LOG_DAMAGED if is_damaged else RemovalReason.NOT_RECOVERED)
        return wanted

    def _raise_generations(self, known: int) -> None:
        """Issue only generations above `known`. Memory whose node would refuse these takes no new objects until the
        node has learned the new limit.
        """
        before = self._generations.limit
        self._generations.rise_above(known)
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
