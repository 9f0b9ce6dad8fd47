"""The master's state, event by event, with a clock that is a number."""

from __future__ import annotations

import pytest

from moonpool.base.errors import ConfigError, InvalidInput
from moonpool.store.allocator import GRANULE_NBYTES
from moonpool.store.messages import ObjectInfo, PutGrant, PutItem, Written
from moonpool.store.rules import PoolRules
from moonpool.store.state import PoolState
from moonpool.transfer.descriptor import SegmentDescriptor

G = GRANULE_NBYTES


def descriptor(name: str, num_granules: int = 10, incarnation: int = 1) -> SegmentDescriptor:
    return SegmentDescriptor(
        name=name, nbytes=num_granules * G, incarnation=incarnation, host="h", endpoints=(), granule_nbytes=G
    )


def mount(state: PoolState, name: str, num_granules: int = 10, *, node: str = "", incarnation: int = 1) -> None:
    state.mount(node or name, descriptor(name, num_granules, incarnation), 0.0)
    assert state.heartbeat(name, incarnation, 0.0)


def pool(*names: str, num_granules: int = 10, **rules: float) -> PoolState:
    state = PoolState(PoolRules(**{"segment_ttl_s": 1e9, **rules}), epoch=1)  # type: ignore[arg-type]
    for name in names:
        mount(state, name, num_granules)
    return state


def grant(state: PoolState, key: bytes, now_s: float = 0.0, nbytes: int = G, **options: object) -> PutGrant:
    outcome = state.put_start([PutItem(key, nbytes, **options)], now_s)[0]  # type: ignore[arg-type]
    assert outcome.grant is not None, outcome.refusal
    return outcome.grant


def refusal_code(state: PoolState, key: bytes, now_s: float = 0.0, nbytes: int = G) -> str:
    outcome = state.put_start([PutItem(key, nbytes)], now_s)[0]
    assert outcome.refusal is not None
    return outcome.refusal.code


def put(state: PoolState, key: bytes, now_s: float = 0.0, nbytes: int = G, **options: object) -> PutGrant:
    granted = grant(state, key, now_s, nbytes, **options)
    assert state.put_end([Written(key, granted.generation)], now_s) == [None]
    return granted


def info(state: PoolState, key: bytes, now_s: float = 0.0) -> ObjectInfo:
    found = state.lookup([key], False, now_s)[0]
    assert found is not None
    return found


def test_an_object_is_visible_from_put_end_on() -> None:
    state = pool("a")
    granted = grant(state, b"k")
    assert state.lookup([b"k"], False, 0.0) == [None]
    assert "being written" in state.why(b"k", 1.0)
    assert state.put_end([Written(b"k", granted.generation)], 0.0) == [None]
    assert info(state, b"k").replicas == granted.replicas
    assert state.put_end([Written(b"k", granted.generation)], 0.0) == [None], "said twice"
    state.check_integrity()


def test_a_taken_key_is_refused() -> None:
    state = pool("a")
    granted = grant(state, b"k")
    assert refusal_code(state, b"k") == "already_exists"
    state.put_end([Written(b"k", granted.generation)], 0.0)
    assert refusal_code(state, b"k") == "already_exists"


def test_bad_items_do_not_fail_their_neighbours() -> None:
    state = pool("a")
    items = [
        PutItem(b"", G),
        PutItem(b"ok", G),
        PutItem(b"z", 0),
        PutItem(b"r", G, num_replicas=0),
        PutItem(b"b", 99 * G),
    ]
    outcomes = state.put_start(items, 0.0)
    assert [each.refusal.code if each.refusal else None for each in outcomes] == [
        "invalid_input", None, "invalid_input", "invalid_input", "no_space",
    ]  # fmt: skip


def test_generations_rise_and_carry_the_epoch() -> None:
    state = PoolState(PoolRules(), epoch=7)
    mount(state, "a")
    first, second = grant(state, b"1"), grant(state, b"2")
    assert first.generation >> 32 == 7
    assert second.generation > first.generation
    later = PoolState(PoolRules(), epoch=8)
    mount(later, "a")
    assert grant(later, b"1").generation > second.generation


