"""The conductor over real sockets, with a small store that speaks the real Subscribe."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from watched_status import until_status
from worker_info import info

from moonpool.base.cluster import (
    CONDUCTOR_SERVICE,
    PrefillSample,
    PullSample,
    RegisterWorker,
    ReportWorker,
    WorkerLoad,
)
from moonpool.base.errors import ConfigError, IdentityMismatch, NotFound, Overloaded, Unavailable
from moonpool.base.keys import object_key
from moonpool.base.metrics import GetMetrics
from moonpool.base.rpc import AsyncClient, RpcServer
from moonpool.conductor.messages import (
    ConductorStatus,
    ExplainRequest,
    PrefillEnded,
    Records,
    RequestEnded,
    Route,
    Status,
)
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.conductor.service import Conductor, ConductorConfig
from moonpool.store.messages import SERVICE, EventBatch, Subscribe, Why

KEYS = [bytes([number]) * 32 for number in range(10)]
OBJECTS = tuple(object_key(key) for key in KEYS)


class EventStore:
    """Nothing but a store's event stream; `say` sends a batch to every listener."""

    def __init__(self, stored: tuple[bytes, ...]) -> None:
        self.stored = stored
        self.subscriptions = 0
        self._queues: set[asyncio.Queue[EventBatch]] = set()
        self.asked: list[bytes] = []
        self._server = RpcServer(SERVICE, {Subscribe: self._subscribe, Why: self._why})

    def _why(self, call: Why, peer: object) -> str:
        self.asked.append(call.key)
        return "it was evicted 3 s ago"

    async def _subscribe(self, call: Subscribe, peer: object) -> AsyncIterator[EventBatch]:
        queue: asyncio.Queue[EventBatch] = asyncio.Queue()
        self._queues.add(queue)
        self.subscriptions += 1
        try:
            yield EventBatch(sequence=1, snapshot=True, stored=self.stored)
            while True:
                yield await queue.get()
        finally:
            self._queues.discard(queue)

    def say(self, batch: EventBatch) -> None:
        for queue in self._queues:
            queue.put_nowait(batch)

    async def listen(self, address: str) -> str:
        return await self._server.listen(address)

    async def close(self) -> None:
        await self._server.close()


class Cluster:
    """A conductor and connections to it, all closed at the end."""

    def __init__(self, conductor: Conductor, address: str) -> None:
        self.conductor, self.address = conductor, address
        self._clients: list[AsyncClient] = []

    async def connect(self) -> AsyncClient:
        self._clients.append(await AsyncClient.connect(self.address, CONDUCTOR_SERVICE))
        return self._clients[-1]

    async def worker(self, name: str, **changes: Any) -> AsyncClient:
        client = await self.connect()
        await client.call(RegisterWorker(info(name, **changes)))
        return client

    async def status(self) -> ConductorStatus:
        return await (self._clients or [await self.connect()])[0].call(Status())

    async def until_status(self, condition: Callable[[ConductorStatus], bool]) -> ConductorStatus:
        return await until_status(await self.connect(), condition)

    async def close(self) -> None:
        for client in self._clients:
            client.close()
        await self.conductor.close()


def route(request_id: str, **fields: Any) -> Route:
    return Route(request_id=request_id, keys=KEYS, num_tokens=645, max_tokens=16, **fields)


def assigned(status: ConductorStatus) -> dict[str, int]:
    return {one.info.name: one.assigned for one in status.workers}


async def start(tmp_path: Path, **settings: Any) -> Cluster:
    conductor = Conductor(ConductorConfig(address=f"unix:{tmp_path}/c.sock", **settings))
    return Cluster(conductor, await conductor.start())


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = await start(tmp_path)
    yield cluster
    await cluster.close()


