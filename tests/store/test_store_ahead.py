"""Puts in one round trip: space is granted ahead, used for one put each, and given back."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from facade_pool import FacadePool, facade_pool
from store_pool import MIB
from waiting import wait_until

from moonpool.base.errors import StaleGeneration
from moonpool.store import Store
from moonpool.store.client import ahead
from moonpool.store.messages.values import MAX_AHEAD_NBYTES
from moonpool.transfer.transports.mapped import MappedWriter


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[FacadePool]:
    yield from facade_pool(tmp_path, dram_nbytes=64 * MIB)


@pytest.fixture(params=["mapped", "tcp"])
def writer(pool: FacadePool, request: pytest.FixtureRequest) -> Store:
    return pool.store(shm=request.param == "mapped")


class Calls:
    """Counts what a client asks the master."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kinds: Counter[str] = Counter()
        original = store.master.call_noting_repeats

        def call(call: Any, *more: Any) -> Any:
            self.kinds[type(call).__name__] += 1
            return original(call, *more)

        monkeypatch.setattr(store.master, "call_noting_repeats", call)


def ahead_nbytes(store: Store) -> int:
    return store.stats().counters["ahead_bytes"]


def test_a_put_is_one_call(pool: FacadePool, writer: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = pool.store()
    writer.put("first", bytes(1000))
    asked = Calls(writer, monkeypatch)
    for number in range(120):
        assert writer.put(f"k{number}", b"%04d" % number * 250)
    assert asked.kinds == {"PutAt": 120, "GrantAhead": 4}  # for 16 places, then 32, 64 and 64
    for number in range(120):
        assert reader.get(f"k{number}") == b"%04d" % number * 250


def test_a_taken_key_keeps_its_value_and_the_place_is_used_again(
    pool: FacadePool, writer: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.put("k", b"old")
    writer.put("l", b"l")
    asked = Calls(writer, monkeypatch)
    held = ahead_nbytes(pool.store())
    for _ in range(20):
        assert not writer.put("k", b"new")
    assert ahead_nbytes(pool.store()) == held
    assert writer.put("m", b"m")
    assert asked.kinds["GrantAhead"] == 0
    assert [writer.get(key) for key in ("k", "l", "m")] == [b"old", b"l", b"m"]


def test_other_puts_go_the_ordinary_way(writer: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Calls(writer, monkeypatch)
    for turn in range(4):
        writer.put(f"large{turn}", bytes(5 * MIB))
        writer.upsert("k", b"%d" % turn)
        writer.put_many({f"{turn}.{number}": b"v" for number in range(3)})
        writer.put(f"g{turn}", b"v", group="g")
    assert asked.kinds["PutAt"] == 0
    assert writer.get("k") == b"3"


def test_a_large_put_is_one_call_in_mapped_memory_and_asks_first_elsewhere(
    pool: FacadePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped, remote, reader = pool.store(shm=True), pool.store(shm=False), pool.store()
    asked_by = {mapped: {"PutAt": 12, "GrantAhead": 4}, remote: {"PutStart": 12, "PutEnd": 12}}
    for store, expected in asked_by.items():
        values = {f"{'mapped' if store is mapped else 'remote'}{number}": bytes([number]) * MIB for number in range(13)}
        first, *others = values
        store.put(first, values[first])
        asked = Calls(store, monkeypatch)
        for key in others:
            assert store.put(key, values[key])
        assert asked.kinds == expected  # 64 MiB of memory: at most 3 places of 1 MiB and a header are held
        assert {key: reader.get(key) for key in values} == values


@pytest.mark.parametrize("has_thread", [True, False], ids=["a thread helps", "no thread is free"])
@pytest.mark.parametrize("nbytes", [3 * MIB // 2 + 1, 5 * MIB + 1], ids=["space ahead", "in the ordinary way"])
def test_two_threads_copy_and_checksum_a_large_object(
    pool: FacadePool, monkeypatch: pytest.MonkeyPatch, nbytes: int, has_thread: bool
) -> None:
    writer, reader, rng = pool.store(shm=True), pool.store(), random.Random(3)
    values = {f"k{number}": rng.randbytes(nbytes) for number in range(6)}
    asked, threads = Calls(writer, monkeypatch), []
    engine = writer.piece_puts.tools.engine
    original = engine.call_on_thread

    def call_on_thread(act: Any) -> Any:
        threads.append(act)
        return original(act if has_thread else lambda: None)

    monkeypatch.setattr(engine, "call_on_thread", call_on_thread)
    for key, value in values.items():
        assert writer.put(key, value)
    if nbytes > MAX_AHEAD_NBYTES:
        assert asked.kinds["PutStart"] == len(threads) == 6
    else:  # after the first one, which asked first
        assert asked.kinds["PutAt"] == len(threads) == 5
    assert {key: reader.get(key) for key in values} == values
    for act in threads:
        act()  # too late: it does nothing


def test_a_large_put_whose_space_is_lost_is_put_in_the_ordinary_way(
    pool: FacadePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = pool.store(shm=True), pool.store()
    for number in range(2):
        assert writer.put(f"k{number}", bytes(MIB))

    def refuse(*_: Any) -> None:
        raise StaleGeneration("a later write was here")

    monkeypatch.setattr(MappedWriter, "write_head_last", refuse)
    asked = Calls(writer, monkeypatch)
    assert writer.put("k2", b"2" * MIB)
    assert asked.kinds == {"PutStart": 1, "PutEnd": 1, "PutRevoke": 1}
    assert reader.get("k2") == b"2" * MIB


def test_a_large_put_asks_first_after_a_key_was_taken(pool: FacadePool, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = pool.store(shm=True)
    for number in range(3):
        writer.put(f"k{number}", bytes(MIB))
    asked = Calls(writer, monkeypatch)
    for number in range(3):
        assert not writer.put(f"k{number}", b"n" * MIB)
    assert asked.kinds == {"PutAt": 1, "PutStart": 2}  # it was written once in vain
    assert writer.get("k2") == bytes(MIB)
    wait_until(lambda: not writer.put("k0", b"n" * MIB) and asked.kinds["PutAt"] == 2, "it does not ask first for long")


def test_what_is_not_used_is_given_back(pool: FacadePool, writer: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_IDLE_S", 0.1)
    monkeypatch.setattr(ahead, "_LOOK_S", 0.02)
    monkeypatch.setattr(ahead, "_RENEW", 0.0)
    for number in range(3):
        writer.put(f"k{number}", b"v")
    wait_until(lambda: ahead_nbytes(writer) == 0, "all is given back")
    wait_until(lambda: not any(each.name == "store-ahead" for each in threading.enumerate()), "the thread ends")
    asked = Calls(writer, monkeypatch)
    for number in range(3):
        assert writer.put(f"l{number}", b"v")
    assert asked.kinds["GrantAhead"] > 0, "it asks for space again"


def test_a_closed_client_holds_nothing(pool: FacadePool, writer: Store) -> None:
    for number in range(3):
        writer.put(f"k{number}", b"v")
    other = pool.store()
    assert ahead_nbytes(other) > 0
    writer.close()
    assert ahead_nbytes(other) == 0
    assert [other.get(f"k{number}") for number in range(3)] == [b"v"] * 3


def test_a_full_pool_takes_it_back(tmp_path: Path) -> None:
    for pool in facade_pool(tmp_path, dram_nbytes=MIB):
        writer, filler = pool.store(), pool.store()
        for number in range(3):
            writer.put(f"k{number}", b"v")
        assert ahead_nbytes(filler) > 0
        for number in range(300):
            filler.put_many({f"f{number}": bytes(8192)}, pinned=True)
            if filler.stats().used_nbytes > 0.98 * MIB:
                break
        wait_taken_back(writer, filler)


def wait_taken_back(writer: Store, watcher: Store) -> None:
    """Held places are used for some seconds only: after a stall a put asks for a place of its own."""
    numbers = itertools.count()

    def is_taken_back() -> bool:
        writer.put(f"last{next(numbers)}", b"v")
        return ahead_nbytes(watcher) == 0

    wait_until(is_taken_back, "a client that goes on putting has given all of it back")


def test_threads_put_at_once(pool: FacadePool, writer: Store) -> None:
    new: list[int] = []

    def put(thread: int) -> None:
        for number in range(100):
            key = number if number % 2 else thread * 1000 + number  # half of the keys are everybody's
            if writer.put(f"k{key}", b"%06d" % key * 100):
                new.append(key)

    threads = [threading.Thread(target=put, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(new) == sorted(set(new)), "one put of a key is the first"
    assert len(new) == 4 * 50 + 50
    for key in new:
        assert writer.get(f"k{key}") == b"%06d" % key * 100
