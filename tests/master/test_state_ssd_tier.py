"""DRAM over SSD: what is written behind, what goes, and what comes back to memory."""

from __future__ import annotations

import pytest
from state_pool import G, Pool, offload, on_ssd_alone

from moonpool.base.errors import Corrupt, NoSpace, Overloaded, StaleGeneration, Unavailable
from moonpool.store import messages as m

# down


def test_every_object_is_offloaded_in_the_order_it_was_stored() -> None:
    pool = Pool("a", ssd_granules=100, offloads_in_flight=2)
    pool.mount("b")
    for number in range(4):
        pool.put(b"%d" % number, 2, preferred=("a.dram",))
    pool.put(b"elsewhere", preferred=("b.dram",))
    orders = pool.orders("a")
    assert [order.key for order in orders] == [b"0", b"1"]
    assert all(order.kind is m.OrderKind.OFFLOAD for order in orders)
    assert orders[0].source.segment == "a.dram"
    offset = pool.answer(orders[0])
    found = pool.find(b"0")
    assert found is not None
    assert [each.segment for each in found.replicas] == ["a.dram", "a.ssd"], "memory before disk"
    assert found.replicas[1] == m.Placement("a.ssd", offset or 0, 1, orders[0].source.generation)
    assert [order.key for order in pool.orders("a")] == [b"1", b"2"]
    pool.carry_out("a")
    assert pool.counters["offloaded"] == 4
    assert pool.places(b"elsewhere") == ["b.dram"], "its node has no SSD"


def test_an_object_goes_to_the_ssd_of_any_node_that_has_it() -> None:
    pool = Pool("b")
    pool.mount("a")
    pool.mount_ssd("a")
    pool.put(b"k", num_replicas=2, preferred=("b.dram", "a.dram"))
    pool.carry_out("a")
    assert pool.places(b"k") == ["b.dram", "a.dram", "a.ssd"]


def test_an_object_that_moved_meanwhile_goes_to_the_ssd_of_its_new_node() -> None:
    pool = Pool("a", "b", ssd_granules=100, offloads_in_flight=1)
    pool.put(b"first", preferred=("a.dram",))
    pool.put(b"k", preferred=("a.dram",))
    pool.state.move(b"k", "a.dram", "b.dram", 0.0)
    (copy,) = pool.orders("b")
    pool.answer(copy)
    pool.carry_out("a", "b")
    assert pool.places(b"k") == ["b.dram", "b.ssd"]


@pytest.mark.parametrize("error", [NoSpace("disk full"), Overloaded("busy")])
def test_a_disk_that_refuses_is_asked_again_a_while_later(error: NoSpace) -> None:
    pool = Pool("a", ssd_granules=100)
    pool.put(b"k")
    (order,) = pool.orders("a")
    pool.answer(order, error)
    assert pool.orders("a") == []
    pool.tick(0.5)
    assert pool.orders("a") == []
    pool.tick(0.6)
    assert len(pool.orders("a")) == 1
    assert pool.counters["offload_failures"] == 1


def test_a_node_that_does_not_answer_is_asked_again() -> None:
    pool = Pool("a", ssd_granules=100, order_timeout_s=60)
    pool.put(b"k")
    pool.wait(60)
    pool.wait(2)
    (order,) = pool.orders("a")
    pool.answer(order)
    assert pool.places(b"k") == ["a.dram", "a.ssd"]


def test_what_cannot_be_read_is_not_tried_again() -> None:
    pool = Pool("a", ssd_granules=100)
    for key, error in ((b"stale", StaleGeneration("gone")), (b"bad", Corrupt("wrong bytes"))):
        pool.put(key)
        for _ in range(2):  # a stale one once more, under another generation
            for order in pool.orders("a"):
                pool.answer(order, error)
        pool.tick(5)
        assert pool.orders("a") == []
    assert pool.places(b"stale") == ["a.dram"]
    assert not pool.has(b"bad"), "a corrupt source is quarantined"


