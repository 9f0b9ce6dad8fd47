"""Pins: they count, they end with their holder, and they keep the bytes whatever becomes of the object."""

from __future__ import annotations

import pytest
from state_pool import SESSION, Pool, descriptor

from moonpool.base.errors import NotSettled

OTHER = SESSION + 1


def test_pins_count_and_unknown_ones_are_ignored() -> None:
    pool = Pool("a")
    pool.put(b"k")
    assert pool.pin(1, b"k")
    assert pool.pin(1, b"k")
    assert not pool.pin(1, b"?")
    assert not pool.remove(b"k")
    pool.unpin(1, b"k")
    pool.unpin(2, b"k")
    assert not pool.remove(b"k")
    pool.unpin(1, b"k")
    pool.unpin(1, b"k")
    assert pool.remove(b"k")


def test_pins_end_with_their_connection() -> None:
    pool = Pool("a")
    pool.put(b"k")
    pool.pin(1, b"k")
    pool.pin(2, b"k")
    pool.state.connection_closed(1, 0.0)
    assert not pool.remove(b"k")
    pool.state.connection_closed(2, 0.0)
    pool.state.connection_closed(3, 0.0)
    assert pool.remove(b"k")


def test_pins_end_with_their_process() -> None:
    pool = Pool("a")
    pool.put(b"k")
    pool.pin(SESSION, b"k")
    pool.sessions_gone(SESSION)
    assert pool.remove(b"k")


def test_a_removed_object_leaves_its_bytes_to_its_pins() -> None:
    pool = Pool("a", granules=1)
    pool.put(b"k")
    pool.pin(SESSION, b"k")
    pool.pin(OTHER, b"k")
    assert pool.remove(b"k", force=True)
    assert not pool.has(b"k")
    assert pool.refused(b"new") == "no_space"
    pool.sessions_gone(SESSION)
    assert pool.refused(b"new") == "no_space"
    pool.unpin(OTHER, b"k")
    pool.put(b"new")


def test_bytes_of_a_removed_object_wait_for_the_last_lease_too() -> None:
    pool = Pool("a", granules=1, lease_s=10)
    pool.put(b"k")
    assert pool.find(b"k", lease=True, session=SESSION)
    pool.remove(b"k", force=True)
    pool.unpin(SESSION, b"k")
    assert pool.refused(b"new") == "no_space"
    pool.tick(10)
    pool.put(b"new")


def test_pins_of_an_earlier_object_of_the_key_end_first() -> None:
    pool = Pool("a", granules=3, lease_s=1)
    pool.put(b"k")
    pool.pin(SESSION, b"k")
    pool.put(b"k", replace=True)
    pool.pin(SESSION, b"k")
    assert pool.used == 2
    pool.unpin(SESSION, b"k")
    assert pool.used == 1
    assert not pool.remove(b"k"), "the later one is pinned still"
    pool.unpin(SESSION, b"k")
    assert pool.remove(b"k")


def test_a_replica_that_moves_away_leaves_its_bytes_to_the_pins() -> None:
    pool = Pool("a", "b", granules=2)
    pool.put(b"k", preferred=("a.dram",))
    pool.pin(SESSION, b"k")
    pool.state.move(b"k", "a.dram", "b.dram", 0.0)
    pool.carry_out("b")
    assert pool.places(b"k") == ["b.dram"]
    assert pool.used == 2, "the process looks at it still"
    pool.unpin(SESSION, b"k")
    assert pool.used == 1


def test_a_pinned_object_that_loses_its_node_is_gone() -> None:
    pool = Pool("a")
    pool.put(b"k")
    pool.pin(SESSION, b"k")
    pool.unmount("a.dram")
    pool.tick()
    assert not pool.has(b"k")
    pool.unpin(SESSION, b"k")


# across the master's death


def test_pins_of_processes_outlive_the_master_and_those_of_connections_do_not() -> None:
    pool = Pool("a", granules=2, lease_s=1)
    pool.put(b"mine")
    pool.put(b"theirs")
    pool.pin(SESSION, b"mine")
    pool.pin(1, b"theirs")
    pool.restart()
    pool.tick(2)
    assert not pool.remove(b"mine")
    assert pool.remove(b"theirs")
    pool.sessions_gone(SESSION)
    assert pool.remove(b"mine")


