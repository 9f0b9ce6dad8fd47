"""Copies, moves and drains that somebody asked for."""

from __future__ import annotations

import pytest
from state_pool import Pool

from moonpool.base.errors import InvalidInput, NoSpace, NotFound
from moonpool.store import messages as m


def info(pool: Pool, task_id: int) -> m.TaskInfo:
    found = pool.state.task(task_id, pool.now_s)
    assert found is not None
    return found


def test_a_copy_goes_to_one_target_after_the_other() -> None:
    pool = Pool("a", "b", "c")
    pool.put(b"k", 2, preferred=("a.dram",))
    task = pool.state.copy(b"k", ["b.dram", "c.dram"], 0.0)
    pool.carry_out("b")
    assert (info(pool, task).state, info(pool, task).num_done, info(pool, task).num_total) == ("running", 1, 2)
    pool.carry_out("c")
    assert info(pool, task) == m.TaskInfo(task, "copy", "done", "", 2, 2, 4 * 4096, "b.dram, c.dram")
    assert pool.places(b"k") == ["a.dram", "b.dram", "c.dram"]


def test_tasks_are_listed() -> None:
    pool = Pool("a", "b", "c")
    assert pool.state.tasks(pool.now_s) == []
    for key in (b"1", b"2", b"3"):
        pool.put(key, preferred=("a.dram",))
    done = pool.state.copy(b"1", ["b.dram"], 0.0)
    pool.carry_out("b")
    copy = pool.state.copy(b"2", ["b.dram", "c.dram"], 0.0)
    move = pool.state.move(b"3", "a.dram", "c.dram", 0.0)
    drain = pool.state.drain("a.dram", 0.0)
    assert pool.state.tasks(pool.now_s) == [info(pool, task) for task in (copy, move, drain)]
    assert [(task.kind, task.state, task.segment) for task in pool.state.tasks(pool.now_s)] == [
        ("copy", "running", "b.dram, c.dram"),
        ("move", "running", "c.dram"),
        ("drain", "running", "a.dram"),
    ]
    assert [task.task_id for task in pool.state.tasks(pool.now_s, finished=True)] == [done, copy, move, drain]


@pytest.mark.parametrize("targets", [(), ("a.dram",), ("?",), ("b.ssd",), ("b.dram", "b.dram")])
def test_targets_that_make_no_sense(targets: tuple[str, ...]) -> None:
    pool = Pool("a", "b", ssd_granules=10)
    pool.put(b"k", preferred=("a.dram",))
    with pytest.raises(InvalidInput):
        pool.state.copy(b"k", targets, 0.0)
    with pytest.raises(NotFound):
        pool.state.copy(b"?", ["b.dram"], 0.0)
    assert pool.state.task(5, pool.now_s) is None


def test_a_copy_that_finds_no_room_is_refused() -> None:
    pool = Pool("a", "b", granules=2)
    pool.put(b"k", 2, preferred=("a.dram",))
    pool.put(b"other", preferred=("b.dram",))
    with pytest.raises(NoSpace):
        pool.state.copy(b"k", ["b.dram"], 0.0)


def test_a_copy_fails_with_its_object_and_with_its_node() -> None:
    pool = Pool("a", "b", "c")
    for key in (b"1", b"2", b"3"):
        pool.put(key, preferred=("a.dram",))
    removed = pool.state.copy(b"1", ["b.dram", "c.dram"], 0.0)
    refused = pool.state.copy(b"2", ["b.dram"], 0.0)
    lost = pool.state.copy(b"3", ["c.dram"], 0.0)
    pool.remove(b"1")
    first, second = pool.orders("b")
    pool.answer(first)
    pool.answer(second, NoSpace("no room"))
    pool.unmount("c.dram")
    assert (info(pool, removed).state, info(pool, removed).num_done) == ("failed", 0)
    assert "removed" in info(pool, removed).message
    assert (info(pool, refused).state, info(pool, refused).message) == ("failed", "no room")
    assert info(pool, lost).state == "failed"


