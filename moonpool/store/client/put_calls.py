"""The calls to the master around a put: PutStart, PutRenew, PutEnd and PutRevoke.

An answer to a PutStart may be lost, or come when its caller has given up. Then no process knows which space was
granted. So each PutStart has a number, another one each time it is sent, and the client tells the master which numbers
it has given up (PutDrop), before its next call of any kind: the space and the keys are free then. A PutRevoke that was
not answered is sent again in the same way, and puts whose PutEnd was not answered are revoked.

Every PutStart also states the generation up to which this client has no open put (Grants): the master takes back what
it granted below that and was not told of.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import count

import msgspec

from moonpool.base.errors import (
    AlreadyExists,
    DeadlineExceeded,
    MoonpoolError,
    NotFound,
    NotSettled,
    PeerLost,
    StaleGeneration,
    Unavailable,
    from_wire,
)
from moonpool.base.object_header import NO_IDENTITY
from moonpool.store import messages as m
from moonpool.store.client.ahead import HeldPlace, HeldSpace
from moonpool.store.client.config import ClientConfig
from moonpool.store.client.counters import ClientCounters
from moonpool.store.client.directory import SegmentDirectory
from moonpool.store.client.master_client import MasterClient
from moonpool.store.client.put_request import Put, W, put_start
from moonpool.store.client.session_client import SessionClient
from moonpool.store.messages import Placement


class Grants:
    """The puts that this client has open. Pure, thread-safe.

    Generations only rise, so the generations that a call is granted are above all that were known when it began.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self._calls_began_at: list[int] = []  # per running call: the last generation known when it began
        self._last = 0

    def begin_call(self) -> tuple[int, int]:
        """Begin a PutStart. Return the argument for end_call(), and the generation up to which no put is open."""
        with self._lock:
            self._calls_began_at.append(self._last)
            return self._last, min((self._last, *self._calls_began_at, *(each - 1 for each in self._open)))

    def end_call(self, began_at: int) -> None:
        """End a PutStart, answered or not. Call add() with its grants first."""
        with self._lock:
            self._calls_began_at.remove(began_at)

    def add(self, generations: Iterable[int], last: int) -> None:
        """Add the granted generations (0: not granted). `last` is the last one that the master gave to any client."""
        with self._lock:
            self._open.update(each for each in generations if each)
            self._last = max(self._last, last)

    def discard(self, generations: Iterable[int]) -> None:
        """Remove puts that were ended or given back. This client no longer writes to their space."""
        with self._lock:
            self._open.difference_update(generations)


class GrantedPuts:
    """The answer to one PutStart. By position: the space, or in `errors` why there is none."""

    def __init__(self, keys: list[bytes], session: int, reply: m.PutReply) -> None:
        self.keys, self.session = keys, session
        self.can_wait = False  # a refusal is temporary
        self.generations, self.replicas = reply.generations, reply.replicas
        self.errors: list[MoonpoolError | None] = [None] * len(keys)
        for position, refusal in reply.refusals.items():
            error = self.errors[position] = from_wire(refusal.code, refusal.message)
            self.can_wait = self.can_wait or isinstance(error, Unavailable)
        self.failed: dict[int, tuple[str, ...]] = {}  # segments whose replicas could not be written
        self.unsettled: set[int] = set()  # writes may still arrive at the owner

    def open(self) -> list[int]:
        """Return the positions that have space, with a replica that did not fail."""
        return [position for position, error in enumerate(self.errors) if error is None]

    def fail(self, position: int, placement: Placement, error: MoonpoolError) -> None:
        """Leave out a replica that cannot be written. The put fails with its last replica."""
        failed = self.failed[position] = (*self.failed.get(position, ()), placement.segment)
        if isinstance(error, Unavailable):
            self.unsettled.add(position)
        if len(failed) == len(self.replicas[position]):
            self.errors[position] = error