def test_bytes_that_pins_hold_outlive_the_master() -> None:
    for snapshot in (False, True):
        pool = Pool("a", "b", granules=2, lease_s=1)
        pool.put(b"removed", preferred=("a.dram",))
        pool.put(b"moved", preferred=("b.dram",))
        for session in (SESSION, OTHER, OTHER):
            pool.pin(session, b"removed")
            pool.pin(session, b"moved")
        pool.remove(b"removed", force=True)
        pool.state.move(b"moved", "b.dram", "a.dram", 0.0)
        pool.carry_out("a")
        if snapshot:
            pool.snapshot()
        pool.restart()
        pool.tick(2)
        assert pool.used == 3
        pool.unpin(OTHER, b"removed")
        pool.unpin(OTHER, b"moved")
        pool.sessions_gone(SESSION)
        assert pool.used == 3
        pool.unpin(OTHER, b"removed")
        pool.unpin(OTHER, b"moved")
        assert pool.used == 1
        assert pool.places(b"moved") == ["a.dram"]


def test_a_replaced_object_that_is_looked_at_outlives_the_master() -> None:
    for when in ("never", "before", "between"):
        pool = Pool("a", lease_s=1)
        pool.put(b"k", 2)
        pool.pin(SESSION, b"k")
        if when == "before":
            pool.snapshot()
        pool.put(b"k", 3, replace=True)
        pool.pin(OTHER, b"k")
        if when == "between":
            pool.snapshot()
        pool.put(b"k", 1, replace=True)
        pool.restart()
        pool.tick(2)
        assert pool.used == 6
        pool.sessions_gone(SESSION)
        assert pool.used == 4
        pool.sessions_gone(OTHER)
        assert pool.used == 1


def test_processes_that_no_node_knows_are_gone() -> None:
    pool = Pool("a", "b", granules=4, lease_s=1)
    pool.put(b"k")
    pool.pin(SESSION, b"k")
    pool.pin(OTHER, b"k")
    pool.start(b"writing", session=SESSION)
    held = pool.start(b"held", session=SESSION)
    pool.revoke(held, settled=False)
    pool.crash()
    pool.recount("a.dram", sessions=[OTHER])
    assert pool.used == 3, "the other node has not spoken yet"
    pool.recount("b.dram", sessions=[])
    pool.tick(2)
    assert pool.used == 1
    assert not pool.remove(b"k")
    pool.sessions_gone(OTHER)
    assert pool.remove(b"k")


def test_a_node_that_does_not_come_back_keeps_no_process_alive() -> None:
    pool = Pool("a", "b", granules=4, segment_ttl_s=10, lease_s=1)
    pool.put(b"k", preferred=("a.dram",))
    pool.pin(SESSION, b"k")
    pool.sessions.clear()  # only b knew it
    pool.crash()
    pool.answer_recounts("a")
    pool.tick(5)
    assert not pool.remove(b"k")
    pool.beat("a")
    pool.tick(6)
    pool.answer_recounts("a")
    pool.tick()
    assert pool.remove(b"k")


def test_processes_of_a_node_that_is_gone_are_asked_for() -> None:
    pool = Pool("a", "b", granules=4, lease_s=1)
    pool.put(b"k", preferred=("a.dram",))
    for session in (SESSION, OTHER):
        pool.pin(session, b"k")
    pool.unmount("b.dram")
    assert pool.beat("a")["a.dram"].recount_above is not None
    pool.put(b"new", preferred=("a.dram",))
    pool.sessions.discard(OTHER)  # its session registry was b's, and it is dead
    pool.answer_recounts("a")
    pool.tick(5)
    assert not pool.remove(b"k")
    pool.sessions_gone(SESSION)
    assert pool.remove(b"k")


def test_a_question_about_processes_makes_no_segment_wait() -> None:
    pool = Pool("a", "b", granules=4)
    pool.put(b"k", preferred=("a.dram",))
    pool.pin(SESSION, b"k")
    pool.now_s = 5.0
    pool.state.mount("b", descriptor("b.dram", 4, 9), pool.now_s)
    assert pool.state.heartbeat("b.dram", 9, pool.now_s).recount_above is not None
    pool.put(b"new", preferred=("b.dram",))
    assert pool.places(b"new") == ["b.dram"]


def test_a_process_that_is_heard_of_lives() -> None:
    pool = Pool("a", granules=4, lease_s=1)
    pool.put(b"k")
    pool.pin(SESSION, b"k")
    pool.sessions.clear()
    pool.crash()
    with pytest.raises(NotSettled):  # before any node has spoken
        pool.find(b"k", session=SESSION)
    pool.answer_recounts()
    pool.tick(5)
    assert not pool.remove(b"k")
