"""Segments come, beat, fall silent, leave and are taken over."""

from __future__ import annotations

import pytest
from state_pool import SESSION, G, Pool, descriptor, num_calls

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import AlreadyExists, InvalidInput, NotFound
from moonpool.store import messages as m


def status(pool: Pool) -> dict[str, str]:
    return {each.name: each.status for each in pool.state.stats().segments}


def test_a_segment_takes_part_from_its_first_heartbeat_on() -> None:
    pool = Pool()
    reply = pool.state.mount("a", descriptor("a.dram", 10), 0.0)
    assert reply.epoch == 1
    assert status(pool) == {"a.dram": "waiting"}
    assert pool.refused(b"k") == "no_space"
    beat = pool.state.heartbeat("a.dram", 1, 0.0)
    assert (beat.known, beat.epoch, beat.recount_above) == (True, 1, None)
    assert pool.start(b"k").generation > reply.generation_floor
    assert status(pool) == {"a.dram": "ok"}


def test_mounting_twice_changes_nothing() -> None:
    pool = Pool("a")
    pool.put(b"k")
    first = pool.state.mount("a", descriptor("a.dram", 10), 0.0)
    assert pool.state.mount("a", descriptor("a.dram", 10), 5.0) == first
    assert pool.has(b"k")
    pool.restart()
    assert pool.state.mount("a", descriptor("a.dram", 10), 5.0).generation_floor == first.generation_floor
    assert pool.has(b"k")


def test_a_heartbeat_of_another_incarnation_is_unknown() -> None:
    pool = Pool("a")
    assert not pool.state.heartbeat("a.dram", 7, 0.0).known
    assert not pool.state.heartbeat("?", 1, 0.0).known


def test_a_name_is_not_taken_from_a_living_node() -> None:
    pool = Pool("a", heartbeat_s=1)
    pool.put(b"k")
    with pytest.raises(AlreadyExists):
        pool.state.mount("impostor", descriptor("a.dram", 10, 9), 2.9)
    assert pool.has(b"k")
    pool.state.mount("a", descriptor("a.dram", 10, 9), 3.0)
    assert not pool.has(b"k"), "three heartbeats late it is another process's"


def test_a_name_is_free_at_once_when_its_connection_has_ended() -> None:
    pool = Pool("a")
    pool.state.members.disconnected("a.dram", 1, 0.0)
    pool.mount("a")
    pool.put(b"k")
    pool.state.members.disconnected("a.dram", 1, 0.0)  # the earlier incarnation's connection, late
    with pytest.raises(AlreadyExists):
        pool.state.mount("a", descriptor("a.dram", 10, 9), 0.0)


def test_a_heartbeat_after_a_lost_connection_claims_the_name_again() -> None:
    pool = Pool("a")
    pool.state.members.disconnected("a.dram", 1, 0.0)
    pool.beat()
    with pytest.raises(AlreadyExists):
        pool.state.mount("a", descriptor("a.dram", 10, 9), 0.0)


def test_a_new_incarnation_voids_what_the_earlier_one_held() -> None:
    pool = Pool("a")
    pool.put(b"k")
    writing = pool.start(b"writing")
    pool.now_s = 5.0
    assert pool.mount("a").generation_floor >= writing.generation
    assert not pool.has(b"k")
    assert pool.used == 0
    refusal = pool.end(writing)
    assert refusal is not None
    assert refusal.code == "stale_generation"
    assert "a node that left or died" in pool.why(b"k")
    pool.put(b"k")


def test_silence_is_death() -> None:
    pool = Pool("a", "b", segment_ttl_s=10)
    pool.put(b"only", preferred=("a.dram",))
    pool.put(b"both", num_replicas=2)
    pool.now_s = 9.0
    pool.beat("b")
    pool.tick(0.9)
    assert pool.has(b"only")
    pool.tick(0.1)
    assert not pool.has(b"only")
    assert pool.places(b"both") == ["b.dram"]
    assert [each.descriptor.name for each in pool.state.segments()] == ["b.dram"]
    assert not pool.beat("a")["a.dram"].known


