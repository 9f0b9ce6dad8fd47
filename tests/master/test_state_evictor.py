"""Making room: by the watermark in bounded steps, at once for a put; what may go first, last and never."""

from __future__ import annotations

from functools import partial

import pytest
from state_pool import SESSION, G, Pool, num_calls

from moonpool.base.errors import NoSpace
from moonpool.master.policies import POLICIES
from moonpool.store import messages as m


def keys_of(pool: Pool, count: int = 30) -> list[int]:
    return [number for number in range(count) if pool.has(b"%d" % number)]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_above_the_high_mark_objects_go_until_the_low_one(policy: str) -> None:
    pool = Pool("a", granules=20, high_watermark=0.8, low_watermark=0.5, eviction=policy)
    for number in range(16):
        pool.put(b"%d" % number)
    pool.tick()
    assert pool.used == 16, "not above it yet"
    pool.put(b"16")
    pool.tick()
    assert pool.used == 10
    assert pool.counters["evicted"] == 7
    gone = next(number for number in range(17) if not pool.has(b"%d" % number))
    assert "above its high watermark" in pool.why(b"%d" % gone)


def test_the_least_recently_used_go_first() -> None:
    pool = Pool("a", granules=10, high_watermark=0.9, low_watermark=0.5, lease_s=1)
    for number in range(9):
        pool.put(b"%d" % number)
    pool.exist(b"0", b"2")
    pool.tick(2)
    pool.put(b"9")
    pool.tick()
    assert keys_of(pool) == [0, 2, 7, 8, 9]


def test_a_tick_is_one_bounded_step() -> None:
    pool = Pool("a", granules=20, high_watermark=0.5, low_watermark=0.1, step_objects=4)
    for number in range(20):
        pool.put(b"%d" % number)
    assert pool.state.tick(0.0), "there is more to do"
    assert pool.used == 16
    pool.tick()
    assert pool.used == 2


def test_a_put_that_finds_no_space_evicts_at_once() -> None:
    pool = Pool("a", granules=4, high_watermark=1.0, low_watermark=1.0)
    for number in range(4):
        pool.put(b"%d" % number)
    pool.put(b"new", 2)
    assert keys_of(pool) == [2, 3]
    assert "to make room for a put" in pool.why(b"0")


def test_eviction_goes_on_until_there_is_a_long_enough_range() -> None:
    pool = Pool("a", granules=6)
    for number in range(6):
        pool.put(b"%d" % number)
    pool.exist(b"1")  # leased, so the range around it is of no use
    pool.put(b"new", 4)
    assert keys_of(pool) == [1]


def test_puts_that_come_one_by_one_evict_in_the_order_of_the_policy() -> None:
    """What is left when there is room again is the next to go, not passed over."""
    pool = Pool("a", granules=40, high_watermark=1.0)
    for number in range(80):
        pool.put(b"%d" % number)
        assert keys_of(pool, 80) == list(range(max(0, number - 39), number + 1))


def test_what_is_leased_pinned_or_being_written_never_goes() -> None:
    pool = Pool("a", granules=4)
    pool.put(b"hard", hard_pin=True)
    pool.put(b"pinned")
    pool.pin(1, b"pinned")
    pool.put(b"leased")
    pool.exist(b"leased")
    pool.start(b"writing")
    assert pool.refused(b"new") == "no_space"
    refusal = pool.try_start(b"new")
    assert isinstance(refusal, m.Refusal)
    assert "leased, pinned or being written" in refusal.message
    assert pool.has(b"hard", b"pinned", b"leased")


def test_soft_pins_go_last_and_only_for_puts() -> None:
    pool = Pool("a", granules=4, high_watermark=0.5, low_watermark=0.25)
    pool.put(b"soft", soft_pin_s=100)
    pool.put(b"1")
    pool.put(b"2")
    pool.put(b"3")
    pool.tick()
    assert pool.has(b"soft")
    assert pool.used == 1, "everything else went first"
    pool.put(b"soft2", 3, soft_pin_s=100)
    pool.tick()
    assert pool.has(b"soft", b"soft2"), "the watermark does not touch them"
    pool.put(b"new", 4)
    assert not pool.has(b"soft")


def test_a_soft_pin_ends() -> None:
    pool = Pool("a", granules=4, high_watermark=0.5, low_watermark=0.25)
    for number in range(4):
        pool.put(b"%d" % number, soft_pin_s=10 if number < 2 else 0)
    pool.tick(10)
    assert pool.used == 1
    assert keys_of(pool) == [3]