def test_late_put_end_is_refused_and_the_key_is_free_again() -> None:
    state = pool("a", num_granules=1, put_discard_s=30, put_release_s=600)
    granted = grant(state, b"k", now_s=0)
    state.tick(29.9)
    assert state.stats().counters["puts_in_progress"] == 1
    late = state.put_end([Written(b"k", granted.generation)], 30.0)[0]
    assert late is not None
    assert late.code == "stale_generation"
    assert "did not end it in time" in state.why(b"k", 31.0)
    assert refusal_code(state, b"k", 599.9) == "no_space", "the key is free, the space is not: the writer may be slow"
    state.tick(600.0)
    assert grant(state, b"k", 600.0).generation > granted.generation
    state.check_integrity()


def test_revoke_frees_at_once_only_when_settled() -> None:
    state = pool("a", num_granules=1)
    granted = grant(state, b"k")
    state.put_revoke([Written(b"k", granted.generation - 1), Written(b"unknown", 5)], True, 0.0)
    assert state.stats().counters["puts_in_progress"] == 1, "another's generation revokes nothing"
    state.put_revoke([Written(b"k", granted.generation)], True, 0.0)
    granted = grant(state, b"k")
    state.put_revoke([Written(b"k", granted.generation)], False, 0.0)
    assert refusal_code(state, b"k") == "no_space"


def test_replicas_go_to_distinct_nodes_then_to_distinct_segments() -> None:
    state = pool()
    mount(state, "a1", node="a")
    mount(state, "a2", node="a", num_granules=100)
    mount(state, "b1", node="b")
    names = [each.segment for each in grant(state, b"k", num_replicas=2, preferred_segment="a1").replicas]
    assert names == ["a1", "b1"]
    names = [each.segment for each in grant(state, b"l", num_replicas=3).replicas]
    assert sorted(names) == ["a1", "a2", "b1"]
    assert len(grant(state, b"m", num_replicas=9).replicas) == 3, "as many as there are segments"


def test_nothing_is_placed_before_the_node_acknowledged() -> None:
    state = pool()
    reply = state.mount("a", descriptor("a"), 0.0)
    assert refusal_code(state, b"k") == "no_space"
    assert state.heartbeat("a", 1, 0.0)
    assert grant(state, b"k").generation > reply.generation_floor
    with pytest.raises(InvalidInput):
        state.mount("x", SegmentDescriptor(name="x", nbytes=G, incarnation=1, host="h", endpoints=()), 0.0)


def test_prefix_lookup_stops_at_the_first_gap() -> None:
    state = pool("a")
    for key in (b"1", b"2", b"4"):
        put(state, key)
    found = state.lookup([b"1", b"2", b"3", b"4"], True, 0.0)
    assert [each is not None for each in found] == [True, True, False, False]
    found = state.lookup([b"1", b"2", b"3", b"4"], False, 0.0)
    assert [each is not None for each in found] == [True, True, False, True]


def test_watermark_evicts_least_recently_used_and_spares_leased_and_pinned() -> None:
    state = pool("a", num_granules=100, high_watermark=0.8, low_watermark=0.5, lease_s=10)
    for number in range(81):
        put(state, b"%d" % number)
    state.pin(7, [b"0"], 0.0)
    state.exist([b"1", b"2"], 0.0)
    put(state, b"hard", pinned=True)
    while state.tick(5.0):
        pass
    present = state.exist([b"%d" % number for number in range(81)], 5.0)
    assert present[:3] == [True] * 3
    assert present.index(True, 3) == 35, "50 of 100 stay: 0, 1, 2, hard and the 46 newest"
    assert state.exist([b"hard"], 5.0) == [True]
    assert "high watermark" in state.why(b"3", 6.0)
    state.check_integrity()