def test_a_move_gives_the_old_replica_up_when_the_new_one_is_there() -> None:
    pool = Pool("a", "b", "c", lease_s=10)
    pool.put(b"k", preferred=("a.dram", "c.dram"), num_replicas=2)
    pool.exist(b"k")
    task = pool.state.move(b"k", "a.dram", "b.dram", 0.0)
    assert pool.places(b"k") == ["a.dram", "c.dram"]
    pool.carry_out("b")
    assert pool.places(b"k") == ["c.dram", "b.dram"]
    assert pool.used == 3, "its reader goes on"
    pool.tick(10)
    assert pool.used == 2
    assert (info(pool, task).state, info(pool, task).num_done) == ("done", 1)


def test_a_move_that_fails_changes_nothing() -> None:
    pool = Pool("a", "b")
    pool.put(b"k", preferred=("a.dram",))
    task = pool.state.move(b"k", "a.dram", "b.dram", 0.0)
    (order,) = pool.orders("b")
    pool.answer(order, NoSpace("no"))
    assert info(pool, task).state == "failed"
    assert pool.places(b"k") == ["a.dram"]
    assert pool.used == 1


def test_a_move_needs_a_replica_in_memory_and_a_place() -> None:
    pool = Pool("a", "b", ssd_granules=10)
    pool.put(b"k", preferred=("a.dram",))
    pool.carry_out("a")
    for source, target in (("b.dram", "a.dram"), ("a.ssd", "b.dram"), ("a.dram", "a.dram"), ("a.dram", "?")):
        with pytest.raises(InvalidInput):
            pool.state.move(b"k", source, target, 0.0)


def test_cancelling() -> None:
    pool = Pool("a", "b", "c")
    pool.put(b"k", preferred=("a.dram",))
    task = pool.state.copy(b"k", ["b.dram", "c.dram"], 0.0)
    assert pool.state.cancel_task(task, pool.now_s)
    assert not pool.state.cancel_task(task, pool.now_s)
    assert not pool.state.cancel_task(99, pool.now_s)
    pool.carry_out("b", "c")
    assert info(pool, task).state == "cancelled"
    assert pool.places(b"k") == ["a.dram", "b.dram"], "what was under way ended well"


# drains


def test_a_drain_moves_everything_away() -> None:
    pool = Pool("a", "b", granules=20, task_moves_in_flight=3)
    for number in range(8):
        pool.put(b"%d" % number, preferred=("a.dram",))
    pool.put(b"both", num_replicas=2, preferred=("b.dram",))
    task = pool.state.drain("a.dram", 0.0)
    assert pool.state.drain("a.dram", 0.0) == task
    pool.tick()
    assert len(pool.orders("b")) == 3
    pool.put(b"new", preferred=("a.dram",))
    assert pool.places(b"new") == ["b.dram"], "nothing new is placed there"
    for _ in range(20):
        pool.carry_out("b")
        pool.tick(0.1)
    assert info(pool, task).state == "done"
    assert info(pool, task).num_done == 9
    assert {each.name: each.status for each in pool.state.stats().segments}["a.dram"] == "drained"
    assert all(pool.places(b"%d" % number) == ["b.dram"] for number in range(8))
    pool.unmount("a.dram")
    assert pool.has(b"0", b"7", b"both")


def test_a_drain_finds_extra_replicas_anywhere_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonpool.master.state.tasks._SCAN_SLOTS", 2)
    pool = Pool("a", "b", granules=20)
    for number in range(9):
        pool.put(b"%d" % number, num_replicas=1 + (number == 8), preferred=("b.dram", "a.dram"))
    task = pool.state.drain("a.dram", 0.0)
    for _ in range(10):
        pool.tick(0.1)
    assert info(pool, task).state == "done"
    assert pool.places(b"8") == ["b.dram"]


def test_a_drain_that_finds_no_room_fails_and_the_segment_goes_on() -> None:
    pool = Pool("a", "b", granules=4, high_watermark=1.0)
    pool.put(b"1", 4, preferred=("a.dram",))
    pool.put(b"2", 4, preferred=("b.dram",))
    task = pool.state.drain("a.dram", 0.0)
    pool.tick(61)
    assert info(pool, task).state == "failed"
    assert "1 objects stay" in info(pool, task).message
    pool.remove(b"1")
    pool.put(b"3", preferred=("a.dram",))
    assert pool.places(b"3") == ["a.dram"]


