"""Puts that were begun and not ended: they go on, are given back or discarded, or end with their process. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from moonpool.base.errors import AlreadyExists, InvalidInput, MoonpoolError, StaleGeneration, Unavailable
from moonpool.master.rules import PoolRules
from moonpool.master.state.changes import RemovalReason
from moonpool.master.state.index import FIRST_SESSION, ObjectIndex
from moonpool.master.state.records import Freed, Identified, LetGo, Outcomes, PutsAbandoned
from moonpool.master.state.segments import Place
from moonpool.master.state.space import SpaceReturns
from moonpool.store.messages import PutOptions, Refusal
from moonpool.store.messages.values import MAX_REPLICAS

MAX_IDENTITIES = 2**16 - 1
_MAX_DIGEST_NBYTES = 64


class Identities:
    """Number 0 is no identity."""

    def __init__(self, outcomes: Outcomes) -> None:
        self._outcomes = outcomes
        self._numbers: dict[bytes, int] = {}
        self._digests: list[bytes] = [b""]

    def number_of(self, digest: bytes) -> int:
        if not digest.strip(b"\0"):
            return 0
        number = self._numbers.get(digest)
        if number is None:
            if len(digest) > _MAX_DIGEST_NBYTES:
                raise InvalidInput(f"an identity has at most {_MAX_DIGEST_NBYTES} bytes", param="identity")
            if len(self._digests) > MAX_IDENTITIES:
                return 0  # the header says it all the same; only `why` knows less
            number = len(self._digests)
            self.restore(number, digest)
            self._outcomes.add(Identified(number, digest))
        return number

    def digest(self, number: int) -> bytes:
        return self._digests[number] if number < len(self._digests) else b""

    def restore(self, number: int, digest: bytes) -> None:
        while len(self._digests) <= number:
            self._digests.append(b"")
        self._digests[number] = digest
        self._numbers[digest] = number

    def items(self) -> Iterator[tuple[int, bytes]]:
        return ((number, digest) for digest, number in self._numbers.items())


MAX_KEY_NBYTES = 1024


def refusal(error: MoonpoolError) -> Refusal:
    return Refusal(error.code, str(error))


STORED = refusal(AlreadyExists("the key is stored already"))
UNDER_WAY = refusal(AlreadyExists("another put of this key is under way"))
RECOUNTING = refusal(Unavailable("nodes are being recounted after the master's restart: ask again soon"))
DISCARDED = refusal(StaleGeneration("the put was discarded: it took too long, or its space was taken back"))
LOST = refusal(StaleGeneration("no replica of the put is left: its nodes are gone or could not be written to"))


def check_pairs(keys: Sequence[bytes], generations: Sequence[int]) -> None:
    """InvalidInput unless each key has a generation."""
    if len(keys) != len(generations):
        raise InvalidInput(
            f"{len(keys)} keys and {len(generations)} generations: each key needs one", param="generations"
        )


def check_batch(
    keys: Sequence[bytes],
    sizes: Sequence[int],
    options: PutOptions,
    session: int,
    parents: Sequence[bytes] | None,
    groups: Sequence[bytes] | None,
) -> None:
    """InvalidInput when the batch makes no sense as a whole."""
    if len(sizes) != len(keys) or any(column is not None and len(column) != len(keys) for column in (parents, groups)):
        raise InvalidInput("the columns of a put have different lengths")
    if not 0 < options.num_replicas <= MAX_REPLICAS:
        raise InvalidInput(f"a put has 1 to {MAX_REPLICAS} replicas", param="num_replicas")
    if session and session < FIRST_SESSION:
        raise InvalidInput(f"a session is 0 or at least {FIRST_SESSION}", param="session")


class Terms(msgspec.Struct, eq=False, gc=False):
    """What the puts of one batch have in common."""

    session: int
    flags: int
    identity: int
    soft_pin_s: float
    replace: bool


class PendingPut(msgspec.Struct, eq=False, gc=False):
    """Space that was granted and is being written. Not visible, not evictable."""

    key: bytes
    nbytes: int
    generation: int
    places: list[Place]
    terms: Terms
    renewed_s: float
    parent: bytes | None = None
    group: bytes = b""


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
