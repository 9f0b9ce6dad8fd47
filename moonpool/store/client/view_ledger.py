"""The pins behind views: which objects the master holds for this process, until when, and who ends them.

The garbage collector decides when a view has ended: when no slice or array made from its memory is left. A thread then
ends the pins, many with one call.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from numpy.typing import NDArray

from moonpool.base.clock import BootClock, Clock
from moonpool.base.errors import MoonpoolError
from moonpool.store.messages import ObjectInfo, Placement

SPARE_S = 1.0  # a tenth of a lease, which keeps the object for longer anyway
_GATHER_S = 0.02  # views closed within this time are unpinned with one call
_JOIN_TIMEOUT_S = 5.0
_TRY_AGAIN_S = 1.0


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
    """One pin of an object, held by the master for this process. `connection` is the one over which it was made."""

    __slots__ = ("connection", "info", "is_over", "key", "released_s", "session")

    def __init__(self, info: ObjectInfo, session: int, connection: object) -> None:
        self.info, self.key, self.session, self.connection = info, info.key, session, connection
        self.is_over = False
        self.released_s = 0.0  # when its last view ended, while it is spare


class _Wakeup:
    """Wakes the release thread."""


_WAKEUP = _Wakeup()


class _Anchor(weakref.ref["NDArray[Any]"]):
    """A weak reference to the array over an object's bytes: dies with the last slice or array made from it."""

    __slots__ = ("nbytes", "pin")

    nbytes: int
    pin: HeldPin


_Released: TypeAlias = _Anchor | HeldPin | _Wakeup


class ViewLedger:
    """The pins behind all views, and the thread that ends those no longer used. Thread-safe.

    A pin whose view has ended is spare for SPARE_S: another view of the object uses it without asking the master.

    Of several pins of one key the master ends the oldest first, and they may pin different objects, because the key may
    have been replaced in between. So a released pin waits for the older ones of its key.

    `unpin` gets a session, keys, and the connection over which these pins were made, which is one for all of a session.
    When an answer about pins is lost, or the connection, it is not known how many pins the master holds. Then their
    session is retired: it gets no more views, and when its last view is released, `end_session` ends all its pins.
    """

    def __init__(
        self,
        max_nbytes: int,
        unpin: Callable[[int, list[bytes], object], None],
        end_session: Callable[[int], None],
        clock: Clock | None = None,
    ) -> None:
        self._max_nbytes = max_nbytes
        self._clock: Clock = clock or BootClock()
        self._unpin, self._end_session = unpin, end_session
        self._lock = threading.Lock()
        self._nbytes = 0
        self._anchors: dict[int, _Anchor] = {}
        self._pins: dict[tuple[int, bytes], deque[HeldPin]] = {}  # by session and key, oldest first
        self._num_pins: Counter[int] = Counter()  # by session
        self._retired: set[int] = set()
        self._spare: OrderedDict[bytes, HeldPin] = OrderedDict()  # by key, released first comes first
        self.pinning = threading.Lock()  # held from the look-up to add_pins(): pins are added in the master's order
        # The garbage collector calls put() anywhere, even within another put(): only SimpleQueue allows that.
        self._released: SimpleQueue[_Released] = SimpleQueue()
        self._over: list[HeldPin] = []  # to be ended by the thread
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

    def add_pins(self, infos: Sequence[ObjectInfo], session: int, connection: object = None) -> list[HeldPin]:
        """Add pins that the master has just made, of these objects."""
        pins = [HeldPin(info, session, connection) for info in infos]
        with self._lock:
            for pin in pins:
                self._pins.setdefault((session, pin.key), deque()).append(pin)
            self._num_pins[session] += len(pins)
        return pins

    def take_spare(self, key: bytes) -> HeldPin | None:
        """Return a pin of the key that no view uses any more, for another one."""
        if not self._anchors and not self._spare:
            return None
        released = self._take_released()
        if released:
            self._sort_released(released)
            self._released.put(_WAKEUP)  # the thread waits for the end of what is spare now
        with self._lock:
            pin = self._spare.pop(key, None)
            if pin is None or pin.session not in self._retired:
                return pin
        self.drop(pin)
        return None

    def retire(self, session: int) -> None:
        """Retire a session after an answer about its pins was lost. No look-up pins for it any more. Idempotent."""
        with self._lock:
            self._retired.add(session)
            for key in [key for key, pin in self._spare.items() if pin.session == session]:
                self._released.put(self._spare.pop(key))
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
            self._released.put(_WAKEUP)
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
            is_open = self._wait_for_released()
            over: dict[int, list[bytes]] = {}
            connections: dict[int, object] = {}
            for pin in self._take_over(everything=not is_open):
                session, keys = self._forget(pin)
                over.setdefault(session, []).extend(keys)
                connections[session] = pin.connection
            for session, keys in over.items():
                # A repeated call could end the pin of another view, so it is sent once.
                with contextlib.suppress(MoonpoolError):
                    if keys and session not in self._retired:
                        self._unpin(session, keys, connections[session])
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

    def _wait_for_released(self) -> bool:
        """Wait until something was released or a spare pin is over. Return False when the ledger is closed."""
        with self._lock:
            first = next(iter(self._spare.values()), None)
        left_s = None if first is None else max(0.0, first.released_s + SPARE_S - self._clock.now_s())
        with contextlib.suppress(Empty):
            self._sort_released([self._released.get(timeout=left_s)])  # at once: it may be wanted again
            self._closing.wait(_GATHER_S)
        self._sort_released(self._take_released())
        return not self._closing.is_set()

    def _take_released(self) -> list[_Released]:
        released: list[_Released] = []
        with contextlib.suppress(Empty):
            while True:
                released.append(self._released.get_nowait())
        return released

    def _sort_released(self, released: Sequence[_Released]) -> None:
        """Keep the pins whose view has ended as spare ones. Those that are dropped, and older spare ones of the same
        key, are over.
        """
        now_s = self._clock.now_s()
        with self._lock:
            for each in released:
                if isinstance(each, HeldPin):
                    self._over.append(each)
                elif isinstance(each, _Anchor):
                    del self._anchors[id(each)]
                    self._nbytes -= each.nbytes
                    older = self._spare.pop(each.pin.key, None)
                    if older is not None:
                        self._over.append(older)
                    each.pin.released_s = now_s
                    self._spare[each.pin.key] = each.pin

    def _take_over(self, everything: bool) -> list[HeldPin]:
        """Return the pins that are to be ended now."""
        until_s = self._clock.now_s() - SPARE_S
        with self._lock:
            over, self._over = self._over, []
            while self._spare:
                key, pin = next(iter(self._spare.items()))
                if not everything and pin.session not in self._retired and pin.released_s > until_s:
                    break
                over.append(self._spare.pop(key))
        return over

    def _forget(self, pin: HeldPin) -> tuple[int, list[bytes]]:
        """Remove the pin. Return its session, and its key as many times as the master is to end a pin of it now."""
        with self._lock:
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
