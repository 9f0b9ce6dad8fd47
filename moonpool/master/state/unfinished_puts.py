"""Puts that were begun and have not ended: they are renewed, revoked, discarded, or end with their process. Pure.

Also the refusals of puts, and small numbers for identity digests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from moonpool.base.errors import AlreadyExists, InvalidInput, MoonpoolError, StaleGeneration, Unavailable
from moonpool.master.rules import PoolRules
from moonpool.master.state.changes import RemovalReason
from moonpool.master.state.index import ObjectIndex
from moonpool.master.state.objects import FIRST_SESSION
from moonpool.master.state.records import Identified, Outcomes, PutsAbandoned
from moonpool.master.state.segments import Place
from moonpool.master.state.space import PoolSpace
from moonpool.store.messages import Placement, Refusal

MAX_KEY_NBYTES = 1024
MAX_IDENTITIES = 2**16 - 1
MAX_DROPPED = 65_536  # PutStarts that were given up before they came
_MAX_DIGEST_NBYTES = 64


def refusal(error: MoonpoolError) -> Refusal:
    return Refusal(error.code, str(error))


STORED = refusal(AlreadyExists("the key is stored already"))
UNDER_WAY = refusal(AlreadyExists("another put of this key is under way"))
RECOUNTING = refusal(Unavailable("nodes are being recounted after the master's restart: ask again soon"))
DISCARDED = refusal(StaleGeneration("the put was discarded: it took too long, or its space was taken back"))
LOST = refusal(StaleGeneration("no replica of the put is left: its nodes are gone or could not be written to"))


def check_pairs(keys: Sequence[bytes], generations: Sequence[int]) -> None:
    """Raise InvalidInput unless each key has a generation."""
    if len(keys) != len(generations):
        raise InvalidInput(
            f"{len(keys)} keys and {len(generations)} generations: each key needs one", param="generations"
        )


class Identities:
    """Numbers identity digests: a pool has few, and ten million objects name one each. Number 0 is no identity."""

    def __init__(self, outcomes: Outcomes) -> None:
        self._outcomes = outcomes
        self._numbers: dict[bytes, int] = {}
        self._digests: list[bytes] = [b""]

    def number_of(self, digest: bytes) -> int:
        """Return the digest's number, a new one if need be; 0 if all numbers are used."""
        if not digest.strip(b"\0"):
            return 0
        number = self._numbers.get(digest)
        if number is None:
            if len(digest) > _MAX_DIGEST_NBYTES:
                raise InvalidInput(f"an identity has at most {_MAX_DIGEST_NBYTES} bytes", param="identity")
            if len(self._digests) > MAX_IDENTITIES:
                return 0  # readers compare the digest in the object's header; only `why` cannot name it
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


# Structs of msgspec rather than classes: a batch makes a thousand of them, in a third of the time.
# Of PutTerms.flags, beside those of the object (table.Flag): the new value takes over pins and group of the old one.
KEEP_PINS = 1 << 16
AHEAD = 1 << 17  # space that was granted ahead (ahead.py)


class PutTerms(msgspec.Struct, eq=False, gc=False):
    """What the puts of one batch have in common. `number` is that of their PutStart, 0 if it has none."""

    session: int
    flags: int
    identity: int
    soft_pin_s: float
    replace: bool
    number: int = 0


class Voiding:
    """Replicas that nodes were ordered to void (voids.py), of one key."""

    __slots__ = ("number", "replicas", "until_s")

    def __init__(self) -> None:
        self.number = 0  # of the key's latest replicas, among all that left
        self.until_s = 0.0  # until when a reader may remember them
        self.replicas: set[Placement | None] = set()  # that are not known to be void; None: of unknown ones

    def is_over(self, now_s: float) -> bool:
        """Return whether no reader takes them for an object any more without asking."""
        return not self.replicas or self.until_s <= now_s


class PendingPut(msgspec.Struct, eq=False, gc=False):
    """Space that was granted and is being written. Not visible, not evictable."""

    key: bytes
    nbytes: int
    generation: int
    places: list[Place]
    terms: PutTerms
    renewed_s: float
    parent: bytes | None = None
    group: bytes = b""
    voiding: Voiding | None = None  # of the object that an upsert replaces
    turn: int = 0  # of space granted ahead: copies of calls for earlier turns do nothing (PutAt.turn)


def are_plain(puts: Sequence[PendingPut]) -> bool:
    """Return whether all have one replica, no pin and no group, as most objects do."""
    last = None
    for put in puts:
        terms = put.terms
        if terms is not last and (terms.flags or terms.soft_pin_s):
            return False
        if put.group or len(put.places) != 1:
            return False
        last = terms
    return True


