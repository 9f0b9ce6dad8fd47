"""Routes that wait, over real sockets: answered late, refused late, cancelled, and lost with their connection."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from waiting import HANG_S
from watched_status import until_status
from worker_info import info as worker_info

from moonpool.base.cluster import (
    CONDUCTOR_SERVICE,
    DecodeSample,
    PrefillSample,
    RegisterWorker,
    ReportWorker,
    WorkerInfo,
    WorkerLoad,
)
from moonpool.base.errors import ConfigError, Overloaded, PeerLost
from moonpool.base.metrics import GetMetrics
from moonpool.base.rpc import AsyncClient
from moonpool.conductor.admission.forms import AdmissionForm
from moonpool.conductor.messages import (
    BeforeDecode,
    Decision,
    DecisionRecord,
    ExplainRequest,
    ExportTrace,
    PrefillEnded,
    RecordRows,
    Records,
    RequestEnded,
    Route,
    Status,
)
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.conductor.service import Conductor, ConductorConfig

TOKENS = 640


def info(name: str) -> WorkerInfo:
    return worker_info(name, max_num_seqs=64)


def route(request_id: str, **fields: Any) -> Route:
    return Route(request_id=request_id, keys=fields.pop("keys", []), num_tokens=TOKENS, max_tokens=2000, **fields)


class Live:
    """A conductor with one prefill worker, where a prompt takes 100 s: what waits does so until the test says more."""

    def __init__(self, conductor: Conductor, address: str) -> None:
        self.conductor, self.address = conductor, address
        self.clients: list[AsyncClient] = []
        self.num_sent = 0

    async def connect(self) -> AsyncClient:
        self.clients.append(await AsyncClient.connect(self.address, CONDUCTOR_SERVICE))
        return self.clients[-1]

    async def register(self) -> None:
        for name in ("p0", "d0"):
            worker = await self.connect()
            await worker.call(RegisterWorker(info(name)))
            samples = tuple(PrefillSample(TOKENS, 0, 100.0) for _ in range(9))
            steps = tuple(DecodeSample(num, num * TOKENS, 0.01 * num) for num in (1, 5, 10, 20))
            load = WorkerLoad(free_pages=1000)
            await worker.call(
                ReportWorker(name=name, incarnation=1, sequence=1, load=load, prefills=samples, decodes=steps)
            )

    async def fill(self, front_end: AsyncClient) -> None:
        for self.num_sent in range(100):
            sent = asyncio.create_task(front_end.call(route(f"r{self.num_sent}")))
            if await self._waits(front_end, sent):
                sent.cancel()
                await asyncio.wait((sent,))
                await self.until_waiting(0)
                return
            sent.result()

    async def _waits(self, front_end: AsyncClient, sent: asyncio.Task[Decision]) -> bool:
        status = await until_status(front_end, lambda status: sent.done() or status.num_waiting == 1)
        return status.num_waiting == 1

    async def until_waiting(self, count: int) -> None:
        await until_status(await self.connect(), lambda status: status.num_waiting == count)

    async def close(self) -> None:
        for client in self.clients:
            client.close()
        await self.conductor.close()


async def start(tmp_path: Path, **policy: Any) -> Live:
    conductor = Conductor(ConductorConfig(address=f"unix:{tmp_path}/c.sock", policy=PolicyConfig(**policy)))
    live = Live(conductor, await conductor.start())
    await live.register()
    return live


@pytest.fixture
async def live(tmp_path: Path) -> AsyncIterator[Live]:
    live = await start(tmp_path, ttft_slo_s=3000.0, worker_backlog_s=750.0)
    yield live
    await live.close()


async def wait_for(live: Live, front_end: AsyncClient, request_id: str, **fields: Any) -> asyncio.Task[Decision]:
    before = (await front_end.call(Status())).num_waiting
    task = asyncio.create_task(front_end.call(route(request_id, **fields), timeout_s=HANG_S))
    await live.until_waiting(before + 1)
    return task


async def test_a_route_is_answered_when_its_turn_comes(live: Live) -> None:
    front_end = await live.connect()
    await live.fill(front_end)
    later = await wait_for(live, front_end, "later")
    urgent = await wait_for(live, front_end, "urgent", priority=1)
    await front_end.call(PrefillEnded(request_id="r0"))
    decision = await asyncio.wait_for(urgent, HANG_S)
    assert decision.waited_s > 0
    assert not later.done()
    await front_end.call(PrefillEnded(request_id="r1"))
    assert (await asyncio.wait_for(later, HANG_S)).request_id == "later"
    assert (await front_end.call(Status())).num_waiting == 0


async def test_a_cancelled_route_and_an_ended_request_leave_the_queue(live: Live) -> None:
    front_end = await live.connect()
    await live.fill(front_end)
    first = await wait_for(live, front_end, "first")
    second = await wait_for(live, front_end, "second")
    third = await wait_for(live, front_end, "third")
    first.cancel()
    await live.until_waiting(2)
    await front_end.call(RequestEnded(request_id="second", outcome="cancelled"))
    await asyncio.wait((second,), timeout=HANG_S)
    assert second.exception() is not None
    await front_end.call(PrefillEnded(request_id="r0"))
    assert (await asyncio.wait_for(third, HANG_S)).request_id == "third"
    outcomes = {one.request_id: one.outcome for one in await front_end.call(Records())}
    assert (outcomes["first"], outcomes["second"], outcomes["third"]) == ("abandoned", "cancelled", "open")


async def test_a_front_end_that_goes_takes_its_waiting_requests_along(live: Live) -> None:
    front_end, other = await live.connect(), await live.connect()
    await live.fill(other)
    waiting = await wait_for(live, front_end, "gone")
    front_end.close()
    with pytest.raises(PeerLost):
        await waiting
    await live.until_waiting(0)


async def test_a_conductor_that_ends_loses_nobody_silently(tmp_path: Path) -> None:
    live = await start(tmp_path, ttft_slo_s=3000.0)
    front_end = await live.connect()
    await live.fill(front_end)
    waiting = await wait_for(live, front_end, "waiting")
    await live.conductor.close()
    with pytest.raises(PeerLost):
        await waiting
    await live.close()


async def test_a_turn_that_does_not_come_in_time_is_refused(tmp_path: Path) -> None:
    live = await start(tmp_path, tbt_slo_s=0.05, admission=AdmissionForm.EARLY, queue_capacity=4, queue_timeout_s=0.3)
    front_end = await live.connect()
    for number in range(10):
        await front_end.call(PrefillEnded(request_id=f"r{number - 1}"))
        try:
            await front_end.call(route(f"r{number}"))
        except Overloaded as error:
            refused = error
            break
    waited = re.match(r"it waited ([0-9.]+) s", str(refused))
    assert waited is not None, refused
    assert float(waited[1]) >= 0.3
    assert refused.retry_after_s >= 1
    await live.close()


async def test_before_decode_refuses_over_the_wire(tmp_path: Path) -> None:
    live = await start(tmp_path, tbt_slo_s=0.03, admission=AdmissionForm.NONE)
    front_end = await live.connect()
    num_refused = 0
    for number in range(8):
        decision = await front_end.call(route(f"r{number}"))
        assert decision.asks_before_decode
        try:
            await front_end.call(BeforeDecode(request_id=f"r{number}"))
        except Overloaded:
            num_refused += 1
            await front_end.call(RequestEnded(request_id=f"r{number}", outcome="overloaded"))
    assert 0 < num_refused < 8
    samples = {one.name: one for one in await front_end.call(GetMetrics())}
    assert samples["moonpool_conductor_wasted_prefills"].samples[0].value == num_refused
    refused = samples["moonpool_conductor_refused"].samples
    assert {one.labels["cause"]: one.value for one in refused}["tbt"] == num_refused
    await live.close()


async def test_records_are_found_explained_and_exported(live: Live) -> None:
    front_end = await live.connect()
    keys = [bytes([number]) * 32 for number in range(10)]
    for number, tenant in enumerate("aab"):
        await front_end.call(route(f"abc-{number}" if number else "one", tenant=tenant, keys=keys))
        await front_end.call(RequestEnded(request_id=f"abc-{number}" if number else "one", output_tokens=5, ttft_s=0.5))
    assert [one.request_id for one in await front_end.call(Records(tenant="a"))] == ["one", "abc-1"]
    assert await front_end.call(Records(outcome="overloaded")) == []
    rows = await front_end.call(RecordRows(wanted=Records(tenant="a")))
    as_json = [msgspec.json.decode(each.json, type=DecisionRecord) for each in rows]
    assert as_json == await front_end.call(Records(tenant="a"))
    [explained] = await front_end.call(ExplainRequest(request_id="one"))
    assert explained.lines[0].startswith("Request one: 640 prompt tokens")
    both = await front_end.call(ExplainRequest(request_id="abc"))
    assert [each.record.request_id for each in both] == ["abc-1", "abc-2"]
    [_] = await front_end.call(ExplainRequest(request_id="abc", tenant="b"))
    assert await front_end.call(ExplainRequest(request_id="unknown")) == []
    lines = b"".join([chunk async for chunk in front_end.stream(ExportTrace())]).splitlines()
    assert [msgspec.json.decode(line)["input_length"] for line in lines] == [640] * 3
    assert len({tuple(msgspec.json.decode(line)["hash_ids"][:1]) for line in lines}) == 1  # a prefix they share
    with pytest.raises(ConfigError):
        [chunk async for chunk in front_end.stream(ExportTrace(trace_block_tokens=100))]
