"""Puts that were begun and not ended: they go on, are given back or discarded, or end with their process. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moonpool.master.rules import PoolRules
from moonpool.master.state.index import FIRST_SESSION, ObjectIndex
from moonpool.master.state.pending import PendingPut
from moonpool.master.state.records import Freed, LetGo, PutsAbandoned
from moonpool.master.state.removal_reasons import RemovalReason
from moonpool.master.state.segments import Place
from moonpool.master.state.space import SpaceReturns


class UnfinishedPuts:
    def __init__(self, rules: PoolRules, index: ObjectIndex, space: SpaceReturns) -> None:
        self._rules = rules
        self._index = index
        self._space = space
        self.pending: dict[bytes, PendingPut] = {}  # the one that is discarded first comes first
        index.table.promised = self.pending
        self.counters = dict.fromkeys(("refused", "discarded"), 0)

    def renew(self, keys: Sequence[bytes], generations: Sequence[int], now_s: float) -> list[bool]:
        """Unfinished puts that go on. True where there is one."""
        renewed = []
        for key, generation in zip(keys, generations, strict=True):
            put = self.pending.get(key)
            alive = put is not None and put.generation == generation and not self._discard_if_late(put, now_s)
            if alive and put is not None:
                put.renewed_s = now_s
                self.pending[key] = self.pending.pop(key)  # to the end of the line
            renewed.append(alive)
        return renewed

    def revoke(self, keys: Sequence[bytes], generations: Sequence[int], settled: bool, now_s: float) -> None:
        """Ends unfinished puts. The space rests unless no write can still be under way (`settled`)."""
        ended, freed = [], []
        for key, generation in zip(keys, generations, strict=True):
            put = self.pending.get(key)
            if put is not None and put.generation == generation:
                ended.append(put)
            elif settled and self._space.settled(generation):
                freed.append(generation)
        if ended:
            self._abandon(ended, RemovalReason.PUT_REVOKED, settled, now_s)
        if freed:
            self._index.outcomes.add(Freed(freed))

    def let_go(self, keys: Sequence[bytes], session: int, up_to: int, now_s: float) -> None:
        """The session has none of its puts in its hands up to that generation. Those of `keys` make way at once, the
        others are discarded in time.
        """
        found = [self.pending[key] for key in dict.fromkeys(keys) if key in self.pending] if self.pending else []
        lost = [put for put in found if put.terms.session == session and put.generation <= up_to]
        if lost:
            self._abandon(lost, RemovalReason.PUT_REVOKED, False, now_s)
        if self._space.let_go(session, up_to, now_s + self._rules.put_release_s):
            self._index.outcomes.add(LetGo(session, up_to))

    def discard_late(self, now_s: float, limit: int) -> bool:
        """Ends up to `limit` puts whose time is over. True when there may be more."""
        late: list[PendingPut] = []
        for put in self.pending.values():
            if now_s < put.renewed_s + self._rules.put_discard_s or len(late) == limit:
                break
            late.append(put)
        if late:
            self._abandon(late, RemovalReason.PUT_ABANDONED, False, now_s)
        return len(late) == limit

    def session_gone(self, session: int, now_s: float) -> None:
        """The writer has ended: its unfinished puts will never be, and nothing writes there any more."""
        mine = [put for put in self.pending.values() if put.terms.session == session]
        if mine:
            self._abandon(mine, RemovalReason.PUT_ABANDONED, True, now_s)

    def sessions(self) -> set[int]:
        return {put.terms.session for put in self.pending.values() if put.terms.session >= FIRST_SESSION}

    def spans(self) -> Iterator[tuple[Place, int]]:
        for put in self.pending.values():
            for place in put.places:
                yield place, put.nbytes

    def _discard_if_late(self, put: PendingPut, now_s: float) -> bool:
        if now_s < put.renewed_s + self._rules.put_discard_s:
            return False
        self._abandon([put], RemovalReason.PUT_ABANDONED, False, now_s)
        return True

    def _abandon(self, puts: Sequence[PendingPut], fate: RemovalReason, settled: bool, now_s: float) -> None:
        for put in puts:
            del self.pending[put.key]
            if settled:
                self._space.rest(put.places, put.nbytes, now_s, now_s)
            else:
                self.keep(put, put.renewed_s, now_s)
            self._index.fates.record(put.key, fate, now_s)
        self.counters["discarded"] += len(puts)
        self._index.outcomes.add(
            PutsAbandoned(
                [put.key for put in puts],
                [put.generation for put in puts],
                [int(fate)] * len(puts),
                [not settled] * len(puts),
            )
        )

    def keep(self, put: PendingPut, renewed_s: float, now_s: float) -> None:
        """Space of an ended put whose writer has not said that it stopped."""
        session, rest_s = put.terms.session, self._rules.put_release_s
        if session < FIRST_SESSION:
            self._space.rest_put(put.generation, put.places, put.nbytes, renewed_s + rest_s)
        elif put.generation <= self._space.let_go_by(session):
            self._space.rest_put(put.generation, put.places, put.nbytes, now_s + rest_s)
        else:
            self._space.hold_put(put.generation, put.places, put.nbytes, session)
