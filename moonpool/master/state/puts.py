"""Putting: space is granted, written by the client, and made visible at the end. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moonpool.base.errors import InvalidInput, NoSpace
from moonpool.master.rules import PoolRules
from moonpool.master.state.bulk import LEAST, are_plain, insert_plain
from moonpool.master.state.changes import RemovalReason
from moonpool.master.state.evictor import Evictor
from moonpool.master.state.index import ObjectIndex
from moonpool.master.state.records import Freed, Granted, PutsEnded, shortened
from moonpool.master.state.segments import Place, SegmentTable
from moonpool.master.state.space import Generations, SpaceReturns
from moonpool.master.state.table import Flag, Replica
from moonpool.master.state.unfinished_puts import (
    DISCARDED,
    LOST,
    MAX_KEY_NBYTES,
    RECOUNTING,
    STORED,
    UNDER_WAY,
    Identities,
    PendingPut,
    Terms,
    UnfinishedPuts,
    check_batch,
    refusal,
)
from moonpool.store.messages import Placement, PutOptions, PutReply, Refusal


class Puts(UnfinishedPuts):
    def __init__(
        self,
        rules: PoolRules,
        index: ObjectIndex,
        segments: SegmentTable,
        space: SpaceReturns,
        evictor: Evictor,
        generations: Generations,
        identities: Identities,
    ) -> None:
        super().__init__(rules, index, space)
        self._segments = segments
        self._evictor = evictor
        self._generations = generations
        self._identities = identities

    # beginning

    def start(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        options: PutOptions,
        session: int,
        parents: Sequence[bytes] | None,
        groups: Sequence[bytes] | None,
        now_s: float,
    ) -> PutReply:
        """Space for each item, on up to num_replicas distinct segments and at least one; or why not."""
        check_batch(keys, sizes, options, session, parents, groups)
        terms = self._terms(options, session)
        if len(keys) == 1 and groups is None:
            reply = self._start_one(keys, sizes, options, terms, parents, now_s)
            if reply is not None:
                return reply
        refusals: dict[int, Refusal] = {}
        wanted = self._admitted(keys, sizes, options, refusals, now_s)
        places = self._place([sizes[at] for at in wanted], options, now_s)
        if len(wanted) == len(keys) and groups is None and all(len(found) == 1 for found in places):
            return self._grant_all(keys, sizes, terms, parents, places, now_s)
        return self._grant_some(
            keys, sizes, terms, parents, groups, dict(zip(wanted, places, strict=True)), refusals, now_s
        )

    def _grant_some(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        terms: Terms,
        parents: Sequence[bytes] | None,
        groups: Sequence[bytes] | None,
        places: Mapping[int, list[Place]],
        refusals: dict[int, Refusal],
        now_s: float,
    ) -> PutReply:
        """Those that have places, by position, are begun; the others are refused."""
        generations = [0] * len(keys)
        replicas: list[tuple[Placement, ...]] = [()] * len(keys)
        first = self._generations.take(len(places)) - 1
        granted: list[int] = []
        pending, by_number = self.pending, self._segments.by_number
        last_number, name, incarnation = 0, "", 0
        for at, found in places.items():
            key = keys[at]
            if not found or key in pending:  # the same key twice in one batch: the first has it
                refusals[at] = self._refusal(key, sizes[at], found)
                continue
            first += 1
            put = pending[key] = PendingPut(key, sizes[at], first, found, terms, now_s)
            if parents is not None:
                put.parent = parents[at]
            if groups is not None:
                put.group = groups[at]
            generations[at] = first
            number, offset = found[0]
            if number != last_number:
                descriptor, last_number = by_number[number].descriptor, number
                name, incarnation = descriptor.name, descriptor.incarnation
            if len(found) == 1:
                replicas[at] = (Placement(name, offset, incarnation, first),)
            else:
                replicas[at] = self._placements(found, first)
            granted.append(at)
        self.counters["refused"] += len(refusals)
        if granted and self._index.outcomes.enabled:
            self._record_grants(granted, keys, sizes, generations, terms, parents, groups)
        return PutReply(generations, replicas, refusals, self._generations.last)

    def _start_one(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        options: PutOptions,
        terms: Terms,
        parents: Sequence[bytes] | None,
        now_s: float,
    ) -> PutReply | None:
        """A new key by itself, for which there is room: twice as quick as a batch of one. None for any other."""
        key, nbytes, pending, index = keys[0], sizes[0], self.pending, self._index
        if options.num_replicas != 1 or key in pending or not 0 < len(key) <= MAX_KEY_NBYTES or nbytes <= 0:
            return None
        if index.find(key, now_s) is not None or len(index.table) + len(pending) >= index.table.max_objects:
            return None
        place = self._segments.place_one(nbytes, options.preferred)
        if place is None:
            return None
        generation = self._generations.take(1)
        put = pending[key] = PendingPut(key, nbytes, generation, [place], terms, now_s)
        if parents is not None:
            put.parent = parents[0]
        generations = [generation]
        if index.outcomes.enabled:
            self._record_grants([0], keys, sizes, generations, terms, parents, None)
        return PutReply(generations, [self._placements(put.places, generation)], {}, self._generations.last)

    def _grant_all(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        terms: Terms,
        parents: Sequence[bytes] | None,
        places: list[list[Place]],
        now_s: float,
    ) -> PutReply:
        """All have what they want, one replica each: most batches."""
        first = self._generations.take(len(keys))
        generations = list(range(first, first + len(keys)))
        puts = [
            PendingPut(key, nbytes, generation, place, terms, now_s)
            for key, nbytes, generation, place in zip(keys, sizes, generations, places, strict=True)
        ]
        self.pending.update(zip(keys, puts, strict=True))
        if parents is not None:
            for put, parent in zip(puts, parents, strict=True):
                put.parent = parent
        names = {number: self._segments.by_number[number].descriptor for number in {each[0][0] for each in places}}
        at = {number: (descriptor.name, descriptor.incarnation) for number, descriptor in names.items()}
        replicas: list[tuple[Placement, ...]] = []
        for ((number, offset),), generation in zip(places, generations, strict=True):
            name, incarnation = at[number]
            replicas.append((Placement(name, offset, incarnation, generation),))
        if self._index.outcomes.enabled:
            self._record_grants(range(len(keys)), keys, sizes, generations, terms, parents, None)
        return PutReply(generations, replicas, {}, self._generations.last)

    def _placements(self, places: Sequence[Place], generation: int) -> tuple[Placement, ...]:
        at = [(self._segments.by_number[number].descriptor, offset) for number, offset in places]
        return tuple(Placement(each.name, offset, each.incarnation, generation) for each, offset in at)

    def _admitted(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        options: PutOptions,
        refusals: dict[int, Refusal],
        now_s: float,
    ) -> list[int]:
        """The items that may have space; refusals for the others."""
        if self._are_all_new(keys, sizes):
            return list(range(len(keys)))
        admitted, seen, replace, pending = [], set(), options.replace, self.pending
        for at, slot in enumerate(self._index.find_many(keys, now_s)):
            key = keys[at]
            put = pending.get(key)
            if not 0 < len(key) <= MAX_KEY_NBYTES or sizes[at] <= 0:
                refusals[at] = refusal(
                    InvalidInput(f"a key has 1 to {MAX_KEY_NBYTES} bytes and its object at least one")
                )
            elif slot is not None and not replace:
                refusals[at] = STORED
            elif key in seen or (put is not None and not self._make_way(put, replace, now_s)):
                refusals[at] = UNDER_WAY
            else:
                seen.add(key)
                admitted.append(at)
        return admitted

    def _are_all_new(self, keys: Sequence[bytes], sizes: Sequence[int]) -> bool:
        """Whether nothing can be said against any of them; of few keys this is not asked."""
        found = self._index.find_plainly(keys)
        return (
            found is not None
            and bool((found < 0).all())
            and self.pending.keys().isdisjoint(keys)
            and len(set(keys)) == len(keys)
            and min(sizes) > 0
            and 0 < min(map(len, keys)) <= max(map(len, keys)) <= MAX_KEY_NBYTES
        )

    def _make_way(self, put: PendingPut, replace: bool, now_s: float) -> bool:
        """An upsert does not wait for an unfinished put of the same key; others wait until it is discarded."""
        if replace:
            self._abandon([put], RemovalReason.PUT_REVOKED, False, now_s)
            return True
        return self._discard_if_late(put, now_s)

    def _place(self, sizes: list[int], options: PutOptions, now_s: float) -> list[list[Place]]:
        room = self._room_in_table(len(sizes), now_s)
        if room < len(sizes):
            return [*(self._place(sizes[:room], options, now_s) if room else ()), *([] for _ in sizes[room:])]
        least = options.num_replicas if options.all_replicas else 1
        places = self._segments.place_many(sizes, options.num_replicas, options.preferred)
        short = [at for at, found in enumerate(places) if len(found) < least]
        self._give_back(short, places, sizes, now_s)
        # Nothing is evicted for what an empty pool could not hold.
        fits = {nbytes: self._segments.could_hold(nbytes, least) for nbytes in {sizes[at] for at in short}}
        short = [at for at in short if fits[sizes[at]]]
        while short and self._evictor.make_room(sum(sizes[at] for at in short), now_s):
            again = self._segments.place_many([sizes[at] for at in short], options.num_replicas, options.preferred)
            for at, found in zip(short, again, strict=True):
                places[at] = found
            short = [at for at in short if len(places[at]) < least]
            self._give_back(short, places, sizes, now_s)
        return places

    def _room_in_table(self, wanted: int, now_s: float) -> int:
        """How many more objects there may be; others go, as they do when memory is full."""
        missing = self._num_objects() + wanted - self._rules.max_objects
        if missing > 0:
            self._evictor.make_slots(missing, now_s)
        return max(0, self._rules.max_objects - self._num_objects())

    def _num_objects(self) -> int:
        return len(self._index.table) + len(self.pending)

    def _give_back(self, short: Sequence[int], places: list[list[Place]], sizes: Sequence[int], now_s: float) -> None:
        for at in short:
            self._space.rest(places[at], sizes[at], now_s, now_s)
            places[at] = []

    def _terms(self, options: PutOptions, session: int) -> Terms:
        flags = Flag.HARD_PIN if options.hard_pin else 0
        identity = self._identities.number_of(options.identity)
        return Terms(session, flags, identity, options.soft_pin_s, options.replace)

    def _refusal(self, key: bytes, nbytes: int, found: Sequence[Place]) -> Refusal:
        if found:
            return UNDER_WAY
        if self._num_objects() >= self._rules.max_objects:
            return refusal(NoSpace(f"the master's table is full: {self._rules.max_objects} objects (max_objects)"))
        if self._segments.is_recounting(nbytes):
            return RECOUNTING
        if not self._segments.could_hold(nbytes):
            return refusal(NoSpace(f"no mounted segment could hold {nbytes} bytes"))
        return refusal(NoSpace(f"no space for {nbytes} bytes: what is stored is leased, pinned or being written"))

    def _record_grants(
        self,
        granted: Sequence[int],
        keys: Sequence[bytes],
        sizes: Sequence[int],
        generations: Sequence[int],
        terms: Terms,
        parents: Sequence[bytes] | None,
        groups: Sequence[bytes] | None,
    ) -> None:
        pending, kept = self.pending, [keys[at] for at in granted]
        self._index.outcomes.add(
            Granted(
                kept,
                [sizes[at] for at in granted],
                [generations[at] for at in granted],
                [pending[key].places for key in kept],
                terms.session,
                terms.flags,
                terms.identity,
                terms.soft_pin_s,
                terms.replace,
                None if groups is None else [groups[at] for at in granted],
                None if parents is None else shortened([parents[at] for at in granted], kept),
                self._space.let_go_by(terms.session),
            )
        )

    # ending

    def end(
        self, keys: Sequence[bytes], generations: Sequence[int], failed: Mapping[int, tuple[str, ...]], now_s: float
    ) -> tuple[dict[int, Refusal], list[int]]:
        """Makes the objects visible; refusals by position, and the new slots.

        Said twice it is no error; said too late it is StaleGeneration.
        """
        refusals: dict[int, Refusal] = {}
        done: list[PendingPut] = []
        left: dict[int, list[Place]] = {}
        pending, by_number = self.pending, self._segments.by_number
        too_old_s = now_s - self._rules.put_discard_s
        all_plain = len(keys) >= LEAST and not failed and self._are_all_plain(keys, generations, too_old_s)
        if all_plain:
            done = [pending.pop(key) for key in keys]
            keys = ()
        for at, key in enumerate(keys):
            put = pending.get(key)
            if put is None or put.generation != generations[at] or put.renewed_s <= too_old_s:
                if put is not None and put.generation == generations[at]:
                    self._abandon([put], RemovalReason.PUT_ABANDONED, False, now_s)
                late = self._late(key, generations[at], now_s)
                if late is not None:
                    refusals[at] = late
                continue
            if at in failed or put.places[0][0] not in by_number or len(put.places) > 1:
                if not self._drop_failed(put, failed.get(at, ()), now_s):
                    refusals[at] = LOST
                    continue
                left[len(done)] = put.places
            del pending[key]
            done.append(put)
        slots = self._store_all(done, all_plain, now_s)
        if done:
            self._index.outcomes.add(PutsEnded([put.key for put in done], [put.generation for put in done], left))
        return refusals, slots

    def _are_all_plain(self, keys: Sequence[bytes], generations: Sequence[int], too_old_s: float) -> bool:
        """Whether every one is the end of a put that went as it should, of one replica."""
        pending, by_number = self.pending, self._segments.by_number
        puts = [put for put in map(pending.get, keys) if put is not None]
        return (
            len(puts) == len(keys) == len(set(keys))
            and [put.generation for put in puts] == generations
            and min([put.renewed_s for put in puts]) > too_old_s
            and are_plain(puts)
            and {put.places[0][0] for put in puts} <= by_number.keys()
        )

    def _store_all(self, done: Sequence[PendingPut], all_plain: bool, now_s: float) -> list[int]:
        if all_plain or (len(done) >= LEAST and are_plain(done)):
            olds = self._index.table.slots_of.find_many([put.key for put in done])
            if (olds < 0).all():
                return insert_plain(self._index, done)
        return [self.store(put, now_s) for put in done]

    def _late(self, key: bytes, generation: int, now_s: float) -> Refusal | None:
        """None when that very put is stored: it was said twice. Who says it has stopped writing."""
        if self._space.settled(generation):
            self._index.outcomes.add(Freed([generation]))
        slot = self._index.find(key, now_s)
        if slot is not None and self._index.table.version[slot] == generation:
            return None
        return DISCARDED

    def _drop_failed(self, put: PendingPut, failed: Sequence[str], now_s: float) -> bool:
        """Leaves out what could not be written or is gone; False when nothing is left."""
        by_number = self._segments.by_number
        left = [place for place in put.places if place[0] in by_number and by_number[place[0]].name not in failed]
        if not left:
            self._abandon([put], RemovalReason.PUT_ABANDONED, False, now_s)
            return False
        lost = [place for place in put.places if place not in left]
        put.places = left
        # A write that failed by its time may still arrive.
        self._space.rest(lost, put.nbytes, now_s + self._rules.put_release_s, now_s)
        return True

    def store(self, put: PendingPut, now_s: float) -> int:
        """Makes the object of a finished put, in place of the one that its key had."""
        index, table, terms = self._index, self._index.table, put.terms
        old = table.find(put.key)
        if old is not None:
            index.drop(old, RemovalReason.REPLACED, now_s)
        parent = table.find(put.parent) if put.parent else None
        dram = [Replica(number, offset, put.generation) for number, offset in put.places]
        slot = index.insert(put.key, put.nbytes, dram, put.generation, terms.flags, terms.identity, parent)
        if terms.soft_pin_s > 0:
            table.soft_pins[slot] = now_s + terms.soft_pin_s
            table.flags[slot] |= Flag.SOFT_PIN
        if put.group:
            table.join_group(slot, put.group)
        return slot