def test_many_soft_pins_do_not_hide_what_may_go() -> None:
    pool = Pool("a", granules=40, high_watermark=0.9, low_watermark=0.8, step_objects=4)
    for number in range(30):
        pool.put(b"%d" % number, soft_pin_s=100)
    for number in range(30, 40):
        pool.put(b"%d" % number)
    for _ in range(20):
        pool.tick(0.1)
    assert pool.used <= 36
    assert keys_of(pool, 30) == list(range(30))


def test_groups_go_together() -> None:
    pool = Pool("a", granules=6)
    pool.put(b"a1", groups=b"g")
    pool.put(b"x")
    pool.put(b"a2", 2, groups=b"g")
    pool.put(b"y", 2)
    pool.put(b"new")
    assert not pool.has(b"a1")
    assert not pool.has(b"a2")
    assert pool.has(b"x", b"y")
    assert pool.counters["evicted"] == 2


@pytest.mark.parametrize("kept", ["pin", "hard", "lease"])
def test_a_group_stays_while_one_of_it_is_kept(kept: str) -> None:
    pool = Pool("a", granules=4, lease_s=10)
    pool.put(b"a1", groups=b"g")
    pool.put(b"a2", groups=b"g", hard_pin=kept == "hard")
    if kept == "pin":
        pool.pin(SESSION, b"a2")
    elif kept == "lease":
        pool.exist(b"a2")
    pool.put(b"x", 2)
    pool.put(b"new", 2)
    assert pool.has(b"a1", b"a2")
    assert not pool.has(b"x")


def test_what_is_on_ssd_already_goes_first_and_stays_readable() -> None:
    pool = Pool("a", granules=4, ssd_granules=100)
    for number in range(4):
        pool.put(b"%d" % number)
    later = [order for order in pool.orders("a") if order.key in (b"2", b"3")]
    for order in later:
        pool.answer(order)
    pool.put(b"new", 2)
    assert pool.places(b"0") == pool.places(b"1") == ["a.dram"]
    assert pool.places(b"2") == pool.places(b"3") == ["a.ssd"]


def test_what_no_ssd_has_taken_goes_when_there_is_nothing_else() -> None:
    pool = Pool("a", granules=4, ssd_granules=100)
    for number in range(4):
        pool.put(b"%d" % number)
    pool.put(b"new", 4)
    assert keys_of(pool) == []
    assert pool.has(b"new")


def test_an_ssd_that_takes_nothing_does_not_stop_eviction() -> None:
    pool = Pool("a", granules=20, ssd_granules=100, high_watermark=0.5, low_watermark=0.2, step_objects=2)
    for number in range(20):
        pool.put(b"%d" % number)
    for order in pool.orders("a"):
        pool.answer(order, NoSpace("disk full"))
    for _ in range(40):
        pool.tick(0.01)
    assert pool.used == 4


def test_an_evicted_object_with_a_replica_on_an_ssd_that_is_away_waits_for_it() -> None:
    pool = Pool("a", granules=4, ssd_granules=100)
    pool.mount("b", 4)
    pool.put(b"k", preferred=("a.dram",))
    pool.carry_out("a")
    pool.state.copy(b"k", ["b.dram"], pool.now_s)
    pool.carry_out("b")
    pool.unmount("a.ssd")
    pool.unmount("a.dram")
    assert pool.places(b"k") == ["b.dram"]
    pool.put(b"big", 4)
    assert not pool.has(b"k")
    assert "SSD whose node is away" in pool.why(b"k")


def test_evicting_costs_no_more_than_it_must() -> None:
    pool = Pool("a", "b", granules=10)
    for number in range(20):
        pool.put(b"%d" % number)
    pool.put(b"new")
    assert pool.counters["evicted"] == 1
    assert pool.state.stats().used_nbytes == 20 * G


def calls_of_a_batch_in_a_full_pool(num_segments: int) -> int:
    granules = 4096 // num_segments
    pool = Pool(*(f"n{number}" for number in range(num_segments)), granules=granules, high_watermark=1.0)
    counts: list[int] = []
    for first in range(0, 6 * 1024, 1024):
        keys = [b"%d" % number for number in range(first, first + 1024)]
        replies: list[m.PutReply] = []
        counts.append(num_calls(partial(put_all, pool, keys, replies)))
        assert not replies[0].refusals
        pool.state.put_end(keys, replies[0].generations, {}, 0.0)
    assert pool.used == 4096
    return min(counts[4:])


def put_all(pool: Pool, keys: list[bytes], replies: list[m.PutReply]) -> None:
    replies.append(pool.state.put_start(keys, [G] * len(keys), m.PutOptions(), 0.0))


def test_not_every_segment_is_asked_for_every_object_of_a_batch() -> None:
    assert calls_of_a_batch_in_a_full_pool(512) < 3 * calls_of_a_batch_in_a_full_pool(1)
