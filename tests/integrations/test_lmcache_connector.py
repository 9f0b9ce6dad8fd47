"""The LMCache plug-in on real pools, called as LMCache's native_plugin adapter calls it (LMCache itself is not needed;
tests/lmcache has it).
"""

from __future__ import annotations

import ctypes
import json
import random
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from engine_pool import stop
from store_pool import MIB, LocalPool, RoleProcess
from waiting import wait_until

from moonpool.base.errors import ConfigError
from moonpool.integrations.lmcache import LmcacheConnector, LmcacheSettings

MakeConnector = Callable[..., LmcacheConnector]
CHUNK_NBYTES = 100_000
KEYS = [f"org/model@00000001@0@{number:064x}" for number in range(5)]


def chunk(seed: int, nbytes: int = CHUNK_NBYTES) -> memoryview:
    """Memory as LMCache hands it over: a ctypes array."""
    return memoryview((ctypes.c_ubyte * nbytes).from_buffer_copy(random.Random(seed).randbytes(nbytes)))


def room(nbytes: int = CHUNK_NBYTES) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes)())


def answer(connector: LmcacheConnector, number: int) -> tuple[bool, str, list[bool]]:
    """The completion of the only request under way."""
    readable, _, _ = select.select([connector.event_fd()], [], [], 30)
    assert readable
    ((found, ok, error, done),) = connector.drain_completions()
    assert found == number
    assert connector.drain_completions() == []
    assert select.select([connector.event_fd()], [], [], 0)[0] == []
    return ok, error, done


def store_chunks(connector: LmcacheConnector, seeds: range) -> None:
    number = connector.submit_batch_set([KEYS[seed] for seed in seeds], [chunk(seed) for seed in seeds])
    assert answer(connector, number) == (True, "", [True] * len(seeds))


@pytest.fixture
def make_connector(pool: LocalPool) -> Iterator[MakeConnector]:
    with ExitStack() as stack:

        def make(**settings: Any) -> LmcacheConnector:
            connector = LmcacheConnector(**{"master": pool.address, **settings})
            stack.callback(connector.close)
            return connector

        yield make


@pytest.fixture
def connector(make_connector: MakeConnector) -> LmcacheConnector:
    return make_connector()


def test_keys_keep_namespaces_and_chunks_apart() -> None:
    texts = ["a@1@0@ff", "a@1@0@ff@salt", "é@1@0@ff", "\udc80@1@0@ff"]
    keys = [key for name in ("default", "other") for key in LmcacheSettings(namespace=name).pool_keys(texts)]
    assert len(set(keys)) == len(keys)
    assert keys[0] == b"lmcache/default/a@1@0@ff"


@pytest.mark.parametrize(
    "settings",
    [{"namespace": "a/b"}, {"namespace": ""}, {"num_replicas": 0}, {"silence_s": 0.0}, {"colour": "red"}],
)
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LmcacheConnector(master="unix:/none", **settings)


@pytest.mark.parametrize("shm", [True, False])
def test_another_process_loads_what_one_stored(make_connector: MakeConnector, shm: bool) -> None:
    first, second = make_connector(shm=shm), make_connector(shm=shm)
    store_chunks(first, range(4))
    assert answer(second, second.submit_batch_exists(KEYS)) == (True, "", [True] * 4 + [False])
    rooms = [room() for _ in KEYS]
    assert answer(second, second.submit_batch_get(KEYS, rooms)) == (True, "", [True] * 4 + [False])
    assert rooms[:4] == [chunk(seed) for seed in range(4)]
    counters = second.counters()
    assert (counters["looked_up"], counters["found"], counters["loaded"]) == (5, 4, 4)
    assert counters["loaded_nbytes"] == 4 * CHUNK_NBYTES == first.counters()["stored_nbytes"]
    assert not [name for name in counters if name.startswith("failed_")]


def test_a_taken_key_counts_as_stored_and_keeps_its_value(make_connector: MakeConnector) -> None:
    first, second = make_connector(), make_connector()
    store_chunks(first, range(2))
    assert answer(second, second.submit_batch_set([KEYS[0]], [chunk(9)])) == (True, "", [True])
    got = room()
    assert answer(second, second.submit_batch_get([KEYS[0]], [got]))[2] == [True]
    assert got == chunk(0)


