"""Work by two threads: each item once, errors reach the caller, nothing goes on afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonpool.store.client.transfer_window import for_each
from moonpool.transfer import TransferConfig, TransferEngine

MIB = 1 << 20


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[TransferEngine]:
    with TransferEngine(TransferConfig(run_dir=str(tmp_path), shm=False, tcp_host=None)) as made:
        yield made


@pytest.mark.parametrize(("count", "nbytes"), [(0, 0), (1, 64 * MIB), (100, 1000), (100, 100 * MIB)])
def test_every_item_is_done_once(engine: TransferEngine, count: int, nbytes: int) -> None:
    done: list[int] = []
    for_each(engine, range(count), nbytes, done.append)
    assert sorted(done) == list(range(count))


def test_two_threads_work_at_the_same_time(engine: TransferEngine) -> None:
    both, used = threading.Barrier(2, timeout=20.0), set()

    def meet(item: int) -> None:
        used.add(threading.get_ident())
        both.wait()  # ends only when another item is worked on too

    for_each(engine, range(2), 64 * MIB, meet)
    assert len(used) == 2


@pytest.mark.parametrize("bad", [0, 57, 99])
def test_an_error_reaches_the_caller_when_all_has_ended(engine: TransferEngine, bad: int) -> None:
    running = threading.Semaphore(2)

    def work(item: int) -> None:
        with running:
            if item == bad:
                raise ValueError(item)

    with pytest.raises(ValueError, match=str(bad)):
        for_each(engine, range(100), 100 * MIB, work)
    assert running.acquire(blocking=False)
    assert running.acquire(blocking=False)


def test_without_a_free_thread_the_caller_does_all(engine: TransferEngine) -> None:
    engine.close()
    done: list[int] = []
    for_each(engine, range(100), 100 * MIB, done.append)
    assert done == list(range(100))


def test_a_thread_that_is_free_too_late_does_nothing(engine: TransferEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[Callable[[], None]] = []
    monkeypatch.setattr(engine, "call_on_thread", late.append)
    done: list[int] = []
    for_each(engine, range(100), 100 * MIB, done.append)
    for work in late:
        work()
    assert done == list(range(100))
