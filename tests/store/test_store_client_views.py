"""What is in view, counted and let go of: without a pool."""

from __future__ import annotations

import threading

import numpy as np
from store_pool import wait_until

from moonpool.base.errors import PeerLost
from moonpool.store.messages import Placement
from moonpool.store.views import VerifiedCache, ViewLedger


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


class Unpinned:
    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.fails = False
        self.called = threading.Event()

    def __call__(self, keys: list[bytes]) -> None:
        self.called.set()
        if self.fails:
            raise PeerLost("gone")
        self.keys += keys


def test_a_view_lasts_as_long_as_anything_made_from_it() -> None:
    unpinned = Unpinned()
    ledger = ViewLedger(100, unpinned)
    assert ledger.reserve(60)
    array = np.zeros(60, np.uint8)
    ledger.keep(ledger.note_pins([b"k"])[0], array)
    part = np.frombuffer(array.data[10:20], np.uint8)[3:]  # a slice of an array of a slice
    del array
    assert not ledger.reserve(41), "over the limit"
    assert ledger.reserve(40)
    ledger.give_back(40)
    assert unpinned.keys == []
    del part
    wait_until(lambda: unpinned.keys == [b"k"])
    wait_until(lambda: ledger.nbytes == 0)
    ledger.close()
    ledger.close()


def test_pins_are_given_back_together_and_before_the_end() -> None:
    unpinned = Unpinned()
    ledger = ViewLedger(100, unpinned)
    for pin in ledger.note_pins([b"%d" % number for number in range(50)]):
        ledger.drop(pin)
    ledger.close()
    assert sorted(unpinned.keys) == sorted(b"%d" % number for number in range(50))
    assert not ledger.reserve(1), "no views of a closed client"


def test_a_lost_master_ends_no_thread() -> None:
    unpinned = Unpinned()
    ledger = ViewLedger(100, unpinned)
    unpinned.fails = True
    ledger.drop(ledger.note_pins([b"lost"])[0])
    assert unpinned.called.wait(5)
    unpinned.fails = False
    ledger.drop(ledger.note_pins([b"next"])[0])
    ledger.close()
    assert b"next" in unpinned.keys


def test_a_newer_pin_of_a_key_waits_for_the_older_ones() -> None:
    """The master ends the oldest first, and that one may keep the value from before a replacement."""
    unpinned = Unpinned()
    ledger = ViewLedger(100, unpinned)
    old, new, other = ledger.note_pins([b"k", b"k", b"other"])
    ledger.drop(new)
    ledger.drop(other)
    wait_until(lambda: unpinned.keys == [b"other"])
    ledger.drop(old)
    wait_until(lambda: unpinned.keys == [b"other", b"k", b"k"])
    ledger.close()
