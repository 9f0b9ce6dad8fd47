"""Read-only views of objects in mapped memory, without a copy.

The master pins a viewed object for this process's session (session_client.py). The pin ends some time after the view is
closed and no slice or array made from it is left, or when the client is closed; until then the bytes do not change. An
object that is viewed again before that, and whose place is remembered (remembered.py), is viewed without a message: the
pin holds its bytes, and the void mark tells whether they are still the value of the key. Objects on
other machines or disks, and views beyond the client's limit, are private copies with the same interface. Bytes are
verified when an allocation is viewed first; VerifiedCache remembers which allocations were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonpool.base.errors import MoonpoolError, NotSettled, StaleGeneration
from moonpool.store import messages as m
from moonpool.store.client.cuts import scatter
from moonpool.store.client.master_client import MasterClient
from moonpool.store.client.reads import ClientReads
from moonpool.store.client.recovery import Recovery, copy_pieces, missing
from moonpool.store.client.session_client import SessionClient
from moonpool.store.client.verified_read import are_right, check_header, may_be_remembered, sum_arrived
from moonpool.store.client.view_ledger import HeldPin, VerifiedCache, ViewLedger
from moonpool.store.messages import ObjectInfo, Placement
from moonpool.transfer.transports.base import RemoteSegment


class ObjectView:
    """The pieces of one object, read-only. Close it, or use it as a context manager."""

    __slots__ = ("is_copy", "key", "nbytes", "pieces")

    def __init__(self, key: bytes, pieces: tuple[memoryview, ...], is_copy: bool) -> None:
        self.key, self.pieces, self.is_copy = key, pieces, is_copy
        self.nbytes = sum([piece.nbytes for piece in pieces])

    def close(self) -> None:
        """Idempotent. The bytes stay pinned until no slice or array made from the pieces is left."""
        self.pieces = ()

    def __enter__(self) -> ObjectView:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ClientViews:
    """Makes views of objects, for one client. Thread-safe.

    `sessions` is of the views alone: after a lost answer it uses another session number.
    """

    def __init__(
        self,
        master: MasterClient,
        reads: ClientReads,
        sessions: SessionClient,
        *,
        max_view_nbytes: int,
        max_verified_views: int,
    ) -> None:
        self._master, self._reads, self._sessions = master, reads, sessions
        self._directory, self._counters = reads.tools.directory, reads.tools.counters
        self._verified = VerifiedCache(max_verified_views)
        self._ledger = ViewLedger(max_view_nbytes, self._unpin, self._end_session)
        self._pinned: tuple[int, object] = 0, None  # the session of the last pins, and the connection at that time

    def close(self) -> None:
        """Idempotent."""
        self._ledger.close()

    def view(self, keys: list[bytes], identity: bytes | None, always_verify: bool) -> list[ObjectView | MoonpoolError]:
        """Return views of objects in this machine's memory, which are pinned, and of copies of the others."""
        views: list[ObjectView | MoonpoolError | None] = [
            self._view_again(key, identity, always_verify) for key in keys
        ]
        unknown = [position for position, view in enumerate(views) if view is None]
        asked = self._ask_and_view([keys[each] for each in unknown], identity, always_verify) if unknown else []
        for position, view in zip(unknown, asked, strict=True):
            views[position] = view
        found = [view for view in views if view is not None]
        in_place = [each.nbytes for each in found if isinstance(each, ObjectView) and not each.is_copy]
        self._counters.add("bytes_viewed", sum(in_place))
        return found

    def _ask_and_view(
        self, keys: list[bytes], identity: bytes | None, always_verify: bool
    ) -> Iterator[ObjectView | MoonpoolError]:
        infos, pins = self._pinning_lookup(keys)
        recovery = self._reads.recovery(identity)
        for key, info in zip(keys, infos, strict=True):
            if info is None:
                yield missing(key)
                continue
            pin = next(pins, None)
            view = None if pin is None else self._view_in_place(info, pin, identity, always_verify)
            if pin is not None and view is None:
                self._ledger.drop(pin)
            yield view or self._view_copy(info, recovery)

    def _view_again(self, key: bytes, identity: bytes | None, always_verify: bool) -> ObjectView | None:
        """Return a view of an object that is still pinned from an earlier view, and that its key still has; None: ask
        the master.
        """
        pin = self._ledger.take_spare(key)
        if pin is None:
            return None
        remembered = self._reads.remembered
        info, view = remembered.find_one(key, remembered.now_s()), None
        is_held = pin.connection is self._master.connection  # else a master that lost power may have lost the pin
        if is_held and info is not None and set(info.replicas) <= set(pin.info.replicas):
            view = self._view_in_place(info, pin, identity, always_verify, is_remembered=True)
            if view is not None and remembered.is_valid(info, remembered.now_s()):
                self._counters.add_lookup(1, 0)
                remembered.used((info,))
                return view
        if view is None:  # else the view, which came too late, releases the pin as it goes
            self._ledger.drop(pin)
        remembered.forget(key)
        return None

    def _pinning_lookup(self, keys: list[bytes]) -> tuple[list[ObjectInfo | None], Iterator[HeldPin]]:
        """Look the objects up and pin them. Return them with their pins; no pins if no node of this machine would
        notice the end of this process, or if the master pins none of them now.
        """
        with self._ledger.pinning:
            self._retire_if_reconnected()
            session = self._sessions.session()
            if session:
                asked_s, before = self._reads.remembered.now_s(), self._master.connection
                try:
                    session, infos = self._lookup_for(session, keys)
                except NotSettled:  # a restarted master has not heard from a node: writers may change what lies there
                    return self._reads.lookup(keys), iter(())
                connection = self._master.connection
                if connection is not before:  # older pins of the session may be lost, or these
                    self._retire(session)
                self._pinned = session, connection
                self._reads.remembered.add(infos, asked_s)
                found = [info for info in self._reads.counted(infos) if info is not None]
                return infos, iter(self._ledger.add_pins(found, session, connection) if session else ())
        return self._reads.lookup(keys), iter(())

    def _lookup_for(self, session: int, keys: list[bytes]) -> tuple[int, list[ObjectInfo | None]]:
        """Look the objects up and pin them for the session, or for a new one. Return the session and the objects."""
        try:
            found, repeated = self._master.call_noting_repeats(m.Lookup(keys=keys, session=session))
        except StaleGeneration:  # the master has ended the session; go on with a new one
            self._retire(session)
            session = self._sessions.session()
            found, repeated = self._master.call_noting_repeats(m.Lookup(keys=keys, session=session))
        except MoonpoolError:
            self._retire(session)
            raise
        if repeated:  # the objects may be pinned twice
            self._retire(session)
        return session, found

    def _retire_if_reconnected(self) -> None:
        """Pins of one connection have a session of their own: a master that lost power may have lost the older ones. In
        place of a lost pin it would end a newer one of the same session and key, whose object is in view.
        """
        session, connection = self._pinned
        if session and connection is not self._master.connection:
            self._retire(session)
            self._pinned = 0, None

    def _retire(self, session: int) -> None:
        """Use another session from now on: it is not known which pins the master holds for this one."""
        self._sessions.renew(session)
        self._ledger.retire(session)

    def _view_in_place(
        self,
        info: ObjectInfo,
        pin: HeldPin,
        identity: bytes | None,
        always_verify: bool,
        *,
        is_remembered: bool = False,
    ) -> ObjectView | None:
        """Return a view of a replica on this machine; None when no replica can be viewed. A copy then raises what is
        wrong, if anything is. With `is_remembered` a replica that has left the object is not viewed.
        """
        for place in self._directory.best_first(info.replicas):
            try:
                segment = self._directory.info(place)
                if self._sessions.is_registered_at(segment):
                    remote = self._directory.open_segment(segment)
                    return self._view_replica(info, pin, place, remote, identity, always_verify, is_remembered)
            except MoonpoolError:
                continue
        return None

    def _view_replica(
        self,
        info: ObjectInfo,
        pin: HeldPin,
        place: Placement,
        remote: RemoteSegment,
        identity: bytes | None,
        always_verify: bool,
        is_remembered: bool,
    ) -> ObjectView | None:
        """Return a view of the replica; None when its bytes are not right, it has left the object, is not mapped here,
        or the limit is reached. Raise what check_header() raises.
        """
        start = place.offset
        memory = remote.view(0, remote.nbytes)
        if memory is None:
            return None
        header = check_header(memory, start, info, place, identity)
        if is_remembered and not may_be_remembered(memory, start, header):
            return None
        if not self._ledger.reserve(info.nbytes - header.nbytes):
            return None
        array = np.frombuffer(memory[start + header.nbytes : start + info.nbytes], np.uint8)
        pieces = _cut(array, header.sizes)
        if always_verify or place not in self._verified:
            if not are_right(header, [[piece] for piece in pieces], sum_arrived):
                self._ledger.give_back(array.nbytes)
                return None
            self._verified.add(place)
        self._ledger.keep(pin, array)
        return ObjectView(info.key, pieces, is_copy=False)

    def _view_copy(self, info: ObjectInfo, recovery: Recovery) -> ObjectView | MoonpoolError:
        try:
            return ObjectView(info.key, recovery.read(info, copy_pieces), is_copy=True)
        except MoonpoolError as error:
            return error

    def _unpin(self, session: int, keys: list[bytes], connection: object) -> None:
        """End pins, over their own connection: a look-up for the same session may just have connected again, and a
        master that lost these pins would end those of the look-up.
        """
        try:
            self._master.call_once(m.Unpin(keys=keys, session=session), connection)
        except MoonpoolError:
            self._retire(session)

    def _end_session(self, session: int) -> None:
        self._master.call(m.SessionsGone(sessions=[session]))


def _cut(array: NDArray[Any], sizes: Sequence[int]) -> tuple[memoryview, ...]:
    whole = array.data  # slices of it keep the array alive
    if len(sizes) == 1:
        return (whole,)
    return tuple(views[0] if views else whole[:0] for views in scatter(sizes, [whole]))