class PutCalls:
    """Thread-safe."""

    def __init__(
        self,
        master: MasterClient,
        directory: SegmentDirectory,
        sessions: SessionClient,
        counters: ClientCounters,
        config: ClientConfig,
    ) -> None:
        self._master, self._directory, self._sessions, self._counters = master, directory, sessions, counters
        self._grants = Grants()
        self._numbers = count(1 + sessions.number // 2)  # of PutStarts; no other client has them
        self.ahead = HeldSpace(master, sessions.session, directory.local_segment, directory.is_local_memory, config)

    def take_ahead(self, put: Put, nbytes: int) -> HeldPlace | None:
        """Return space for this put that was granted ahead; None: it is put in the ordinary way."""
        options = put.options
        if options.replace or options.num_replicas != 1 or options.preferred or put.parent or put.group:
            return None
        return self.ahead.take(nbytes)

    def put_at(self, put: Put, nbytes: int, held: HeldPlace) -> MoonpoolError | None:
        """Make the object visible that was written to this place. Return the error: AlreadyExists if the key is taken,
        StaleGeneration if the place is lost; then the object can be put in the ordinary way.
        """
        identity = b"" if put.identity == NO_IDENTITY else put.identity
        options = put.options
        if identity and not options.identity:
            options = msgspec.structs.replace(options, identity=identity)
        call = m.PutAt(put.key, held.generation, nbytes, options, held.turn)
        try:
            try:
                reply, is_repeated = self._master.call_noting_repeats(call)
            except NotSettled:
                reply, is_repeated = self._master.call(call), True
        except MoonpoolError as lost:
            # It is unknown whether the object is stored. The master ignores the return of space that is in use.
            self.ahead.drop(held)
            return lost
        error = None if reply.refusal is None else from_wire(reply.refusal.code, reply.refusal.message)
        if error is None:
            self.ahead.use_up(held)
        elif isinstance(error, AlreadyExists):
            self.ahead.put_back(held)
        else:
            self.ahead.drop(held)
        if not reply.may_hold or isinstance(error, StaleGeneration):
            self.ahead.give_back_all()
        if isinstance(error, StaleGeneration) and is_repeated:  # the first call may have stored it: then it was removed
            return Unavailable("the master was lost while it ended this put; the object may or may not be stored")
        return error

    def start(
        self, requests: Sequence[W], sizes: Sequence[int], meanwhile: Callable[[], bool] | None = None
    ) -> GrantedPuts:
        """Ask for the space of requests with the same options. A restarted master that still waits for its nodes is
        asked again for `retry_s`. `meanwhile` as in BlockingClient.call.
        """
        granted = self._start_in_session(requests, sizes, meanwhile)
        if granted.can_wait:
            for _ in self._master.retry_pauses():
                self.revoke(granted, granted.open())  # ask for all again, so that the bundle is placed together
                granted = self._start_in_session(requests, sizes)
                if not granted.can_wait:
                    break
        self._counters.add_refusals(error for error in granted.errors if error is not None)
        return granted

    def _start_in_session(
        self, requests: Sequence[W], sizes: Sequence[int], meanwhile: Callable[[], bool] | None = None
    ) -> GrantedPuts:
        """Start the puts, with a session if a granted segment needs one."""
        granted = self._start(requests, sizes, meanwhile)
        if not granted.session and self._may_write_in_place(granted):
            self.revoke(granted, granted.open())  # this machine's first node has started: ask again, with a session
            granted = self._start(requests, sizes)
        return granted

    def _may_write_in_place(self, granted: GrantedPuts) -> bool:
        """Return whether a granted segment is on a node of this machine, at which a session must be registered."""
        for place in {place.segment: place for places in granted.replicas for place in places}.values():
            with contextlib.suppress(NotFound):
                self._directory.info(place)  # asks the master if the segment is new
        return self._sessions.session() != 0

    def _start(
        self, requests: Sequence[W], sizes: Sequence[int], meanwhile: Callable[[], bool] | None = None
    ) -> GrantedPuts:
        session = self._sessions.session()
        try:
            return self._start_for(session, requests, sizes, meanwhile)
        except StaleGeneration:  # the master has ended the session; go on with a new one
            self._sessions.renew(session)
            return self._start_for(self._sessions.session(), requests, sizes)

    def _start_for(
        self, session: int, requests: Sequence[W], sizes: Sequence[int], meanwhile: Callable[[], bool] | None = None
    ) -> GrantedPuts:
        local = self._directory.local_segment()
        began_at, settled_up_to = self._grants.begin_call()
        try:
            call = put_start(requests, sizes, session, local, settled_up_to)
            reply = self._ask(call, meanwhile)
            self._grants.add(reply.generations, reply.last_generation)
        finally:
            self._grants.end_call(began_at)
        return GrantedPuts(call.keys, session, reply)

    def _ask(self, call: m.PutStart, meanwhile: Callable[[], bool] | None = None) -> m.PutReply:
        """Send the call, under another number each time. Give up what is granted by an answer that does not come."""
        call.number = next(self._numbers)

        def drop() -> None:
            self._master.owe(m.PutDrop(call.number, call.keys))
            call.number = next(self._numbers)

        return self._master.call_noting_repeats(call, meanwhile, drop)[0]

    def start_shared(self, requests: Sequence[W], sizes: Sequence[int], session: int) -> GrantedPuts:
        """Ask for space that several processes write, in a session of their own."""
        call = put_start(requests, sizes, session, self._directory.local_segment(), 0)
        return GrantedPuts(call.keys, session, self._ask(call))

    def end(self, granted: GrantedPuts, meanwhile: Callable[[], bool] | None = None) -> None:
        """Make the written puts visible and give the space of the others back. `errors` has the outcome of each.

        If the master cannot be asked, it is not known whether the puts are visible. `meanwhile` as in start().
        """
        self.revoke(granted, [position for position in granted.failed if granted.errors[position] is not None])
        written = granted.open()
        keys = [granted.keys[position] for position in written]
        generations = [granted.generations[position] for position in written]
        failed = {index: granted.failed[p] for index, p in enumerate(written) if p in granted.failed}
        try:
            refused = self.finish(keys, generations, failed, meanwhile)
        except MoonpoolError as lost:
            refused = dict.fromkeys(range(len(written)), lost)
        for index, error in refused.items():
            granted.errors[written[index]] = error

    def finish(
        self,
        keys: list[bytes],
        generations: list[int],
        failed: dict[int, tuple[str, ...]],
        meanwhile: Callable[[], bool] | None = None,
    ) -> dict[int, MoonpoolError]:
        """Make the objects visible. Return the errors by position. If this raises, those that are not visible by then
        are given back.
        """
        if not keys:
            return {}
        try:
            refusals = self._master.call(m.PutEnd(keys=keys, generations=generations, failed=failed), meanwhile)
        except BaseException:
            for settled in (True, False):
                some = [at for at in range(len(keys)) if (at not in failed) is settled]
                self._owe_revoke([keys[at] for at in some], [generations[at] for at in some], settled)
            raise
        finally:
            self._grants.discard(generations)
        errors = {position: from_wire(refusal.code, refusal.message) for position, refusal in refusals.items()}
        self._counters.add_refusals(errors.values())
        return errors

    def revoke(self, granted: GrantedPuts, positions: Iterable[int]) -> None:
        """Give the space of these positions back."""
        with_space = [position for position in positions if granted.replicas[position]]
        for settled in (True, False):
            some = [position for position in with_space if (position not in granted.unsettled) is settled]
            keys = [granted.keys[position] for position in some]
            self.give_back(keys, [granted.generations[position] for position in some], settled)

    def give_back(self, keys: list[bytes], generations: list[int], settled: bool) -> None:
        """Give space back: now, or with the next call if the master does not answer."""
        if keys:
            try:
                self._master.call_once(m.PutRevoke(keys=keys, generations=generations, settled=settled))
            except MoonpoolError as error:
                self._counters.add_refusal(error)
                if isinstance(error, (PeerLost, DeadlineExceeded)):
                    self._owe_revoke(keys, generations, settled)
            finally:
                self._grants.discard(generations)

    def _owe_revoke(self, keys: list[bytes], generations: list[int], settled: bool) -> None:
        if keys:
            self._master.owe(m.PutRevoke(keys=keys, generations=generations, settled=settled))

    def renew(self, keys: list[bytes], generations: list[int]) -> list[bool]:
        """Tell the master that the puts go on. Return False where it has discarded the put."""
        return self._master.call(m.PutRenew(keys=keys, generations=generations)) if keys else []
