"""A node that comes back: which records of its SSD are wanted, and what became of the others."""

from __future__ import annotations

import msgspec
import pytest
from state_pool import G, Pool, held, offload, on_ssd_alone

from moonpool.store import messages as m


def come_back(pool: Pool, *items: m.HeldItem, last: bool = True) -> list[bool]:
    """The node's process was killed, and another one has its folder."""
    pool.now_s += 5
    pool.mount("a")
    pool.mount_ssd("a", 100, last=False)
    return pool.inventory("a", items, last)


def test_wrong_bytes_in_memory_leave_a_record_that_is_away() -> None:
    pool = Pool("a", ssd_granules=100)
    pool.mount("b")
    pool.put(b"k", preferred=("a.dram",))
    items = offload(pool)
    pool.state.copy(b"k", ["b.dram"], 0.0)
    pool.carry_out("b")
    pool.unmount("a.dram")
    pool.unmount("a.ssd")
    assert pool.corrupt(b"k", "b.dram")
    assert not pool.has(b"k")
    assert "node is away" in pool.why(b"k")
    assert come_back(pool, items[b"k"]) == [True]
    assert pool.places(b"k") == ["a.ssd"]


def test_a_node_comes_back_with_its_records() -> None:
    pool = Pool("a", ssd_granules=100)
    items = on_ssd_alone(pool, b"1", b"2")
    pool.state.take_changes()
    assert come_back(pool, items[b"1"], last=False) == [True]
    assert pool.places(b"1") == ["a.ssd"]
    assert not pool.has(b"2")
    assert pool.inventory("a", [items[b"2"]]) == [True]
    found = pool.find(b"2")
    assert found is not None
    assert found.replicas[0].incarnation == 2
    pool.tick()
    changes = pool.state.take_changes()
    assert changes is not None
    assert dict(changes.tiers) == {b"1": m.Tier.SSD, b"2": m.Tier.SSD}
    pool.put(b"new")
    assert [order.key for order in pool.orders("a")] == [b"new"], "it is written to again"


def test_what_a_node_came_back_without_is_lost() -> None:
    pool = Pool("a", ssd_granules=100)
    items = on_ssd_alone(pool, b"1", b"2")
    come_back(pool, items[b"1"])
    pool.tick()
    assert pool.has(b"1")
    assert not pool.has(b"2")
    assert "not there any more when its node" in pool.why(b"2")
    assert pool.counters["objects_away"] == 0


@pytest.mark.parametrize("force", [False, True])
def test_what_was_removed_while_its_node_was_away_does_not_come_back(force: bool) -> None:
    pool = Pool("a", ssd_granules=100)
    items = on_ssd_alone(pool, b"1", b"2", b"3")
    pool.unmount("a.ssd")
    assert not pool.has(b"1")
    assert pool.remove(b"1", force=force)
    assert pool.state.remove_matching("2", force, 0, pool.now_s).num_removed == 1
    pool.mount("b")
    pool.put(b"3", preferred=("b.dram",))
    assert come_back(pool, *items.values()) == [False, False, False]
    pool.tick()
    assert not pool.has(b"1")
    assert not pool.has(b"2")
    assert pool.places(b"3") == ["b.dram"], "put anew meanwhile"


def test_a_record_that_was_to_be_dropped_does_not_come_back() -> None:
    pool = Pool("a", granules=20, ssd_granules=4, ssd_high_watermark=0.5)
    for number in range(4):
        pool.put(b"%d" % number)
    items = offload(pool)
    pool.tick()
    dropped = [order for order in pool.orders("a") if order.kind is m.OrderKind.DROP]
    assert dropped
    wanted = pool.inventory("a", list(items.values()))
    gone = {order.key for order in dropped}
    assert [item.key for item, keep in zip(items.values(), wanted, strict=True) if not keep] == sorted(gone)
    assert all(pool.places(key) == ["a.dram"] for key in gone)


def test_an_offload_that_was_not_reported_is_adopted() -> None:
    """The node wrote the record and died before it could say so."""
    pool = Pool("a", ssd_granules=100)
    pool.put(b"written")
    pool.put(b"not")
    written = pool.orders("a")[0]
    pool.unmount("a.dram")
    pool.unmount("a.ssd")
    pool.tick()
    assert not pool.has(b"written")
    assert "node is away" in pool.why(b"written")
    assert come_back(pool, held(written)) == [True]
    pool.tick()
    assert pool.places(b"written") == ["a.ssd"]
    assert "not there any more" in pool.why(b"not")