def test_eviction_goes_in_steps() -> None:
    state = pool("a", num_granules=100, high_watermark=0.5, low_watermark=0.1, step_objects=10)
    for number in range(60):
        put(state, b"%d" % number)
    assert state.tick(0.0)
    assert state.stats().num_objects == 50


def test_a_put_without_space_evicts_right_away() -> None:
    state = pool("a", num_granules=4)
    for number in range(4):
        put(state, b"%d" % number)
    state.lookup([b"0"], False, 0.0)
    granted = grant(state, b"new", 1.0, 2 * G)
    assert granted.replicas[0].offset == G, "0 is leased; 1 and 2 went"
    assert state.exist([b"0", b"1", b"2", b"3"], 1.0) == [True, False, False, True]
    assert refusal_code(state, b"more", 1.0, 2 * G) == "no_space", "all is leased or being written"
    state.check_integrity()


def test_leased_objects_at_the_old_end_do_not_hide_the_others() -> None:
    state = pool("a", num_granules=6000)
    keys = [b"%d" % number for number in range(6000)]
    for key in keys:
        put(state, key)
    state.exist(keys[:5000], 0.0)
    state.exist([], 0.0)
    for key in keys[5000:]:
        state.remove([key], False, 0.0)
        put(state, key, 1.0)
    for _ in range(3):
        outcome = state.put_start([PutItem(b"new", G)], 1.0)[0]
        if outcome.grant is not None:
            break
    assert outcome.grant is not None


def test_remove_respects_leases_and_pins_unless_forced() -> None:
    state = pool("a", num_granules=1, lease_s=10)
    put(state, b"k")
    state.exist([b"k"], 0.0)
    assert state.remove([b"k", b"never"], False, 5.0) == [False, True]
    assert state.remove([b"k"], True, 5.0) == [True]
    assert refusal_code(state, b"k", 5.0) == "no_space", "its bytes rest until the lease is over"
    state.tick(10.0)
    put(state, b"k", 10.0)
    state.pin(1, [b"k"], 10.0)
    assert state.remove([b"k"], False, 10.0) == [False]
    assert state.remove([b"k"], True, 10.0) == [True]
    state.tick(99.0)
    assert refusal_code(state, b"k", 99.0) == "no_space", "a pinned reader may still look at the bytes"
    state.connection_closed(1, 99.0)
    put(state, b"k", 99.0)
    state.check_integrity()


def test_pins_count_and_end_with_their_connection() -> None:
    state = pool("a", num_granules=1)
    put(state, b"k")
    assert state.pin(1, [b"k", b"k", b"none"], 0.0) == [True, True, False]
    state.pin(2, [b"k"], 0.0)
    state.unpin(1, [b"k"], 0.0)
    state.connection_closed(2, 0.0)
    state.unpin(2, [b"k"], 0.0)
    state.check_integrity()
    assert refusal_code(state, b"new") == "no_space"
    state.connection_closed(1, 0.0)
    state.check_integrity()
    put(state, b"new")


def test_quarantine_replica_by_replica() -> None:
    state = pool("a", "b", num_granules=1, lease_s=10)
    put(state, b"k", num_replicas=2)
    found = info(state, b"k")
    assert not state.report_corrupt(b"k", found.generation - 1, "a", 0.0), "a late reader is no proof"
    assert state.report_corrupt(b"k", found.generation, "a", 0.0)
    assert not state.report_corrupt(b"k", found.generation, "a", 0.0), "reported already"
    assert [each.segment for each in info(state, b"k").replicas] == ["b"]
    state.check_integrity()
    assert state.report_corrupt(b"k", found.generation, "b", 0.0)
    assert state.exist([b"k"], 0.0) == [False]
    assert "wrong bytes" in state.why(b"k", 1.0)
    assert state.stats().used_nbytes == 2 * G, "leased until 10"
    state.tick(10.0)
    assert state.stats().used_nbytes == 0
    assert state.stats().counters["corrupt_replicas"] == 2


