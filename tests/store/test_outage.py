"""What an outage costs a client: one short wait for the master, one failed read per node; real processes."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest
from store_pool import MIB, LocalPool, ProcessPool
from waiting import HANG_S, wait_until

from moonpool.base.errors import BreakerOpen, Unavailable
from moonpool.store import Store
from moonpool.store import messages as m
from moonpool.store.client import ClientConfig, Put

T = TypeVar("T")
KEYS = [b"key-%d" % number for number in range(20)]
# A client that waits for the master as shortly as by default, and would wait this long for an answer.
HASTY: dict[str, Any] = {"silence_s": ClientConfig.silence_s, "retry_s": 0.0, "rpc_timeout_s": 600.0}


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ProcessPool]:
    with ExitStack() as stack:
        pool = ProcessPool(tmp_path, stack)
        pool.start_master()
        yield pool


def put_all(client: Store) -> None:
    for key in KEYS:
        assert client.put(key, key * 100)


def answered(ask: Callable[[], T]) -> T:
    """Return the first answer. On a busy machine a master that runs may be silent for 0.2 s, too."""
    answers: list[T] = []

    def is_answered() -> bool:
        try:
            answers.append(ask())
        except Unavailable:
            return False
        return True

    wait_until(is_answered, "the master answers")
    return answers[0]


def is_refused(client: Store) -> bool:
    """Whether the call fails because the master is away."""
    with pytest.raises(Unavailable) as caught:
        client.exist_many(KEYS)
    return isinstance(caught.value, BreakerOpen)


def num_outages(client: Store) -> int:
    return client.counters()["master_outages"]


@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_a_master_that_is_away_costs_one_short_wait(
    pool: ProcessPool, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool.start_node()
    put_all(pool.client())
    client = pool.client(**HASTY)
    assert answered(lambda: client.pin_many(KEYS[:1])) == [True]
    assert all(answered(lambda: client.exist_many(KEYS)))
    before, refused_before = num_outages(client), client.counters()["calls_refused"]
    with caplog.at_level("WARNING"):
        if fault == "killed":
            pool.master.kill()
        else:
            os.kill(pool.master.process.pid, signal.SIGSTOP)
        began_s = time.monotonic()
        assert is_refused(client)
        assert time.monotonic() - began_s < HANG_S / 2, "far below its patience of 600 s"
        began_s, num_calls = time.monotonic(), 1000
        assert all(is_refused(client) for _ in range(num_calls))
        assert time.monotonic() - began_s < HANG_S / 2, "the others fail at once: 1000 silences are 200 s"
        assert client.counters()["calls_refused"] - refused_before == num_calls
        assert num_outages(client) - before == 1
        assert len([each for each in caplog.records if "is away" in each.message]) == 1
        if fault == "killed":
            pool.start_master()
        else:
            os.kill(pool.master.process.pid, signal.SIGCONT)
        wait_until(lambda: all(answered(lambda: client.exist_many(KEYS))), "its node is there again, too")
    got = answered(lambda: client.get_many(KEYS))
    assert got == [key * 100 for key in KEYS], "nothing was ever said not to be there"


def test_threads_wait_together_not_in_turn(pool: ProcessPool) -> None:
    client = pool.client(**HASTY)
    answered(lambda: client.exist_many(KEYS))
    before, refused_before = num_outages(client), client.counters()["calls_refused"]
    os.kill(pool.master.process.pid, signal.SIGSTOP)
    all_here, refused = threading.Barrier(12), list[bool]()

    def ask() -> None:
        all_here.wait(HANG_S)
        refused.append(is_refused(client))

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert refused == [True] * 12
    assert num_outages(client) - before == 1, "one of them has waited for a silence"
    assert client.counters()["calls_refused"] - refused_before == 11, "and has found out for all"
    os.kill(pool.master.process.pid, signal.SIGCONT)
    answered(lambda: client.exist_many(KEYS))


def test_who_has_patience_waits_for_the_master(pool: ProcessPool) -> None:
    pool.start_node()
    client = pool.client(retry_s=HANG_S, rpc_timeout_s=HANG_S)
    put_all(client)
    pool.master.kill()
    found: list[list[bool]] = []
    asking = threading.Thread(target=lambda: found.append(client.exist_many(KEYS)))
    asking.start()
    pool.start_master()
    asking.join(HANG_S)
    assert found == [[True] * len(KEYS)]


def test_what_lies_on_a_dead_node_does_not_exist_until_it_is_back(
    pool: ProcessPool, caplog: pytest.LogCaptureFixture
) -> None:
    disk: dict[str, Any] = {"ssd_dir": str(pool.tmp_path / "ssd"), "ssd_nbytes": 8 * MIB}
    node = pool.start_node(**disk)
    client = pool.client()
    put_all(client)
    wait_until(lambda: all(each.tier & m.Tier.SSD for each in client.objects()), "all is on the SSD")
    node.kill()
    assert client.exist_many(KEYS) == [True] * len(KEYS), "neither master nor client has noticed the loss yet"
    with caplog.at_level("WARNING"):
        buffers = [[bytearray(len(key) * 100)] for key in KEYS]

        def is_unreadable() -> bool:
            return isinstance(client.get_many_into(KEYS, buffers)[0], Unavailable)

        wait_until(is_unreadable, "the client notices the loss")
        wait_until(lambda: client.exist_many(KEYS) == [False] * len(KEYS), "all of it is left out")
        assert all(is_unreadable() for _ in range(50)), "no miss: it may come back"
    assert len([each for each in caplog.records if "cannot be read" in each.message]) <= 2, "one line per segment"
    pool.start_node(**disk)
    wait_until(lambda: client.exist_many(KEYS) == [True] * len(KEYS), "all of it is back")
    wait_until(lambda: not client.directory.unreadable.listed, "the client reads it again")
    assert client.get_many(KEYS) == [key * 100 for key in KEYS]


def test_another_replica_is_read_and_counts(tmp_path: Path) -> None:
    """The dead node's half of the pool is left out; what has a second replica is there as ever."""
    pool = LocalPool(tmp_path, 4 * MIB, num_nodes=2)
    try:
        client = pool.client()
        assert client.put(b"both", b"1" * 1000, num_replicas=2)
        for number in range(20):
            client.put(b"%d" % number, b"1")
        pool.break_memory(0)
        keys = [b"both", *(b"%d" % number for number in range(20))]
        for key in keys:
            try:
                client.get(key)
            except Unavailable:
                continue
        there = dict(zip(keys, client.exist_many(keys), strict=True))
        assert there[b"both"]
        for key, exists in there.items():
            info = client.lookup([key])[0]
            assert info is not None
            segments = {place.segment for place in info.replicas}
            assert exists == (segments != {pool.nodes[0].segment_name})
    finally:
        pool.close()