@pytest.mark.parametrize("swept", [False, True])
def test_an_unreported_offload_is_adopted_whatever_comes_back_first(swept: bool) -> None:
    """The SSD is mounted, and tells what it has, while the master takes the old memory for alive."""
    pool = Pool("a", ssd_granules=100, step_objects=1)
    for number in range(5):
        pool.put(b"%d" % number)
    written = [order for order in pool.orders("a") if order.key != b"2"]
    pool.now_s += 5
    pool.mount_ssd("a", 100)
    items = [held(order, at * G) for at, order in enumerate(written)]
    assert pool.inventory("a", items) == [True] * 4
    pool.mount("a")
    if swept:
        pool.tick()
    reply = pool.beat("a")["a.ssd"]
    assert reply.recount_above is not None, "it is asked once more, for what was written since"
    assert pool.inventory("a", items) == [True] * 4
    assert pool.beat("a")["a.ssd"].recount_above is None
    pool.tick()
    assert all(pool.places(b"%d" % number) == ["a.ssd"] for number in (0, 1, 3, 4))
    assert not pool.has(b"2")


def test_memory_that_ends_alone_asks_its_ssd() -> None:
    pool = Pool("a", ssd_granules=100)
    pool.put(b"reported")
    offload(pool)
    pool.put(b"unreported")
    (order,) = pool.orders("a")
    pool.unmount("a.dram")
    assert pool.places(b"reported") == ["a.ssd"]
    assert not pool.has(b"unreported")
    assert pool.beat("a")["a.ssd"].recount_above is not None
    reported = pool.find(b"reported")
    assert reported is not None
    item = m.HeldItem(b"reported", reported.replicas[0].generation, G, reported.replicas[0].offset)
    assert pool.inventory("a", [item, held(order, 77 * G)]) == [True, True]
    assert pool.places(b"unreported") == ["a.ssd"]


def test_a_record_that_only_the_journal_knows_is_lost() -> None:
    """The master lost power, and with it the memory of having had the record dropped."""
    pool = Pool("a", ssd_granules=100)
    items = on_ssd_alone(pool, b"1", b"2", b"3")
    pool.put(b"in both tiers")
    items |= offload(pool)
    pool.restart()
    assert pool.has(b"1", b"2", b"3"), "objects can be read at once"
    assert pool.inventory("a", [items[b"1"]], last=False) == [True]
    assert pool.has(b"2"), "it may be named yet"
    assert pool.inventory("a", [items[b"3"]]) == [True]
    assert pool.has(b"1", b"3")
    assert not pool.has(b"2")
    assert "not there any more when its node" in pool.why(b"2")
    pool.tick()
    assert pool.places(b"in both tiers") == ["a.dram"]
    assert [order.kind for order in pool.carry_out("a")] == [m.OrderKind.OFFLOAD], "it is written once more"
    assert pool.places(b"in both tiers") == ["a.dram", "a.ssd"]


def test_a_replica_elsewhere_makes_nobody_wait() -> None:
    pool = Pool("a", ssd_granules=100)
    pool.mount("b")
    pool.put(b"k", num_replicas=2)
    (order,) = pool.orders("a")
    pool.unmount("a.dram")
    pool.unmount("a.ssd")
    pool.tick()
    assert pool.places(b"k") == ["b.dram"]
    assert come_back(pool, held(order)) == [True], "and the record is welcome all the same"
    assert pool.places(b"k") == ["b.dram", "a.ssd"]


def test_an_order_that_is_carried_out_twice_harms_nothing() -> None:
    """Its answer was lost; an inventory told of the record; then the order was sent again."""
    pool = Pool("a", ssd_granules=100)
    pool.put(b"k")
    (order,) = pool.orders("a")
    assert pool.inventory("a", [held(order, 0)]) == [True]
    pool.answer(order, offset=5 * G)
    assert pool.orders("a") == [], "the record is not dropped"
    found = pool.find(b"k")
    assert found is not None
    assert found.replicas[1].offset == 5 * G


def test_records_of_other_generations_or_sizes_are_not_wanted() -> None:
    pool = Pool("a", ssd_granules=100)
    item = on_ssd_alone(pool, b"k")[b"k"]
    other = m.HeldItem(b"k", item.generation - 1, item.nbytes, 50 * G)
    longer = m.HeldItem(b"k", item.generation, item.nbytes + 1, 60 * G)
    assert come_back(pool, other, longer, item) == [False, False, True]