def test_an_object_older_than_a_record_of_its_key_is_written_under_a_new_generation() -> None:
    """Space that was granted ahead may be used after space with a higher generation."""
    pool = Pool("a", ssd_granules=100)
    pool.put(b"k")
    (order,) = pool.orders("a")
    pool.answer(order, StaleGeneration("the log knows a newer one"))
    (again,) = pool.orders("a")
    assert (again.kind, again.source) == (order.kind, order.source)
    assert again.target is not None
    assert again.target.generation > order.source.generation
    pool.answer(again)
    found = pool.find(b"k")
    assert found is not None
    assert [each.generation for each in found.replicas] == [order.source.generation, again.target.generation]
    assert pool.counters["offload_failures"] == 0
    pool.remove(b"k")
    (drop,) = pool.orders("a")
    assert drop.source.generation == again.target.generation


def test_a_record_of_what_was_removed_meanwhile_is_dropped() -> None:
    pool = Pool("a", ssd_granules=100)
    pool.put(b"k")
    (order,) = pool.orders("a")
    pool.remove(b"k")
    offset = pool.answer(order)
    (drop,) = pool.orders("a")
    assert drop.kind is m.OrderKind.DROP
    assert (drop.key, drop.source.generation, drop.source.offset) == (b"k", order.source.generation, offset)
    pool.answer(drop)
    assert pool.orders("a") == []


def test_removing_and_replacing_drop_the_record() -> None:
    pool = Pool("a", ssd_granules=100)
    for remove in (True, False):
        pool.put(b"k")
        offload(pool)
        if remove:
            pool.remove(b"k")
        else:
            pool.put(b"k", replace=True)
        kinds = [order.kind for order in pool.orders("a")]
        assert m.OrderKind.DROP in kinds
        offload(pool)


# going


def test_above_the_mark_the_oldest_unused_records_go() -> None:
    pool = Pool("a", granules=30, ssd_granules=10, ssd_high_watermark=0.8, lease_s=1)
    for number in range(8):
        pool.put(b"%d" % number)
    offload(pool)
    pool.use(b"0", b"1")
    pool.tick(5)
    pool.put(b"8")
    pool.put(b"9")
    offload(pool)
    pool.tick()
    gone = [number for number in range(10) if "a.ssd" not in pool.places(b"%d" % number)]
    assert gone == [2, 3], "0 and 1 were used since the hand passed by"
    assert pool.counters["evicted_ssd"] == 2
    drops = [order for order in pool.orders("a") if order.kind is m.OrderKind.DROP]
    assert [order.key for order in drops] == [b"2", b"3"]
    changes = pool.state.take_changes()
    assert changes is not None
    assert dict(changes.tiers).get(b"0") == m.Tier.DRAM | m.Tier.SSD
    assert b"2" in changes.stored
    assert b"2" not in dict(changes.tiers), "in DRAM alone"


def test_the_last_replica_of_an_object_goes_with_its_record() -> None:
    pool = Pool("a", granules=4, ssd_granules=10, ssd_high_watermark=0.5)
    on_ssd_alone(pool, b"old")
    for number in range(5):
        pool.put(b"%d" % number)
        offload(pool)
        pool.tick()
    assert "evicted from SSD" in pool.why(b"old")
    ssd = next(each for each in pool.state.stats().segments if each.tier is m.Tier.SSD)
    assert ssd.used_nbytes <= 5 * G


def test_what_its_ssd_has_let_go_does_not_outlive_others_in_memory() -> None:
    pool = Pool("a", granules=4, ssd_granules=4, ssd_high_watermark=0.5, high_watermark=1.0)
    for number in range(4):
        pool.put(b"%d" % number)
        offload(pool)
        pool.tick()
    assert pool.places(b"0") == ["a.dram"]
    assert pool.places(b"3") == ["a.dram", "a.ssd"]
    pool.put(b"new", 2)
    assert not pool.has(b"0")
    assert pool.places(b"3") == ["a.dram", "a.ssd"]


def test_records_that_are_kept_stay_and_nobody_spins() -> None:
    pool = Pool("a", granules=10, ssd_granules=4, ssd_high_watermark=0.5, step_objects=2)
    for number in range(4):
        pool.put(b"%d" % number, hard_pin=True)
    offload(pool)
    assert not pool.state.tick(pool.now_s), "there is nothing that it could do"
    assert all("a.ssd" in pool.places(b"%d" % number) for number in range(4))


def test_groups_go_from_an_ssd_together() -> None:
    pool = Pool("a", granules=20, ssd_granules=10, ssd_high_watermark=0.5, lease_s=1)
    for number in range(6):
        pool.put(b"%d" % number, groups=b"g" if number in (0, 3) else b"")
    offload(pool)
    pool.tick()
    gone = [number for number in range(6) if "a.ssd" not in pool.places(b"%d" % number)]
    assert gone == [0, 3]


