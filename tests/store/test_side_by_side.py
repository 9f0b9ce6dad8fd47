"""Work by two threads: each item once, errors reach the caller, nothing goes on afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from moonpool.base.checksum import runs_beside_others
from moonpool.store.client.transfer_window import TransferThreads, for_each

MIB = 1 << 20


@pytest.fixture
def threads() -> Iterator[TransferThreads]:
    made = TransferThreads()
    yield made
    made.close()


@pytest.mark.parametrize(("count", "nbytes"), [(0, 0), (1, 64 * MIB), (100, 1000), (100, 100 * MIB)])
def test_every_item_is_done_once(threads: TransferThreads, count: int, nbytes: int) -> None:
    done: list[int] = []
    for_each(threads, range(count), nbytes, done.append)
    assert sorted(done) == list(range(count))


@pytest.mark.skipif(not runs_beside_others(), reason="checksums hold Python's lock here")
def test_two_threads_work_at_the_same_time(threads: TransferThreads) -> None:
    both, used = threading.Barrier(2, timeout=20.0), set()

    def meet(item: int) -> None:
        used.add(threading.get_ident())
        both.wait()  # ends only when another item is worked on too

    for_each(threads, range(2), 64 * MIB, meet)
    assert len(used) == 2


@pytest.mark.parametrize("bad", [0, 57, 99])
def test_an_error_reaches_the_caller_when_all_has_ended(threads: TransferThreads, bad: int) -> None:
    running = threading.Semaphore(2)

    def work(item: int) -> None:
        with running:
            if item == bad:
                raise ValueError(item)

    with pytest.raises(ValueError, match=str(bad)):
        for_each(threads, range(100), 100 * MIB, work)
    assert running.acquire(blocking=False)
    assert running.acquire(blocking=False)