async def test_a_request_from_route_to_record(cluster: Cluster) -> None:
    front_end = await cluster.connect()
    with pytest.raises(Unavailable, match="no prefill worker"):
        await front_end.call(route("r0"))
    p0 = await cluster.worker("p0")
    await cluster.worker("d0")
    await p0.call(
        ReportWorker(
            name="p0",
            incarnation=1,
            sequence=1,
            load=WorkerLoad(free_pages=990),
            cached=tuple(KEYS[:4]),
            prefills=(PrefillSample(640, 0, 2.0),),
        )
    )
    decision = await front_end.call(route("r1"))
    assert (decision.prefill.name, decision.prefill.address) == ("p0", "unix:/run/p0.sock")
    assert decision.candidates[0].local_blocks == 4
    assert 0.5 < decision.ttft_s < 2.0
    assert assigned(await cluster.status()) == {"p0": 1, "d0": 1}
    await front_end.call(PrefillEnded("r1"))
    assert assigned(await cluster.status()) == {"p0": 0, "d0": 1}
    await front_end.call(RequestEnded(request_id="r1", ttft_s=1.1, cached_tokens=256, output_tokens=3))
    refused, record = await front_end.call(Records())
    assert refused.outcome == "unavailable"
    assert (record.prefill, record.decode, record.outcome) == ("p0", "d0", "done")
    assert (record.predicted_ttft_s, record.measured_ttft_s) == (decision.ttft_s, 1.1)
    status = await cluster.status()
    assert (status.pool_connected, status.counters["routed"]) == (False, 1)


async def test_a_worker_is_gone_with_its_connection(cluster: Cluster) -> None:
    front_end = await cluster.connect()
    p0 = await cluster.worker("p0")
    await cluster.worker("d0")
    await front_end.call(route("r1"))
    p0.close()
    status = await cluster.until_status(lambda status: len(status.workers) == 1)
    assert assigned(status) == {"d0": 1}
    with pytest.raises(Unavailable):
        await front_end.call(route("r1", exclude=("p0",)))
    await cluster.worker("p0", incarnation=2)
    decision = await front_end.call(route("r1"))
    assert decision.prefill.incarnation == 2


async def test_a_new_incarnation_replaces_the_old_one(cluster: Cluster) -> None:
    old = await cluster.worker("p0")
    await cluster.worker("p0", incarnation=2)
    old.close()
    await cluster.until_status(lambda status: [one.info.incarnation for one in status.workers] == [2])
    other = await cluster.worker("d0")
    with pytest.raises(NotFound):
        await other.call(ReportWorker(name="p0", incarnation=1, sequence=1, load=WorkerLoad()))


async def test_a_front_end_is_gone_with_its_connection(cluster: Cluster) -> None:
    await cluster.worker("p0")
    await cluster.worker("d0")
    one, two = await cluster.connect(), await cluster.connect()
    await one.call(route("r1"))
    await one.call(route("r2"))
    await two.call(route("r3"))
    one.close()
    await cluster.until_status(lambda status: assigned(status) == {"p0": 1, "d0": 1})
    assert [record.outcome for record in await two.call(Records(limit=3))] == ["abandoned", "abandoned", "open"]


async def test_a_worker_of_another_model_is_refused(cluster: Cluster) -> None:
    await cluster.worker("p0")
    with pytest.raises(IdentityMismatch, match="cannot share KV"):
        await cluster.worker("d0", identity=b"\2" * 32)
    assert assigned(await cluster.status()) == {"p0": 0}


async def test_targets_refuse_with_a_time_to_come_back(tmp_path: Path) -> None:
    cluster = await start(tmp_path, policy=PolicyConfig(ttft_slo_s=3.0))
    worker = await cluster.worker("p0")
    await cluster.worker("d0")
    sample = PrefillSample(645, 0, 2.0)
    await worker.call(
        ReportWorker(name="p0", incarnation=1, sequence=1, load=WorkerLoad(free_pages=9), prefills=(sample,))
    )
    front_end = await cluster.connect()
    await front_end.call(Route(request_id="r1", keys=[], num_tokens=645, max_tokens=1))
    with pytest.raises(Overloaded) as caught:
        await front_end.call(Route(request_id="r2", keys=[], num_tokens=645, max_tokens=1))
    assert 0.9 <= caught.value.retry_after_s <= 2.0
    await cluster.close()


