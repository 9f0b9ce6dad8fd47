"""What is said to the master around a put: begin, go on, end, give back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

from moonpool.base.errors import AlreadyExists, MoonpoolError, NotFound, StaleGeneration, Unavailable, from_wire
from moonpool.store import messages as m
from moonpool.store.client.counters import ClientCounters
from moonpool.store.client.directory import SegmentDirectory
from moonpool.store.client.grants import Grants
from moonpool.store.client.master_client import MasterClient
from moonpool.store.client.put_request import W, put_start
from moonpool.store.client.session_client import SessionClient
from moonpool.store.messages import Placement


class GrantedPuts:
    """A bundle of puts that was begun, by position: space, or in `errors` the reason why there is none."""

    def __init__(self, keys: list[bytes], session: int, reply: m.PutReply, repeated: bool = False) -> None:
        self.keys, self.session = keys, session
        self.repeated = repeated  # the call was said twice: what the first one was granted is not known
        self.can_wait = False  # something was refused for the time being
        self.generations, self.replicas = reply.generations, reply.replicas
        self.errors: list[MoonpoolError | None] = [None] * len(keys)
        for position, refusal in reply.refusals.items():
            error = self.errors[position] = from_wire(refusal.code, refusal.message)
            self.can_wait = self.can_wait or isinstance(error, Unavailable)
        self.failed: dict[int, tuple[str, ...]] = {}  # segments whose replicas could not be written
        self.unsettled: set[int] = set()  # bytes may still be on their way to the other side

    def open(self) -> list[int]:
        """The positions that have space, and a replica that did not fail."""
        return [position for position, error in enumerate(self.errors) if error is None]

    def fail(self, position: int, placement: Placement, error: MoonpoolError) -> None:
        """One replica cannot be written; with the last one the put fails."""
        failed = self.failed[position] = (*self.failed.get(position, ()), placement.segment)
        if isinstance(error, Unavailable):
            self.unsettled.add(position)
        if len(failed) == len(self.replicas[position]):
            self.errors[position] = error


class PutCalls:
    """Thread-safe."""

    def __init__(
        self, line: MasterClient, directory: SegmentDirectory, holder: SessionClient, counters: ClientCounters
    ) -> None:
        self._line, self._directory, self._holder, self._counters = line, directory, holder, counters
        self._grants = Grants()

    def start(
        self, wishes: Sequence[W], sizes: Sequence[int], meanwhile: Callable[[], bool] | None = None
    ) -> GrantedPuts:
        """Space for wishes that have their options in common. A master that is back and still waits for its nodes' word
        is asked until it has it, as one that is away is. `meanwhile` may be done while it is asked, or not at all.
        """
        granted = self._start_known(wishes, sizes, meanwhile)
        if granted.can_wait:
            for _ in self._line.patience():
                self.revoke(granted, granted.open())  # all of them once more: a bundle lies together
                granted = self._start_known(wishes, sizes)
                if not granted.can_wait:
                    break
        self._counters.add_refusals(error for error in granted.errors if error is not None)
        return granted

    def _start_known(
        self, wishes: Sequence[W], sizes: Sequence[int], meanwhile: Callable[[], bool] | None = None
    ) -> GrantedPuts:
        """With a session where one is needed, and nothing left over from an answer that was lost."""
        granted = self._start(wishes, sizes, meanwhile)
        if not granted.session and self._may_write_in_place(granted):
            self.revoke(granted, granted.open())  # the first node of this machine has come; once more, with a session
            granted = self._start(wishes, sizes)
        if self._grants.take_doubt():  # what a lost answer had granted is let go by beginning once more
            self.revoke(granted, granted.open())
            granted = self._start(wishes, sizes)
        if granted.repeated:
            self._doubt(granted.keys, granted.errors)
        return granted

    def _may_write_in_place(self, granted: GrantedPuts) -> bool:
        """Whether a grant led to nodes that a session has to be known at."""
        for place in {place.segment: place for places in granted.replicas for place in places}.values():
            with contextlib.suppress(NotFound):
                self._directory.info(place)  # which looks again, if the segment is new
        return self._holder.session() != 0

    def _start(
        self, wishes: Sequence[W], sizes: Sequence[int], meanwhile: Callable[[], bool] | None = None
    ) -> GrantedPuts:
        session = self._holder.session()
        try:
            return self._start_for(session, wishes, sizes, meanwhile)
        except StaleGeneration:  # the master has given the session up; this process goes on with another
            self._holder.renew(session)
            return self._start_for(self._holder.session(), wishes, sizes)

    def _start_for(
        self, session: int, wishes: Sequence[W], sizes: Sequence[int], meanwhile: Callable[[], bool] | None = None
    ) -> GrantedPuts:
        local = self._directory.local_segment()
        began_at, settled_up_to = self._grants.ask()
        repeated = True
        try:
            call = put_start(wishes, sizes, session, local, settled_up_to)
            reply, repeated = self._line.ask_noting_repeats(call, meanwhile)
            self._grants.take_up(reply.generations, reply.last_generation)
        finally:
            self._grants.end_ask(began_at)
            if repeated:
                self._grants.doubt()
        return GrantedPuts(call.keys, session, reply, repeated)

    def end(self, granted: GrantedPuts, meanwhile: Callable[[], bool] | None = None) -> None:
        """Makes visible what was written and gives the rest back; `errors` then says what became of each.

        When the master cannot be asked, whether they are visible is not known. `meanwhile` as in start().
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
        """Makes the objects visible; by position why not."""
        if not keys:
            return {}
        try:
            refusals = self._line.ask(m.PutEnd(keys=keys, generations=generations, failed=failed), meanwhile)
        finally:
            self._grants.let_go(generations)
        errors = {position: from_wire(refusal.code, refusal.message) for position, refusal in refusals.items()}
        self._counters.add_refusals(errors.values())
        return errors

    def revoke(self, granted: GrantedPuts, positions: Iterable[int]) -> None:
        """Gives the space of these back."""
        with_space = [position for position in positions if granted.replicas[position]]
        for settled in (True, False):
            some = [position for position in with_space if (position not in granted.unsettled) is settled]
            keys = [granted.keys[position] for position in some]
            self.give_back(keys, [granted.generations[position] for position in some], settled)

    def give_back(self, keys: list[bytes], generations: list[int], settled: bool) -> None:
        """Best effort: what the master does not hear of it discards by itself in time."""
        if keys:
            try:
                self._line.ask_once(m.PutRevoke(keys=keys, generations=generations, settled=settled))
            except MoonpoolError as error:
                self._counters.add_refusal(error)
            finally:
                self._grants.let_go(generations)

    def renew(self, keys: list[bytes], generations: list[int]) -> list[bool]:
        """False where there is no such put any more."""
        return self._line.ask(m.PutRenew(keys=keys, generations=generations)) if keys else []

    def _doubt(self, keys: Sequence[bytes], errors: list[MoonpoolError | None]) -> None:
        """The call was said twice. A key that is taken, but not by an object, may be taken by ourselves."""
        taken = [position for position, error in enumerate(errors) if isinstance(error, AlreadyExists)]
        existing = self._line.ask(m.Exist([keys[position] for position in taken])) if taken else []
        for position, exists in zip(taken, existing, strict=True):
            if not exists:
                errors[position] = Unavailable(
                    "the master was lost while it began this put; the key is free again when it has discarded that one"
                )
