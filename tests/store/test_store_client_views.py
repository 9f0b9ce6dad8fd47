"""What is in view, counted and let go of: without a pool."""

from __future__ import annotations

import threading

import numpy as np
from waiting import HANG_S, wait_until

from moonpool.base.clock import VirtualClock
from moonpool.base.errors import PeerLost
from moonpool.store.client.view_ledger import SPARE_S, VerifiedCache, ViewLedger
from moonpool.store.messages import ObjectInfo, Placement


def infos(*keys: bytes) -> list[ObjectInfo]:
    return [ObjectInfo(key, 1, (place(0),), 1.0) for key in keys]


def place(offset: int, generation: int = 1) -> Placement:
    return Placement("s", offset, 1, generation)


def test_what_was_verified_is_remembered_as_long_as_there_is_room() -> None:
    cache = VerifiedCache(2)
    cache.add(place(0))
    cache.add(place(1))
    assert place(0) in cache
    cache.add(place(2))
    assert [place(n) in cache for n in range(3)] == [True, False, True], "the one not asked for went"
    assert place(0, generation=2) not in cache


SESSION = 2**40


class Unpinned:
    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.ended: list[int] = []
        self.fails = False
        self.called = threading.Event()

    def __call__(self, session: int, keys: list[bytes], connection: object) -> None:
        assert session == SESSION
        self.called.set()
        if self.fails:
            raise PeerLost("gone")
        self.keys += keys


def test_a_view_lasts_as_long_as_anything_made_from_it() -> None:
    unpinned = Unpinned()
    ledger = ViewLedger(100, unpinned, unpinned.ended.append)
    assert ledger.reserve(60)
    array = np.zeros(60, np.uint8)
    ledger.keep(ledger.add_pins(infos(b"k"), SESSION)[0], array)
    part = np.frombuffer(array.data[10:20], np.uint8)[3:]  # a slice of an array of a slice
    del array
    assert not ledger.reserve(41), "over the limit"
    assert ledger.reserve(40)
    ledger.give_back(40)
    assert unpinned.keys == []
    del part
    wait_until(lambda: unpinned.keys == [b"k"], "the pin ends")
    wait_until(lambda: ledger.nbytes == 0, "its room is free")
    ledger.close()
    ledger.close()


def test_pins_are_given_back_together_and_before_the_end() -> None:
    unpinned = Unpinned()
    ledger = ViewLedger(100, unpinned, unpinned.ended.append)
    for pin in ledger.add_pins(infos(*[b"%d" % number for number in range(50)]), SESSION):
        ledger.drop(pin)
    ledger.close()
    assert sorted(unpinned.keys) == sorted(b"%d" % number for number in range(50))
    assert not ledger.reserve(1), "no views of a closed client"


def test_a_lost_master_ends_no_thread() -> None:
    unpinned = Unpinned()
    ledger = ViewLedger(100, unpinned, unpinned.ended.append)
    unpinned.fails = True
    ledger.drop(ledger.add_pins(infos(b"lost"), SESSION)[0])
    assert unpinned.called.wait(HANG_S)
    unpinned.fails = False
    ledger.drop(ledger.add_pins(infos(b"next"), SESSION)[0])
    ledger.close()
    assert b"next" in unpinned.keys


def test_a_newer_pin_of_a_key_waits_for_the_older_ones() -> None:
    """The master ends the oldest first, and that one may keep the value from before a replacement."""
    unpinned = Unpinned()
    ledger = ViewLedger(100, unpinned, unpinned.ended.append)
    old, new, other = ledger.add_pins(infos(b"k", b"k", b"other"), SESSION)
    ledger.drop(new)
    ledger.drop(other)
    wait_until(lambda: unpinned.keys == [b"other"], "the other pin ends")
    ledger.drop(old)
    wait_until(lambda: unpinned.keys == [b"other", b"k", b"k"], "both pins of the key end")
    ledger.close()


def test_a_retired_session_ends_with_its_last_view() -> None:
    """An answer about its pins was lost, so the master may hold more of them than are known here."""
    unpinned = Unpinned()
    ledger = ViewLedger(100, unpinned, unpinned.ended.append)
    first, second = ledger.add_pins(infos(b"a", b"b"), SESSION)
    ledger.retire(SESSION)
    ledger.drop(first)
    (other,) = ledger.add_pins(infos(b"c"), SESSION)  # its look-up was under way
    ledger.drop(second)
    ledger.retire(SESSION + 1)  # which has none
    wait_until(lambda: unpinned.ended == [SESSION + 1], "the session without pins ends")
    ledger.drop(other)
    wait_until(lambda: unpinned.ended == [SESSION + 1, SESSION], "the session ends with its last pin")
    ledger.close()
    assert unpinned.keys == []


def test_the_end_of_a_session_is_said_until_it_is_heard() -> None:
    said: list[int] = []

    def fail_once(session: int) -> None:
        said.append(session)
        if len(said) == 1:
            raise PeerLost("gone")

    ledger = ViewLedger(100, Unpinned(), fail_once)
    ledger.retire(SESSION)
    wait_until(lambda: said == [SESSION, SESSION], "the end is said again")
    ledger.close()


def test_a_pin_is_spare_for_a_while_after_its_view() -> None:
    unpinned, clock = Unpinned(), VirtualClock()
    ledger = ViewLedger(100, unpinned, unpinned.ended.append, clock)
    old, new = ledger.add_pins(infos(b"k", b"k"), SESSION)
    assert ledger.take_spare(b"k") is None, "both are in use"
    for pin in (old, new):
        assert ledger.reserve(10)
        ledger.keep(pin, np.zeros(10, np.uint8))  # which goes at once
        wait_until(lambda: ledger.nbytes == 0, "the view has ended")  # else the thread may take the older one last
    assert ledger.take_spare(b"other") is None
    assert ledger.take_spare(b"k") is new
    assert ledger.take_spare(b"k") is None
    wait_until(lambda: unpinned.keys == [b"k"], "the older pin ends")
    assert ledger.reserve(10)
    ledger.keep(new, np.zeros(10, np.uint8))
    wait_until(lambda: ledger.nbytes == 0, "the view has ended")
    clock.advance(SPARE_S)
    wait_until(lambda: unpinned.keys == [b"k", b"k"], "its time is over, although nothing else was released")
    assert ledger.take_spare(b"k") is None
    ledger.close()


def test_spare_pins_end_with_the_ledger_and_with_their_session() -> None:
    unpinned = Unpinned()
    ledger = ViewLedger(100, unpinned, unpinned.ended.append, VirtualClock())
    for pin in ledger.add_pins(infos(b"a", b"b"), SESSION):
        ledger.keep(pin, np.zeros(0, np.uint8))
    wait_until(lambda: not ledger._anchors, "all views have ended")  # the thread may have one in its hands
    kept = ledger.take_spare(b"a")
    assert kept is not None
    ledger.retire(SESSION)
    assert ledger.take_spare(b"b") is None
    ledger.keep(kept, np.zeros(0, np.uint8))
    wait_until(lambda: unpinned.ended == [SESSION], "the session ends")
    (other,) = ledger.add_pins(infos(b"c"), SESSION + 1)
    ledger.keep(other, np.zeros(0, np.uint8))
    unpinned_later: list[tuple[int, list[bytes]]] = []
    ledger._unpin = lambda session, keys, _: unpinned_later.append((session, keys))
    ledger.close()
    assert unpinned_later == [(SESSION + 1, [b"c"])]