def test_one_record_of_an_object_is_enough() -> None:
    pool = Pool("a", "b", ssd_granules=100)
    pool.put(b"k", num_replicas=2, preferred=("a.dram", "b.dram"))
    (order,) = pool.orders("a")
    pool.answer(order)
    wrong = pool.inventory("b", [held(order, 0)])
    assert wrong == [False]
    assert pool.places(b"k") == ["a.dram", "b.dram", "a.ssd"]


def test_records_in_doubt_are_kept_only_where_the_master_knows_them() -> None:
    pool = Pool("a", ssd_granules=100)
    items = on_ssd_alone(pool, b"1", b"2", b"3")
    removed = msgspec.structs.replace(items[b"1"], doubt=m.Doubt.REMOVED)
    salvaged = msgspec.structs.replace(items[b"2"], doubt=m.Doubt.SALVAGED)
    elsewhere = msgspec.structs.replace(items[b"3"], offset=items[b"3"].offset + 64 * G, doubt=m.Doubt.SALVAGED)
    assert come_back(pool, removed, salvaged, elsewhere, last=False) == [True, True, False]
    assert pool.places(b"1") == pool.places(b"2") == ["a.ssd"]


def test_a_master_that_knows_nothing_takes_no_record_in_doubt() -> None:
    pool = Pool("a", ssd_granules=100)
    items = on_ssd_alone(pool, b"1", b"2", b"3")
    fresh = Pool("a", ssd_granules=0)
    fresh.mount_ssd("a", 100, last=False)
    told = [
        items[b"1"],
        msgspec.structs.replace(items[b"2"], doubt=m.Doubt.REMOVED),
        msgspec.structs.replace(items[b"3"], doubt=m.Doubt.SALVAGED),
    ]
    assert fresh.inventory("a", told) == [True, False, False]


def test_why_names_what_was_lost_with_a_damaged_log() -> None:
    pool = Pool("a", ssd_granules=100)
    items = on_ssd_alone(pool, b"1", b"2")
    come_back(pool, items[b"1"], last=False)
    pool.state.members.inventory("a.ssd", 2, [], True, pool.now_s, is_damaged=True)
    pool.tick()
    assert pool.has(b"1")
    assert "damaged part of its node's SSD log" in pool.why(b"2")


def test_compaction_moves_records() -> None:
    pool = Pool("a", ssd_granules=100)
    item = on_ssd_alone(pool, b"k")[b"k"]
    moves = [(b"k", item.generation, 9 * G), (b"k", item.generation + 1, 0), (b"?", 1, 0)]
    assert pool.state.members.relocated("a.ssd", 1, moves) == [True, False, False]
    found = pool.find(b"k")
    assert found is not None
    assert found.replicas[0].offset == 9 * G
    pool.restart()
    found = pool.find(b"k")
    assert found is not None
    assert found.replicas[0].offset == 9 * G


# a master that knows nothing


def test_a_master_that_knows_nothing_takes_what_ssds_have() -> None:
    pool = Pool()
    pool.mount("a")
    pool.mount_ssd("a", 100, last=False)
    items = [m.HeldItem(b"%d" % number, 2**40 + number, G, number * G) for number in range(3)]
    assert pool.inventory("a", items[:2], last=False) == [True, True]
    assert pool.inventory("a", items[2:]) == [True]
    assert pool.places(b"0") == ["a.ssd"]
    pool.beat("a")  # its memory hears how far the generations go now
    assert pool.start(b"new").generation > 2**40 + 2, "generations stay unique"
    pool.remove(b"1")
    assert pool.inventory("a", items) == [True, False, True], "it was asked before, and knows what it removed"
    assert come_back(pool, *items) == [True, False, True]


def test_a_master_goes_on_taking_what_it_has_not_seen_after_it_came_back() -> None:
    pool = Pool()
    pool.mount("a")
    pool.mount_ssd("a")
    pool.restart()
    pool.snapshot()
    pool.restart()
    pool.mount("b")
    pool.mount_ssd("b", 100, last=False)
    assert pool.inventory("b", [m.HeldItem(b"k", 5, G, 0)]) == [True]
    assert pool.inventory("a", [m.HeldItem(b"other", 6, G, 0)]) == [False], "that one has spoken"
    assert pool.places(b"k") == ["b.ssd"]
