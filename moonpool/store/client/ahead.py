"""Space that the master granted ahead, so that a small put is one call: the client writes first, and asks then.

After two puts of the same number of granules within a few seconds, the client asks for several places of that size and
uses one for each put (PutAt). Large objects only in memory of this machine: over a network, writing what is stored
already costs more than asking first. After a key that was taken, large puts ask first for a while.

What the client holds is bounded. A thread renews it and gives back what was not used for a while; it runs only while
something is held. All of it is given back when the master is short of space, and at the end.

The master frees a place only when this client gives it back, or does not name it among those that it knows, or has
ended. So a place is known here from the answer that grants it until the master has taken it back or made it an object.
A place is used only if it was renewed a short time ago: the master discards what is not renewed, much later. Nor is it
used after a restart of the master, which may not know it: the write would be refused. Such places are given back.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from moonpool.base.clock import BootClock, Clock
from moonpool.base.errors import MoonpoolError
from moonpool.store.client.config import ClientConfig
from moonpool.store.client.master_client import MasterClient
from moonpool.store.messages import GRANULE_NBYTES, GrantAhead, Placement, PutRenew, PutRevoke, ahead_key, num_granules
from moonpool.store.messages.values import MAX_AHEAD, MAX_AHEAD_NBYTES

_ASK_PLACES, _ASK_NBYTES = 16, 16 * 1024 * 1024  # places of the first GrantAhead for a size, most bytes of each
_LARGE_NBYTES = 256 * 1024 + GRANULE_NBYTES  # a larger object takes longer to write over a network than a call
_ASK_FIRST_S = 1.0  # for large objects, after a key was taken
_DEMAND_S = 5.0  # two puts of a size within this time: more are to be expected
_IDLE_S = 5.0  # a size that was not put for so long is given back
_PAUSE_S = 1.0  # after the master had nothing to grant
_LOOK_S = 1.0
_JOIN_TIMEOUT_S = 2.0
# As parts of ClientConfig.renew_after_s, which is a third of the time after which the master discards:
_USABLE, _RENEW, _DISCARDED = 1.0, 0.4, 4.0


class HeldPlace(NamedTuple):
    generation: int
    place: Placement
    session: int
    granules: int
    renewed_s: float
    master: int  # the incarnation that granted it
    turn: int = 0  # how often it was used for a put that was refused


class _Size:
    """The places of one number of granules."""

    def __init__(self) -> None:
        self.places: list[HeldPlace] = []
        self.put_s = float("-inf")  # when the latest put of this size began
        self.ask_first_until_s = float("-inf")  # keys of large objects were taken: they are not written before asking
        self.num_to_ask = _ASK_PLACES  # of the next GrantAhead; doubled by each, until the size is given back as idle


class HeldSpace:
    """Thread-safe. `session` returns this client's session; `local_segment` the segment to prefer; `is_local` whether a
    segment is memory of this machine.
    """

    def __init__(
        self,
        master: MasterClient,
        session: Callable[[], int],
        local_segment: Callable[[], str | None],
        is_local: Callable[[str], bool],
        config: ClientConfig,
        clock: Clock | None = None,
    ) -> None:
        self._master, self._session, self._local_segment, self._is_local = master, session, local_segment, is_local
        self._max_nbytes, self._renew_after_s = config.ahead_nbytes, config.renew_after_s
        self._clock: Clock = clock or BootClock()
        self._lock = threading.Lock()
        self._asking = threading.Lock()  # one GrantAhead at a time: its answer says what this client knows
        self._sizes: dict[int, _Size] = {}  # by number of granules
        self._known: set[int] = set()  # all generations that were granted, and not given back or used up
        self._known_up_to = 0
        self._pause_until_s = 0.0
        self._lost_s: float | None = None  # when the answer to a GrantAhead was lost, or the master was asked about it
        self._knows_lost = False  # the master has told since then how far its generations had got
        self._unreturned: list[tuple[int, bool]] = []  # generations that are to be given back, and whether settled
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def take(self, nbytes: int) -> HeldPlace | None:
        """Return a place for an object of that size; None: put it in the ordinary way. Asks the master for places if
        puts of this size are frequent and none is left.
        """
        if nbytes > MAX_AHEAD_NBYTES or not self._max_nbytes or self._ended.is_set():
            return None
        try:
            granules, now_s, session = num_granules(nbytes), self._clock.now_s(), self._session()
        except MoonpoolError:  # the ordinary way says what is wrong
            return None
        if nbytes > _LARGE_NBYTES and not session:  # this client maps no memory of its machine
            return None
        with self._lock:
            size = self._sizes.get(granules)
            if size is None:
                size = self._sizes[granules] = _Size()
            is_frequent, size.put_s = now_s - size.put_s <= _DEMAND_S, now_s
            if now_s < size.ask_first_until_s:
                return None
            found = self._pop(granules, session, now_s) if size.places else None
        if found is None and is_frequent:
            with self._asking:
                with self._lock:
                    found = self._pop(granules, session, now_s)  # another thread may have asked meanwhile
                if found is None:
                    self._ask(granules, session)
                    with self._lock:
                        found = self._pop(granules, session, now_s)
        return found

    def put_back(self, held: HeldPlace) -> None:
        """Keep a place that was taken, and whose put was refused. No write to it is under way."""
        with self._lock:
            if not self._ended.is_set():
                size = self._sizes.setdefault(held.granules, _Size())
                size.places.append(held._replace(turn=held.turn + 1))
                if held.granules * GRANULE_NBYTES > _LARGE_NBYTES:
                    size.ask_first_until_s = self._clock.now_s() + _ASK_FIRST_S
                return
        self.drop(held)

    def use_up(self, held: HeldPlace) -> None:
        """Forget a place that has become an object."""
        with self._lock:
            self._known.discard(held.generation)

    def drop(self, held: HeldPlace, settled: bool = True) -> None:
        """Give a place back. `settled`: no write to it can still arrive."""
        self._return([(held.generation, settled)])

    def give_back_all(self) -> None:
        """Give back all that is held and not in use."""
        with self._lock:
            held = self._clear(self._sizes.values())
        self._return(held)

    def close(self) -> None:
        """Give everything back. Idempotent."""
        self._ended.set()
        thread = self._thread
        if thread is not None:
            thread.join(_JOIN_TIMEOUT_S)
        self.give_back_all()

    @property
    def held_nbytes(self) -> int:
        with self._lock:
            return sum([granules * GRANULE_NBYTES * len(size.places) for granules, size in self._sizes.items()])

    def _pop(self, granules: int, session: int, now_s: float) -> HeldPlace | None:
        size = self._sizes.get(granules)
        while size is not None and size.places:
            held, master = size.places.pop(), self._master.incarnation
            is_fresh = now_s - held.renewed_s < _USABLE * self._renew_after_s
            if is_fresh and held.session == session and held.master == master:
                return held
            self._unreturned.append((held.generation, True))
        return None

    def _clear(self, sizes: Iterable[_Size]) -> list[tuple[int, bool]]:
        held = []
        for size in sizes:
            held += [(each.generation, True) for each in size.places]
            size.places.clear()
            size.num_to_ask = _ASK_PLACES
        return held

    def _ask(self, granules: int, session: int) -> None:
        nbytes, asked_s = granules * GRANULE_NBYTES, self._clock.now_s()
        with self._lock:
            size = self._sizes.setdefault(granules, _Size())
            count = min(size.num_to_ask, max(2, _ASK_NBYTES // nbytes), self._max_nbytes // nbytes)
            size.num_to_ask = min(2 * size.num_to_ask, MAX_AHEAD)
        if not count or asked_s < self._pause_until_s:
            return
        if self.held_nbytes + count * nbytes > self._max_nbytes:
            self.give_back_all()
        master = self._master.incarnation  # before the call: it may end with another one
        granted = self._grants(nbytes, count, session)
        places = [HeldPlace(generation, place, session, granules, asked_s, master) for generation, place in granted]
        if nbytes > _LARGE_NBYTES:
            self._return([(each.generation, True) for each in places if not self._is_local(each.place.segment)])
            places = [each for each in places if self._is_local(each.place.segment)]
        if not places:
            self._pause_until_s = asked_s + _PAUSE_S
        with self._lock:
            self._sizes.setdefault(granules, _Size()).places += places
            if (places or self._lost_s is not None) and self._thread is None and not self._ended.is_set():
                self._thread = threading.Thread(target=self._keep, name="store-ahead", daemon=True)
                self._thread.start()
        if self._ended.is_set():
            self.give_back_all()

    def _grants(self, nbytes: int, count: int, session: int) -> list[tuple[int, Placement]]:
        """Send a GrantAhead, which also names all that this client knows. Return what was granted."""
        with self._lock:
            known, known_up_to = tuple(self._known), self._known_up_to
        try:
            local = self._local_segment()
            call = GrantAhead(nbytes, count, () if local is None else (local,), session, known, known_up_to)
            reply, is_repeated = self._master.call_noting_repeats(call)
        except MoonpoolError:  # the ordinary way says what is wrong
            self._lost_s, self._knows_lost = self._clock.now_s(), False
            return []
        if is_repeated:
            self._lost_s, self._knows_lost = self._clock.now_s(), False
        with self._lock:
            self._known.update(reply.generations)
            self._known_up_to = max(self._known_up_to, reply.last_generation)
        return [(each, places[0]) for each, places in zip(reply.generations, reply.replicas, strict=True)]

    def _return(self, held: list[tuple[int, bool]]) -> None:
        """Give places back, with those that could not be given back before. The thread tries again what fails."""
        with self._lock:
            held, self._unreturned = [*self._unreturned, *held], []
        for settled in (True, False):
            some = [generation for generation, is_settled in held if is_settled is settled]
            if not some:
                continue
            try:
                self._master.call(PutRevoke([ahead_key(each) for each in some], some, settled))
                with self._lock:
                    self._known.difference_update(some)
            except MoonpoolError:  # the master discards them in the end; it frees them when this process ends
                with self._lock:
                    self._unreturned += [(each, settled) for each in some]

    # the thread

    def _keep(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self._give_back_idle()
            self._renew()
            self._free_lost()
            with self._lock:
                if not (
                    self._unreturned or self._lost_s is not None or any(each.places for each in self._sizes.values())
                ):
                    self._sizes.clear()
                    self._thread = None
                    return

    def _give_back_idle(self) -> None:
        idle_s = self._clock.now_s() - _IDLE_S
        with self._lock:
            held = self._clear([size for size in self._sizes.values() if size.put_s <= idle_s])
        self._return(held)

    def _free_lost(self) -> None:
        """Tell the master what this client knows, once it has discarded what was granted by an answer that was lost.

        That takes two calls. The first one's answer says up to which generation the master had granted; the master may
        have stood still until then. The second one, when that much is discarded, says that none of it is known here.
        """
        lost_s = self._lost_s
        if lost_s is None or self._clock.now_s() - lost_s <= _DISCARDED * self._renew_after_s:
            return
        with self._asking:
            is_second, self._lost_s, self._knows_lost = self._knows_lost, None, False
            try:
                self._grants(1, 0, self._session())
            except MoonpoolError:  # no session: once more
                self._lost_s = self._clock.now_s()
            if self._lost_s is None and not is_second:
                self._lost_s, self._knows_lost = self._clock.now_s(), True

    def _renew(self) -> None:
        asked_s = self._clock.now_s()
        due_s = asked_s - _RENEW * self._renew_after_s
        with self._lock:
            due = [each for size in self._sizes.values() for each in size.places if each.renewed_s <= due_s]
        if not due:
            return
        generations = [each.generation for each in due]
        with contextlib.suppress(MoonpoolError):  # unusable soon; then they are given back
            renewed = self._master.call(PutRenew([ahead_key(each) for each in generations], generations))
            kept = dict(zip(generations, renewed, strict=True))
            with self._lock:
                # The master has discarded these, or wants them: it keeps their space until they are given back.
                held = {each.generation for size in self._sizes.values() for each in size.places}
                self._unreturned += [(each, True) for each, is_kept in kept.items() if not is_kept and each in held]
                for size in self._sizes.values():
                    size.places = [
                        each._replace(renewed_s=asked_s) if each.generation in kept else each
                        for each in size.places
                        if kept.get(each.generation, True)
                    ]