class UnfinishedPuts:
    def __init__(self, rules: PoolRules, index: ObjectIndex, space: PoolSpace) -> None:
        self._rules = rules
        self._index = index
        self._space = space
        self.pending: dict[bytes, PendingPut] = {}  # the put that is discarded first comes first
        index.table.promised = self.pending
        self.ahead_nbytes = 0  # of the unfinished puts that are AHEAD
        # Not in the journal: a call does not outlive its connection, nor the connection this process.
        self._dropped: OrderedDict[int, None] = OrderedDict()  # PutStarts that were given up and have not come
        self.counters = dict.fromkeys(("refused", "discarded", "unanswered"), 0)

    def renew(self, keys: Sequence[bytes], generations: Sequence[int], now_s: float) -> list[bool]:
        """Restart the time of unfinished puts. Return for each whether it is still unfinished."""
        renewed = []
        for key, generation in zip(keys, generations, strict=True):
            put = self.pending.get(key)
            alive = put is not None and put.generation == generation and not self.discard_if_late(put, now_s)
            if alive and put is not None:
                put.renewed_s = now_s
                self.pending[key] = self.pending.pop(key)  # to the end of the dict
            renewed.append(alive)
        return renewed

    def revoke(self, keys: Sequence[bytes], generations: Sequence[int], settled: bool, now_s: float) -> None:
        """End unfinished puts. Free their space now if no write can still be under way (`settled`), otherwise later."""
        revoked, earlier = [], []
        for key, generation in zip(keys, generations, strict=True):
            put = self.pending.get(key)
            if put is not None and put.generation == generation:
                revoked.append(put)
            else:
                earlier.append(generation)
        if revoked:
            self.abandon(revoked, RemovalReason.PUT_REVOKED, settled, now_s)
        if settled:
            self._space.free_puts(earlier)
        else:
            for generation in earlier:
                self._space.stop_put(generation, now_s + self._rules.put_release_s)

    def drop(self, number: int, keys: Iterable[bytes], now_s: float) -> None:
        """The client has given up the PutStart of that number and of these keys before its answer came. Free what was
        granted, also to puts that have been discarded since; or refuse the call when it comes.
        """
        if not number:
            return
        found = [self.pending[key] for key in dict.fromkeys(keys) if key in self.pending]
        puts = [put for put in found if put.terms.number == number]
        if puts:
            self.abandon(puts, RemovalReason.PUT_REVOKED, True, now_s)
        num_freed = len(puts) + self._space.free_puts_of(number)
        self.counters["unanswered"] += num_freed
        if not num_freed:
            self._dropped[number] = None
            if len(self._dropped) > MAX_DROPPED:
                self._dropped.popitem(last=False)

    def is_dropped(self, number: int) -> bool:
        """Return whether the client gave up the PutStart of that number before it came."""
        return number in self._dropped

    def on_session_stopped(self, keys: Iterable[bytes], session: int, up_to: int, now_s: float) -> None:
        """The session works on none of its puts up to that generation any more. End its puts of `keys` now; the others
        are discarded when their time is over.
        """
        found = [self.pending[key] for key in dict.fromkeys(keys) if key in self.pending] if self.pending else []
        lost = [put for put in found if put.terms.session == session and put.generation <= up_to]
        if lost:
            self.abandon(lost, RemovalReason.PUT_REVOKED, False, now_s)
        self._space.on_session_stopped(session, up_to, now_s + self._rules.put_release_s)

    def discard_late(self, now_s: float, limit: int) -> bool:
        """End up to `limit` puts whose time is over. Return whether there may be more."""
        late: list[PendingPut] = []
        for put in self.pending.values():
            if now_s < put.renewed_s + self._rules.put_discard_s or len(late) == limit:
                break
            late.append(put)
        if late:
            self.abandon(late, RemovalReason.PUT_ABANDONED, False, now_s)
        return len(late) == limit

    def on_session_gone(self, session: int, now_s: float) -> None:
        """End the unfinished puts of a process that has ended, and free all space it could have written."""
        mine = [put for put in self.pending.values() if put.terms.session == session]
        if mine:
            self.abandon(mine, RemovalReason.PUT_ABANDONED, True, now_s)
        self._space.on_session_gone(session)

    def sessions(self) -> set[int]:
        """Return the sessions that have unfinished puts, or space of ended ones."""
        unfinished = {put.terms.session for put in self.pending.values() if put.terms.session >= FIRST_SESSION}
        return unfinished.union(self._space.holding_sessions())

    def spans(self) -> Iterator[tuple[Place, int]]:
        for put in self.pending.values():
            for place in put.places:
                yield place, put.nbytes

    def discard_if_late(self, put: PendingPut, now_s: float) -> bool:
        if now_s < put.renewed_s + self._rules.put_discard_s:
            return False
        self.abandon([put], RemovalReason.PUT_ABANDONED, False, now_s)
        return True

    def abandon(self, puts: Sequence[PendingPut], reason: RemovalReason, settled: bool, now_s: float) -> None:
        for put in puts:
            del self.pending[put.key]
            if put.terms.flags & AHEAD:
                self.ahead_nbytes -= put.nbytes
            if settled:
                self._space.free(put.places, put.nbytes)
            else:
                self.keep_space(put, put.renewed_s, now_s, reason)
            if not put.terms.flags & AHEAD:
                self._index.removals.record(put.key, reason, now_s)
        self.counters["discarded"] += len(puts)
        self._index.outcomes.add(
            PutsAbandoned(
                [put.key for put in puts],
                [put.generation for put in puts],
                [int(reason)] * len(puts),
                [not settled] * len(puts),
            )
        )

    def keep_space(self, put: PendingPut, renewed_s: float, now_s: float, reason: RemovalReason) -> None:
        """Keep the space of an ended put whose writer has not reported that it stopped. What was granted ahead is
        revoked only by its client, which then no longer writes it in place.
        """
        session, release_s, number = put.terms.session, self._rules.put_release_s, put.terms.number
        ahead = bool(put.terms.flags & AHEAD)
        stopped = reason is RemovalReason.PUT_REVOKED if ahead else put.generation <= self._space.stopped_up_to(session)
        if session < FIRST_SESSION:
            self._space.free_put_at(renewed_s + release_s, put.generation, put.places, put.nbytes, number)
        elif stopped:
            self._space.free_put_at(now_s + release_s, put.generation, put.places, put.nbytes, number)
        else:
            self._space.hold_put(put.generation, put.places, put.nbytes, session, ahead, number)