def test_a_lost_node_costs_bounded_steps() -> None:
    pool = Pool("a", "b", granules=100, step_objects=4)
    for number in range(90):
        pool.put(b"%d" % number, preferred=("a.dram",))
    pool.unmount("a.dram")
    assert pool.state.stats().num_objects == 90
    assert not pool.has(b"89"), "who asks is told the truth at once"
    assert pool.state.tick(pool.now_s)
    assert pool.state.stats().num_objects > 80
    pool.tick()
    assert pool.state.stats().num_objects == 0
    assert pool.counters["lost"] == 90


def test_unmounting_something_unknown_does_nothing() -> None:
    pool = Pool("a")
    pool.state.unmount("a.dram", 5, 0.0)
    pool.state.unmount("?", 1, 0.0)
    assert status(pool) == {"a.dram": "ok"}


def test_memory_must_be_fenced_in_granules() -> None:
    plain = SegmentDescriptor(name="x", nbytes=G, incarnation=1, host="h", endpoints=())
    for wrong in (plain, descriptor("x", 0)):
        with pytest.raises(InvalidInput):
            Pool().state.mount("a", wrong, 0.0)


def test_an_ssd_says_how_much_it_takes() -> None:
    with pytest.raises(InvalidInput):
        Pool().state.mount("a", descriptor("a.ssd", 10), 0.0, tier=m.Tier.SSD)


def test_an_inventory_is_of_a_mounted_ssd() -> None:
    pool = Pool("a", ssd_granules=10)
    for name, incarnation in (("a.dram", 1), ("a.ssd", 2), ("?", 1)):
        with pytest.raises(NotFound):
            pool.state.members.inventory(name, incarnation, [], True, 0.0)
    pool.unmount("a.ssd")
    with pytest.raises(NotFound):
        pool.state.members.inventory("a.ssd", 1, [], True, 0.0)


def test_an_ssd_is_away_before_it_is_gone() -> None:
    pool = Pool("a", ssd_granules=10, segment_ttl_s=10, away_ttl_s=100)
    pool.put(b"k")
    pool.carry_out("a")
    pool.tick(10)
    assert status(pool) == {"a.ssd": "away"}
    assert not pool.has(b"k")
    assert "SSD whose node is away" in pool.why(b"k")
    assert pool.counters["objects_away"] == 1
    assert pool.state.stats().num_objects == 0
    pool.tick(89)
    assert pool.counters["objects_away"] == 1
    pool.tick(1)
    assert status(pool) == {}
    assert "a node that left or died" in pool.why(b"k")


def test_stats_tell_of_every_tier() -> None:
    pool = Pool("a", ssd_granules=50)
    pool.put(b"k", 3)
    pool.carry_out("a")
    stats = pool.state.stats()
    assert (stats.num_objects, stats.capacity_nbytes, stats.used_nbytes) == (1, 10 * G, 3 * G)
    ssd = next(each for each in stats.segments if each.tier is m.Tier.SSD)
    assert (ssd.capacity_nbytes, ssd.used_nbytes, ssd.num_objects) == (50 * G, 3 * G, 1)
    info = next(each for each in pool.state.segments() if each.tier is m.Tier.DRAM)
    assert (info.node, info.registry_address) == ("a", "unix:/a")


def test_a_lost_segment_gives_nothing_back_to_the_next_one() -> None:
    pool = Pool("a", high_watermark=1.0)
    pool.start(b"held", session=SESSION)
    pool.put(b"k")
    pool.exist(b"k")
    pool.remove(b"k", force=True)
    pool.now_s = 5.0
    pool.mount("a")
    pool.put(b"new", 10)
    pool.sessions_gone(SESSION)
    pool.tick(1000)
    assert pool.used == 10


def calls_of_a_put(num_segments: int) -> int:
    """Of one object, which is to lie on a given segment."""
    pool = Pool(*(f"n{number}" for number in range(num_segments)), granules=64)
    options = m.PutOptions(preferred=("n0.dram",))
    replies: list[m.PutReply] = []
    count = num_calls(lambda: replies.append(pool.state.put_start([b"k"], [G], options, 0.0)))
    assert replies[0].replicas[0][0].segment == options.preferred[0]
    return count


def test_a_put_that_says_where_does_not_rank_all_segments() -> None:
    assert calls_of_a_put(200) == calls_of_a_put(1)