def test_a_large_object_makes_its_room_on_a_full_ssd() -> None:
    pool = Pool("a", granules=40, ssd_granules=10, ssd_high_watermark=0.9)
    for number in range(9):
        pool.put(b"%d" % number)
    offload(pool)
    pool.put(b"large", 5)
    pool.put(b"huge", 20)
    pool.put(b"small")
    for _ in range(3):
        pool.tick(1)
        offload(pool)
    assert pool.places(b"large") == ["a.dram", "a.ssd"]
    assert pool.places(b"huge") == ["a.dram"], "the disk could never hold it, and nobody waits behind it"
    assert pool.places(b"small") == ["a.dram", "a.ssd"]


def test_a_long_queue_is_looked_at_in_steps() -> None:
    pool = Pool("a", granules=64, ssd_granules=1000, offloads_in_flight=1, step_objects=4)
    for number in range(40):
        pool.put(b"%d" % number)
    for number in range(40):
        pool.remove(b"%d" % number)
    pool.put(b"k")
    for _ in range(20):
        pool.tick(0.1)
        offload(pool)
    assert pool.places(b"k") == ["a.dram", "a.ssd"]


# up


def test_an_object_comes_back_when_it_is_asked_for_again() -> None:
    pool = Pool("a", ssd_granules=100, promote_after_hits=2)
    on_ssd_alone(pool, b"k")
    pool.use(b"k")
    assert pool.orders("a") == []
    pool.use(b"k")
    (order,) = pool.orders("a")
    assert order.kind is m.OrderKind.COPY
    assert (order.source.segment, order.target and order.target.segment) == ("a.ssd", "a.dram")
    pool.answer(order)
    assert pool.places(b"k") == ["a.dram", "a.ssd"]
    assert pool.counters["ssd_hits"] == 2
    assert pool.counters["promoted"] == 1
    pool.tick(100)
    pool.put(b"filler", 10)
    assert pool.places(b"k") == ["a.ssd"], "it was evicted from memory again, and nothing had to be written"


def test_promotion_can_be_turned_off() -> None:
    pool = Pool("a", ssd_granules=100, promote_after_hits=0)
    on_ssd_alone(pool, b"k")
    for _ in range(5):
        pool.use(b"k")
    assert pool.orders("a") == []


def test_hits_of_an_earlier_object_do_not_count() -> None:
    pool = Pool("a", ssd_granules=100, promote_after_hits=2, lease_s=1)
    on_ssd_alone(pool, b"k")
    pool.use(b"k")
    pool.remove(b"k", force=True)
    pool.tick(2)
    on_ssd_alone(pool, b"other")  # in the same slot
    pool.use(b"other")
    assert pool.orders("a") == []


def test_the_next_blocks_of_a_prefix_come_along() -> None:
    pool = Pool("a", granules=12, ssd_granules=100, promote_after_hits=1, read_ahead_blocks=2)
    for number in range(6):
        pool.put(b"%d" % number, parents=b"%d" % (number - 1) if number else b"")
    on_ssd_alone(pool)
    pool.put(b"filler", 12)
    pool.remove(b"filler")
    assert pool.places(b"0") == ["a.ssd"]
    pool.state.lookup([b"0", b"1"], pool.now_s, prefix=True)
    asked = [order.key for order in pool.orders("a") if order.kind is m.OrderKind.COPY]
    assert asked == [b"0", b"1", b"2", b"3"]
    pool.carry_out("a")
    assert pool.places(b"3") == ["a.dram", "a.ssd"]
    assert pool.places(b"4") == ["a.ssd"]


def test_a_corrupt_record_is_quarantined() -> None:
    pool = Pool("a", ssd_granules=100)
    pool.put(b"k")
    offload(pool)
    assert pool.corrupt(b"k", "a.ssd")
    assert pool.places(b"k") == ["a.dram"]
    on_ssd_alone(pool, b"other")
    assert pool.corrupt(b"other", "a.ssd")
    assert "wrong bytes" in pool.why(b"other")