def test_namespaces_do_not_see_each_other(make_connector: MakeConnector) -> None:
    store_chunks(make_connector(), range(1))
    other = make_connector(namespace="other")
    assert answer(other, other.submit_batch_exists(KEYS[:1]))[2] == [False]


def test_delete_removes_what_no_reader_has_leased(make_connector: MakeConnector, pool: LocalPool) -> None:
    connector = make_connector()
    store_chunks(connector, range(2))
    assert answer(connector, connector.submit_batch_exists(KEYS[:1]))[2] == [True]
    assert answer(connector, connector.submit_batch_delete(KEYS[:2]))[2] == [False, True]
    pool.advance(3600)
    assert answer(connector, connector.submit_batch_delete(KEYS[:1]))[2] == [True]
    assert answer(connector, connector.submit_batch_exists(KEYS[:2]))[2] == [False, False]


@pytest.mark.parametrize("shm", [True, False])
def test_wrong_bytes_are_never_loaded(make_connector: MakeConnector, pool: LocalPool, shm: bool) -> None:
    connector = make_connector(shm=shm)
    store_chunks(connector, range(3))
    (info,) = pool.client().lookup(LmcacheSettings().pool_keys(KEYS[1:2]))
    assert info is not None
    end = info.replicas[0].offset + info.nbytes
    pool.nodes[0].segment.memory[end - 100 : end] = bytes(100)
    rooms = [room() for _ in range(3)]
    ok, error, done = answer(connector, connector.submit_batch_get(KEYS[:3], rooms))
    assert (ok, done) == (False, [True, False, True])
    assert error.startswith("corrupt")
    counters = connector.counters()
    assert (counters["corrupt"], counters["failed_load_corrupt"], counters["loaded"]) == (1, 1, 2)
    store_chunks(connector, range(1, 2))  # it was taken out of the pool, so it can be stored again
    assert answer(connector, connector.submit_batch_get(KEYS[1:2], rooms[1:2]))[2] == [True]
    assert rooms[1] == chunk(1)


