"""Replicas that readers may remember while their object gets another value, or none. Pure.

For as long as a look-up's lease lasts, a reader may read an object again where it found it, without asking. So when a
replica leaves its object earlier than that (a forced removal, an upsert, a move), its node is ordered to void the
replica's header: from then on no reader takes it for an object unless it asks the master first.

- An upsert orders this when it starts, and its value becomes visible only when the old one is void. Until then look-ups
  find the old value and let no client remember it.
- When a replica leaves in another way, its key is not settled until the node has voided it, or the lease is over. A
  removal is not reported as done before its keys are settled, and no value becomes visible under a key that is not.

A master that lost power knows nothing of the last moments, so what is not on disk is not remembered (unsynced.py).
Eviction waits for the lease, so it voids nothing. A node that is silent is given up by the master only when no reader
remembers its replicas any more (remember_s).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from moonpool.master.rules import PoolRules
from moonpool.master.state.orders import OpenOrder, OrderBook
from moonpool.master.state.records import Outcomes, Unsettled
from moonpool.master.state.segments import MountedSegment, SegmentTable
from moonpool.master.state.table import Replica
from moonpool.master.state.unfinished_puts import PendingPut, Voiding
from moonpool.store.messages import OrderKind, OrderResult, Placement, Tier

_HEARD_FOR_S = 0.1  # the time of the heartbeats is looked up so often


class Voids:
    """Keys that are not settled yet. `pending` are the unfinished puts."""

    def __init__(
        self,
        rules: PoolRules,
        segments: SegmentTable,
        orders: OrderBook,
        outcomes: Outcomes,
        pending: Mapping[bytes, PendingPut],
    ) -> None:
        self._rules = rules
        self._segments = segments
        self._orders = orders
        self._outcomes = outcomes
        self._pending = pending
        self._unsettled: dict[bytes, Voiding] = {}  # oldest first
        self.last_number = 0  # of the key that became unsettled last
        self._taken_over: dict[int, float] = {}  # ended segments: until when a reader may remember their replicas
        self._heard_s = self._looked_s = float("-inf")  # the oldest of the nodes' last heartbeats, and when that was so

    def remember_s(self, now_s: float) -> float:
        """Return for how long a reader may remember what a look-up finds now."""
        if not self._outcomes.unsynced.update():
            self._outcomes.unsynced.sync_soon()
            return 0.0
        if now_s >= self._looked_s + _HEARD_FOR_S:  # in between nodes are only heard again, which is later
            heard_s = [each.heard_s for each in self._segments.of_tier(Tier.DRAM) if not each.is_away]
            self._heard_s, self._looked_s = min(heard_s, default=now_s), now_s
        return max(0.0, min(self._rules.lease_s, self._heard_s + self._rules.segment_ttl_s - now_s))

    def remember(self, keys: Sequence[bytes], now_s: float) -> tuple[float, Set[bytes]]:
        """Return remember_s(), and those keys whose objects no reader may remember."""
        remember_s = self.remember_s(now_s)  # first: it asks which keys are on disk by now
        return remember_s, self._not_remembered(keys)

    def _not_remembered(self, keys: Sequence[bytes]) -> Set[bytes]:
        """Return the keys whose object an upsert is about to replace, or the journal does not have on disk, so that the
        next master may not know of it.
        """
        pending, unsynced = self._pending, self._outcomes.unsynced.keys
        if not unsynced.isdisjoint(keys):
            self._outcomes.unsynced.sync_soon()
        elif pending.keys().isdisjoint(keys):  # mostly, and much faster
            return frozenset()
        return {key for key in keys if key in unsynced or ((put := pending.get(key)) is not None and put.terms.replace)}

    def begin_upsert(
        self, put: PendingPut, nbytes: int, replicas: Sequence[Replica], until_s: float, now_s: float
    ) -> None:
        """Order the nodes to void the replicas that the put replaces, which may be remembered until then."""
        put.voiding = Voiding()
        put.voiding.until_s = min(until_s, now_s + self._rules.lease_s)
        if until_s > now_s:
            self._order(put.voiding, put.key, nbytes, replicas, now_s)

    def on_replicas_left(
        self, key: bytes, nbytes: int, replicas: Sequence[Replica], until_s: float, now_s: float
    ) -> None:
        """Order the nodes to void these replicas, which may be remembered until then. Those of a node that is gone are
        remembered by no client, unless another process took its name.
        """
        mounted = [each for each in replicas if each.segment in self._segments.by_number]
        taken = [self._taken_over.get(each.segment, now_s) for each in replicas] if self._taken_over else []
        if not mounted:
            until_s = min(until_s, max(taken, default=now_s))
        if until_s <= now_s:
            return
        voiding = self._add(key, min(until_s, now_s + self._rules.lease_s))
        if max(taken, default=now_s) > now_s:
            voiding.replicas.add(None)
        self._outcomes.add(Unsettled([key]))
        self._order(voiding, key, nbytes, mounted, now_s)

    def on_taken_over(self, segment: MountedSegment, now_s: float) -> None:
        """Another process has mounted this segment's name while the old node was silent, but not known to be gone:
        readers may still reach it.
        """
        self._taken_over = {number: until_s for number, until_s in self._taken_over.items() if until_s > now_s}
        if segment.tier is Tier.DRAM and segment.gone_since_s is None:
            self._taken_over[segment.number] = segment.heard_s + self._rules.segment_ttl_s

    def _order(self, voiding: Voiding, key: bytes, nbytes: int, replicas: Sequence[Replica], now_s: float) -> None:
        for replica in replicas:
            segment = self._segments.by_number.get(replica.segment)
            if segment is None:
                continue  # its node is gone, and no client remembers it
            at = segment.descriptor
            source = Placement(at.name, replica.offset, at.incarnation, replica.generation)
            voiding.replicas.add(source)
            self._orders.add(segment.node, OrderKind.VOID, key, nbytes, 0, source, None, self._on_done, now_s)

    def wait_for(self, keys: Iterable[bytes], until_s: float) -> None:
        """These keys are not settled before then: an earlier master may have ordered nodes to void their replicas."""
        for key in keys:
            self._add(key, until_s).replicas.add(None)

    def unsettled(self, now_s: float) -> list[bytes]:
        """Return the keys that are not settled."""
        self.expire(now_s)
        return list(self._unsettled)

    def are_settled(self, keys: Iterable[bytes], now_s: float, up_to: int | None = None) -> bool:
        """Return whether no reader finds an older value of these keys; with `up_to`, one of a key that became unsettled
        later does not count.
        """
        return not self._unsettled or all(self._is_settled(key, now_s, up_to) for key in keys)

    def settled_up_to(self, number: int, now_s: float) -> bool:
        """Return whether all keys that became unsettled up to that number are settled."""
        self.expire(now_s)
        first = next(iter(self._unsettled.values()), None)
        return first is None or first.number > number

    def expire(self, now_s: float) -> None:
        """Settle keys whose replicas no client remembers any more."""
        while self._unsettled:
            key, entry = next(iter(self._unsettled.items()))
            if entry.until_s > now_s:
                return
            del self._unsettled[key]

    def _add(self, key: bytes, until_s: float) -> Voiding:
        """Return the key's entry, as the newest."""
        self.last_number += 1
        entry = self._unsettled.pop(key, None) or Voiding()
        entry.number = self.last_number
        entry.until_s = max(entry.until_s, until_s)
        self._unsettled[key] = entry
        return entry

    def _is_settled(self, key: bytes, now_s: float, up_to: int | None) -> bool:
        entry = self._unsettled.get(key)
        if entry is None or (up_to is not None and entry.number > up_to):
            return True
        if entry.is_over(now_s):
            del self._unsettled[key]
            return True
        return False

    def _on_done(self, opened: OpenOrder, result: OrderResult, now_s: float) -> None:
        if result.refusal is not None:
            return  # the node may not have done it: the key waits for the end of the lease
        key, source = opened.order.key, opened.order.source
        put = self._pending.get(key)
        if put is not None and put.voiding is not None:
            put.voiding.replicas.discard(source)
        entry = self._unsettled.get(key)
        if entry is not None:
            entry.replicas.discard(source)
            if not entry.replicas:
                del self._unsettled[key]
