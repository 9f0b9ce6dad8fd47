"""Keys that many ask for get another replica, within bounds."""

from __future__ import annotations

from state_pool import Pool


def ask(pool: Pool, key: bytes, times: int) -> None:
    for _ in range(times):
        assert pool.use(key) == [True]


def test_a_hot_key_is_copied_to_another_node() -> None:
    pool = Pool("a", "b", hot_hits=4, hot_max_part=0.5)
    pool.put(b"k", preferred=("a.dram",))
    ask(pool, b"k", 3)
    assert pool.orders("b") == []
    ask(pool, b"k", 1)
    pool.carry_out("b")
    assert pool.places(b"k") == ["a.dram", "b.dram"]
    assert pool.counters["hot_replicas"] == 1
    ask(pool, b"k", 20)
    assert pool.orders("b") == [], "no more than hot_max_replicas"


def test_look_ups_are_counted_in_windows() -> None:
    pool = Pool("a", "b", hot_hits=4, hot_window_s=10, hot_max_part=0.5)
    pool.put(b"k")
    for _ in range(5):
        ask(pool, b"k", 3)
        pool.now_s += 10
    assert pool.counters["hot_replicas"] == 0


def test_it_can_be_turned_off_and_needs_two_nodes() -> None:
    for pool in (Pool("a", "b", hot_hits=0), Pool("a", hot_hits=1)):
        pool.put(b"k")
        ask(pool, b"k", 20)
        assert pool.counters["orders_in_progress"] == 0


def test_extra_replicas_take_a_bounded_part_of_the_pool() -> None:
    pool = Pool("a", "b", granules=20, hot_hits=1, hot_max_part=0.1)
    for number in range(10):
        pool.put(b"%d" % number)
        ask(pool, b"%d" % number, 1)
        pool.carry_out("a", "b")
    assert pool.counters["hot_replicas"] == 4
    assert pool.used == 14
    pool.remove(b"0", force=True)
    ask(pool, b"9", 1)
    pool.now_s += 10
    ask(pool, b"9", 1)
    pool.carry_out("a", "b")
    assert len(pool.places(b"9")) == 2, "what went makes room for others"


def test_a_pool_that_is_nearly_full_has_better_uses_for_its_space() -> None:
    pool = Pool("a", "b", granules=10, hot_hits=1, hot_max_part=1.0)
    for number in range(17):
        pool.put(b"%d" % number)
    ask(pool, b"0", 1)
    assert pool.counters["hot_replicas"] == 0


def test_one_request_counts_once_however_often_it_asks() -> None:
    """A prefill asks first what is there, waits for its turn, and then asks where to read it."""
    pool = Pool("a", "b", hot_hits=4, hot_max_part=0.5)
    pool.put(b"k", preferred=("a.dram",))
    for _ in range(3):
        pool.exist(b"k", b"gone")
        pool.state.lookup([b"k", b"gone"], pool.now_s, prefix=True, reads=False)
        pool.state.lookup([b"k"], pool.now_s, prefix=True)
    assert (pool.counters["hits"], pool.counters["misses"]) == (3, 3)
    assert pool.orders("b") == [], "three requests have used it"
    pool.use(b"k")
    pool.carry_out("b")
    assert pool.counters["hot_replicas"] == 1


def test_who_remembers_fewer_replicas_looks_the_key_up_again() -> None:
    pool = Pool("a", "b", hot_hits=1, hot_max_part=0.5)
    pool.put(b"k", preferred=("a.dram",))
    (info,) = pool.state.lookup([b"k"], pool.now_s)
    assert info is not None
    generation = info.replicas[0].generation
    assert pool.state.renew_leases([b"k"], [generation], pool.now_s, [1]).is_there == [True], "the copy is under way"
    pool.carry_out("b")
    assert pool.state.renew_leases([b"k"], [generation], pool.now_s, [1]).is_there == [False]
    assert pool.state.renew_leases([b"k"], [generation], pool.now_s, [2]).is_there == [True]
    assert pool.state.renew_leases([b"k"], [generation], pool.now_s).is_there == [True]