class Load:
    """Two clients that put and evict all the time; a third one is asked by the test."""

    def __init__(self, pool: ProcessPool, silence_s: float) -> None:
        pool.start_node(dram_nbytes=MIB)
        self.client, *self._writers = (pool.client(silence_s=silence_s, retry_s=0.0) for _ in range(3))
        self._is_over = threading.Event()
        self.num_puts = [0 for _ in self._writers]
        self._threads = [threading.Thread(target=self._put, args=(number,)) for number in range(len(self._writers))]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(HANG_S)

    @property
    def num_outages(self) -> int:
        return sum(num_outages(client) for client in (self.client, *self._writers))

    def ask(self, rng: random.Random) -> None:
        self.client.exist_many([rng.randbytes(8) for _ in range(100)])

    def _put(self, number: int) -> None:
        rng = random.Random(number)
        while not self._is_over.is_set():
            self._writers[number].put_objects([_put(rng) for _ in range(50)])
            self.num_puts[number] += 1


def test_a_loaded_master_without_faults_never_counts_as_away(pool: ProcessPool) -> None:
    """Two threads put and evict all the time, and this one asks."""
    rng = random.Random(1)
    with Load(pool, silence_s=HANG_S / 2) as load:

        def is_enough() -> bool:
            load.ask(rng)
            return min(load.num_puts) >= 30

        wait_until(is_enough, "each thread has put 30 times")
        assert load.num_outages == 0
    assert load.client.stats().counters["evicted"] > 0


@pytest.mark.soak
@pytest.mark.timeout(4000)
def test_a_loaded_master_is_never_silent_for_as_long_as_counts_as_away(pool: ProcessPool) -> None:
    """The same for an hour with the product's silence of 0.2 s. Noise: the time that the host takes away is printed."""
    rng, num_calls, stolen_before = random.Random(1), 0, stolen_s()
    with Load(pool, silence_s=ClientConfig.silence_s) as load:
        until_s = time.monotonic() + 3600.0
        while time.monotonic() < until_s and not load.num_outages:
            answered(lambda: load.ask(rng))
            num_calls += 1
        stolen = stolen_s() - stolen_before
        said = f"{load.num_outages} outages in {num_calls} calls; the host took {stolen:.2f} s away"
    print(said)
    assert not load.num_outages, said


def stolen_s() -> float:
    """Return for how long, since they started, processors stood still because the host of this virtual machine ran
    something else."""
    total = Path("/proc/stat").read_text().splitlines()[0]
    return int(total.split()[8]) / os.sysconf("SC_CLK_TCK")


def _put(rng: random.Random) -> Put:
    return Put(rng.randbytes(8), [rng.randbytes(rng.randrange(1, 9000))])
