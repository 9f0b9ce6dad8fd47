"""Extra replicas for the readers of hot keys: when they are made, what makes way for them, when they go. Pure.

- A key is hot when it was used `hot_hits` times within one window for each of its replicas. The blocks of its chain
  that are at least half as warm are copied with it, in one batch and in their order, to other nodes. This is done at
  ticks: readers wait neither for it nor for what is evicted for it.
- In a pool above its low watermark a copy takes the place of what eviction would drop next, if it is worth more: uses
  per byte and second, counted alike for both. Of an object with n replicas each serves an n-th of the uses.
- Replicas that are there and copies under way take at most `hot_max_part` of the pool; `hot_copies_in_flight` bounds
  the copies, so that nodes carry their orders out in time.
- Once per window each such object is looked at. Its extra replicas go when it was used less than half as often as makes
  it hot, or when what eviction would drop next is worth more. So what has cooled is free within two windows.

Replicas that a writer or a caller asked for are not touched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from moonpool.base.units import format_nbytes
from moonpool.master.rules import PoolRules
from moonpool.master.state.evictor import Evictor, MayGo
from moonpool.master.state.index import ObjectIndex
from moonpool.master.state.orders import Copies
from moonpool.master.state.segments import Place, SegmentTable
from moonpool.master.state.space import PoolSpace
from moonpool.master.state.table import Flag
from moonpool.master.state.uses import UseCounts
from moonpool.store.messages import GRANULE_NBYTES, Refusal, num_granules

_CANDIDATES = 1024  # the most candidates for eviction that copies look at between two ticks


class HotReplicas:
    def __init__(
        self,
        rules: PoolRules,
        index: ObjectIndex,
        segments: SegmentTable,
        space: PoolSpace,
        copies: Copies,
        evictor: Evictor,
    ) -> None:
        self._rules = rules
        self._index = index
        self._segments = segments
        self._space = space
        self._copies = copies
        self._evictor = evictor
        self._uses = UseCounts(rules, index.table)
        self._reached: dict[int, None] = {}  # slots that were used often enough to be looked at
        self._keep_hits = max(1, rules.hot_hits // 2)
        self._under_way: dict[bytes, int] = {}  # sizes of the copies that were ordered
        self._under_way_nbytes = 0
        self._candidates_left = 0
        self._window = self._first_review = 0
        self._to_review = 0  # objects that are still to be looked at in this window
        self.counters = dict.fromkeys(("hot_reads", "hot_saved_bytes"), 0)

    @property
    def is_used(self) -> bool:
        """Whether hot keys are replicated. A pool of one node has no place for a second replica."""
        return self._rules.hot_hits > 0 and self._segments.num_dram_nodes > 1

    def begin(self, now_s: float) -> None:
        """A master starts: judge replicas of the journal by the first window that it has seen from its beginning."""
        self._window = self._uses.window(now_s)
        self._first_review = self._window + 2

    def on_found(self, slots: Sequence[int], now_s: float) -> None:
        """Note a use of each."""
        if self._uses.add(slots, now_s):
            self._count()

    def step(self, now_s: float, limit: int) -> bool:
        """Count uses, order copies of what has become hot, and drop replicas of up to `limit` objects that have cooled.
        Return whether there is more to do.
        """
        self._count()
        self._candidates_left = _CANDIDATES
        if self._reached:
            reached, self._reached = self._reached, {}
            self._copy_hot(reached, now_s)
        return self._review(now_s, limit)

    def _count(self) -> None:
        table = self._index.table
        for slots, before, after in self._uses.count():
            if table.hot:
                self._count_saved(slots[table.all_flags[slots] & Flag.EXTRA != 0].tolist())
            if self._rules.hot_hits:
                hot_hits = np.uint64(self._rules.hot_hits)
                self._reached.update(dict.fromkeys(slots[before // hot_hits != after // hot_hits].tolist()))

    def _count_saved(self, slots: Sequence[int]) -> None:
        """Count what these reads save the nodes of the first replicas. Readers take all replicas in turns."""
        table, counters = self._index.table, self.counters
        for slot in slots:
            mark = table.hot.get(slot)
            if mark is not None:
                saved = table.nbytes[slot] * len(mark.generations) // (1 + len(table.extras[slot]))
                mark.saved_nbytes += saved
                counters["hot_saved_bytes"] += saved
                counters["hot_reads"] += 1

    # making replicas

    def _copy_hot(self, reached: Iterable[int], now_s: float) -> None:
        seen: set[int] = set()
        for slot in reached:
            if slot not in seen and self._wants(slot, self._rules.hot_hits, now_s):
                chain = self._chain(slot, now_s)
                seen.update(chain)
                self._copy_chain(self._within_budgets(chain), now_s)

    def _wants(self, slot: int, least_uses: int, now_s: float) -> bool:
        """Return whether one more replica may be made of an object that was used so often for each of its replicas."""
        table = self._index.table
        count = self._num_replicas(slot)
        if not table.dram_segment[slot] or count >= self._rules.hot_max_replicas:
            return False
        return self._uses.in_window(slot, now_s) >= least_uses * count and self._copies.can_start(slot)

    def _num_replicas(self, slot: int) -> int:
        return 1 + len(self._index.table.extras.get(slot, ()))

    def _chain(self, slot: int, now_s: float) -> deque[int]:
        """Return the object and the blocks before and after it that are warm too, in their order."""
        table, most = self._index.table, self._rules.hot_copies_in_flight
        chain, at = deque([slot]), table.parent_slot(slot)
        while at is not None and len(chain) < most and self._wants(at, self._keep_hits, now_s):
            chain.appendleft(at)
            at = table.parent_slot(at)
        at = self._following(slot)
        while at is not None and len(chain) < most and self._wants(at, self._keep_hits, now_s):
            chain.append(at)
            at = self._following(at)
        return chain

    def _following(self, slot: int) -> int | None:
        """Return the block that was stored last as the continuation of this one."""
        table = self._index.table
        at = table.child[slot] - 1
        known = at >= 0 and table.keys[at] is not None and table.parent_slot(at) == slot
        return at if known else None

    def _within_budgets(self, chain: Sequence[int]) -> list[int]:
        """Return the leading blocks for which the budgets suffice."""
        taken = self._index.table.hot_nbytes + self._under_way_nbytes
        left = int(self._rules.hot_max_part * self._segments.capacity_nbytes) - taken
        return self._leading(chain, left)[: self._rules.hot_copies_in_flight - len(self._under_way)]

    def _leading(self, chain: Sequence[int], nbytes: int) -> list[int]:
        """Return the leading blocks that take no more than that many bytes."""
        found: list[int] = []
        for slot in chain:
            nbytes -= self._nbytes(slot)
            if nbytes < 0:
                break
            found.append(slot)
        return found

    def _nbytes(self, slot: int) -> int:
        """Return how much space one replica takes."""
        return num_granules(self._index.table.nbytes[slot]) * GRANULE_NBYTES

    def _copy_chain(self, chain: list[int], now_s: float) -> None:
        """Copy the leading blocks for which there is room, each to a node that has no replica of it."""
        if not chain:
            return
        worth, kept = self._worth(chain, now_s, 1), frozenset(chain)

        def may_go(members: Sequence[int]) -> bool:
            return kept.isdisjoint(members) and self._worth(members, now_s) < worth

        low_nbytes, used = int(self._rules.low_watermark * self._segments.capacity_nbytes), self._segments.used_nbytes
        limit = max(low_nbytes, used)
        nbytes = sum(map(self._nbytes, chain))
        self._make_way(used + nbytes - limit, may_go, now_s)
        by_holders: dict[frozenset[str], list[int]] = {}
        for slot in self._leading(chain, limit - self._segments.used_nbytes):
            by_holders.setdefault(self._holders(slot), []).append(slot)
        for holders, slots in by_holders.items():
            for slot, place in zip(slots, self._places(slots, holders, may_go, now_s), strict=True):
                if place is not None:
                    self._start(slot, place, now_s)

    def _holders(self, slot: int) -> frozenset[str]:
        by_number = self._segments.by_number
        segments = [by_number.get(each.segment) for each in self._index.table.dram_replicas(slot)]
        return frozenset([each.node for each in segments if each is not None])

    def _places(
        self, slots: Sequence[int], avoid_nodes: frozenset[str], may_go: MayGo, now_s: float
    ) -> list[Place | None]:
        """Allocate space for each. Where the other nodes have none, go on to evict while the pool is above its low
        watermark: the next in the order may be on these nodes. None: there is no space.
        """
        sizes = [self._index.table.nbytes[slot] for slot in slots]
        places: list[Place | None] = [None] * len(slots)
        missing = list(range(len(slots)))
        while missing:
            found = self._space.place([sizes[at] for at in missing], avoid_nodes=sorted(avoid_nodes))
            for at, each in zip(missing, found, strict=True):
                places[at] = each[0] if each else None
            missing = [at for at in missing if places[at] is None]
            over = self._segments.used_nbytes - int(self._rules.low_watermark * self._segments.capacity_nbytes)
            if not self._make_way(min(over, sum(sizes[at] for at in missing)), may_go, now_s):
                break
        return places

    def _make_way(self, nbytes: int, may_go: MayGo, now_s: float) -> bool:
        """Evict until so much is free, or the next object may not go. Return whether anything was evicted."""
        before = self._segments.used_nbytes
        if nbytes > 0 and self._candidates_left > 0:
            self._candidates_left -= self._evictor.make_way(nbytes, may_go, now_s, self._candidates_left)
        return self._segments.used_nbytes < before

    def _worth(self, slots: Sequence[int], now_s: float, num_more: int = 0) -> float:
        """Return the uses per second and byte of one replica, if each object has `num_more` replicas than now."""
        uses = sum([self._uses.rate(slot, now_s) / (self._num_replicas(slot) + num_more) for slot in slots])
        return uses / sum(map(self._nbytes, slots))

    def _start(self, slot: int, place: Place, now_s: float) -> None:
        key, nbytes = self._index.table.key(slot), self._nbytes(slot)
        self._under_way[key] = nbytes
        self._under_way_nbytes += nbytes
        self._copies.start_at(slot, place, now_s, on_copied=self._ended, is_hot=True)

    def _ended(self, key: bytes, refusal: Refusal | None, now_s: float) -> None:
        self._under_way_nbytes -= self._under_way.pop(key)

    # dropping replicas

    def _review(self, now_s: float, limit: int) -> bool:
        """Look at up to `limit` objects that were not looked at in this window, and drop what has cooled. Return
        whether there are more.
        """
        hot, window = self._index.table.hot, self._uses.window(now_s)
        if window != self._window:
            self._window = window
            self._to_review = len(hot) if window >= self._first_review else 0
        count = min(self._to_review, len(hot), limit)
        if not count:
            return False
        least = self._worth_of_next(now_s)
        for _ in range(count):
            slot = next(iter(hot))
            hot.move_to_end(slot)
            if self._uses.lately(slot, now_s) < self._keep_hits or self._worth((slot,), now_s) < least:
                self._index.drop_hot_replicas(slot, now_s)
        self._to_review = min(self._to_review - count, len(hot))
        return self._to_review > 0

    def _worth_of_next(self, now_s: float) -> float:
        """Return the worth of what eviction would drop next; 0 if the pool has room."""
        if self._segments.used_nbytes <= self._rules.low_watermark * self._segments.capacity_nbytes:
            return 0.0
        members = self._evictor.next_victims(now_s, _CANDIDATES)
        return self._worth(members, now_s) if members else 0.0

    # questions

    def explain(self, slot: int, now_s: float) -> Iterator[str]:
        """Yield a sentence's end about the extra replicas of the object, if it has some."""
        mark, table, by_number = self._index.table.hot.get(slot), self._index.table, self._segments.by_number
        if mark is not None:
            extra = [each for each in table.extras[slot] if each.generation in mark.generations]
            names = ", ".join([by_number[each.segment].name for each in extra if each.segment in by_number])
            uses, window_s = self._uses.lately(slot, now_s), self._rules.hot_window_s
            yield (
                f"the replica on {names} was made because the object is hot ({uses} uses within {window_s:g} s); "
                f"readers took about {format_nbytes(mark.saved_nbytes)} from there"
            )
