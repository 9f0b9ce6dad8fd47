"""A table that is full (`max_objects`) is no other trouble than memory that is full: something goes, if it may."""

from __future__ import annotations

import pytest
from state_pool import SESSION, G, Pool, offload, on_ssd_alone

from moonpool.store import messages as m


def message(pool: Pool, key: bytes) -> str:
    refusal = pool.try_start(key)
    assert isinstance(refusal, m.Refusal)
    assert refusal.code == "no_space"
    return refusal.message


def test_what_is_oldest_goes() -> None:
    pool = Pool("a", max_objects=2)
    pool.put(b"1")
    pool.put(b"2")
    pool.put(b"3")
    assert not pool.has(b"1")
    assert pool.has(b"2", b"3")
    assert "evicted to make room" in pool.why(b"1")
    pool.restart()
    assert pool.has(b"2", b"3")
    assert pool.state.stats().num_objects == 2


def test_it_refuses_when_nothing_may_go() -> None:
    pool = Pool("a", max_objects=3, lease_s=10)
    pool.put(b"leased")
    pool.put(b"hard", hard_pin=True)
    pool.put(b"pinned")
    pool.pin(SESSION, b"pinned")
    pool.find(b"leased", lease=True)
    assert "max_objects" in message(pool, b"new")
    assert pool.has(b"leased", b"hard", b"pinned")
    pool.tick(10)
    pool.put(b"new")
    assert not pool.has(b"leased")


def test_puts_under_way_have_their_places() -> None:
    pool = Pool("a", max_objects=2)
    grants = [pool.start(b"1"), pool.start(b"2")]
    assert "max_objects" in message(pool, b"3")
    assert [pool.end(grant) for grant in grants] == [None, None]
    pool.put(b"3")
    assert not pool.has(b"1")


def test_what_is_softly_pinned_goes_last() -> None:
    pool = Pool("a", max_objects=2)
    pool.put(b"soft", soft_pin_s=100)
    pool.put(b"1")
    pool.put(b"2")
    assert not pool.has(b"1")
    assert pool.has(b"soft", b"2")
    pool.put(b"kept", hard_pin=True)
    pool.put(b"3")
    assert not pool.has(b"soft")


def test_of_a_batch_that_is_too_large_the_beginning_is_taken() -> None:
    pool = Pool("a", max_objects=3)
    pool.put(b"hard", hard_pin=True)
    keys = [b"1", b"2", b"3"]
    reply = pool.state.put_start(keys, [G] * 3, m.PutOptions(), pool.now_s)
    pool.check()
    assert [bool(replicas) for replicas in reply.replicas] == [True, True, False]
    assert "max_objects" in reply.refusals[2].message


def test_a_group_goes_together() -> None:
    pool = Pool("a", max_objects=3)
    pool.put(b"g1", groups=b"g")
    pool.put(b"1")
    pool.put(b"g2", groups=b"g")
    pool.put(b"2")
    assert not pool.has(b"g1")
    assert not pool.has(b"g2")
    assert pool.has(b"1", b"2")


def test_what_is_on_ssd_alone_goes_first_and_its_record_too() -> None:
    pool = Pool("a", granules=4, ssd_granules=50, max_objects=4, lease_s=1)
    on_ssd_alone(pool, b"1", b"2")
    pool.put(b"3")
    pool.put(b"4")
    offload(pool)
    pool.tick(2)
    pool.find(b"1", lease=True)
    pool.tick(2)
    pool.put(b"5")
    assert not pool.has(b"2"), "nobody has used it"
    assert pool.has(b"1", b"3", b"4", b"5")
    dropped = [order.key for order in pool.orders("a") if order.kind is m.OrderKind.DROP]
    assert dropped == [b"2"]


def test_an_object_in_both_tiers_goes_whole() -> None:
    pool = Pool("a", granules=8, ssd_granules=50, max_objects=2, lease_s=1)
    pool.put(b"1")
    pool.put(b"2")
    offload(pool)
    assert pool.places(b"1") == ["a.dram", "a.ssd"]
    pool.put(b"3")
    assert not pool.has(b"1")
    assert [order.key for order in pool.orders("a") if order.kind is m.OrderKind.DROP] == [b"1"]


@pytest.mark.parametrize("eviction", ["lru", "prefix", "s3fifo"])
def test_many_more_than_there_are_places_for(eviction: str) -> None:
    pool = Pool("a", granules=200, ssd_granules=100, max_objects=50, eviction=eviction)
    for start in range(0, 400, 8):
        keys = [b"%d" % number for number in range(start, start + 8)]
        reply = pool.state.put_start(keys, [G] * 8, m.PutOptions(), pool.now_s)
        assert not reply.refusals
        pool.state.put_end(keys, reply.generations, {}, pool.now_s)
        pool.check()
        pool.carry_out("a")
    assert pool.state.stats().num_objects == 50


def test_records_are_adopted_only_where_no_put_under_way_needs_the_slot() -> None:
    pool = Pool("a", ssd_granules=100, max_objects=3)
    pool.put(b"1")
    grants = [pool.start(b"2"), pool.start(b"3")]
    unknown = [m.HeldItem(b"old-%d" % number, 1, G, number * G) for number in range(4)]
    pool.now_s += 5
    pool.mount_ssd("a", 100)
    pool.state.members.adopts = True  # as a master that began with nothing and has not seen this disk
    pool.state.members.listed.clear()
    assert pool.inventory("a", unknown) == [False] * 4
    assert [pool.end(grant) for grant in grants] == [None, None]
    assert pool.has(b"1", b"2", b"3")
    assert pool.state.stats().num_objects == 3
