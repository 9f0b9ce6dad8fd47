"""Space granted ahead: a client holds it and puts small objects with one call, after they are written. Pure.

Space that is held is an unfinished put under a key of its own (ahead_key), so it is journalled, renewed, discarded and
given back as any unfinished put. put_at() gives it the key of an object and ends it. Two rules differ:

- Space that was discarded is held until its process gives it back, states that it does not know of it (free_unknown),
  or ends. The generation up to which a process has no open put does not count: what it only holds is not open.
- All that is held is bounded by MAX_PART of the pool. While the pool has less than half of the room above the high
  watermark, nothing is granted, and put_at() and renewals ask clients to give back what they hold; so they do for space
  on a segment that is drained.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.base.errors import InvalidInput
from moonpool.master.rules import PoolRules
from moonpool.master.state.changes import RemovalReason
from moonpool.master.state.index import ObjectIndex
from moonpool.master.state.objects import FIRST_SESSION
from moonpool.master.state.puts import Puts
from moonpool.master.state.records import Named
from moonpool.master.state.segments import SegmentTable
from moonpool.master.state.space import Generations, PoolSpace
from moonpool.master.state.table import Flag
from moonpool.master.state.unfinished_puts import (
    AHEAD,
    DISCARDED,
    LOST,
    MAX_KEY_NBYTES,
    STORED,
    UNDER_WAY,
    Identities,
    PendingPut,
    PutTerms,
    refusal,
)
from moonpool.store.messages import (
    GRANULE_NBYTES,
    GrantAhead,
    PutAt,
    PutAtReply,
    PutReply,
    Refusal,
    ahead_key,
    num_granules,
)
from moonpool.store.messages.values import MAX_AHEAD, MAX_AHEAD_NBYTES

MAX_PART = 1 / 16  # of the pool's bytes


class SpaceAhead:
    def __init__(
        self,
        rules: PoolRules,
        index: ObjectIndex,
        segments: SegmentTable,
        space: PoolSpace,
        puts: Puts,
        generations: Generations,
        identities: Identities,
    ) -> None:
        self._rules = rules
        self._index = index
        self._segments = segments
        self._space = space
        self._puts = puts
        self._generations = generations
        self._identities = identities

    def grant(self, wanted: GrantAhead, now_s: float) -> PutReply:
        """Grant places for objects of that number of granules; fewer than asked for, or none, when the pool is short of
        space. First free discarded space of which the session does not know.
        """
        nbytes, count, session = wanted.nbytes, wanted.count, wanted.session
        if session and session < FIRST_SESSION:
            raise InvalidInput(f"a session is 0 or at least {FIRST_SESSION}", param="session")
        if not 0 < nbytes <= MAX_AHEAD_NBYTES or not 0 <= count <= MAX_AHEAD:
            raise InvalidInput(f"space is granted ahead for {MAX_AHEAD} objects of {MAX_AHEAD_NBYTES} bytes at most")
        if session:
            self._space.free_unknown(session, frozenset(wanted.known), wanted.known_up_to)
        each_nbytes = num_granules(nbytes) * GRANULE_NBYTES
        left_nbytes = int(MAX_PART * self._segments.capacity_nbytes) - self._puts.ahead_nbytes
        count = min(count, max(0, left_nbytes) // each_nbytes, self._rules.max_objects - self._puts.num_objects())
        if count <= 0 or self.is_short(count * each_nbytes):
            return PutReply([], [], {}, self._generations.last)
        places = [found for found in self._space.place([each_nbytes] * count, 1, wanted.preferred) if found]
        generations, placements = self._space.stamp(places)
        keys = [ahead_key(generation) for generation in generations]
        if not self._puts.pending.keys().isdisjoint(keys):  # somebody chose such a key for an object
            for found in places:
                self._space.free(found, each_nbytes)
            return PutReply([], [], {}, self._generations.last)
        terms = PutTerms(session, AHEAD, 0, 0.0, False)
        for key, generation, found in zip(keys, generations, places, strict=True):
            self._puts.pending[key] = PendingPut(key, each_nbytes, generation, found, terms, now_s)
        self._puts.ahead_nbytes += len(keys) * each_nbytes
        if keys and self._index.outcomes.enabled:
            self._puts.record_grants(keys, [each_nbytes] * len(keys), generations, terms, None, None, places)
        return PutReply(generations, placements, {}, self._generations.last)

    def renew(self, keys: Sequence[bytes], generations: Sequence[int], now_s: float) -> list[bool]:
        """Renew unfinished puts. Return False where the put was discarded, and for space granted ahead that its client
        has to give back: the pool is short of space, or the space is on a segment that is drained.
        """
        renewed, pending = self._puts.renew(keys, generations, now_s), self._puts.pending
        if not self._puts.ahead_nbytes:
            return renewed
        is_short, pairs = self.is_short(), zip(keys, renewed, strict=True)
        return [is_kept and not self._is_taken_back(pending[key], is_short) for key, is_kept in pairs]

    def _is_taken_back(self, put: PendingPut, is_short: bool) -> bool:
        segment = self._segments.by_number.get(put.places[0][0]) if put.terms.flags & AHEAD else None
        return segment is not None and (is_short or segment.draining)

    def put_at(self, put: PutAt, now_s: float) -> PutAtReply:
        """Make the object visible that was written to this space. If the key is taken, the client keeps the space, for
        the next turn; a copy of this call that arrives later then does nothing. A repeated call is no error.
        """
        key, generation, puts = put.key, put.generation, self._puts
        held = puts.pending.get(ahead_key(generation))
        if held is None or held.generation != generation or not held.terms.flags & AHEAD:
            refusals, _ = puts.end([key], [generation], {}, now_s)  # a repeated call, or the space is lost
            return PutAtReply(refusals.get(0), not self.is_short())
        refused = self._check(put, held, now_s) if put.turn >= held.turn else STORED
        if refused is None:
            options, outcomes = put.options, self._index.outcomes
            flags = Flag.HARD_PIN if options.hard_pin else 0
            identity = self._identities.number_of(options.identity) if options.identity else 0
            terms = PutTerms(held.terms.session, flags, identity, options.soft_pin_s, False)
            self.name(held, key, put.nbytes, terms)
            outcomes.add(Named(generation, key, put.nbytes, flags, identity, options.soft_pin_s))
            del puts.pending[key]
            puts.store(held, now_s)
            outcomes.ended([key], [generation], {})
        elif refused in (STORED, UNDER_WAY):
            held.turn = max(held.turn, put.turn + 1)
        segment = self._segments.by_number.get(held.places[0][0])
        return PutAtReply(refused, not self.is_short() and segment is not None and segment.takes_new)

    def name(self, held: PendingPut, key: bytes, nbytes: int, terms: PutTerms) -> None:
        """Turn space that is held into an unfinished put of this key."""
        del self._puts.pending[held.key]
        self._puts.ahead_nbytes -= held.nbytes
        held.key, held.nbytes, held.terms = key, nbytes, terms
        self._puts.pending[key] = held

    def _check(self, put: PutAt, held: PendingPut, now_s: float) -> Refusal | None:
        key, options = put.key, put.options
        if not 0 < len(key) <= MAX_KEY_NBYTES or num_granules(put.nbytes) * GRANULE_NBYTES != held.nbytes:
            return refusal(InvalidInput("this key or this size does not go with space that was granted ahead"))
        if options.replace or options.num_replicas != 1:
            return refusal(InvalidInput("upserts and several replicas need a PutStart"))
        if self._puts.discard_if_late(held, now_s):
            return DISCARDED
        if held.places[0][0] not in self._segments.by_number:
            self._puts.abandon([held], RemovalReason.PUT_ABANDONED, False, now_s)
            return LOST
        if self._index.find(key, now_s) is not None:
            return STORED
        other = self._puts.pending.get(key)
        if other is not None and not self._puts.discard_if_late(other, now_s):
            return UNDER_WAY
        return None

    def is_short(self, more_nbytes: int = 0) -> bool:
        """Return whether the pool has too little room for space that is only held."""
        limit = (1 + self._rules.high_watermark) / 2 * self._segments.capacity_nbytes
        return self._segments.used_nbytes + more_nbytes > limit
