"""Looking up: leases, prefixes, groups, identities, corrupt replicas, and the sentences of `why`."""

from __future__ import annotations

import pytest
from state_pool import SESSION, Pool

from moonpool.base.errors import InvalidInput
from moonpool.master.state.snapshot import snapshot_keys
from moonpool.store import messages as m


def full(pool: Pool) -> Pool:
    """Four objects in four granules."""
    for number in range(4):
        pool.put(b"%d" % number)
    return pool


def test_a_lookup_leases_and_a_put_does_not() -> None:
    pool = full(Pool("a", granules=4, lease_s=10))
    found = pool.find(b"0", lease=True)
    assert found is not None
    assert found.lease_s == 10
    pool.put(b"4", 3)
    assert pool.has(b"0")
    assert not any(pool.has(b"%d" % number) for number in (1, 2, 3))
    pool.tick(10)
    pool.put(b"5", 4)
    assert not pool.has(b"0")


def test_exist_leases_too() -> None:
    pool = full(Pool("a", granules=4))
    assert pool.exist(b"0", b"?") == [True, False]
    pool.put(b"4", 3)
    assert pool.has(b"0")


def test_a_lookup_may_promise_nothing() -> None:
    pool = full(Pool("a", granules=4))
    found = pool.find(b"1", lease=False)
    assert found is not None
    assert found.lease_s == 0.0
    pool.put(b"4", 4)
    assert not pool.has(b"1")


def test_many_are_leased_at_once() -> None:
    pool = Pool("a", granules=100)
    keys = [b"%d" % number for number in range(100)]
    for key in keys:
        pool.put(key)
    assert pool.exist(*keys) == [True] * 100
    assert pool.refused(b"more") == "no_space"


def test_leased_bytes_are_not_reused_though_the_object_was_removed() -> None:
    pool = Pool("a", granules=1, lease_s=10)
    pool.put(b"k")
    assert pool.find(b"k", lease=True)
    assert not pool.remove(b"k")
    assert pool.remove(b"k", force=True)
    assert not pool.has(b"k")
    assert pool.refused(b"other") == "no_space"
    pool.tick(10)
    pool.put(b"other")


def test_a_prefix_ends_at_the_first_missing_key() -> None:
    pool = full(Pool("a"))
    found = pool.state.lookup([b"0", b"1", b"?", b"2"], 0.0, prefix=True)
    assert [info is not None for info in found] == [True, True, False, False]
    found = pool.state.lookup([b"0", b"?", b"2"], 0.0)
    assert [info is not None for info in found] == [True, False, True]
    assert pool.counters["hits"] == 4
    assert pool.counters["misses"] == 3


def test_the_same_key_twice_in_a_lookup() -> None:
    pool = full(Pool("a"))
    found = pool.state.lookup([b"0", b"0"], 0.0, session=SESSION)
    assert found[0] == found[1]
    pool.check()


def test_a_lookup_for_a_process_pins() -> None:
    pool = full(Pool("a", granules=4, lease_s=1))
    assert pool.find(b"0", session=SESSION)
    pool.tick(5)
    pool.put(b"4", 3)
    assert pool.has(b"0")
    assert not pool.remove(b"0")
    pool.unpin(SESSION, b"0")
    assert pool.remove(b"0")


def test_a_session_is_no_connection() -> None:
    with pytest.raises(InvalidInput):
        Pool("a").state.lookup([b"k"], 0.0, session=3)


def test_the_members_of_a_group_are_leased_together() -> None:
    pool = Pool("a", granules=4, lease_s=10)
    pool.put(b"1", groups=b"g")
    pool.put(b"2", groups=b"g")
    pool.put(b"alone", groups=b"")
    assert pool.exist(b"1") == [True]
    assert not pool.remove(b"2"), "leased with its group"
    pool.put(b"big", 2)
    assert pool.has(b"1", b"2")
    assert not pool.has(b"alone")


# wrong bytes


def test_a_corrupt_replica_is_never_handed_out_again() -> None:
    pool = Pool("a", "b")
    pool.put(b"k", num_replicas=2)
    assert pool.corrupt(b"k", "a.dram")
    assert pool.places(b"k") == ["b.dram"]
    assert not pool.corrupt(b"k", "a.dram"), "the reader was late"
    assert pool.corrupt(b"k", "b.dram")
    assert "wrong bytes were found" in pool.why(b"k")
    assert pool.counters["corrupt_replicas"] == 2
    assert pool.used == 0


def test_a_late_report_does_not_hurt_the_next_object() -> None:
    pool = Pool("a")
    old = pool.put(b"k")
    pool.put(b"k", replace=True)
    assert not pool.report_corrupt(b"k", old.replicas[0])
    assert not pool.report_corrupt(b"?", old.replicas[0])
    assert pool.has(b"k")


# why


def test_why_tells_what_became_of_a_key() -> None:
    pool = Pool("a", max_fates=4)
    assert pool.why(b"k") == "this object was never stored"
    pool.put(b"k")
    assert "is stored: 4096 bytes on a.dram" in pool.why(b"k")
    pool.remove(b"k")
    pool.now_s += 2
    assert pool.why(b"k") == "this object was removed by a caller, 2.0 s ago"
    pool.put(b"k")
    assert "is stored" in pool.why(b"k")


def test_endings_are_remembered_in_bounded_memory() -> None:
    pool = Pool("a", max_fates=2)
    for key in (b"1", b"2", b"3"):
        pool.put(key)
        pool.remove(key)
    assert "or that was longer ago than the last 2 endings" in pool.why(b"1")
    assert "removed" in pool.why(b"3")


def test_why_tells_a_reader_of_another_identity() -> None:
    pool = Pool("a")
    pool.put(b"k", identity=b"llama" * 4)
    pool.put(b"plain", identity=b"\0" * 32)
    assert "is stored:" in pool.why(b"k")
    assert "is stored:" in pool.why(b"k", b"llama" * 4)
    assert "another identity" in pool.why(b"k", b"qwen" * 4)
    assert "is stored:" in pool.why(b"plain", b"qwen" * 4), "whoever said nothing is not refused"
    pool.restart()
    assert "another identity" in pool.why(b"k", b"qwen" * 4)
    pool.snapshot()
    pool.restart()
    assert "another identity" in pool.why(b"k", b"qwen" * 4)


# what listeners hear


def test_listeners_hear_the_latest_word_about_a_key() -> None:
    pool = Pool("a", "b")
    pool.put(b"1")
    pool.put(b"2")
    pool.remove(b"2")
    pool.put(b"3", num_replicas=2)
    changes = pool.state.take_changes()
    assert changes is not None
    assert set(changes.stored) == {b"1", b"3"}
    assert changes.removed == (b"2",)
    assert changes.moved == ()
    assert changes.tiers == ()
    assert pool.state.take_changes() is None
    pool.corrupt(b"3", "a.dram")
    changes = pool.state.take_changes()
    assert changes is not None
    assert changes.moved == (b"3",)
    assert [part for part in snapshot_keys(pool.state.index) if part] == [[(b"1", m.Tier.DRAM), (b"3", m.Tier.DRAM)]]
