"""The cache of hot remote objects: bounded, never stale, and of use."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from facade_pool import FacadePool, facade_pool
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.errors import IdentityMismatch, InvalidInput
from moonpool.store import Store
from moonpool.store.client.cache import ObjectCache, RecentKeys

CACHE_NBYTES = 1 << 20


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[FacadePool]:
    yield from facade_pool(tmp_path)


@pytest.fixture
def far(pool: FacadePool) -> Store:
    """Everything is far away: no memory is shared."""
    return pool.store(shm=False, cache_nbytes=CACHE_NBYTES)


def moved_nbytes(store: Store) -> int:
    return store.counters()["bytes_read"]


def test_the_third_read_moves_no_bytes(pool: FacadePool, far: Store) -> None:
    pool.store().put("hot", b"x" * 1000)
    for _ in range(2):
        assert far.get("hot") == b"x" * 1000
    before = moved_nbytes(far)
    assert far.get("hot") == b"x" * 1000
    target = bytearray(1000)
    assert far.get_into("hot", target) == 1000
    assert target == b"x" * 1000
    assert moved_nbytes(far) == before
    counters = far.counters()
    assert (counters["cache_hits"], counters["cache_hit_bytes"], counters["cache_bytes"]) == (2, 2000, 1000)


def test_what_was_read_once_stays_outside(pool: FacadePool, far: Store) -> None:
    far.put_many([(f"scan-{number}", b"x") for number in range(100)])
    far.get_many([f"scan-{number}" for number in range(100)])
    assert far.counters()["cache_bytes"] == 0


def test_a_replaced_or_removed_object_is_never_served(pool: FacadePool, far: Store) -> None:
    other = pool.store()
    for version in range(5):
        other.upsert("key", b"value %d" % version)
        for _ in range(4):
            assert far.get("key") == b"value %d" % version
    assert far.counters()["cache_hits"] > 0
    other.remove("key", force=True)
    assert far.get("key") is None
    other.put("key", b"new")
    assert [far.get("key") for _ in range(4)] == [b"new"] * 4


def test_many_at_once_hits_and_misses_mixed(pool: FacadePool, far: Store) -> None:
    far.put_many([(f"k{number}", bytes([number]) * 10) for number in range(10)])
    for _ in range(2):
        far.get_many(["k1", "k2"])
    far.put("k3", b"taken already")
    assert far.get_many(["k0", "k1", "none", "k2"]) == [bytes(10), b"\1" * 10, None, b"\2" * 10]
    targets = [[bytearray(4), bytearray(9)], [bytearray(3)], [bytearray(10)]]
    got = far.get_many_into(["k1", "k2", "k4"], targets)
    assert (got[0], got[2]) == (10, 10)
    assert isinstance(got[1], InvalidInput)  # from the cache, too large for its buffer
    assert targets[0] == [b"\1" * 4, b"\1" * 6 + bytes(3)]
    assert targets[2] == [b"\4" * 10]


def test_reads_into_memory_are_learnt_from(pool: FacadePool, far: Store) -> None:
    far.put("k", b"0123456789")
    for _ in range(3):
        left, right = bytearray(4), bytearray(20)
        assert far.get_into("k", [left, right]) == 10
        assert left + right[:6] == b"0123456789"
    assert far.get("k") == b"0123456789"
    assert far.counters()["cache_hits"] == 2


def test_a_cached_value_is_not_served_to_a_reader_of_another_identity(pool: FacadePool, far: Store) -> None:
    far.put("block", b"kv", identity=b"m" * 32)
    assert [far.get("block") for _ in range(4)] == [b"kv"] * 4
    assert far.counters()["cache_hits"] > 0
    assert far.get_many(["block"], identity=b"x" * 32) == [None]
    assert far.get_many(["block"], identity=b"m" * 32) == [b"kv"]
    (got,) = far.get_many_into(["block"], [bytearray(2)], identity=b"x" * 32)
    assert isinstance(got, IdentityMismatch)


def test_memory_of_this_machine_is_not_kept_twice(pool: FacadePool) -> None:
    near = pool.store(cache_nbytes=CACHE_NBYTES)
    near.put("k", b"123")
    for _ in range(5):
        assert near.get("k") == b"123"
    counters = near.counters()
    assert (counters["cache_bytes"], counters["bytes_read"]) == (0, 15)


def test_threads_see_whole_and_current_values(pool: FacadePool, far: Store) -> None:
    """While values change, a reader gets one that was current during its call, whole."""
    writer, latest, wrong = pool.store(), [0], []
    writer.upsert("k", b"%06d" % 0 * 500)
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            at_least = latest[0]
            value = far.get("k")
            if value is None or value != value[:6] * 500 or int(value[:6]) < at_least:
                wrong.append(value)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for version in range(1, 60):
        writer.upsert("k", b"%06d" % version * 500)
        latest[0] = version
    done.set()
    for reader in readers:
        reader.join()
    assert not wrong


STEP = st.tuples(
    st.sampled_from(["put", "get", "drop", "note"]), st.integers(0, 5), st.integers(0, 3), st.integers(0, 60)
)


@given(st.lists(STEP))
def test_a_cache_is_bounded_and_true(steps: list[tuple[str, int, int, int]]) -> None:
    cache = ObjectCache(100, window_keys=2)
    for what, number, generation, nbytes in steps:
        key = b"%d" % number
        value = bytes([generation]) * nbytes
        if what == "put":
            cache.put(key, frozenset({generation}), value)
            assert cache.get(key, frozenset({generation, 99})) == value
        elif what == "get":
            got = cache.get(key, frozenset({generation}))
            assert got is None or set(got) <= {generation}
        elif what == "drop":
            cache.drop(key)
            assert key not in cache
        else:
            cache.add_read(key)
        assert 0 <= cache.counters()["cache_bytes"] <= 100


def test_the_least_recently_used_goes_first_and_the_too_large_never_comes() -> None:
    cache, now = ObjectCache(100), frozenset({1})
    for key in (b"a", b"b"):
        cache.put(key, now, bytes(50))
    assert cache.get(b"a", now) is not None
    cache.put(b"c", now, bytes(50))
    assert [key in cache for key in (b"a", b"b", b"c")] == [True, False, True]
    cache.put(b"d", now, bytes(101))
    assert b"d" not in cache
    assert cache.counters()["cache_evicted"] == 1


def test_recent_keys_are_bounded_and_remember_a_window() -> None:
    recent = RecentKeys(3)
    seen = [recent.add(key) for key in (b"1", b"2", b"1", b"3", b"4", b"2")]
    assert seen == [False, False, True, False, False, True]
    for number in range(100):
        recent.add(b"x%d" % number)
        assert b"x%d" % max(0, number - 2) in recent
    assert b"1" not in recent