async def test_metrics(cluster: Cluster) -> None:
    client = await cluster.worker("p0")
    families = {family.name: family for family in await client.call(GetMetrics())}
    assert families["moonpool_conductor_assigned"].samples[0].labels == {"worker": "p0"}
    assert families["moonpool_conductor_pool_connected"].samples[0].value == 0
    assert families["moonpool_conductor_events"].kind == "counter"


async def test_follows_the_pool_and_its_restarts(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/store.sock"
    cluster = await start(tmp_path, store_address=address)  # before there is a store
    await cluster.worker("p0")
    await cluster.worker("d0")
    front_end = await cluster.connect()
    assert (await front_end.call(route("r1"))).pool_blocks == 0

    store = EventStore(OBJECTS[:5])
    await store.listen(address)
    await cluster.until_status(lambda status: status.pool_connected and status.pool_blocks == 5)
    store.say(EventBatch(sequence=2, stored=OBJECTS[5:8], removed=OBJECTS[:1]))
    store.say(EventBatch(sequence=3, stored=OBJECTS[:1]))
    await cluster.until_status(lambda status: status.pool_blocks == 8)
    assert (await front_end.call(route("r2"))).pool_blocks == 8

    await store.close()
    await cluster.until_status(lambda status: not status.pool_connected and status.pool_blocks == 0)
    assert (await front_end.call(route("r3"))).pool_blocks == 0

    store = EventStore(OBJECTS[:2])
    await store.listen(address)
    await cluster.until_status(lambda status: status.pool_connected and status.pool_blocks == 2)
    await cluster.close()
    await store.close()


async def test_a_gap_in_the_pools_events_starts_afresh(tmp_path: Path) -> None:
    store = EventStore(OBJECTS[:5])
    cluster = await start(tmp_path, store_address=await store.listen("tcp:127.0.0.1:0"))
    await cluster.until_status(lambda status: status.pool_connected)
    store.stored = OBJECTS
    store.say(EventBatch(sequence=9, removed=OBJECTS[:5]))
    await cluster.until_status(lambda status: status.pool_blocks == 10)
    assert store.subscriptions == 2
    await cluster.close()
    await store.close()


async def test_the_address_may_be_taken(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        await Conductor(ConductorConfig(address=cluster.address)).start()
    assert (await cluster.status()).workers == ()  # undisturbed
    await cluster.conductor.close()
    await cluster.conductor.close()


async def test_the_pool_says_why_a_block_was_missed_but_only_when_somebody_asks(tmp_path: Path) -> None:
    store = EventStore(OBJECTS[:7])
    cluster = await start(tmp_path, store_address=await store.listen(f"unix:{tmp_path}/s.sock"))
    cluster.conductor.state.costs.learn(pulls=[PullSample(1 << 20, 2e-3)])
    await cluster.worker("p0")
    await cluster.worker("d0")
    await cluster.until_status(lambda status: status.pool_blocks == 7)
    front_end = await cluster.connect()
    await front_end.call(route("r1"))
    await front_end.call(
        RequestEnded(request_id="r1", ttft_s=0.5, cached_tokens=4 * 64, pool_tokens=4 * 64, output_tokens=3)
    )
    assert store.asked == []
    [explained] = await front_end.call(ExplainRequest(request_id="r1"))
    assert store.asked == [OBJECTS[4]]
    assert "The first block that was not reused: it was evicted 3 s ago." in explained.lines
    assert any(line.startswith("That is 192 fewer than expected") for line in explained.lines)
    await store.close()
    [explained] = await front_end.call(ExplainRequest(request_id="r1"))  # a pool that is away has no say
    assert not any("evicted 3 s ago" in line for line in explained.lines)
    await cluster.close()
