"""What an outage costs a client: one short wait for the master, one failed read per node; real processes."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from store_pool import MIB, LocalPool, RoleProcess, wait_until
from wall_time import stolen_s

from moonpool.base.errors import BreakerOpen, Unavailable
from moonpool.store import Store
from moonpool.store import messages as m
from moonpool.store.client import ClientConfig
from moonpool.transfer.config import TransferConfig
from moonpool.transfer.engine import TransferEngine

# Tests run on crowded machines: there the client itself is late, which is forgiven to the master (base/clock.py).
CROWDED = 8
KEYS = [b"key-%d" % number for number in range(20)]


class Pool:
    """A master and nodes as processes, and clients that do not wait."""

    def __init__(self, tmp_path: Path, stack: ExitStack) -> None:
        self._tmp_path, self._stack = tmp_path, stack
        self.address = f"unix:{tmp_path}/m.sock"
        self.master = self.start_master()

    def start_master(self) -> RoleProcess:
        # A node that is away is remembered for so long that no test sees it forgotten.
        times = {"heartbeat_s": 0.1, "segment_ttl_s": 60.0, "tick_s": 0.01, "lease_s": 0.2}
        self.master = self._start("master", data_dir=str(self._tmp_path / "data"), listen=self.address, **times)
        return self.master

    def start_node(self, name: str = "n0", **more: Any) -> RoleProcess:
        config = {"master_address": self.address, "dram_nbytes": 4 * MIB, "retry_s": 0.05, **more}
        return self._start("node", name=name, run_dir=str(self._tmp_path), **config)

    def client(self, **config: Any) -> Store:
        engine = TransferEngine(TransferConfig(run_dir=str(self._tmp_path), tcp_host=None))
        self._stack.enter_context(engine)
        return self._stack.enter_context(Store(self.address, engine=engine, config=ClientConfig(**config)))

    def _start(self, role: str, **config: Any) -> RoleProcess:
        process = RoleProcess(role, **config)
        self._stack.callback(process.close)
        return process


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with ExitStack() as stack:
        yield Pool(tmp_path, stack)


def put_all(client: Store) -> None:
    for key in KEYS:
        wait_until(lambda key=key: is_put(client, key))  # type: ignore[misc]


def is_put(client: Store, key: bytes) -> bool:
    """On a busy machine a master that runs may be silent for 0.2 s."""
    try:
        return client.exist_many([key])[0] or client.put(key, key * 100)
    except Unavailable:
        return False


def refusal_s(client: Store) -> float:
    """How long a call takes that fails because the master is away."""
    began_s = time.monotonic()
    with pytest.raises(Unavailable) as caught:
        client.exist_many(KEYS)
    assert isinstance(caught.value, BreakerOpen)
    return time.monotonic() - began_s


def answers(client: Store) -> bool:
    try:
        return client.exist_many(KEYS) == [True] * len(KEYS)
    except Unavailable:
        return False


@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_a_master_that_is_away_costs_one_short_wait(pool: Pool, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    pool.start_node()
    client = pool.client()
    put_all(client)
    assert client.pin_many(KEYS[:1]) == [True]
    with caplog.at_level("WARNING"):
        if fault == "killed":
            pool.master.kill()
        else:
            os.kill(pool.master.process.pid, signal.SIGSTOP)
        first_s = refusal_s(client)
        began_s, num_calls = time.monotonic(), 1000
        for _ in range(num_calls):
            refusal_s(client)
        assert first_s < 0.25 * CROWDED
        assert (time.monotonic() - began_s) / num_calls < 0.01, "the others fail at once"
        assert client.counters()["master_outages"] == 1
        assert len([each for each in caplog.records if "is away" in each.message]) == 1
        if fault == "killed":
            pool.start_master()
        else:
            os.kill(pool.master.process.pid, signal.SIGCONT)
        wait_until(lambda: answers(client))
    assert client.get_many(KEYS) == [key * 100 for key in KEYS], "nothing was ever said not to be there"


def test_threads_wait_together_not_in_turn(pool: Pool) -> None:
    pool.start_node()
    client = pool.client()
    put_all(client)
    os.kill(pool.master.process.pid, signal.SIGSTOP)
    waits_s: list[float] = []
    threads = [threading.Thread(target=lambda: waits_s.append(refusal_s(client))) for _ in range(12)]
    began_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(waits_s) == 12
    assert time.monotonic() - began_s < 12 * 0.2, "one of them has found out for all"
    os.kill(pool.master.process.pid, signal.SIGCONT)
    wait_until(lambda: answers(client))


def test_who_has_patience_waits_for_the_master(pool: Pool) -> None:
    pool.start_node()
    client = pool.client(retry_s=10.0)
    put_all(client)
    pool.master.kill()
    found: list[list[bool]] = []
    asking = threading.Thread(target=lambda: found.append(client.exist_many(KEYS)))
    asking.start()
    pool.start_master()
    asking.join(20)
    assert found == [[True] * len(KEYS)]


def test_what_lies_on_a_dead_node_does_not_exist_until_it_is_back(
    pool: Pool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = {"ssd_dir": str(tmp_path / "ssd"), "ssd_nbytes": 8 * MIB}
    node = pool.start_node(**disk)
    client = pool.client()
    put_all(client)
    wait_until(lambda: all(each.tier & m.Tier.SSD for each in client.objects()))
    node.kill()
    assert client.exist_many(KEYS) == [True] * len(KEYS), "neither master nor client has noticed the loss yet"
    with caplog.at_level("WARNING"):
        buffers = [[bytearray(len(key) * 100)] for key in KEYS]
        wait_until(lambda: isinstance(client.get_many_into(KEYS, buffers)[0], Unavailable))
        wait_until(lambda: client.exist_many(KEYS) == [False] * len(KEYS))
        for _ in range(50):
            assert isinstance(client.get_many_into(KEYS, buffers)[0], Unavailable), "no miss: it may come back"
    assert len([each for each in caplog.records if "cannot be read" in each.message]) <= 2, "one line per segment"
    pool.start_node(**disk)
    wait_until(lambda: client.exist_many(KEYS) == [True] * len(KEYS))
    wait_until(lambda: not client.directory.unreadable.listed)
    assert client.get_many(KEYS) == [key * 100 for key in KEYS]


def test_another_replica_is_read_and_counts(tmp_path: Path) -> None:
    """The dead node's half of the pool is left out; what has a second replica is there as ever."""
    pool = LocalPool(tmp_path, 4 * MIB, num_nodes=2)
    try:
        client = pool.client()
        assert client.put(b"both", b"1" * 1000, num_replicas=2)
        for number in range(20):
            client.put(b"%d" % number, b"1")
        pool.nodes[0]._engine.close()  # type: ignore[union-attr]  # as if it had died, before the master knows
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


