"""How often workers report, what is learnt of their samples, and when a conductor looks at its queue after a report."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from waiting import HANG_S
from worker_info import info

from moonpool.base.cluster import CONDUCTOR_SERVICE, DecodeSample, RegisterWorker, ReportWorker, WorkerLoad
from moonpool.base.rpc import AsyncClient
from moonpool.conductor import service
from moonpool.conductor.costs import SampleThinning
from moonpool.conductor.messages import RequestEnded, Route
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.conductor.placement.prefix_index import PrefixIndex
from moonpool.conductor.registration import LOOK_S
from moonpool.conductor.report_pace import ReportPace
from moonpool.conductor.request_queue import RequestQueue
from moonpool.conductor.service import Conductor, ConductorConfig
from moonpool.conductor.state import ConductorState

CALL_S, PING_S = 70e-6, 60e-6  # what a call costs beside its handler, and a ping


@pytest.mark.parametrize("handler_s", [10e-6, 100e-6, 200e-6])
@pytest.mark.parametrize("num_workers", [1, 10, 1000])
def test_workers_take_a_tenth_of_a_core_at_most(num_workers: int, handler_s: float) -> None:
    pace = ReportPace()
    for _ in range(500):
        pace.handled(handler_s)
    interval_s = pace.interval_s(num_workers)
    num_pings = num_workers if interval_s > 1 else 0  # each second at most
    share = num_workers * (CALL_S + handler_s) / interval_s + num_pings * PING_S
    assert 0.03 < share <= 0.1


def test_few_workers_report_as_often_as_they_want() -> None:
    pace = ReportPace()
    for _ in range(500):
        pace.handled(50e-6)
    assert pace.interval_s(10) < 0.05


def test_one_slow_report_changes_little_and_the_interval_has_a_limit() -> None:
    pace = ReportPace()
    before_s = pace.interval_s(1000)
    pace.handled(3.0)  # the process was stopped
    assert pace.interval_s(1000) < 2 * before_s
    for _ in range(1000):
        pace.handled(3.0)
    assert pace.interval_s(100_000) == 10.0


def test_of_many_samples_a_part_of_each_workers_is_learnt() -> None:
    thinning, num_workers = SampleThinning(), 300
    learnt, seen, num_seconds = dict.fromkeys(range(num_workers), 0), 0, 100
    for second in range(num_seconds):
        for worker in range(num_workers):
            samples = [DecodeSample(worker, number, 0.1) for number in range(1 + worker % 30)]
            taken = thinning.take(samples, second + worker / num_workers)
            seen += len(samples)
            for one in taken:
                learnt[one.num_seqs] += 1
    total = sum(learnt.values())
    assert seen > 4000 * num_seconds
    assert 90 * num_seconds < total < 110 * num_seconds + 1000
    many = [learnt[worker] for worker in range(num_workers) if worker % 30 > 20]
    assert min(many) > 0, "of every worker with many samples"


def test_few_samples_are_all_learnt() -> None:
    thinning = SampleThinning()
    samples = tuple(DecodeSample(1, number, 0.1) for number in range(12))
    for number in range(700):
        assert thinning.take(samples, number / 7) == samples
    assert thinning.take((), 100.0) == ()


async def test_reports_of_many_workers_share_a_look_at_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look costs as much as a route. After the end of a request it has no delay."""
    monkeypatch.setattr(service, "_LOOK_AFTER_REPORT_S", HANG_S)
    looks = list[int]()
    dispatch = RequestQueue.dispatch

    def counted(queue: RequestQueue, now_s: float) -> object:
        looks.append(len(queue))
        return dispatch(queue, now_s)

    monkeypatch.setattr(RequestQueue, "dispatch", counted)
    policy = PolicyConfig(ttft_slo_s=600.0, tbt_slo_s=0.05)
    conductor = Conductor(ConductorConfig(address=f"unix:{tmp_path}/c.sock", policy=policy))
    client = await AsyncClient.connect(await conductor.start(), CONDUCTOR_SERVICE)

    def report(name: str, sequence: int, **samples: object) -> ReportWorker:
        load = WorkerLoad(free_pages=1000)
        return ReportWorker(name=name, incarnation=1, sequence=sequence, load=load, **samples)  # type: ignore[arg-type]

    def route(name: str) -> Route:
        return Route(request_id=name, keys=[], num_tokens=64, max_tokens=2000)

    try:
        for name in ("p0", "d0"):
            await client.call(RegisterWorker(info=info(name, max_num_seqs=64)))
        steps = tuple(DecodeSample(number, number * 64, 0.01 * (number + 1)) for number in (1, 2, 3, 4, 8))
        answer = await client.call(report("p0", 1))
        assert 0 < answer.interval_s < 0.05
        await client.call(report("d0", 1, decodes=steps * 8))
        for number in range(3):
            await client.call(route(f"r{number}"))
        waiting = asyncio.create_task(client.call(route("waits"), timeout_s=HANG_S))
        while not conductor._queue.num_waiting:  # noqa: ASYNC110 - a turn of the loop, as many as it needs
            await asyncio.sleep(0)
        looks.clear()
        for sequence in range(2, 22):
            await client.call(report("p0", sequence))
        assert looks == []
        for number in range(3):
            await client.call(RequestEnded(request_id=f"r{number}"))
        assert (await waiting).request_id == "waits"
    finally:
        client.close()
        await conductor.close()


def test_a_worker_that_is_asked_to_report_seldom_is_not_late_before_its_time() -> None:
    state = ConductorState(PolicyConfig(), PrefixIndex(), 0)
    state.register(info("p0", report_every_s=2.0))
    state.report_interval_s = 5.0
    state.report(ReportWorker(name="p0", incarnation=1, sequence=1, load=WorkerLoad()), 1.0)
    for _ in range(int((3 * 2.0 + 5.0) / LOOK_S)):
        state.look()
        assert state.late == frozenset()
    state.look()
    assert state.late == {"p0"}
