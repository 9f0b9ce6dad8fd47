"""What depends on how full the pool, a disk or the table is: each such rule at 50, 89, 93 and 99 %.

Of hot replicas see test_state_hot_keys.py.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from state_pool import SESSION, G, Pool, held, offload

from moonpool.base.errors import NoSpace
from moonpool.master.state import ahead, promotions
from moonpool.node.ssd.types import SsdStats
from moonpool.node.ssd_tier import is_compaction_due
from moonpool.store.messages import GrantAhead, OrderKind, PutAt, PutOptions, ahead_key

PARTS = (50, 89, 93, 99)
at_each = pytest.mark.parametrize("percent", PARTS)


def filled(percent: int, *nodes: str, **rules: Any) -> Pool:
    """A pool of 200 granules, used so far, by objects of one granule under the keys 0, 1, 2, ... Nothing is leased."""
    names = nodes or ("a", "b")
    pool = Pool(*names, granules=200 // len(names), **rules)
    pool.fill([b"%d" % number for number in range(2 * percent)])
    assert pool.used == 2 * percent
    return pool


def test_eviction_begins_above_the_high_mark_and_ends_at_the_low_one() -> None:
    left = {}
    for percent in PARTS:
        pool = filled(percent)
        pool.tick()
        left[percent] = pool.used
        assert pool.has(*[b"%d" % number for number in range(2 * percent - left[percent], 2 * percent)])
    assert left == {50: 100, 89: 178, 93: 186, 99: 180}


def test_eviction_that_has_begun_goes_on_below_the_high_mark() -> None:
    pool = filled(99, step_objects=4)
    used = []
    while pool.state.tick(pool.now_s):
        used.append(pool.used)
    assert used[:3] == [194, 190, 186]
    assert pool.used == 180


@at_each
def test_a_put_evicts_only_what_it_needs(percent: int) -> None:
    pool = filled(percent, "a")
    pool.put(b"new", 10)
    evicted = 10 if percent == 99 else 0
    assert (pool.used, pool.counters["evicted"]) == (2 * percent + 10 - evicted, evicted)


@at_each
def test_copies_that_callers_ask_for_evict_nothing(percent: int) -> None:
    pool = filled(percent)
    pool.put(b"large", 1, preferred=("a.dram",))
    pool.state.copy(b"large", ["b.dram"], pool.now_s)
    pool.carry_out("b")
    assert pool.places(b"large") == ["a.dram", "b.dram"]
    full = Pool("a", "b", granules=100)
    full.put(b"k", preferred=("a.dram",))
    full.fill([b"%d" % number for number in range(percent)], preferred=("b.dram",))
    full.put(b"rest", 100 - percent, preferred=("b.dram",))
    with pytest.raises(NoSpace):
        full.state.copy(b"k", ["b.dram"], full.now_s)
    assert full.counters["evicted"] == 0


def granted(pool: Pool, count: int) -> int:
    pool.sessions.add(SESSION)
    reply = pool.state.grant_ahead(GrantAhead(G, count, session=SESSION), pool.now_s)
    pool.check()
    return len(reply.generations)


@at_each
def test_space_is_granted_ahead_below_the_middle_of_high_mark_and_end(percent: int) -> None:
    """97.5 % with these rules; and never more than a sixteenth of the pool."""
    pool = filled(percent)
    assert granted(pool, 64) == (12 if percent < 90 else 0), "all that was asked for, or nothing"
    assert int(ahead.MAX_PART * 200) == 12
    expected = {50: 0, 89: 0, 93: 9, 99: 0}[percent]
    assert granted(pool, 9) == expected


@at_each
def test_clients_give_space_ahead_back_when_the_pool_is_short(percent: int) -> None:
    pool = Pool("a", "b", granules=100)
    reply = pool.state.grant_ahead(GrantAhead(G, 4, session=SESSION), pool.now_s)
    pool.sessions.add(SESSION)
    pool.check()
    pool.fill([b"%d" % number for number in range(2 * percent - 4)])
    first, second, *_ = reply.generations
    is_short = percent == 99
    assert pool.state.put_renew([ahead_key(first)], [first], pool.now_s) == [not is_short]
    answer = pool.state.put_at(PutAt(b"new", second, G, PutOptions()), pool.now_s)
    assert (answer.refusal, answer.may_hold) == (None, not is_short)


@at_each
def test_the_emptiest_node_gets_what_is_new(percent: int) -> None:
    pool = Pool("a", "b", granules=100)
    pool.fill([b"%d" % number for number in range(percent)], preferred=("a.dram",))
    pool.put(b"new")
    assert pool.places(b"new") == ["b.dram"]


@at_each
def test_a_node_that_joins_gets_its_share_and_all_that_fits_nowhere_else(percent: int) -> None:
    pool = Pool("a", granules=100, high_watermark=1.0)
    pool.fill([b"%d" % number for number in range(percent)])
    pool.now_s = 100.0
    pool.mount("young", 100)
    pool.tick()
    pool.fill([b"new-%d" % number for number in range(110 - percent)])
    on_young = sum(pool.places(b"new-%d" % number) == ["young.dram"] for number in range(110 - percent))
    assert on_young == 10
    assert pool.counters["evicted"] == 0


@at_each
def test_a_drain_moves_what_the_other_nodes_have_room_for(percent: int) -> None:
    pool = Pool("a", "b", granules=100)
    for name in "ab":
        pool.fill([b"%s-%d" % (name.encode(), number) for number in range(percent)], preferred=(f"{name}.dram",))
    task = pool.state.drain("a.dram", pool.now_s)
    for _ in range(20):
        pool.tick(0.1)
        pool.carry_out("a", "b")
    moved = sum(pool.places(b"a-%d" % number) == ["b.dram"] for number in range(percent))
    assert moved == (50 if percent == 50 else moved)
    assert moved >= 100 - percent
    info = pool.state.task(task, pool.now_s)
    assert info is not None
    assert info.state == ("done" if percent == 50 else "running")
    assert pool.used + pool.counters["evicted"] == 2 * percent, "nothing is lost but by eviction above the mark"


# memory over SSD


def on_disk(percent: int, **rules: Any) -> Pool:
    """One node: 4 objects are on its SSD alone, and its memory is used so far."""
    pool = Pool("a", granules=100, ssd_granules=1000, high_watermark=1.0, **rules)
    pool.fill([b"disk-%d" % number for number in range(4)])
    offload(pool)
    pool.fill([b"%d" % number for number in range(100)])
    assert all(pool.places(b"disk-%d" % number) == ["a.ssd"] for number in range(4))
    for number in range(100 - percent):
        pool.remove(b"%d" % number, force=True)
    assert pool.used == percent
    return pool


def copies_from_disk(pool: Pool) -> int:
    return sum(order.kind is OrderKind.COPY for order in pool.orders("a"))


@at_each
def test_objects_come_back_from_disk_while_there_is_room(percent: int) -> None:
    pool = on_disk(percent)
    for _ in range(2):
        pool.use(*[b"disk-%d" % number for number in range(4)])
    assert copies_from_disk(pool) == (1 if percent == 99 else 4)
    assert pool.counters["evicted"] == 4, "those of the beginning"


@at_each
def test_objects_that_are_asked_for_come_back_within_their_budget(percent: int) -> None:
    pool = on_disk(percent)
    asked = pool.state.promotions.ask([b"disk-%d" % number for number in range(4)], pool.now_s)
    assert asked == min(4, 100 - percent)
    assert int(promotions.MAX_PART * 100) == 6


@at_each
def test_records_leave_a_disk_above_its_mark(percent: int) -> None:
    pool = Pool("a", granules=200, ssd_granules=100)
    pool.fill([b"%d" % number for number in range(percent)])
    items = offload(pool)
    assert len(items) == percent
    pool.tick(100)
    assert pool.counters["evicted_ssd"] == (4 if percent == 99 else 0)
    assert pool.has(*[b"%d" % number for number in range(percent)]), "they are in memory, too"


@at_each
def test_a_disk_is_written_while_it_has_room_for_all_that_is_under_way(percent: int) -> None:
    pool = Pool("a", granules=200, ssd_granules=100, ssd_high_watermark=1.0, offloads_in_flight=1000)
    pool.fill([b"%d" % number for number in range(percent)])
    items = offload(pool)
    pool.fill([b"new-%d" % number for number in range(20)])
    assert len(pool.orders("a")) == min(20, 100 - percent)
    assert all(held(order).generation for order in pool.orders("a"))
    assert len(items) == percent


@pytest.mark.parametrize(("percent", "is_due"), [(50, False), (89, False), (93, False), (99, True)])
def test_a_log_is_compacted_when_its_free_space_is_short(percent: int, is_due: bool) -> None:
    nothing: dict[str, Any] = dict.fromkeys([field.name for field in fields(SsdStats)], 0)
    found = {**nothing, "live_nbytes": percent - 1, "dead_nbytes": 1, "free_nbytes": 100 - percent}
    assert is_compaction_due(SsdStats(**found), 100) is is_due


# the table


@at_each
def test_a_table_evicts_when_every_slot_is_taken(percent: int) -> None:
    pool = Pool("a", granules=200, max_objects=100)
    pool.fill([b"%d" % number for number in range(percent)])
    pool.fill([b"new-%d" % number for number in range(10)])
    assert pool.counters["evicted"] == max(0, percent + 10 - 100)
    assert pool.has(*[b"new-%d" % number for number in range(10)])