def test_what_was_bad_on_disk_is_written_once_more_when_it_was_dropped() -> None:
    """Not before: the log has one record of a generation, and an inventory could not tell them apart."""
    pool = Pool("a", ssd_granules=100)
    pool.put(b"k")
    offload(pool)
    assert pool.corrupt(b"k", "a.ssd")
    (drop,) = pool.orders("a")
    assert drop.kind is m.OrderKind.DROP
    pool.answer(drop)
    (again,) = pool.orders("a")
    assert again.kind is m.OrderKind.OFFLOAD
    pool.answer(again)
    assert pool.places(b"k") == ["a.dram", "a.ssd"]


def test_a_bad_record_that_could_not_be_dropped_is_not_written_once_more() -> None:
    pool = Pool("a", ssd_granules=100)
    pool.put(b"k")
    offload(pool)
    assert pool.corrupt(b"k", "a.ssd")
    (drop,) = pool.orders("a")
    pool.answer(drop, Unavailable("the disk is not in use"))
    assert pool.orders("a") == []


@pytest.mark.parametrize("replaced", [False, True])
def test_what_was_removed_before_its_bad_record_was_dropped_is_not_written_once_more(replaced: bool) -> None:
    pool = Pool("a", ssd_granules=100)
    pool.put(b"k")
    offload(pool)
    assert pool.corrupt(b"k", "a.ssd")
    (drop,) = pool.orders("a")
    pool.remove(b"k")
    if replaced:
        pool.put(b"k")
    before = pool.orders("a")
    pool.answer(drop)
    assert [order for order in before if order is not drop] == pool.orders("a")


def test_a_record_that_made_way_on_disk_is_not_written_once_more() -> None:
    pool = Pool("a", granules=20, ssd_granules=4, ssd_high_watermark=0.5)
    for number in range(4):
        pool.put(b"%d" % number)
    offload(pool)
    pool.tick()
    assert {order.kind for order in pool.carry_out("a")} == {m.OrderKind.DROP}


@pytest.mark.parametrize("found_by_reader", [False, True])
def test_another_replica_is_offloaded_when_one_turns_out_to_be_bad(found_by_reader: bool) -> None:
    pool = Pool("a", "b", ssd_granules=100)
    pool.put(b"k", num_replicas=2)
    (order,) = [*pool.orders("a"), *pool.orders("b")]
    if found_by_reader:
        assert pool.corrupt(b"k", order.source.segment)
        pool.answer(order, StaleGeneration("its space has been given away"))
    else:
        pool.answer(order, Corrupt("wrong bytes"))
    assert len(pool.places(b"k")) == 1
    pool.carry_out("a", "b")
    assert len(pool.places(b"k")) == 2


def test_a_late_report_does_not_hurt_a_record_that_compaction_moved() -> None:
    pool = Pool("a", ssd_granules=100)
    item = on_ssd_alone(pool, b"k")[b"k"]
    found = pool.find(b"k")
    assert found is not None
    (old,) = found.replicas
    assert pool.state.members.relocated("a.ssd", 1, [(b"k", item.generation, 9 * G)]) == [True]
    assert not pool.report_corrupt(b"k", old)
    assert pool.places(b"k") == ["a.ssd"]
    assert pool.corrupt(b"k", "a.ssd"), "who reads it where it lies now is believed"


def test_what_waits_for_the_disk_does_not_go_while_something_else_can() -> None:
    """Although it comes first in the order, and a step does not look further."""
    pool = Pool(
        "a", granules=20, ssd_granules=100, high_watermark=0.9, low_watermark=0.85, step_objects=4, eviction="lru"
    )
    for number in range(19):
        pool.put(b"%d" % number)
    orders = {order.key: order for order in pool.orders("a")}
    for number in (15, 17, 18):
        pool.answer(orders[b"%d" % number])
    for _ in range(10):
        pool.state.tick(0.0)
    assert pool.used == 17
    assert pool.has(*[b"%d" % number for number in range(19)]), "nothing is lost"
    assert [pool.places(b"%d" % number) for number in (15, 17, 18)].count(["a.ssd"]) == 2
    pool.check()


def test_what_waits_for_the_disk_goes_when_nothing_else_can() -> None:
    pool = Pool(
        "a", granules=20, ssd_granules=100, high_watermark=0.9, low_watermark=0.85, step_objects=4, eviction="lru"
    )
    for number in range(19):
        pool.put(b"%d" % number)
    for _ in range(20):
        pool.state.tick(0.0)
    assert pool.used == 17
    pool.check()
