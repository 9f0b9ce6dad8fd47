"""From keys to bytes: look-ups, and the ways to read what they find."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from moonpool.base.errors import MoonpoolError, StaleGeneration
from moonpool.store import messages as m
from moonpool.store.client.get_batch import BatchRead, Got
from moonpool.store.client.master_client import MasterClient
from moonpool.store.client.read_session import ReadSession, ReadTools
from moonpool.store.client.recovery import Recovery, Targets, missing, read_pieces
from moonpool.store.client.session_client import SessionClient
from moonpool.store.client.transfer_window import TransferThreads
from moonpool.store.client.views import HeldPin, ObjectView, VerifiedCache, Viewer, ViewLedger
from moonpool.store.messages import ObjectInfo, Placement

T = TypeVar("T")
BATCH_OBJECTS = 1000  # looked up and read in one round, so that leases stay fresh


class ClientReads:
    """Whole objects, objects piece by piece, and views. Thread-safe."""

    def __init__(
        self,
        line: MasterClient,
        crew: TransferThreads,
        holder: SessionClient,
        tools: ReadTools,
        *,
        max_view_nbytes: int,
        max_verified_views: int,
    ) -> None:
        self._line, self._crew, self._holder, self._tools = line, crew, holder, tools
        self._ledger = ViewLedger(max_view_nbytes, self._unpin, self._end_session)
        self._viewer = Viewer(self._ledger, VerifiedCache(max_verified_views))

    def close(self) -> None:
        """Idempotent."""
        self._ledger.close()

    def lookup(self, keys: list[bytes], *, prefix: bool = False, reads: bool = True) -> list[ObjectInfo | None]:
        """Leased and counted; hits only if the caller now `reads` them."""
        return self._counted(self._line.ask(m.Lookup(keys=keys, prefix=prefix, reads=reads)), reads)

    def _counted(self, found: list[ObjectInfo | None], reads: bool = True) -> list[ObjectInfo | None]:
        num_misses = found.count(None)
        self._tools.counters.add_lookup(len(found) - num_misses if reads else 0, num_misses)
        return found

    def read(self, keys: Sequence[bytes], targets: Sequence[Targets], identity: bytes | None) -> list[Got]:
        """Whole objects, into their targets or into new bytes."""
        got: list[Got] = []
        recovery = self._recovery(identity)
        for start in range(0, len(keys), BATCH_OBJECTS):
            some = list(keys[start : start + BATCH_OBJECTS])
            infos = self._line.ask(m.Lookup(keys=some))
            got += BatchRead(
                some,
                infos,
                targets[start : start + BATCH_OBJECTS],
                identity,
                crew=self._crew,
                tools=self._tools,
                recovery=recovery,
            ).run()
        return got

    def read_one(self, key: bytes, identity: bytes | None, read: Callable[[ReadSession], T]) -> T:
        """What `read` takes from the open object. NotFound for a miss; raises what ReadSession raises."""
        info = self.lookup([key])[0]
        if info is None:
            raise missing(key)
        return self._recovery(identity).read(info, read)

    def view(self, keys: list[bytes], identity: bytes | None, always_verify: bool) -> list[ObjectView | MoonpoolError]:
        """Pinned where they lie in this machine's memory, copies elsewhere."""
        infos, pins = self._pinning_lookup(keys)
        recovery = self._recovery(identity)
        views: list[ObjectView | MoonpoolError] = []
        for key, info in zip(keys, infos, strict=True):
            if info is None:
                views.append(missing(key))
                continue
            pin = next(pins, None)
            view = None if pin is None else self._view_in_place(info, pin, identity, always_verify)
            views.append(view or self._view_copy(info, recovery))
            if pin is not None and view is None:
                self._ledger.drop(pin)
        in_place = [each.nbytes for each in views if isinstance(each, ObjectView) and not each.is_copy]
        self._tools.counters.add("bytes_viewed", sum(in_place))
        return views

    def _pinning_lookup(self, keys: list[bytes]) -> tuple[list[ObjectInfo | None], Iterator[HeldPin]]:
        """What was found, and the pins of it; none where no node of this machine would notice our end."""
        with self._ledger.pinning:
            session = self._holder.session()
            if session:
                session, infos = self._lookup_for(session, keys)
                found = [info.key for info in self._counted(infos) if info is not None]
                return infos, iter(self._ledger.note_pins(found, session) if session else ())
        return self.lookup(keys), iter(())

    def _lookup_for(self, session: int, keys: list[bytes]) -> tuple[int, list[ObjectInfo | None]]:
        """What was found, and the session that it is pinned for."""
        try:
            found, repeated = self._line.ask_noting_repeats(m.Lookup(keys=keys, session=session))
        except StaleGeneration:  # the master has given the session up; this process goes on with another
            self._retire(session)
            session = self._holder.session()
            found, repeated = self._line.ask_noting_repeats(m.Lookup(keys=keys, session=session))
        except MoonpoolError:
            self._retire(session)
            raise
        if repeated:  # perhaps they are pinned twice
            self._retire(session)
        return session, found

    def _retire(self, session: int) -> None:
        """What the master holds for it is not known any more."""
        self._holder.renew(session)
        self._ledger.retire(session)

    def _view_in_place(
        self, info: ObjectInfo, pin: HeldPin, identity: bytes | None, always_verify: bool
    ) -> ObjectView | None:
        """None when there is no replica here that can be trusted to stay; a copy tells what is wrong, if anything."""
        for place in self._tools.directory.best_first(info.replicas):
            try:
                segment = self._tools.directory.info(place)
                if self._holder.holds(segment):
                    remote = self._tools.directory.open_segment(segment)
                    return self._viewer.view(info, pin, place, remote, identity, always_verify)
            except MoonpoolError:
                continue
        return None

    def _view_copy(self, info: ObjectInfo, recovery: Recovery) -> ObjectView | MoonpoolError:
        try:
            return ObjectView(info.key, recovery.read(info, read_pieces), is_copy=True)
        except MoonpoolError as error:
            return error

    def _recovery(self, identity: bytes | None) -> Recovery:
        return Recovery(self._tools, self._look_again, identity)

    def _look_again(self, key: bytes) -> ObjectInfo | None:
        return self._line.ask(m.Lookup(keys=[key]))[0]

    def _unpin(self, session: int, keys: list[bytes]) -> None:
        try:
            self._line.ask_once(m.Unpin(keys=keys, session=session))
        except MoonpoolError:
            self._retire(session)

    def _end_session(self, session: int) -> None:
        self._line.ask(m.SessionsGone(sessions=[session]))


def report_corrupt(line: MasterClient, info: ObjectInfo, place: Placement) -> bool:
    """False when the object has no such replica there any more: the reader was late."""
    call = m.ReportCorrupt(key=info.key, generation=place.generation, segment=place.segment, offset=place.offset)
    return line.ask(call)
