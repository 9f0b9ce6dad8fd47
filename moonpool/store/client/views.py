"""Objects seen where they lie: read-only, without a copy, on the machine that holds them.

A view is pinned for this process (holder.py), so its bytes stay what they are until it is closed, nothing made from it
(slices, arrays) is left, and the master has heard of it; or until the client is closed. What lies elsewhere, and what
goes beyond the client's limit, is a private copy of the same form. Bytes are verified when they are first seen; the
same allocation is not verified again as long as it is remembered.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonpool.base.errors import MoonpoolError
from moonpool.store.client.cuts import scatter
from moonpool.store.client.verified_read import are_right, check_header, sum_arrived
from moonpool.store.messages import ObjectInfo, Placement
from moonpool.transfer.transports.base import RemoteSegment

_GATHER_S = 0.02  # views closed within this time are let go together
_JOIN_TIMEOUT_S = 5.0
_TRY_AGAIN_S = 1.0


class ObjectView:
    """The pieces of one object, read-only. Close it, or use it as a context manager."""

    __slots__ = ("is_copy", "key", "nbytes", "pieces")

    def __init__(self, key: bytes, pieces: tuple[memoryview, ...], is_copy: bool) -> None:
        self.key, self.pieces, self.is_copy = key, pieces, is_copy
        self.nbytes = sum([piece.nbytes for piece in pieces])

    def close(self) -> None:
        """Idempotent. The bytes stay as long as slices or arrays made from the pieces do, and no longer."""
        self.pieces = ()

    def __enter__(self) -> ObjectView:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class VerifiedCache:
    """Which allocations were found right, as many as fit. Thread-safe."""

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


class _Nudge:
    """Nothing is gone, but there is something to do."""


_NUDGE = _Nudge()


class _Anchor(weakref.ref["NDArray[Any]"]):
    """Ends with the last thing that shows the object's bytes."""

    __slots__ = ("nbytes", "pin")

    nbytes: int
    pin: HeldPin


class ViewLedger:
    """What is in view, and the thread that lets go of what no longer is. Thread-safe.

    Of several pins of one key the master ends the oldest first, and they may keep different objects: the key may have
    been given another value in between. So a pin that is over waits for the older ones of its key.

    When an answer about pins was lost, nobody here knows how many the master holds. Then their session is retired: it
    gets no more views, and when its last one is gone all that it holds is given up by `end_session`.
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
        self.pinning = threading.Lock()  # hold it from the look-up that pins to note_pins(), to keep their order
        # Put to from wherever an array happens to be collected, within a put too: no other queue bears that.
        self._gone: SimpleQueue[_Anchor | HeldPin | _Nudge | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    @property
    def nbytes(self) -> int:
        """In view now."""
        return self._nbytes

    def reserve(self, nbytes: int) -> bool:
        """Room for a view of this size, if the limit allows."""
        with self._lock:
            if self._closing.is_set() or self._nbytes + nbytes > self._max_nbytes:
                return False
            self._nbytes += nbytes
            return True

    def note_pins(self, keys: Sequence[bytes], session: int) -> list[HeldPin]:
        """These were pinned, just now."""
        pins = [HeldPin(key, session) for key in keys]
        with self._lock:
            for pin in pins:
                self._pins.setdefault((session, pin.key), deque()).append(pin)
            self._num_pins[session] += len(pins)
        return pins

    def retire(self, session: int) -> None:
        """An answer about its pins was lost. Idempotent; no look-up pins for it any more."""
        with self._lock:
            self._retired.add(session)
        self._gone.put(_NUDGE)
        self._run()

    def keep(self, pin: HeldPin, array: NDArray[Any]) -> None:
        """The pin, and the room reserved for it, are given back when nothing shows the array's memory."""
        anchor = _Anchor(array, self._gone.put)
        anchor.pin, anchor.nbytes = pin, array.nbytes
        self._anchors[id(anchor)] = anchor
        self._run()

    def give_back(self, nbytes: int) -> None:
        """Room that was reserved and not used."""
        with self._lock:
            self._nbytes -= nbytes

    def drop(self, pin: HeldPin) -> None:
        """A pin that was not needed."""
        self._gone.put(pin)
        self._run()

    def close(self) -> None:
        """Idempotent. What is still in view is not waited for."""
        with self._lock:
            self._closing.set()
            thread, self._thread = self._thread, None
        if thread is not None:
            self._gone.put(None)
            thread.join(_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._closing.is_set():
                    self._thread = threading.Thread(target=self._let_go, name="store-views", daemon=True)
                    self._thread.start()

    def _let_go(self) -> None:
        is_open = True
        while is_open:
            gone = self._take()
            is_open = None not in gone
            over: dict[int, list[bytes]] = {}
            for each in gone:
                if isinstance(each, _Anchor | HeldPin):
                    session, keys = self._forget(each)
                    over.setdefault(session, []).extend(keys)
            for session, keys in over.items():
                # Said twice it might let go of another view, so it is said once.
                with contextlib.suppress(MoonpoolError):
                    if keys and session not in self._retired:
                        self._unpin(session, keys)
            self._end_retired()

    def _end_retired(self) -> None:
        with self.pinning:  # whoever looks up for such a session has noted its pins by then
            over = [session for session in self._retired if not self._num_pins[session]]
        for session in over:
            try:
                self._end_session(session)
            except MoonpoolError:
                if not self._closing.wait(_TRY_AGAIN_S):  # at the latest it ends with the client
                    self._gone.put(_NUDGE)
            else:
                self._retired.discard(session)
                del self._num_pins[session]

    def _take(self) -> list[_Anchor | HeldPin | _Nudge | None]:
        """Waits for what is gone; then takes all that went within a moment."""
        gone = [self._gone.get()]
        self._closing.wait(_GATHER_S)
        with contextlib.suppress(Empty):
            while True:
                gone.append(self._gone.get_nowait())
        return gone

    def _forget(self, gone: _Anchor | HeldPin) -> tuple[int, list[bytes]]:
        """Whose pin it was, and the key, as many times as the master is to end a pin of it now."""
        pin = gone
        if isinstance(pin, _Anchor):
            del self._anchors[id(pin)]
            pin = pin.pin
        with self._lock:
            self._nbytes -= gone.nbytes if isinstance(gone, _Anchor) else 0
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


class Viewer:
    """Makes views of objects that are pinned for this process."""

    def __init__(self, ledger: ViewLedger, verified: VerifiedCache) -> None:
        self._ledger, self._verified = ledger, verified

    def view(
        self,
        info: ObjectInfo,
        pin: HeldPin,
        place: Placement,
        remote: RemoteSegment,
        identity: bytes | None,
        always: bool,
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
        if always or place not in self._verified:
            if not are_right(header, [[piece] for piece in pieces], sum_arrived):
                self._ledger.give_back(array.nbytes)
                return None
            self._verified.add(place)
        self._ledger.keep(pin, array)
        return ObjectView(info.key, pieces, is_copy=False)


def _cut(array: NDArray[Any], sizes: Sequence[int]) -> tuple[memoryview, ...]:
    whole = array.data  # whatever is made from it keeps the array
    if len(sizes) == 1:
        return (whole,)
    return tuple(views[0] if views else whole[:0] for views in scatter(sizes, [whole]))
