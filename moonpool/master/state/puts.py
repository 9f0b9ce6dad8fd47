"""Putting: the master grants space, the client writes it, and the end of the put makes the object visible. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moonpool.base.errors import InvalidInput, NoSpace
from moonpool.master.rules import PoolRules
from moonpool.master.state.changes import RemovalReason
from moonpool.master.state.evictor import Evictor
from moonpool.master.state.index import ObjectIndex
from moonpool.master.state.objects import FIRST_SESSION
from moonpool.master.state.records import Granted, shortened
from moonpool.master.state.segments import Place, SegmentTable
from moonpool.master.state.space import Generations, PoolSpace
from moonpool.master.state.table import Flag, Replica
from moonpool.master.state.unfinished_puts import (
    AHEAD,
    DISCARDED,
    KEEP_PINS,
    LOST,
    MAX_KEY_NBYTES,
    RECOUNTING,
    STORED,
    UNDER_WAY,
    Identities,
    PendingPut,
    PutTerms,
    UnfinishedPuts,
    are_plain,
    refusal,
)
from moonpool.store.messages import Placement, PutOptions, PutReply, Refusal
from moonpool.store.messages.values import MAX_REPLICAS

_LEAST_BULK = 16  # fewer new objects are faster to insert one by one


class Puts(UnfinishedPuts):
    def __init__(
        self,
        rules: PoolRules,
        index: ObjectIndex,
        segments: SegmentTable,
        space: PoolSpace,
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
        number: int = 0,
    ) -> PutReply:
        """Grant space to each item, on one to num_replicas distinct segments; refuse it if there is none.

        Raise InvalidInput if the batch as a whole is wrong. Single items are refused one by one.
        """
        columns = (sizes, parents, groups)
        if any(column is not None and len(column) != len(keys) for column in columns):
            raise InvalidInput("the columns of a put have different lengths")
        if not 0 < options.num_replicas <= MAX_REPLICAS:
            raise InvalidInput(f"a put has 1 to {MAX_REPLICAS} replicas", param="num_replicas")
        if session and session < FIRST_SESSION:
            raise InvalidInput(f"a session is 0 or at least {FIRST_SESSION}", param="session")
        flags = (Flag.HARD_PIN if options.hard_pin else 0) | (KEEP_PINS if options.keep_pins else 0)
        identity = self._identities.number_of(options.identity)
        terms = PutTerms(session, flags, identity, options.soft_pin_s, options.replace, number)
        if len(keys) == 1 and groups is None:
            reply = self._start_one(keys, sizes, options, terms, parents, now_s)
            if reply is not None:
                return reply
        refusals: dict[int, Refusal] = {}
        short: list[int] = []
        self._evictor.begin_event()
        positions = self._admitted(keys, sizes, options, refusals, now_s)
        places = self._place([sizes[at] for at in positions], options, now_s)
        if not all(places):
            short = [at for at, found in zip(positions, places, strict=True) if not found]
            positions = [at for at, found in zip(positions, places, strict=True) if found]
            places = [found for found in places if found]
        granted = self._grant(keys, sizes, terms, parents, groups, positions, places, now_s)
        for at in short:  # now that the others are begun: they may be what fills the table
            refusals[at] = self._no_space(sizes[at])
        self.counters["refused"] += len(refusals)
        return PutReply(*granted, refusals, self._generations.last)

    def _start_one(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        options: PutOptions,
        terms: PutTerms,
        parents: Sequence[bytes] | None,
        now_s: float,
    ) -> PutReply | None:
        """Start the put of a new key that is alone in its batch and finds room: twice as fast as a batch of one. Return
        None in all other cases.
        """
        key, nbytes, index = keys[0], sizes[0], self._index
        if options.num_replicas != 1 or key in self.pending or not 0 < len(key) <= MAX_KEY_NBYTES or nbytes <= 0:
            return None
        if index.find(key, now_s) is not None or index.table.is_full:
            return None
        place = self._segments.place_one(nbytes, options.preferred)
        if place is None:
            return None
        places = [place]
        generation, placements = self._space.stamp_one(places)
        put = self.pending[key] = PendingPut(key, nbytes, generation, places, terms, now_s)
        if parents is not None:
            put.parent = parents[0]
        if index.outcomes.enabled:
            self.record_grants(keys, sizes, [generation], terms, parents, None, [places])
        return PutReply([generation], [placements], {}, generation)

    def _grant(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        terms: PutTerms,
        parents: Sequence[bytes] | None,
        groups: Sequence[bytes] | None,
        positions: Sequence[int],
        places: Sequence[list[Place]],
        now_s: float,
    ) -> tuple[list[int], list[tuple[Placement, ...]]]:
        """Begin the puts at these positions of the batch, each with its places. Return the generations of the
        whole batch and where to write; 0 and () at the other positions.
        """
        num_keys = len(keys)
        if len(positions) < num_keys:
            keys, sizes = [keys[at] for at in positions], [sizes[at] for at in positions]
            parents = None if parents is None else [parents[at] for at in positions]
            groups = None if groups is None else [groups[at] for at in positions]
        granted, placements = self._space.stamp(places)
        puts = [
            PendingPut(key, nbytes, generation, found, terms, now_s)
            for key, nbytes, generation, found in zip(keys, sizes, granted, places, strict=True)
        ]
        if parents is not None:
            for put, parent in zip(puts, parents, strict=True):
                put.parent = parent
        if groups is not None:
            for put, group in zip(puts, groups, strict=True):
                put.group = group
        self.pending.update(zip(keys, puts, strict=True))
        if puts and self._index.outcomes.enabled:
            self.record_grants(keys, sizes, granted, terms, parents, groups, places)
        if len(positions) == num_keys:
            return granted, placements
        generations: list[int] = [0] * num_keys
        replicas: list[tuple[Placement, ...]] = [()] * num_keys
        for at, generation, placed in zip(positions, granted, placements, strict=True):
            generations[at], replicas[at] = generation, placed
        return generations, replicas

    def record_grants(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        generations: Sequence[int],
        terms: PutTerms,
        parents: Sequence[bytes] | None,
        groups: Sequence[bytes] | None,
        places: Sequence[list[Place]],
    ) -> None:
        self._index.outcomes.add(
            Granted(
                list(keys),
                list(sizes),
                list(generations),
                list(places),
                terms.session,
                terms.flags,
                terms.identity,
                terms.soft_pin_s,
                terms.replace,
                None if groups is None else list(groups),
                None if parents is None else shortened(parents, keys),
                self._space.stopped_up_to(terms.session),
                terms.number,
            )
        )

    def _admitted(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        options: PutOptions,
        refusals: dict[int, Refusal],
        now_s: float,
    ) -> Sequence[int]:
        """Return the positions of the items that may have space, each key once; add refusals for the others."""
        if self._are_all_new(keys, sizes):
            return range(len(keys))
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
        """Return whether all items are valid and new. Of few keys it is always False: one by one is as fast."""
        found = self._index.find_batch(keys)
        return (
            found is not None
            and bool((found < 0).all())
            and self.pending.keys().isdisjoint(keys)
            and len(set(keys)) == len(keys)
            and min(sizes) > 0
            and 0 < min(map(len, keys)) <= max(map(len, keys)) <= MAX_KEY_NBYTES
        )

    def _make_way(self, put: PendingPut, replace: bool, now_s: float) -> bool:
        """End an unfinished put for a new one of the same key, if the new one replaces or the old one is too late."""
        if replace and not put.terms.flags & AHEAD:
            self.abandon([put], RemovalReason.PUT_REVOKED, False, now_s)
            return True
        return self.discard_if_late(put, now_s)

    def _place(self, sizes: list[int], options: PutOptions, now_s: float) -> list[list[Place]]:
        """Allocate places for each size, evicting objects if need be; an empty list where there is no space."""
        room = self._room_in_table(len(sizes), now_s)
        if room < len(sizes):
            return [*(self._place(sizes[:room], options, now_s) if room else ()), *([] for _ in sizes[room:])]
        least = options.num_replicas if options.all_replicas else 1
        places = self._space.place(sizes, options.num_replicas, options.preferred, least=least)
        if all(places):
            return places
        short = [at for at, found in enumerate(places) if not found]
        # Nothing is evicted for what an empty pool could not hold.
        fits = {nbytes: self._segments.could_hold(nbytes, least) for nbytes in {sizes[at] for at in short}}
        short = [at for at in short if fits[sizes[at]]]
        while short and self._evictor.make_room(sum(sizes[at] for at in short), now_s):
            missing = [sizes[at] for at in short]
            again = self._space.place(missing, options.num_replicas, options.preferred, least=least)
            for at, found in zip(short, again, strict=True):
                places[at] = found
            short = [at for at in short if not places[at]]
        return places

    def _room_in_table(self, wanted: int, now_s: float) -> int:
        """Return how many more objects the table can hold; evict objects if these are fewer than `wanted`."""
        missing = self.num_objects() + wanted - self._rules.max_objects
        if missing > 0:
            self._evictor.make_slots(missing, now_s)
        return max(0, self._rules.max_objects - self.num_objects())

    def num_objects(self) -> int:
        return len(self._index.table) + len(self.pending)

    def _no_space(self, nbytes: int) -> Refusal:
        if self.num_objects() >= self._rules.max_objects:
            return refusal(NoSpace(f"the master's table is full: {self._rules.max_objects} objects (max_objects)"))
        if self._segments.is_recounting(nbytes):
            return RECOUNTING
        if not self._segments.could_hold(nbytes):
            return refusal(NoSpace(f"no mounted segment could hold {nbytes} bytes"))
        return refusal(NoSpace(f"no space for {nbytes} bytes: what is stored is leased, pinned or being written"))

    # ending

    def end(
        self, keys: Sequence[bytes], generations: Sequence[int], failed: Mapping[int, tuple[str, ...]], now_s: float
    ) -> tuple[dict[int, Refusal], list[int]]:
        """Make the objects visible. Return refusals by position, and the slots of the new objects.

        A repeated call is no error; a call after the put was discarded is StaleGeneration.
        """
        refusals: dict[int, Refusal] = {}
        done: list[PendingPut] = []
        left: dict[int, list[Place]] = {}
        pending, by_number = self.pending, self._segments.by_number
        too_old_s = now_s - self._rules.put_discard_s
        all_plain = len(keys) >= _LEAST_BULK and not failed and self._are_all_plain(keys, generations, too_old_s)
        if all_plain:
            done = [pending.pop(key) for key in keys]
            keys = ()
        for at, key in enumerate(keys):
            put = pending.get(key)
            is_late = put is None or put.renewed_s <= too_old_s or put.terms.flags & AHEAD  # that is ended by put_at()
            if put is None or is_late or put.generation != generations[at]:
                if put is not None and put.generation == generations[at]:
                    self.abandon([put], RemovalReason.PUT_ABANDONED, False, now_s)
                late = self.end_again(key, generations[at], now_s)
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
            self._index.outcomes.ended([put.key for put in done], [put.generation for put in done], left)
        return refusals, slots

    def _are_all_plain(self, keys: Sequence[bytes], generations: Sequence[int], too_old_s: float) -> bool:
        """Return whether all of these end unfinished plain puts in time, with the right generations."""
        pending, by_number = self.pending, self._segments.by_number
        puts = [put for put in map(pending.get, keys) if put is not None]
        return (
            len(puts) == len(keys) == len(set(keys))
            and [put.generation for put in puts] == generations
            and min([put.renewed_s for put in puts]) > too_old_s
            and are_plain(puts)
            and {put.places[0][0] for put in puts} <= by_number.keys()
        )

    def end_again(self, key: bytes, generation: int, now_s: float) -> Refusal | None:
        """Handle a PutEnd of a put that is not unfinished. Return None if this put is already stored (a repeated call),
        otherwise the refusal. In both cases the client has stopped writing, so its space can be reused. Space granted
        ahead may be in use for another object by now: its client gives it back itself.
        """
        if not self._space.is_ahead(generation):
            self._space.free_puts([generation])
        slot = self._index.find(key, now_s)
        if slot is not None and self._index.table.version[slot] == generation:
            return None
        return DISCARDED

    def _drop_failed(self, put: PendingPut, failed: Sequence[str], now_s: float) -> bool:
        """Remove the places that are gone or that the client could not write. Return False if none is left; then the
        put is ended.
        """
        by_number = self._segments.by_number
        left = [place for place in put.places if place[0] in by_number and by_number[place[0]].name not in failed]
        if not left:
            self.abandon([put], RemovalReason.PUT_ABANDONED, False, now_s)
            return False
        lost = [place for place in put.places if place not in left]
        put.places = left
        # A write that timed out may still arrive.
        self._space.free_at(now_s + self._rules.put_release_s, lost, put.nbytes, now_s)
        return True

    def _store_all(self, done: Sequence[PendingPut], all_plain: bool, now_s: float) -> list[int]:
        index, keys = self._index, [put.key for put in done]
        if not all_plain and (len(done) < _LEAST_BULK or not are_plain(done)):
            return [self.store(put, now_s) for put in done]
        if (index.table.slots_of.find_many(keys) >= 0).any():
            return [self.store(put, now_s) for put in done]
        return index.insert_plain(
            keys,
            [put.nbytes for put in done],
            [put.generation for put in done],
            [put.places[0] for put in done],
            [put.terms.identity for put in done],
            [put.parent or b"" for put in done] if any(put.parent for put in done) else None,
        )

    def store(self, put: PendingPut, now_s: float) -> int:
        """Make the object of a finished put, in place of the object that its key had. Return its slot."""
        index, table, terms = self._index, self._index.table, put.terms
        flags, group, soft_pin_until_s = terms.flags & ~KEEP_PINS, put.group, now_s + terms.soft_pin_s
        old = table.find(put.key)
        if old is not None:
            if terms.flags & KEEP_PINS:
                flags |= table.flags[old] & Flag.HARD_PIN
                group = group or table.group_of.get(old, b"")
                soft_pin_until_s = max(soft_pin_until_s, table.soft_pins.get(old, now_s))
            is_void = put.voiding is not None and put.voiding.is_over(now_s)
            index.drop(old, RemovalReason.REPLACED, now_s, is_void=is_void)
        parent = table.find(put.parent) if put.parent else None
        dram = [Replica(number, offset, put.generation) for number, offset in put.places]
        slot = index.insert(put.key, put.nbytes, dram, put.generation, flags, terms.identity, parent)
        if soft_pin_until_s > now_s:
            table.soft_pins[slot] = soft_pin_until_s
            table.flags[slot] |= Flag.SOFT_PIN
        if group:
            table.join_group(slot, group)
        return slot