def test_a_silent_node_is_gone_with_what_only_it_held() -> None:
    state = pool(segment_ttl_s=10)
    mount(state, "a")
    mount(state, "b")
    put(state, b"both", num_replicas=2)
    put(state, b"only", preferred_segment="a")
    pending = grant(state, b"pending", preferred_segment="a")
    state.heartbeat("b", 1, 5.0)
    state.tick(10.0)
    assert state.exist([b"both", b"only"], 10.0) == [True, False]
    assert [each.segment for each in info(state, b"both", 10.0).replicas] == ["b"]
    late = state.put_end([Written(b"pending", pending.generation)], 10.0)[0]
    assert late is not None
    assert late.code == "stale_generation"
    assert "node that left or died" in state.why(b"only", 11.0)
    assert not state.heartbeat("a", 1, 11.0)
    state.check_integrity()


def test_lost_objects_are_missing_before_the_sweep_reaches_them() -> None:
    state = pool("a", "b", num_granules=100, step_objects=1)
    for number in range(20):
        put(state, b"%d" % number, preferred_segment="a" if number % 2 else "b")
    state.unmount("a", 99)
    state.unmount("a", 1)
    assert state.exist([b"1", b"2"], 0.0) == [False, True]
    put(state, b"1")
    while state.tick(1.0):
        state.check_integrity()
    assert state.exist([b"%d" % number for number in range(20)], 1.0).count(True) == 11


def test_a_new_incarnation_voids_the_old_one() -> None:
    state = pool("a")
    granted = put(state, b"k")
    reply = state.mount("a", descriptor("a", incarnation=2), 1.0)
    assert reply.generation_floor >= granted.generation
    assert state.exist([b"k"], 1.0) == [False]
    assert not state.heartbeat("a", 1, 1.0)
    state.heartbeat("a", 2, 1.0)
    assert put(state, b"k", 1.0).replicas[0].incarnation == 2
    state.tick(1.0)
    assert state.exist([b"k"], 1.0) == [True]
    assert state.mount("a", descriptor("a", incarnation=2), 2.0) == reply, "said twice"
    assert state.exist([b"k"], 2.0) == [True]


def test_failed_replicas_are_left_out() -> None:
    state = pool("a", "b", put_release_s=600)
    granted = grant(state, b"k", num_replicas=2)
    assert state.put_end([Written(b"k", granted.generation, failed_segments=("a",))], 0.0) == [None]
    assert [each.segment for each in info(state, b"k").replicas] == ["b"]
    granted = grant(state, b"l", num_replicas=1)
    name = granted.replicas[0].segment
    assert state.put_end([Written(b"l", granted.generation, failed_segments=(name,))], 0.0)[0] is not None
    state.tick(600.0)
    assert state.stats().used_nbytes == G
    state.check_integrity()


def test_changes_are_coalesced_and_the_snapshot_is_whole() -> None:
    state = pool("a")
    assert state.take_changes() is None
    for key in (b"1", b"2", b"3"):
        put(state, key)
    state.remove([b"2"], True, 0.0)
    assert state.take_changes() == ((b"1", b"3"), (b"2",))
    assert sorted(key for part in state.snapshot() for key in part) == [b"1", b"3"]
    state.remove([b"1"], True, 0.0)
    put(state, b"1")
    assert state.take_changes() == ((b"1",), ())


def test_why_is_bounded_and_says_so() -> None:
    state = pool("a", max_fates=2)
    assert state.why(b"x", 0.0) == "this object was never stored"
    for key in (b"1", b"2", b"3"):
        put(state, key)
        state.remove([key], True, 0.0)
    assert "longer ago" in state.why(b"1", 1.0)
    assert state.why(b"3", 2.0) == "this object was removed by a caller, 2.0 s ago"
    put(state, b"3")
    assert "is stored" in state.why(b"3", 0.0)


def test_impossible_rules_are_refused() -> None:
    for wrong in ({"low_watermark": 0.99}, {"put_discard_s": 0}, {"lease_s": 0}, {"put_release_s": 1}):
        with pytest.raises(ConfigError):
            PoolRules(**wrong)  # type: ignore[arg-type]