def test_a_chunk_of_another_size_is_not_loaded(connector: LmcacheConnector) -> None:
    store_chunks(connector, range(2))
    rooms = [room(CHUNK_NBYTES * 2), room(CHUNK_NBYTES // 2)]
    ok, _, done = answer(connector, connector.submit_batch_get(KEYS[:2], rooms))
    assert (ok, done) == (False, [False, False])
    assert connector.counters()["failed_load_invalid_input"] == 2


def test_a_call_that_makes_no_sense_is_answered(connector: LmcacheConnector) -> None:
    assert answer(connector, connector.submit_batch_get(KEYS[:2], [room()]))[::2] == (False, [False, False])
    assert answer(connector, connector.submit_batch_set([""], [chunk(0)]))[0]  # an empty name has its prefix
    assert answer(connector, connector.submit_batch_exists(["x" * 70_000]))[::2] == (False, [False])
    assert answer(connector, connector.submit_batch_exists([]))[2] == []


def test_a_full_pool_refuses_and_goes_on(connector: LmcacheConnector) -> None:
    ok, error, done = answer(connector, connector.submit_batch_set(KEYS[:2], [chunk(0, 8 * MIB), chunk(1)]))
    assert (ok, done) == (False, [False, True])
    assert error.startswith("no_space")
    assert connector.counters()["failed_store_no_space"] == 1


def test_a_master_that_is_away_costs_misses_and_comes_back(connector: LmcacheConnector, pool: LocalPool) -> None:
    store_chunks(connector, range(2))
    pool.loop.run(pool.master.close())
    assert answer(connector, connector.submit_batch_exists(KEYS[:2]))[::2] == (False, [False, False])
    assert answer(connector, connector.submit_batch_get(KEYS[:1], [room()]))[::2] == (False, [False])
    assert answer(connector, connector.submit_batch_set(KEYS[2:3], [chunk(2)]))[::2] == (False, [False])
    assert answer(connector, connector.submit_batch_delete(KEYS[:1]))[::2] == (False, [False])
    assert connector.counters()["master_outages"] == 1
    pool.start_master()
    wait_until(
        lambda: answer(connector, connector.submit_batch_exists(KEYS[:2]))[2] == [True, True], "the master is back"
    )


def test_the_pool_may_start_after_lmcache(tmp_path: Path) -> None:
    connector = LmcacheConnector(master=f"unix:{tmp_path}/m.sock")
    try:
        assert answer(connector, connector.submit_batch_exists(KEYS[:1]))[::2] == (False, [False])
        pool = LocalPool(tmp_path, dram_nbytes=4 * MIB)
        try:
            wait_until(
                lambda: answer(connector, connector.submit_batch_set(KEYS[:1], [chunk(0)]))[0], "the pool has started"
            )
        finally:
            pool.close()
    finally:
        connector.close()


@pytest.mark.parametrize("signal_number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_node_that_does_not_answer_is_a_miss(
    make_connector: MakeConnector, pool: LocalPool, tmp_path: Path, signal_number: signal.Signals
) -> None:
    pool.loop.run(pool.nodes.pop().close())
    config = {"name": "n1", "master_address": pool.address, "dram_nbytes": 4 * MIB, "run_dir": str(tmp_path / "run1")}
    node = RoleProcess("node", **config)
    connector = make_connector(shm=False)
    try:
        wait_until(
            lambda: answer(connector, connector.submit_batch_set(KEYS[:2], [chunk(0), chunk(1)]))[0],
            "the node has mounted",
        )
        rooms = [room(), room()]
        assert answer(connector, connector.submit_batch_get(KEYS[:2], rooms))[2] == [True, True]
        if signal_number == signal.SIGSTOP:
            stop(node.process)
        else:
            node.process.kill()
            node.process.wait()
        assert answer(connector, connector.submit_batch_get(KEYS[:2], rooms))[::2] == (False, [False, False])
        assert answer(connector, connector.submit_batch_exists(KEYS[:2]))[2] == [False, False]
        if signal_number == signal.SIGSTOP:
            node.process.send_signal(signal.SIGCONT)
            wait_until(
                lambda: answer(connector, connector.submit_batch_exists(KEYS[:2]))[2] == [True, True], "it goes on"
            )
            assert answer(connector, connector.submit_batch_get(KEYS[:2], rooms))[2] == [True, True]
            assert rooms == [chunk(0), chunk(1)]
    finally:
        node.process.send_signal(signal.SIGCONT) if node.process.poll() is None else None
        connector.close()
        node.close()


def test_many_requests_at_once_are_each_answered_once(connector: LmcacheConnector) -> None:
    store_chunks(connector, range(5))
    rooms = [room() for _ in range(40)]
    expected = {}
    for number, into in enumerate(rooms):
        expected[connector.submit_batch_get([KEYS[number % 5]], [into])] = "load"
        expected[connector.submit_batch_exists(KEYS)] = "look-up"
    seen: list[int] = []
    while len(seen) < len(expected):
        assert select.select([connector.event_fd()], [], [], 30)[0]
        for number, ok, _, done in connector.drain_completions():
            assert ok
            assert all(done)
            seen.append(number)
    assert sorted(seen) == sorted(expected)
    assert rooms == [chunk(number % 5) for number in range(40)]


def test_after_close_every_request_is_answered_as_failed(connector: LmcacheConnector) -> None:
    connector.close()
    connector.close()
    number = connector.submit_batch_exists(KEYS[:2])
    ((found, ok, error, done),) = connector.drain_completions()
    assert (found, ok, done) == (number, False, [False, False])
    assert error.startswith("overloaded")


def test_the_counters_file_has_the_last_state(make_connector: MakeConnector, tmp_path: Path) -> None:
    path = tmp_path / "counters.json"
    connector = make_connector(counters_file=str(path))
    store_chunks(connector, range(3))
    connector.close()
    written = json.loads(path.read_text())
    assert (written["stored"], written["stored_nbytes"]) == (3, 3 * CHUNK_NBYTES)
    assert written["longest_store_ms"] >= 0
