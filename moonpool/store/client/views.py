"""Read-only views of objects in mapped memory, without a copy.

The master pins a viewed object for this process's session (session_client.py). The pin ends when the view is closed and
no slice or array made from it is left, or when the client is closed; until then the bytes do not change. Objects on
other machines or disks, and views beyond the client's limit, are private copies with the same interface. Bytes are
verified when an allocation is viewed first; VerifiedCache remembers which allocations were.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonpool.base.errors import MoonpoolError, StaleGeneration
from moonpool.store import messages as m
from moonpool.store.client.cuts import scatter
from moonpool.store.client.master_client import MasterClient
from moonpool.store.client.reads import ClientReads
from moonpool.store.client.recovery import Recovery, copy_pieces, missing
from moonpool.store.client.session_client import SessionClient
from moonpool.store.client.verified_read import are_right, check_header, sum_arrived
from moonpool.store.messages import ObjectInfo, Placement
from moonpool.transfer.transports.base import RemoteSegment

_GATHER_S = 0.02  # views closed within this time are unpinned with one call
_JOIN_TIMEOUT_S = 5.0
_TRY_AGAIN_S = 1.0


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


class VerifiedCache:
    """The allocations whose bytes were verified, least recently used first out. Thread-safe."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._known: OrderedDict[Placement, None] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, place: Placement) -> bool:
        with self._lock:
            if place not in self._known:
                return False
            self._known.move_to_end(place)
            return True

    def add(self, place: Placement) -> None:
        with self._lock:
            self._known[place] = None
            if len(self._known) > self._capacity:
                self._known.popitem(last=False)


class HeldPin:
    """One pin of a key, held by the master for this process."""

    __slots__ = ("is_over", "key", "session")

    def __init__(self, key: bytes, session: int) -> None:
        self.key, self.session = key, session
        self.is_over = False


class _Wakeup:
    """Wakes the release thread although nothing was released."""


_WAKEUP = _Wakeup()


class _Anchor(weakref.ref["NDArray[Any]"]):
    """A weak reference to the array over an object's bytes: dies with the last slice or array made from it."""

    __slots__ = ("nbytes", "pin")

    nbytes: int
    pin: HeldPin


