"""Keys that many ask for get another replica: when, in place of what, as which chain, and when it goes again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from state_pool import G, Pool

from moonpool.base.errors import NoSpace
from moonpool.store.messages import OrderKind

WINDOW_S = 10.0


def ask(pool: Pool, *keys: bytes, times: int) -> None:
    """Use all of them, `times` times, and let a tick pass."""
    for _ in range(times):
        assert None not in pool.state.lookup(keys, pool.now_s)
    pool.tick()


def filled(part: float, granules: int = 100, **rules: Any) -> Pool:
    """Two nodes of which that part is used, by objects of one granule that nobody reads."""
    settings: dict[str, Any] = {"hot_hits": 4, "hot_max_part": 0.2, "high_watermark": 1.0, **rules}
    pool = Pool("a", "b", granules=granules, **settings)
    pool.fill([b"%d" % number for number in range(round(part * 2 * granules))])
    return pool


def hot_bytes(pool: Pool) -> int:
    """Granules of extra replicas."""
    return pool.counters["hot_bytes"] // G


def test_a_hot_key_is_copied_to_another_node() -> None:
    pool = Pool("a", "b", hot_hits=4, hot_max_part=0.5)
    pool.put(b"k", preferred=("a.dram",))
    ask(pool, b"k", times=3)
    assert pool.orders("b") == []
    ask(pool, b"k", times=1)
    pool.carry_out("b")
    assert pool.places(b"k") == ["a.dram", "b.dram"]
    assert pool.counters["hot_replicas"] == 1
    ask(pool, b"k", times=20)
    assert pool.orders("b") == [], "no more than hot_max_replicas"


def test_each_further_replica_takes_as_many_uses_again() -> None:
    pool = Pool("a", "b", "c", hot_hits=4, hot_max_part=0.5, hot_max_replicas=3)
    pool.put(b"k", preferred=("a.dram",))
    ask(pool, b"k", times=7)
    pool.carry_out("b", "c")
    assert len(pool.places(b"k")) == 2
    ask(pool, b"k", times=1)
    pool.carry_out("b", "c")
    assert sorted(pool.places(b"k")) == ["a.dram", "b.dram", "c.dram"]


def test_look_ups_are_counted_in_windows() -> None:
    pool = Pool("a", "b", hot_hits=4, hot_max_part=0.5)
    pool.put(b"k")
    for _ in range(5):
        ask(pool, b"k", times=3)
        pool.now_s += WINDOW_S
    assert pool.counters["orders_in_progress"] == 0


def test_uses_that_are_counted_together_count_each() -> None:
    """More than a thousand uses of one key between two ticks, and among many keys."""
    pool = Pool("a", "b", granules=600, hot_hits=2000, hot_max_part=0.5)
    keys = [b"%d" % number for number in range(500)]
    pool.fill(keys)
    for _ in range(1999):
        pool.state.lookup([b"0"], pool.now_s)
    pool.state.lookup(keys[1:], pool.now_s)
    pool.tick()
    assert pool.counters["orders_in_progress"] == 0
    pool.state.lookup(keys, pool.now_s)
    pool.tick()
    assert [order.key for node in "ab" for order in pool.orders(node)] == [b"0"]


def test_it_can_be_turned_off_and_needs_two_nodes() -> None:
    for pool in (Pool("a", "b", hot_hits=0), Pool("a", hot_hits=1)):
        pool.put(b"k")
        ask(pool, b"k", times=20)
        assert pool.counters["orders_in_progress"] == 0


def test_one_request_counts_once_however_often_it_asks() -> None:
    """A prefill asks first what is there, waits for its turn, and then asks where to read it."""
    pool = Pool("a", "b", hot_hits=4, hot_max_part=0.5)
    pool.put(b"k", preferred=("a.dram",))
    for _ in range(3):
        pool.exist(b"k", b"gone")
        pool.state.lookup([b"k", b"gone"], pool.now_s, prefix=True, reads=False)
        pool.state.lookup([b"k"], pool.now_s, prefix=True)
    pool.tick()
    assert (pool.counters["hits"], pool.counters["misses"]) == (3, 3)
    assert pool.orders("b") == [], "three requests have used it"
    ask(pool, b"k", times=1)
    pool.carry_out("b")
    assert pool.counters["hot_replicas"] == 1


# what clients remember


def test_who_remembers_other_replicas_looks_the_key_up_again() -> None:
    pool = Pool("a", "b", hot_hits=1, hot_max_part=0.5)
    first = pool.put(b"k", preferred=("a.dram",)).generation

    def is_there(generation: int, *num_replicas: int) -> bool:
        return pool.state.renew_leases([b"k"], [generation], pool.now_s, num_replicas).is_there == [True]

    assert is_there(first, 1)
    pool.tick()
    assert is_there(first, 1), "the copy is under way"
    pool.carry_out("b")
    second = max(each.generation for each in pool.find(b"k").replicas)  # type: ignore[union-attr]
    assert not is_there(first, 1)
    assert not is_there(first), "a client that does not say how many it remembers, remembers one"
    assert is_there(second, 2)
    pool.tick()
    pool.wait(2 * WINDOW_S)
    assert pool.places(b"k") == ["a.dram"], "it has cooled"
    assert not is_there(second, 2), "or an upsert would not void the replica that has left"
    assert is_there(first, 1)


# a full pool


@pytest.mark.parametrize(("part", "evicted"), [(0.5, 0), (0.89, 8), (0.93, 10), (0.99, 10)])
def test_replicas_take_the_place_of_what_would_go_next(part: float, evicted: int) -> None:
    pool = filled(part)
    count = pool.used
    hot = [b"%d" % number for number in range(count - 10, count)]
    for key in hot:
        ask(pool, key, times=4)
    pool.carry_out("a", "b")
    assert [len(pool.places(key)) for key in hot] == [2] * 10
    assert (pool.used, pool.counters["evicted"]) == (count + 10 - evicted, evicted)
    assert [number for number in range(count) if not pool.has(b"%d" % number)] == list(range(evicted)), "in its order"
    if evicted:
        assert "a second replica of an object that is used more took its place" in pool.why(b"0")


@pytest.mark.parametrize("part", [0.91, 0.93, 0.96])
def test_with_the_default_rules_a_pool_that_eviction_keeps_full_replicates(part: float) -> None:
    pool = Pool("a", "b", granules=150, eviction="prefix")
    pool.fill([b"%d" % number for number in range(round(part * 300))])
    hot = [b"%d" % number for number in range(100, 125)]
    for key in hot:
        ask(pool, key, times=20)
    pool.carry_out("a", "b")
    assert [len(pool.places(key)) for key in hot] == [2] * 25
    pool.tick()
    assert 270 <= pool.used <= 285


def warmed(pool: Pool, keys: Sequence[bytes], times: int) -> None:
    """Use these, but so long ago that their leases are over, in the same window."""
    for _ in range(times):
        pool.state.lookup(keys, pool.now_s)
    pool.wait(2)


@pytest.mark.parametrize(("times", "is_copied"), [(39, False), (41, True)])
def test_what_is_worth_more_per_byte_stays(times: int, is_copied: bool) -> None:
    """A byte of an object of ten granules is worth a tenth of its uses, and one of two replicas half of that."""
    pool = filled(0.92, granules=200, lease_s=1, hot_hits=39)
    pool.put(b"large", 10)
    others = [b"%d" % number for number in range(368)]
    warmed(pool, others, 2)
    before = pool.used
    ask(pool, b"large", times=times)
    pool.carry_out("a", "b")
    assert (len(pool.places(b"large")) == 2) is is_copied
    assert pool.has(*others) is not is_copied
    assert pool.used == before


def test_a_part_of_a_chain_is_copied_where_only_a_part_finds_its_place() -> None:
    pool = filled(0.91, lease_s=1)
    chain = put_chain(pool, 8)
    warmed(pool, [b"%d" % number for number in range(5, 182)], 3)
    ask(pool, *chain, times=4)
    pool.carry_out("a", "b")
    assert [len(pool.places(key)) for key in chain] == [2] * 5 + [1] * 3, "five objects were cold, the next one is not"
    assert pool.counters["evicted"] == 5


def test_what_is_leased_or_pinned_makes_no_way() -> None:
    pool = filled(1.0)
    for number in range(199):
        pool.exist(b"%d" % number)
    pool.pin(1, b"199")
    ask(pool, b"7", times=8)
    assert pool.counters["orders_in_progress"] == 0
    assert pool.counters["evicted"] == 0


def test_a_chain_makes_no_way_for_itself() -> None:
    """Its leases are over when its uses are counted, and its coldest block is the next to go."""
    pool = filled(0.9, lease_s=1)
    chain = put_chain(pool, 5)
    for times in range(8):
        pool.use(*chain[0 if times < 2 else 1 :])
    pool.now_s += 1
    pool.use(*[b"%d" % number for number in range(180)])
    pool.now_s += 2
    pool.tick()
    assert pool.has(*chain)
    assert (pool.counters["orders_in_progress"], pool.counters["evicted"]) == (0, 0)


def test_a_look_up_evicts_nothing() -> None:
    """Room for copies is made at ticks, in bounded steps: readers do not wait for it."""
    pool = filled(0.99)
    for _ in range(8):
        pool.use(b"150")
    assert (pool.counters["evicted"], pool.counters["orders_in_progress"]) == (0, 0)
    pool.tick()
    assert (pool.counters["evicted"], pool.counters["orders_in_progress"]) == (1, 1)


def test_room_is_found_where_the_next_to_go_lie_on_the_wrong_node() -> None:
    pool = Pool("a", "b", granules=20, hot_hits=4, hot_max_part=0.2, high_watermark=1.0, low_watermark=0.5)
    for number in range(40):
        pool.put(b"%d" % number, preferred=("a.dram" if number < 20 else "b.dram",))
    pool.put(b"hot", preferred=("a.dram",))
    assert not pool.has(b"0")
    ask(pool, b"hot", times=4)
    pool.carry_out("b")
    assert pool.places(b"hot") == ["a.dram", "b.dram"]
    assert pool.used >= 20, "nothing is evicted below the low watermark"


# chains


def put_chain(pool: Pool, count: int, name: bytes = b"block") -> list[bytes]:
    keys = [name + b"-%d" % number for number in range(count)]
    for key, parent in zip(keys, [b"", *keys], strict=False):
        pool.put(key, preferred=("a.dram",), parents=parent)
    return keys


def copied(pool: Pool) -> list[bytes]:
    """The keys that nodes are asked to copy, in the order of the orders."""
    return [each.key for each in sorted((o for n in "abc" for o in pool.orders(n)), key=lambda o: o.order_id)]


def test_a_hot_chain_is_copied_as_one() -> None:
    pool = Pool("a", "b", "c", granules=100, hot_hits=4, hot_max_part=0.5)
    chain = put_chain(pool, 8)
    ask(pool, *chain, times=4)
    orders = [order for node in "bc" for order in pool.orders(node)]
    assert [order.key for order in orders] == chain
    targets = [order.target for order in orders if order.target is not None]
    assert len({each.segment for each in targets}) == 1, "on one node"
    assert [each.offset - targets[0].offset for each in targets] == [at * G for at in range(8)], "side by side"


def test_blocks_that_are_half_as_warm_are_copied_with_the_hot_one_of_their_chain() -> None:
    pool = Pool("a", "b", granules=100, hot_hits=4, hot_max_part=0.5)
    chain, other = put_chain(pool, 8), put_chain(pool, 3, b"other")
    ask(pool, *chain[:6], *other, times=2)
    ask(pool, chain[6], times=1)
    assert copied(pool) == []
    ask(pool, chain[3], times=2)
    assert copied(pool) == chain[:6], "in its order, without what is cold or of another chain"


def test_a_stale_link_to_a_block_ends_a_chain() -> None:
    pool = Pool("a", "b", granules=100, hot_hits=4, hot_max_part=0.5)
    chain = put_chain(pool, 4)
    pool.remove(chain[1], force=True)
    pool.put(b"in its slot", preferred=("a.dram",))
    ask(pool, b"in its slot", chain[0], times=3)
    ask(pool, *chain[2:], times=4)
    assert copied(pool) == chain[2:]


def test_the_blocks_of_a_chain_on_two_nodes_go_to_the_other_one_each() -> None:
    pool = Pool("a", "b", granules=100, hot_hits=4, hot_max_part=0.5)
    keys = [b"%d" % number for number in range(6)]
    for number, key in enumerate(keys):
        pool.put(key, preferred=("ab"[number % 2] + ".dram",), parents=keys[number - 1] if number else b"")
    ask(pool, *keys, times=4)
    pool.carry_out("a", "b")
    assert [sorted(pool.places(key)) for key in keys] == [["a.dram", "b.dram"]] * 6


# budgets


def test_extra_replicas_take_a_bounded_part_of_the_pool() -> None:
    pool = Pool("a", "b", granules=20, hot_hits=1, hot_max_part=0.1)
    for number in range(10):
        pool.put(b"%d" % number)
        ask(pool, b"%d" % number, times=1)
    assert pool.counters["orders_in_progress"] == 4, "copies under way count"
    pool.carry_out("a", "b")
    ask(pool, b"9", times=1)
    assert (hot_bytes(pool), pool.used, pool.counters["orders_in_progress"]) == (4, 14, 0)
    pool.remove(b"0", force=True)
    ask(pool, b"9", times=1)
    pool.carry_out("a", "b")
    assert len(pool.places(b"9")) == 2, "what went makes room for others"
    assert hot_bytes(pool) == 4


def test_replicas_that_writers_asked_for_are_not_in_that_part() -> None:
    pool = Pool("a", "b", "c", granules=20, hot_hits=1, hot_max_part=0.1, hot_max_replicas=3)
    for number in range(10):
        pool.put(b"%d" % number, num_replicas=2)
    ask(pool, b"0", times=2)
    pool.carry_out("a", "b", "c")
    assert len(pool.places(b"0")) == 3
    assert hot_bytes(pool) == 1


def test_so_many_objects_are_copied_at_the_same_time() -> None:
    pool = Pool("a", "b", granules=100, hot_hits=4, hot_max_part=0.5, hot_copies_in_flight=3)
    chain = put_chain(pool, 8)
    ask(pool, *chain, times=4)
    assert copied(pool) == chain[:3]
    ask(pool, *chain, times=4)
    assert copied(pool) == chain[:3]
    pool.carry_out("b")
    ask(pool, *chain, times=4)
    assert copied(pool) == chain[3:6], "the rest follows when it is asked for again"


def test_copies_that_fail_are_not_counted_for_good() -> None:
    pool = Pool("a", "b", granules=20, hot_hits=4, hot_max_part=0.05, hot_copies_in_flight=1)
    pool.put(b"k", preferred=("a.dram",))
    for _ in range(3):
        ask(pool, b"k", times=4)
        (order,) = pool.orders("b")
        pool.answer(order, NoSpace("there is none"))
    assert pool.places(b"k") == ["a.dram"]
    ask(pool, b"k", times=4)
    pool.carry_out("b")
    assert pool.places(b"k") == ["a.dram", "b.dram"]


# cooling


@pytest.mark.parametrize("last_use_s", [0.0, 4.0, 9.9])
@pytest.mark.parametrize("part", [0.5, 0.89, 0.93, 0.99])
def test_the_bytes_of_what_has_cooled_are_back_within_two_windows(part: float, last_use_s: float) -> None:
    pool = filled(part)
    pool.wait(100 + last_use_s)
    before = pool.used
    chain = [b"%d" % number for number in range(before - 10, before)]
    ask(pool, *chain, times=4)
    pool.carry_out("a", "b")
    assert hot_bytes(pool) == 10
    full = pool.used
    for _ in range(20):
        pool.wait(WINDOW_S / 10)
    assert (hot_bytes(pool), pool.used) == (0, full - 10)
    assert [len(pool.places(key)) for key in chain] == [1] * 10
    assert pool.counters["hot_dropped"] == 10
    assert pool.used >= min(before, 170)


def test_what_is_asked_for_half_as_often_stays_hot() -> None:
    pool = Pool("a", "b", hot_hits=4, hot_max_part=0.5)
    pool.put(b"k")
    ask(pool, b"k", times=4)
    pool.carry_out("a", "b")
    for _ in range(5):
        pool.wait(WINDOW_S)
        ask(pool, b"k", times=2)
        assert len(pool.places(b"k")) == 2
    pool.wait(WINDOW_S)
    ask(pool, b"k", times=1)
    pool.wait(WINDOW_S)
    assert len(pool.places(b"k")) == 1
    assert pool.counters["hot_replicas"] == 1, "it was not made again and again"


def test_replicas_that_callers_asked_for_stay() -> None:
    pool = Pool("a", "b", "c", hot_hits=2, hot_max_part=0.5, hot_max_replicas=3)
    pool.put(b"put", num_replicas=2, preferred=("a.dram", "b.dram"))
    pool.put(b"copied", preferred=("a.dram",))
    pool.state.copy(b"copied", ["b.dram"], pool.now_s)
    pool.carry_out("b")
    ask(pool, b"put", b"copied", times=8)
    pool.carry_out("a", "b", "c")
    assert [len(pool.places(key)) for key in (b"put", b"copied")] == [3, 3]
    pool.wait(2 * WINDOW_S)
    assert [pool.places(key) for key in (b"put", b"copied")] == [["a.dram", "b.dram"]] * 2


def test_a_replica_goes_before_its_object() -> None:
    """These objects are the next to go, and it is not known before the end of the window that they have cooled."""
    pool = Pool("a", "b", granules=20, hot_hits=4, hot_max_part=0.2, lease_s=1, hot_window_s=100, low_watermark=0.5)
    for number in range(3):
        pool.put(b"%d" % number)
        ask(pool, b"%d" % number, times=4)
    pool.carry_out("a", "b")
    assert hot_bytes(pool) == 3
    pool.wait(2)
    for number in range(3, 40):
        pool.put(b"%d" % number)
    assert pool.has(*[b"%d" % number for number in range(40)]), "three replicas made room"
    assert hot_bytes(pool) == 0


def test_a_replica_goes_when_something_else_is_worth_more() -> None:
    pool = filled(0.95, lease_s=1)
    pool.put(b"large", 8)
    ask(pool, b"large", times=4)
    pool.carry_out("a", "b")
    assert len(pool.places(b"large")) == 2, "nobody reads the others"
    for _ in range(3):
        warmed(pool, [b"%d" % number for number in range(8, 190)], 2)
        ask(pool, b"large", times=4)
        pool.wait(WINDOW_S - 2)
    assert len(pool.places(b"large")) == 1, "all others are used half as often and take an eighth of the space"


def test_cooling_is_found_in_bounded_steps() -> None:
    pool = Pool("a", "b", granules=100, hot_hits=4, hot_max_part=0.5, step_objects=3)
    ask(pool, *put_chain(pool, 10), times=4)
    pool.carry_out("b")
    pool.now_s += 2 * WINDOW_S
    left = []
    while pool.state.tick(pool.now_s):
        pool.check()
        left.append(hot_bytes(pool))
    assert left == [7, 4, 1]
    assert hot_bytes(pool) == 0


def test_a_view_keeps_the_bytes_of_a_replica_until_it_is_closed() -> None:
    pool = Pool("a", "b", hot_hits=4, hot_max_part=0.5)
    pool.put(b"k", preferred=("a.dram",))
    ask(pool, b"k", times=4)
    pool.carry_out("b")
    pool.pin(1, b"k")
    pool.wait(2 * WINDOW_S)
    assert (pool.places(b"k"), pool.used) == (["a.dram"], 2)
    pool.unpin(1, b"k")
    assert pool.used == 1


def test_a_replica_that_readers_may_remember_is_voided_when_it_goes() -> None:
    pool = Pool("a", "b", hot_hits=4, hot_max_part=0.5, lease_s=60)
    pool.put(b"k", preferred=("a.dram",))
    ask(pool, b"k", times=4)
    (order,) = pool.carry_out("b")
    pool.wait(2 * WINDOW_S)
    assert pool.places(b"k") == ["a.dram"]
    (void,) = pool.orders("b")
    assert (void.kind, void.source) == (OrderKind.VOID, order.target)
    assert pool.used == 2
    pool.carry_out("b")
    pool.wait(60 - 2 * WINDOW_S)
    assert pool.used == 1, "when its lease has ended"


# nodes and masters that go


def test_a_replica_that_is_the_last_one_is_not_extra() -> None:
    pool = Pool("a", "b", "c", hot_hits=4, hot_max_part=0.5)
    pool.put(b"k", preferred=("a.dram",))
    ask(pool, b"k", times=4)
    pool.carry_out("b", "c")
    (other,) = set(pool.places(b"k")) - {"a.dram"}
    pool.unmount("a.dram")
    assert pool.places(b"k") == [other]
    assert hot_bytes(pool) == 0
    pool.wait(3 * WINDOW_S)
    assert pool.places(b"k") == [other]


@pytest.mark.parametrize("with_snapshot", [False, True])
def test_a_restarted_master_knows_which_replicas_are_extra(with_snapshot: bool) -> None:
    pool = Pool("a", "b", "c", hot_hits=4, hot_max_part=0.5)
    pool.wait(3)
    pool.put(b"hot", preferred=("a.dram",))
    pool.put(b"put", num_replicas=2)
    ask(pool, b"hot", times=4)
    pool.carry_out("b", "c")
    if with_snapshot:
        pool.snapshot()
    pool.restart()
    assert hot_bytes(pool) == 1
    pool.wait(WINDOW_S)
    ask(pool, b"hot", times=2)
    pool.wait(WINDOW_S)
    assert [len(pool.places(key)) for key in (b"hot", b"put")] == [2, 2], "it was used since"
    pool.wait(WINDOW_S)
    assert [len(pool.places(key)) for key in (b"hot", b"put")] == [1, 2]
    pool.restart()
    assert [len(pool.places(key)) for key in (b"hot", b"put")] == [1, 2]


# what is told


def test_what_they_saved_is_counted_and_told() -> None:
    pool = Pool("a", "b", hot_hits=4, hot_max_part=0.5)
    pool.put(b"k", 2, preferred=("a.dram",))
    ask(pool, b"k", times=4)
    pool.carry_out("b")
    assert "hot" not in pool.why(b"other")
    ask(pool, b"k", times=3)
    counters = pool.counters
    assert (counters["hot_objects"], counters["hot_bytes"]) == (1, 2 * G)
    assert (counters["hot_reads"], counters["hot_saved_bytes"]) == (3, 3 * G), "half of each read"
    assert pool.why(b"k").startswith(
        "this object is stored: 8192 bytes on a.dram, b.dram; the replica on b.dram was made because the object is hot "
        "(7 uses within 10 s); readers took about 12.3 kB from there; the lease of its last reader ends in"
    )
