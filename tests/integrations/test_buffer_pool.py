"""Registered memory that is lent and used again: limits, waiting, views, dropped leases and threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from moonpool.integrations.mooncake.buffer_pool import BufferLease, BufferPool

KIB = 1024


class FakeStore:
    """Remembers what is registered."""

    def __init__(self, nbytes: int = 64 * KIB) -> None:
        self.nbytes = nbytes
        self.registered: dict[int, int] = {}
        self.num_registrations = 0
        self.refuses = False

    def local_buffer_nbytes(self) -> int:
        return self.nbytes

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        if self.refuses or buffer_ptr in self.registered:
            return -600
        self.registered[buffer_ptr] = size
        self.num_registrations += 1
        return 0

    def unregister_buffer(self, buffer_ptr: int) -> int:
        return 0 if self.registered.pop(buffer_ptr, None) else -600


def make_pool(store: FakeStore | None = None, **settings: Any) -> BufferPool:
    return BufferPool(store or FakeStore(), **({"min_size_class": 4 * KIB, "alignment": 4 * KIB} | settings))


def test_a_region_is_registered_once_and_lent_again() -> None:
    store = FakeStore()
    pool = make_pool(store)
    with pool.buffer(1000) as lease:
        first = lease.ptr
        assert store.registered[first] == 4 * KIB
        lease.buffer[:4] = b"abcd"
        assert bytes(lease.buffer[:4]) == b"abcd"
        assert (lease.size, len(lease.buffer)) == (1000, 1000)
    with pool.acquire(4096) as lease:
        assert lease.ptr == first
    assert store.num_registrations == 1
    pool.close()
    assert store.registered == {}


@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 65 * KIB, 128 * KIB])
def test_any_size_up_to_the_capacity_is_lent(size: int) -> None:
    pool = make_pool(max_size_class=32 * KIB)
    with pool.acquire(size) as lease:
        assert len(lease.buffer) == size
        assert lease.ptr % 4096 == 0
    pool.close()


@pytest.mark.parametrize("size", [128 * KIB + 1, (1 << 64) - 1, -1])
def test_more_than_the_capacity_is_refused(size: int) -> None:
    pool = make_pool()
    with pytest.raises(RuntimeError, match="capacity"):
        pool.acquire(size)
    pool.close()


@pytest.mark.parametrize("settings", [{"alignment": 12345}, {"alignment": 4}, {"min_size_class": 0}])
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="alignment"):
        make_pool(**settings)


@pytest.mark.parametrize(("nbytes", "reason"), [(-600, "not initialized"), (0, "local buffer")])
def test_a_store_without_a_local_buffer_is_refused(nbytes: int, reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        make_pool(FakeStore(nbytes))
    with pytest.raises(RuntimeError, match="MooncakeDistributedStore"):
        BufferPool(object())  # type: ignore[arg-type]


def test_free_regions_of_other_sizes_make_room() -> None:
    store = FakeStore()  # 128 KiB in all
    pool = make_pool(store)
    leases = [pool.acquire(32 * KIB) for _ in range(4)]
    with pytest.raises(RuntimeError, match="exhausted"):
        pool.acquire(1, block=False)
    for lease in leases:
        lease.release()
    with pool.acquire(128 * KIB):
        assert list(store.registered.values()) == [128 * KIB]
    pool.close()


def test_a_limit_of_leases_and_of_waiting() -> None:
    pool = make_pool(max_regions=1, default_timeout=0.01)
    lease = pool.acquire(1)
    with pytest.raises(RuntimeError, match="timed out"):
        pool.acquire(1)
    with pytest.raises(RuntimeError, match="exhausted"):
        pool.acquire(1, block=False)
    with pytest.raises(RuntimeError, match="non-negative"):
        pool.acquire(1, timeout=-1)
    lease.release()
    lease.release()
    pool.acquire(1).release()
    pool.close()


@pytest.mark.parametrize("end", [BufferLease.release, lambda lease: None])
def test_a_waiting_thread_gets_what_another_gives_back(end: Callable[[BufferLease], None]) -> None:
    pool = make_pool(max_regions=1)
    lease = pool.acquire(1)
    lent: list[BufferLease] = []
    thread = threading.Thread(target=lambda: lent.append(pool.acquire(1)))
    thread.start()
    end(lease)
    del lease
    gc.collect()
    thread.join(10)
    assert len(lent) == 1
    lent.pop().release()
    pool.close()


def test_memory_with_views_is_not_lent_again() -> None:
    pool = make_pool()
    lease = pool.acquire(8)
    view = lease.buffer
    part = view[2:4]
    with pytest.raises(RuntimeError, match="exported views"):
        lease.release()
    del view
    with pytest.raises(RuntimeError, match="exported views"):
        lease.release()
    del lease
    with pytest.raises(RuntimeError, match="active leases"):
        pool.close()
    part[:] = b"ok"
    del part
    gc.collect()
    pool.close()


def test_a_lease_and_a_pool_that_ended_say_so() -> None:
    pool = make_pool()
    lease = pool.acquire(8)
    with pytest.raises(RuntimeError, match="active leases"):
        pool.close()
    lease.release()
    for use in (lambda: lease.ptr, lambda: lease.buffer):
        with pytest.raises(RuntimeError, match="lease is closed"):
            use()
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="pool is closed"):
        pool.acquire(1)
    with pytest.raises(RuntimeError, match="pool is closed"):
        pool.prewarm(1, 1)


def test_prewarming_registers_ahead_as_far_as_there_is_room() -> None:
    store = FakeStore()
    pool = make_pool(store, prewarm_size=8 * KIB, prewarm_count=2)
    assert list(store.registered.values()) == [8 * KIB] * 2
    pool.prewarm(64 * KIB, 100)
    assert sum(store.registered.values()) <= 128 * KIB
    pool.close()


def test_memory_that_cannot_be_registered_is_an_error_and_takes_no_room() -> None:
    store = FakeStore()
    pool = make_pool(store)
    store.refuses = True
    for _ in range(3):
        with pytest.raises(RuntimeError, match="registration"):
            pool.acquire(128 * KIB)
    store.refuses = False
    pool.acquire(128 * KIB).release()
    pool.close()


def test_eight_threads_never_share_memory() -> None:
    pool = make_pool(max_size_class=8 * KIB)
    failures: list[int] = []

    def work(number: int) -> None:
        for turn in range(50):
            with pool.acquire(1 + (number * turn) % (20 * KIB)) as lease:
                lease.buffer[:] = bytes([number]) * lease.size
                if bytes(lease.buffer) != bytes([number]) * lease.size:
                    failures.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    pool.close()