class ViewLedger:
    """The pins behind all views, and the thread that releases those no longer used. Thread-safe.

    Of several pins of one key the master ends the oldest first, and they may pin different objects, because the key may
    have been replaced in between. So a released pin waits for the older ones of its key.

    When an answer about pins is lost, it is not known how many pins the master holds. Then their session is retired: it
    gets no more views, and when its last view is released, `end_session` ends all its pins at once.
    """

    def __init__(
        self,
        max_nbytes: int,
        unpin: Callable[[int, list[bytes]], None],
        end_session: Callable[[int], None],
    ) -> None:
        self._max_nbytes = max_nbytes
        self._unpin, self._end_session = unpin, end_session
        self._lock = threading.Lock()
        self._nbytes = 0
        self._anchors: dict[int, _Anchor] = {}
        self._pins: dict[tuple[int, bytes], deque[HeldPin]] = {}  # by session and key, oldest first
        self._num_pins: Counter[int] = Counter()  # by session
        self._retired: set[int] = set()
        self.pinning = threading.Lock()  # held from the look-up to add_pins(): pins are added in the master's order
        # The garbage collector calls put() anywhere, even within another put(): only SimpleQueue allows that.
        self._released: SimpleQueue[_Anchor | HeldPin | _Wakeup | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    @property
    def nbytes(self) -> int:
        """Bytes in view now."""
        return self._nbytes

    def reserve(self, nbytes: int) -> bool:
        """Reserve room for a view. Return False when the limit is reached."""
        with self._lock:
            if self._closing.is_set() or self._nbytes + nbytes > self._max_nbytes:
                return False
            self._nbytes += nbytes
            return True

    def add_pins(self, keys: Sequence[bytes], session: int) -> list[HeldPin]:
        """Add pins that the master has just made."""
        pins = [HeldPin(key, session) for key in keys]
        with self._lock:
            for pin in pins:
                self._pins.setdefault((session, pin.key), deque()).append(pin)
            self._num_pins[session] += len(pins)
        return pins

    def retire(self, session: int) -> None:
        """Retire a session after an answer about its pins was lost. No look-up pins for it any more. Idempotent."""
        with self._lock:
            self._retired.add(session)
        self._released.put(_WAKEUP)
        self._start_thread()

    def keep(self, pin: HeldPin, array: NDArray[Any]) -> None:
        """Hold the pin and its reserved room until nothing made from the array is left."""
        anchor = _Anchor(array, self._released.put)
        anchor.pin, anchor.nbytes = pin, array.nbytes
        self._anchors[id(anchor)] = anchor
        self._start_thread()

    def give_back(self, nbytes: int) -> None:
        """Give back room that was reserved and not used."""
        with self._lock:
            self._nbytes -= nbytes

    def drop(self, pin: HeldPin) -> None:
        """Release a pin that is not needed."""
        self._released.put(pin)
        self._start_thread()

    def close(self) -> None:
        """Idempotent. Does not wait for open views."""
        with self._lock:
            self._closing.set()
            thread, self._thread = self._thread, None
        if thread is not None:
            self._released.put(None)
            thread.join(_JOIN_TIMEOUT_S)

    def _start_thread(self) -> None:
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._closing.is_set():
                    self._thread = threading.Thread(target=self._release_loop, name="store-views", daemon=True)
                    self._thread.start()

    def _release_loop(self) -> None:
        is_open = True
        while is_open:
            released = self._wait_for_released()
            is_open = None not in released
            over: dict[int, list[bytes]] = {}
            for each in released:
                if isinstance(each, _Anchor | HeldPin):
                    session, keys = self._forget(each)
                    over.setdefault(session, []).extend(keys)
            for session, keys in over.items():
                # A repeated call could end the pin of another view, so it is sent once.
                with contextlib.suppress(MoonpoolError):
                    if keys and session not in self._retired:
                        self._unpin(session, keys)
            self._end_retired()

    def _end_retired(self) -> None:
        with self.pinning:  # a running look-up for such a session has added its pins then
            over = [session for session in self._retired if not self._num_pins[session]]
        for session in over:
            try:
                self._end_session(session)
            except MoonpoolError:
                if not self._closing.wait(_TRY_AGAIN_S):  # else the session ends with the client
                    self._released.put(_WAKEUP)
            else:
                self._retired.discard(session)
                del self._num_pins[session]

    def _wait_for_released(self) -> list[_Anchor | HeldPin | _Wakeup | None]:
        """Wait for a release; return it with all others of the next moment."""
        released = [self._released.get()]
        self._closing.wait(_GATHER_S)
        with contextlib.suppress(Empty):
            while True:
                released.append(self._released.get_nowait())
        return released

    def _forget(self, released: _Anchor | HeldPin) -> tuple[int, list[bytes]]:
        """Remove the pin. Return its session, and its key as many times as the master is to end a pin of it now."""
        pin = released
        if isinstance(pin, _Anchor):
            del self._anchors[id(pin)]
            pin = pin.pin
        with self._lock:
            self._nbytes -= released.nbytes if isinstance(released, _Anchor) else 0
            pin.is_over = True
            pins = self._pins[pin.session, pin.key]
            num_over = 0
            while pins and pins[0].is_over:
                pins.popleft()
                num_over += 1
            if not pins:
                del self._pins[pin.session, pin.key]
            self._num_pins[pin.session] -= num_over
        return pin.session, [pin.key] * num_over


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

    def close(self) -> None:
        """Idempotent."""
        self._ledger.close()

    def view(self, keys: list[bytes], identity: bytes | None, always_verify: bool) -> list[ObjectView | MoonpoolError]:
        """Return views of objects in this machine's memory, which are pinned, and of copies of the others."""
        infos, pins = self._pinning_lookup(keys)
        recovery = self._reads.recovery(identity)
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
        self._counters.add("bytes_viewed", sum(in_place))
        return views

    def _pinning_lookup(self, keys: list[bytes]) -> tuple[list[ObjectInfo | None], Iterator[HeldPin]]:
        """Look the objects up and pin them. Return them with their pins; no pins if no node of this machine would
        notice the end of this process.
        """
        with self._ledger.pinning:
            session = self._sessions.session()
            if session:
                session, infos = self._lookup_for(session, keys)
                found = [info.key for info in self._reads.counted(infos) if info is not None]
                return infos, iter(self._ledger.add_pins(found, session) if session else ())
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

    def _retire(self, session: int) -> None:
        """Use another session from now on: it is not known which pins the master holds for this one."""
        self._sessions.renew(session)
        self._ledger.retire(session)

    def _view_in_place(
        self, info: ObjectInfo, pin: HeldPin, identity: bytes | None, always_verify: bool
    ) -> ObjectView | None:
        """Return a view of a replica on this machine; None when no replica can be viewed. A copy then raises what is
        wrong, if anything is.
        """
        for place in self._directory.best_first(info.replicas):
            try:
                segment = self._directory.info(place)
                if self._sessions.is_registered_at(segment):
                    remote = self._directory.open_segment(segment)
                    return self._view_replica(info, pin, place, remote, identity, always_verify)
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
    ) -> ObjectView | None:
        """Return a view of the replica; None when its bytes are not right, it is not mapped here or the limit is
        reached. Raise what check_header() raises.
        """
        start = place.offset
        memory = remote.view(0, remote.nbytes)
        if memory is None:
            return None
        header = check_header(memory, start, info, place, identity)
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

    def _unpin(self, session: int, keys: list[bytes]) -> None:
        try:
            self._master.call_once(m.Unpin(keys=keys, session=session))
        except MoonpoolError:
            self._retire(session)

    def _end_session(self, session: int) -> None:
        self._master.call(m.SessionsGone(sessions=[session]))


def _cut(array: NDArray[Any], sizes: Sequence[int]) -> tuple[memoryview, ...]:
    whole = array.data  # slices of it keep the array alive
    if len(sizes) == 1:
        return (whole,)
    return tuple(views[0] if views else whole[:0] for views in scatter(sizes, [whole]))