class StolenTime:
    """Tells outages of a master that ran from those of a virtual machine whose host ran something else: then a
    processor stands still, with the master on it, and the clients on the other one do not. The kernel counts that time.
    """

    def __init__(self, clients: Sequence[Store]) -> None:
        self._clients = clients
        self._stolen: deque[tuple[float, float]] = deque(maxlen=500)  # (when, seconds of one processor)
        self._num_seen = 0
        self.num_excused = 0
        self.unexplained: list[str] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> StolenTime:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        before = stolen_s()
        while not self._is_over.wait(0.02):
            now_s, after = time.monotonic(), stolen_s()
            self._stolen.append((now_s, max(new - old for old, new in zip(before, after, strict=True))))
            before = after
            num_outages = sum(client.counters()["master_outages"] for client in self._clients)
            if num_outages > self._num_seen:
                recent_s = sum(seconds for when_s, seconds in self._stolen if now_s - when_s < 1.0)
                if recent_s >= 0.1:
                    self.num_excused += num_outages - self._num_seen
                else:
                    self.unexplained.append(f"{num_outages - self._num_seen} outages with {recent_s:.2f} s stolen")
                self._num_seen = num_outages


@pytest.mark.parametrize("seconds", [3.0, pytest.param(3600.0, marks=[pytest.mark.soak, pytest.mark.timeout(4000)])])
def test_a_loaded_master_without_faults_never_counts_as_away(pool: Pool, seconds: float) -> None:
    """Two threads put and evict all the time, and this one asks."""
    pool.start_node(dram_nbytes=MIB)
    client, *writers = (pool.client() for _ in range(3))
    until_s, rng, is_over = time.monotonic() + seconds, random.Random(1), threading.Event()

    def load(writer: Store, seed: int) -> None:
        number = random.Random(seed)
        while not is_over.is_set():
            writer.put_objects([_put(number) for _ in range(50)])

    threads = [threading.Thread(target=load, args=(writer, seed)) for seed, writer in enumerate(writers)]
    for thread in threads:
        thread.start()
    num_calls = 0
    try:
        with StolenTime([client, *writers]) as stolen:
            while time.monotonic() < until_s and not stolen.unexplained:
                with suppress(BreakerOpen):  # `stolen` sees it, too
                    client.exist_many([rng.randbytes(8) for _ in range(100)])
                num_calls += 1
    finally:
        is_over.set()
        for thread in threads:
            thread.join(60)
    print(f"{num_calls} calls; {stolen.num_excused} outages while the host had taken a processor away")
    assert num_calls > 10
    assert not stolen.unexplained


def _put(rng: random.Random) -> Any:
    from moonpool.store.client import Put

    return Put(rng.randbytes(8), [rng.randbytes(rng.randrange(1, 9000))])