def test_a_drain_does_not_wait_for_space_of_a_writer_that_has_gone() -> None:
    """It is free in ten minutes only; until then bytes may arrive there, but no object."""
    pool = Pool("a", "b")
    pool.put(b"object", preferred=("a.dram",))
    pool.revoke(pool.start(b"lost", preferred=("a.dram",)), settled=False)
    task = pool.state.drain("a.dram", pool.now_s)
    pool.tick()
    pool.carry_out("b")
    pool.tick(1)
    assert info(pool, task).state == "done"
    assert {each.name: (each.status, each.num_objects) for each in pool.state.stats().segments} == {
        "a.dram": ("drained", 0),
        "b.dram": ("ok", 1),
    }
    assert pool.places(b"object") == ["b.dram"]


def test_a_drain_waits_until_an_unfinished_put_is_discarded() -> None:
    pool = Pool("a", "b")
    unfinished = pool.start(b"unfinished", preferred=("a.dram",))
    task = pool.state.drain("a.dram", pool.now_s)
    pool.tick(29)
    assert info(pool, task).state == "running"
    pool.tick(10)
    assert info(pool, task).state == "done"
    assert pool.end(unfinished) is not None, "it was discarded"


def test_a_drain_moves_an_object_whose_put_ends_late() -> None:
    pool = Pool("a", "b")
    unfinished = pool.start(b"late", preferred=("a.dram",))
    task = pool.state.drain("a.dram", pool.now_s)
    pool.tick(20)
    assert pool.end(unfinished) is None
    pool.tick()
    assert info(pool, task).state == "running"
    pool.carry_out("b")
    pool.tick(1)
    assert info(pool, task).state == "done"
    assert pool.places(b"late") == ["b.dram"]


def test_a_drain_that_finds_no_room_leaves_what_is_on_ssd_there() -> None:
    pool = Pool("a", "b", granules=4, ssd_granules=20, high_watermark=1.0)
    pool.put(b"1", 4, preferred=("a.dram",))
    pool.put(b"2", 4, preferred=("b.dram",))
    pool.carry_out("a", "b")
    assert pool.places(b"1") == ["a.dram", "a.ssd"]
    task = pool.state.drain("a.dram", 0.0)
    for _ in range(3):
        pool.tick(0.1)
    assert info(pool, task).state == "done"
    assert pool.places(b"1") == ["a.ssd"]


def test_a_drain_leaves_an_object_in_memory_whose_ssd_is_away() -> None:
    pool = Pool("a", granules=4, ssd_granules=100)
    pool.mount("b", 4)
    pool.put(b"k", preferred=("a.dram",))
    pool.carry_out("a")
    pool.state.copy(b"k", ["b.dram"], pool.now_s)
    pool.carry_out("b")
    pool.unmount("a.ssd")
    pool.unmount("a.dram")
    task = pool.state.drain("b.dram", pool.now_s)
    pool.tick(1)
    assert pool.places(b"k") == ["b.dram"]
    pool.tick(61)
    assert info(pool, task).state == "failed"
    assert "1 objects stay" in info(pool, task).message
    assert pool.places(b"k") == ["b.dram"]


def test_a_drain_that_is_cancelled_or_loses_its_segment() -> None:
    pool = Pool("a", "b", "c")
    pool.put(b"1", preferred=("a.dram",))
    pool.put(b"2", preferred=("b.dram",))
    cancelled, lost = pool.state.drain("a.dram", 0.0), pool.state.drain("b.dram", 0.0)
    assert pool.state.cancel_task(cancelled, pool.now_s)
    pool.unmount("b.dram")
    pool.tick()
    assert info(pool, lost).state == "failed"
    assert "gone" in info(pool, lost).message
    pool.put(b"3", preferred=("a.dram",))
    assert pool.places(b"3") == ["a.dram"]


def test_only_mounted_memory_is_drained() -> None:
    pool = Pool("a", ssd_granules=10)
    with pytest.raises(NotFound):
        pool.state.drain("?", 0.0)
    with pytest.raises(InvalidInput):
        pool.state.drain("a.ssd", 0.0)


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_drain_goes_on_after_the_master_came_back(snapshot: bool) -> None:
    pool = Pool("a", "b")
    pool.put(b"k", preferred=("a.dram",))
    pool.state.drain("a.dram", 0.0)
    pool.check()
    if snapshot:
        pool.snapshot()
    pool.restart()
    for _ in range(5):
        pool.tick(3)
        pool.carry_out("b")
    assert pool.places(b"k") == ["b.dram"]
