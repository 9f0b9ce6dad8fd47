"""A master that comes back: from its journal, from a snapshot that was written while things went on, and with nodes
that know more than it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from state_pool import SESSION, G, Pool, descriptor

from moonpool.base.errors import Corrupt, NotSettled
from moonpool.master.state import PoolState, records, snapshot
from moonpool.master.state.changes import RemovalReason
from moonpool.master.state.recovery import restore
from moonpool.master.state.snapshot import snapshot_records
from moonpool.master.state.table import Replica
from moonpool.store import messages as m

SIZES = {b"%d" % number: number % 3 + 1 for number in range(6)}


def filled(*nodes: str, **rules: Any) -> Pool:
    pool = Pool(*nodes or ("a",), granules=30, lease_s=10, **rules)
    for key, granules in SIZES.items():
        pool.put(key, granules)
    return pool


@pytest.fixture(params=["journal", "snapshot"])
def memory(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def come_back(pool: Pool, memory: str) -> None:
    if memory == "snapshot":
        pool.snapshot()
    pool.restart()


def test_what_was_answered_survives(memory: str) -> None:
    pool = filled("a", "b")
    pool.put(b"two", num_replicas=2)
    pool.remove(b"1")
    before = {key: pool.find(key) for key in (*SIZES, b"two")}
    come_back(pool, memory)
    assert {key: pool.find(key) for key in (*SIZES, b"two")} == before
    assert "removed by a caller" in pool.why(b"1")
    assert pool.state.stats().num_objects == 6


def test_nothing_is_placed_before_the_node_has_answered() -> None:
    pool = filled()
    last = pool.put(b"k").generation
    pool.crash()
    refusal = pool.try_start(b"new")
    assert isinstance(refusal, m.Refusal)
    assert (refusal.code, refusal.message[:26]) == ("unavailable", "nodes are being recounted ")
    assert pool.refused(b"large", 31) == "no_space", "waiting would not help"
    assert pool.has(b"k"), "but everything can be read"
    reply = pool.beat()["a.dram"]
    assert (reply.known, reply.epoch, reply.recount_above) == (True, 2, last)
    assert pool.refused(b"new") == "unavailable"
    pool.recount("a.dram")
    assert pool.beat()["a.dram"].recount_above is None
    pool.put(b"new")
    pool.recount("a.dram", spans=[(0, 30 * G)])  # said twice
    assert pool.has(b"k", b"new")


def test_a_put_waits_for_the_node_that_has_not_answered_yet() -> None:
    pool = Pool("a", "b", granules=3)
    for key in SIZES:
        pool.put(key)
    pool.crash()
    pool.answer_recounts("a")
    assert pool.refused(b"new") == "unavailable", "what is on a is leased, but b may have room"
    assert pool.refused(b"new", num_replicas=2, all_replicas=True) == "unavailable"
    pool.answer_recounts("b")
    assert pool.refused(b"new") == "no_space"


def test_a_node_that_never_answers_is_not_waited_for_any_more() -> None:
    pool = Pool("a", segment_ttl_s=10)
    pool.crash()
    assert pool.refused(b"new") == "unavailable"
    pool.tick(10)
    assert pool.refused(b"new") == "no_space"


def test_everything_is_leased_anew() -> None:
    pool = filled(high_watermark=1.0)
    pool.now_s = 100.0
    pool.restart()
    assert pool.refused(b"big", 30) == "no_space"
    pool.tick(10)
    pool.put(b"big", 30)


def test_a_put_goes_on_across_the_masters_death(memory: str) -> None:
    pool = filled()
    going, revoked = pool.start(b"going", 2, groups=b"g", soft_pin_s=50, identity=b"i" * 8), pool.start(b"revoked")
    pool.now_s = 29.0
    come_back(pool, memory)
    pool.now_s = 50.0
    assert pool.refused(b"going") == "already_exists"
    assert pool.end(going) is None
    found = pool.find(b"going")
    assert found is not None
    assert found.replicas == going.replicas
    assert "another identity" in pool.why(b"going", b"j" * 8)
    pool.revoke(revoked, settled=True)
    assert pool.end(going) is None, "said twice"
    come_back(pool, memory)
    assert pool.end(going) is None, "said twice, to two masters"


def test_space_of_ended_puts_is_kept(memory: str) -> None:
    pool = Pool("a", granules=3)
    slow, held = pool.start(b"slow"), pool.start(b"held", session=SESSION)
    pool.tick(31)
    assert pool.used == 2
    come_back(pool, memory)
    assert pool.used == 2
    pool.tick(599)
    assert pool.used == 2
    pool.tick(1)
    assert pool.used == 1, "that of a process that may write in place stays"
    assert pool.end(slow) is not None
    assert pool.end(held) is not None
    assert pool.used == 0


def test_what_was_freed_stays_free(memory: str) -> None:
    pool = Pool("a", granules=4)
    pool.revoke(pool.start(b"1"), settled=True)
    late = pool.start(b"2", session=SESSION)
    pool.revoke(late, settled=False)
    pool.end(late)
    pool.start(b"3")
    pool.tick(700)
    pool.start(b"4", session=SESSION)
    pool.sessions_gone(SESSION)
    come_back(pool, memory)
    assert pool.used == 0


def test_pins_flags_groups_and_soft_pins_survive(memory: str) -> None:
    pool = Pool("a", granules=4, lease_s=1, high_watermark=1.0)
    pool.put(b"hard", hard_pin=True)
    pool.put(b"soft", soft_pin_s=100)
    pool.put(b"g1", groups=b"g")
    pool.put(b"g2", groups=b"g")
    pool.now_s = 50.0
    come_back(pool, memory)
    pool.tick(5)
    pool.put(b"1")
    assert not pool.has(b"g1")
    assert not pool.has(b"g2")
    pool.put(b"2")
    pool.put(b"3")
    assert pool.has(b"hard", b"soft")


def test_a_soft_pin_that_is_over_does_not_come_back() -> None:
    pool = Pool("a", granules=2, lease_s=1, high_watermark=1.0)
    pool.put(b"soft", soft_pin_s=10)
    pool.now_s = 20.0
    pool.snapshot()
    pool.restart()
    pool.tick(5)
    pool.put(b"1")
    pool.put(b"2")
    assert not pool.has(b"soft")


def test_segments_that_came_and_went(memory: str) -> None:
    pool = Pool("a", "b", "c", ssd_granules=50)
    for name in "abc":
        pool.put(name.encode(), preferred=(f"{name}.dram",))
    pool.carry_out("b")
    pool.unmount("a.dram")
    pool.unmount("b.dram")
    pool.unmount("b.ssd")
    come_back(pool, memory)
    assert pool.places(b"c") == ["c.dram"]
    assert not pool.has(b"a")
    assert not pool.has(b"b")
    assert "node is away" in pool.why(b"b")
    pool.tick()
    assert {each.name: each.status for each in pool.state.stats().segments} == {
        "a.ssd": "waiting",
        "b.ssd": "away",
        "c.dram": "ok",
        "c.ssd": "waiting",
    }


def test_an_ssd_is_asked_and_goes_on(memory: str) -> None:
    pool = Pool("a", ssd_granules=50)
    pool.put(b"done")
    pool.carry_out("a")
    pool.put(b"waits")
    come_back(pool, memory)
    assert pool.places(b"done") == ["a.dram", "a.ssd"]
    assert pool.orders("a") == [], "not before it has spoken"
    assert pool.beat()["a.ssd"].recount_above is not None
    found = pool.find(b"done")
    assert found is not None
    place = found.replicas[1]
    stray = m.HeldItem(b"stray", 3, G, 30 * G)
    moved = m.HeldItem(b"done", place.generation, G, 40 * G)
    assert pool.inventory("a", [moved, stray]) == [True, False]
    assert pool.beat()["a.ssd"].recount_above is None
    pool.tick()
    assert [order.key for order in pool.orders("a")] == [b"waits"]
    found = pool.find(b"done")
    assert found is not None
    assert found.replicas[1].offset == 40 * G, "compaction went on meanwhile"


def test_a_record_that_is_only_hoped_for_cannot_be_read_after_a_restart(memory: str) -> None:
    pool = Pool("a", ssd_granules=50)
    pool.put(b"k")
    pool.unmount("a.dram")
    assert not pool.has(b"k")
    come_back(pool, memory)
    assert not pool.has(b"k")
    pool.inventory("a", [])
    pool.tick()
    assert "not there any more" in pool.why(b"k")


def test_endings_are_remembered_with_their_age() -> None:
    pool = filled()
    pool.remove(b"1")
    pool.now_s = 7.0
    pool.snapshot()
    pool.now_s = 1000.0  # another clock
    pool.restart()
    assert pool.why(b"1") == "this object was removed by a caller, 7.0 s ago"


def test_a_clock_that_begins_anew_does_not_matter(memory: str) -> None:
    pool = filled()
    pool.now_s = 1e6
    pool.put(b"late")
    if memory == "snapshot":
        pool.snapshot()
    pool.check()
    pool.now_s = 1.0
    pool.restart()
    pool.tick(9)
    assert pool.has(b"late", b"0")


# a snapshot while things go on


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "STEP_SLOTS", 2)


def test_a_snapshot_and_the_journal_since_it_began_are_the_truth(small_steps: None) -> None:
    pool = filled("a", "b", ssd_granules=100)
    pool.carry_out("a", "b")
    replaced = pool.start(b"1", 2, replace=True)
    pool.pin(SESSION, b"1")
    pool.pin(SESSION, b"4")
    pool.check()
    steps = snapshot_records(pool.state, pool.now_s)
    written = list(next(steps))
    pool.journal = []
    changes: list[Callable[[], object]] = [
        lambda: pool.end(replaced),
        lambda: pool.remove(b"0"),
        lambda: pool.put(b"0", 3),
        lambda: (pool.remove(b"4", force=True), pool.put(b"4", 1)),
        lambda: pool.corrupt(b"5", pool.places(b"5")[0]),
        lambda: pool.put(b"new"),
        lambda: pool.carry_out("a", "b"),
    ]
    for at, change in enumerate(changes):
        change()
        pool.check()
        if at % 2 == 0:
            written += next(steps, [])
    for part in steps:
        written += part
    pool.check()
    before = {key: pool.find(key) for key in (*SIZES, b"new")}
    used = pool.used
    pool.crash(written + pool.journal)
    assert {key: pool.find(key) for key in (*SIZES, b"new")} == before
    assert pool.used == used
    assert pool.orders("a") == [], "no record is ordered away by what was so once"
    pool.sessions_gone(SESSION)
    pool.tick(20)


def test_a_snapshot_is_written_in_bounded_steps(small_steps: None) -> None:
    pool = filled()
    parts = list(snapshot_records(pool.state, 0.0))
    assert len(parts) == 4
    for part in parts[1:]:
        (entry,) = part
        (placed,) = records.decode(entry)
        assert isinstance(placed, records.Placed)
        assert len(placed.keys) == 2


def test_one_event_is_one_entry() -> None:
    pool = filled(high_watermark=1.0)
    pool.pin(SESSION, b"0")
    upsert = pool.start(b"0", 5, replace=True)
    before = len(pool.journal)
    pool.end(upsert)
    assert len(pool.journal) == before + 1, "a crash leaves the old value or the new one"


def test_looking_up_writes_nothing() -> None:
    pool = filled()
    before = len(pool.journal)
    pool.exist(b"0")
    pool.find(b"0", lease=True)
    assert len(pool.journal) == before


def test_a_journal_of_another_version_is_refused() -> None:
    for entry in (b"\xc1", msgspec.msgpack.encode([["Strange", 1]]), msgspec.msgpack.encode("x")):
        state = PoolState(Pool().rules, 2, journalled=True)
        with pytest.raises(Corrupt):
            restore(state, iter([entry]), 0.0)


def test_a_journal_that_contradicts_itself_is_refused() -> None:
    placed = [
        records.Placed([key], [5], [G], [0], [0], [[Replica(1, 0, 5)]], [None], {}, {}) for key in (b"one", b"two")
    ]
    mounted = records.Mounted(1, "a", descriptor("a.dram", 4), m.Tier.DRAM, None, 4 * G, 0)
    state = PoolState(Pool().rules, 2, journalled=True)
    with pytest.raises(Corrupt):
        restore(state, iter([records.encode([mounted, *placed])]), 0.0)


def test_a_state_without_a_journal_collects_nothing() -> None:
    state = PoolState(Pool().rules, 1)
    state.mount("a", descriptor("a.dram", 4), 0.0)
    assert state.take_records() == ()


# a journal that lost its end


def test_spans_that_the_journal_does_not_know_rest() -> None:
    pool = Pool("a", granules=10)
    pool.put(b"known", 2)
    pool.check()
    kept = list(pool.journal)
    lost = pool.start(b"lost", 3)
    offset = lost.replicas[0].offset
    pool.crash(kept)
    pool.recount("a.dram", spans=[(offset, 2 * G), (offset + 2 * G, G)])
    assert pool.used == 5
    assert pool.has(b"known")
    pool.put(b"new", 5)
    pool.exist(b"new")
    assert pool.refused(b"more") == "no_space"
    assert pool.end(lost) is not None
    assert pool.refused(b"more") == "no_space", "that it ended is not known to be of that span"
    pool.tick(600)
    pool.put(b"more")


@pytest.mark.parametrize("memory", ["journal", "snapshot"])
def test_spans_that_the_journal_does_not_know_rest_after_another_restart(memory: str) -> None:
    pool = Pool("a", granules=10)
    pool.check()
    kept = list(pool.journal)
    lost = pool.start(b"lost", 3)
    pool.journal = kept
    pool.crash(kept)
    pool.recount("a.dram", spans=[(lost.replicas[0].offset, 3 * G)])
    come_back(pool, memory)
    assert pool.used == 3
    assert pool.refused(b"new", 8) == "no_space"
    pool.tick(600)
    assert pool.used == 0
    pool.put(b"new", 8)
    come_back(pool, memory)
    assert pool.used == 8


def test_objects_that_were_written_over_are_gone() -> None:
    """The journal lost that they were evicted, and who got their space."""
    pool = Pool("a", "b", granules=4, lease_s=10, put_release_s=600)
    pool.put(b"over", 2, preferred=("a.dram",))
    pool.put(b"both", 1, preferred=("a.dram", "b.dram"), num_replicas=2)
    pool.put(b"beside", 1, preferred=("a.dram",))
    pool.pin(SESSION, b"over")
    pool.crash()
    pool.recount("b.dram")
    pool.recount("a.dram", spans=[(G, 2 * G)])
    assert not pool.has(b"over")
    assert "not there any more when its node, or the master" in pool.why(b"over")
    assert pool.places(b"both") == ["b.dram"]
    assert pool.places(b"beside") == ["a.dram"]
    pool.sessions_gone(SESSION)
    pool.tick(599)
    assert pool.used == 5, "whoever writes there may be at it still"
    pool.tick(1)
    assert pool.used == 2


def test_space_that_was_written_over_is_kept_by_the_next_master_too(memory: str) -> None:
    """The client that got it by a grant that the journal lost may still write to it."""
    pool = Pool("a", "b", granules=4, lease_s=10, put_release_s=600)
    pool.put(b"over", 2, preferred=("a.dram",))
    pool.put(b"both", 1, preferred=("a.dram", "b.dram"), num_replicas=2)
    pool.crash()
    pool.recount("b.dram")
    pool.recount("a.dram", spans=[(G, 2 * G)])
    assert pool.places(b"both") == ["b.dram"]
    come_back(pool, memory)
    pool.tick(599)
    assert pool.used == 4
    pool.tick(1)
    assert pool.used == 1
    come_back(pool, memory)
    assert pool.used == 1, "the journal knows that it is free"


def test_a_node_is_asked_about_the_time_that_an_earlier_master_lost(memory: str) -> None:
    """It did not answer that master, which placed objects on another node meanwhile."""
    pool = Pool("a", "b", granules=4, lease_s=10)
    over = pool.put(b"over", 2, preferred=("a.dram",))
    kept = list(pool.journal)
    pool.remove(b"over")
    lost = pool.put(b"lost", 2, preferred=("a.dram",))
    assert lost.replicas[0].offset == over.replicas[0].offset
    pool.journal = kept
    pool.crash()
    pool.answer_recounts("b")
    new = pool.put(b"new")
    for _ in range(2):
        if memory == "snapshot":
            pool.snapshot()
        pool.crash()
        assert pool.beat()["a.dram"].recount_above == over.generation
        assert pool.beat()["b.dram"].recount_above == new.generation
    pool.recount("a.dram", spans=[(lost.replicas[0].offset, 2 * G)])
    assert not pool.has(b"over")
    come_back(pool, memory)
    last = pool.put(b"last", preferred=("a.dram",))
    pool.crash()
    assert pool.beat()["a.dram"].recount_above == last.generation, "it has answered"


def test_nodes_are_told_which_grants_are_lost(memory: str) -> None:
    """What an earlier master granted after the last record, up to the first grant of this one. A master before it may
    have lost that, too: then the node is told of all of it together.
    """
    pool = Pool("a", "b", granules=4)
    known = pool.put(b"known").generation
    if memory == "snapshot":
        pool.snapshot()
    kept = list(pool.journal)
    lost = pool.start(b"lost").generation
    pool.journal = kept
    pool.crash()
    first = pool.epoch << 32
    replies = pool.beat()
    assert {(each.recount_above, each.refuse_up_to) for each in replies.values()} == {(known, first)}
    assert known < lost <= first
    pool.answer_recounts("b")
    assert pool.beat("b")["b.dram"].refuse_up_to == 0, "once is enough"
    new = pool.put(b"new", preferred=("b.dram",)).generation
    assert new > first
    if memory == "snapshot":
        pool.snapshot()
    pool.crash()
    first = pool.epoch << 32
    told = {name: (each.recount_above, each.refuse_up_to) for name, each in pool.beat().items()}
    assert told == {"a.dram": (known, first), "b.dram": (new, first)}
    pool.answer_recounts()
    pool.unmount("a.dram")
    assert pool.beat("b")["b.dram"].refuse_up_to == 0


def test_what_may_still_be_overwritten_is_not_viewed() -> None:
    """A client whose grant is lost may write in memory whose node has not answered. Copies are checked."""
    pool = Pool("a", "b", granules=4)
    for key, node in ((b"a", "a.dram"), (b"b", "b.dram")):
        pool.put(key, preferred=(node,))
    pool.put(b"both", num_replicas=2)
    pool.crash()
    pool.answer_recounts("b")
    for keys in ([b"a"], [b"both"], [b"b", b"a"]):
        with pytest.raises(NotSettled):
            pool.state.lookup(keys, pool.now_s, session=SESSION)
        assert None not in pool.state.lookup(keys, pool.now_s)
    assert SESSION not in pool.state.index.pins.owners(), "none is pinned then"
    assert pool.find(b"b", session=SESSION)
    pool.answer_recounts("a")
    assert pool.find(b"a", session=SESSION)
    pool.crash()
    pool.answer_recounts("b")
    pool.unmount("a.dram")
    pool.tick()
    assert pool.state.lookup([b"a", b"both"], pool.now_s, session=SESSION)[0] is None


def test_spans_among_many_free_ranges() -> None:
    pool = Pool("a", granules=20)
    for number in range(20):
        pool.put(b"%d" % number)
    for number in range(0, 20, 2):
        pool.remove(b"%d" % number)
    pool.crash()
    pool.recount("a.dram", spans=[(0, 5 * G), (10 * G, G), (19 * G, G)])
    gone = [number for number in range(1, 20, 2) if not pool.has(b"%d" % number)]
    assert gone == [1, 3, 19]
    assert pool.used == 13 + 1, "five granules, one, one; and seven objects"
    pool.tick(600)
    assert pool.used == 7


def test_a_snapshot_knows_generations_that_have_no_owner_any_more() -> None:
    """Else a node would report as unknown what was freed long ago, or what a process holds."""
    pool = Pool("a", granules=4)
    pool.put(b"k")
    held = pool.start(b"held", session=SESSION)
    pool.revoke(held, settled=False)
    gone = pool.start(b"gone")
    pool.revoke(gone, settled=True)
    pool.snapshot()
    pool.crash()
    assert pool.beat()["a.dram"].recount_above == gone.generation


def test_fates_have_numbers_that_stand_in_journals() -> None:
    assert {fate.name: fate.value for fate in RemovalReason} == {
        "EVICTED_WATERMARK": 1,
        "EVICTED_FOR_PUT": 2,
        "REMOVED": 3,
        "CORRUPT": 4,
        "NODE_GONE": 5,
        "PUT_ABANDONED": 6,
        "PUT_REVOKED": 7,
        "SSD_EVICTED": 8,
        "NOT_RECOVERED": 9,
        "REPLACED": 10,
        "LOG_DAMAGED": 11,
        "EVICTED_FOR_HOT": 12,
    }
