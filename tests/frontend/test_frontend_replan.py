"""Workers die under requests. The client sees the tokens of an undisturbed run, each once, or a reason."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from frontend_cluster import MODEL, ToyCluster, expected
from openai.types import Completion
from waiting import HANG_S, until

from moonpool.base.cluster import WorkerRole
from moonpool.base.errors import Corrupt, Internal, MoonpoolError, NoSpace, NotFound, PeerLost, StaleGeneration
from moonpool.conductor.service import Conductor, ConductorConfig

TEXT, REASON = expected("once upon a time", 60, seed=12)
BODY: dict[str, Any] = {"model": MODEL, "prompt": "once upon a time", "seed": 12, "max_tokens": 60}


async def complete(cluster: ToyCluster, **fields: object) -> httpx.Response:
    async with cluster.client() as http:
        return await http.post("/v1/completions", json={**BODY, **fields})


async def streamed(cluster: ToyCluster) -> str:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="any", max_retries=0) as client:
        stream: openai.AsyncStream[Completion] = await client.completions.create(**BODY, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])


def check(reply: httpx.Response) -> dict[str, Any]:
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (TEXT, REASON)
    usage: dict[str, Any] = reply.json()["usage"]
    return usage


def test_the_run_is_long_enough_to_be_disturbed() -> None:
    assert len(TEXT) > 20


@pytest.mark.parametrize("after", [0, 1, 7])
async def test_decode_worker_dies_and_another_goes_on(tmp_path: Path, after: int) -> None:
    async with ToyCluster(tmp_path, num_decode=2) as cluster:
        cluster.decode.die_after = after
        usage = check(await complete(cluster))
        assert usage["completion_tokens"] == len(TEXT) + (REASON == "stop")
        assert usage["prompt_tokens"] == len(BODY["prompt"])
        first, second = cluster.prefill.specs
        assert (first.epoch, second.epoch) == (1, 2)
        assert second.tokens == first.tokens + [ord(letter) for letter in TEXT[: after + 1]]
        assert second.num_prompt_tokens == len(BODY["prompt"])
        await cluster.until_idle()


async def test_decode_worker_dies_in_a_stream(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path, num_decode=2) as cluster:
        cluster.decode.die_after = 5
        assert await streamed(cluster) == TEXT


async def test_prefill_worker_dies_and_another_takes_over(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path, num_prefill=2) as cluster:
        cluster.prefill.die_during_prefill = True
        check(await complete(cluster))
        assert len(cluster.workers["prefill1"].specs) == 1


async def test_decode_worker_dies_while_prefill_still_runs(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path, num_decode=2) as cluster:
        cluster.prefill.may_go_on.clear()
        asking = asyncio.create_task(complete(cluster))
        await until(lambda: cluster.prefill.num_active > 0, "a prefill has begun")
        await cluster.decode.kill()
        await until(lambda: len(cluster.prefill.specs) == 2, "the first call was given up, not waited for")
        cluster.prefill.may_go_on.set()
        check(await asking)
        await cluster.until_idle()


async def test_the_only_worker_comes_back(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path) as cluster:
        dying = cluster.decode
        dying.die_after = 4
        asking = asyncio.create_task(complete(cluster))
        await dying.gone.wait()
        await until(lambda: len(cluster.state.workers) == 1, "the conductor has lost it")
        await cluster.add_worker("decode0", WorkerRole.DECODE)
        check(await asking)


async def test_a_worker_restarts_at_the_same_name_between_requests(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path) as cluster:
        check(await complete(cluster))
        await cluster.prefill.kill()
        await cluster.add_worker("prefill0", WorkerRole.PREFILL)
        check(await complete(cluster))


async def test_the_conductor_dies_under_a_stream_and_comes_back(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path) as cluster:
        cluster.decode.token_s = 0.005
        asking = asyncio.create_task(complete(cluster))
        await until(lambda: cluster.decode.num_active > 0, "a decode has begun")
        await cluster.conductor.close()
        check(await asking)  # tokens do not pass through the conductor
        waiting = asyncio.create_task(complete(cluster))
        async with cluster.client() as http:
            await http.get("/health")  # the request is there by now
        assert not waiting.done()
        cluster.conductor = Conductor(ConductorConfig(address=cluster.conductor_address))
        await cluster.conductor.start()
        for worker in list(cluster.workers.values()):
            await worker.kill()
            await cluster.add_worker(worker.name, worker.role)
        check(await waiting)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_refused_kv_is_computed_again(tmp_path: Path, role: str) -> None:
    async with ToyCluster(tmp_path) as cluster:
        worker = cluster.workers[f"{role}0"]
        for error in (PeerLost("x"), NotFound("x"), Corrupt("x"), StaleGeneration("x")):
            worker.specs.clear()
            worker.errors = [error]
            check(await complete(cluster))
            assert len(worker.specs) == 2, f"refused once, by {error!r}"


async def test_a_worker_that_failed_is_avoided_when_there_is_another(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path, num_prefill=2) as cluster:
        for worker in (cluster.prefill, cluster.workers["prefill1"]):
            worker.errors = [Corrupt("bad block")]
        check(await complete(cluster))
        assert {name: len(cluster.workers[name].specs) for name in ("prefill0", "prefill1")} in (
            {"prefill0": 2, "prefill1": 1},
            {"prefill0": 1, "prefill1": 2},
        )


async def test_after_so_many_attempts_it_gives_up_with_a_reason(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path, max_attempts=3) as cluster:
        cluster.prefill.errors = [Corrupt("bad block")] * 10
        reply = await complete(cluster)
        assert reply.status_code == 503
        assert "gave up after 3 attempts: bad block" in reply.json()["error"]["message"]
        assert len(cluster.prefill.specs) == 3
        await cluster.until_idle()


@pytest.mark.parametrize(("error", "status"), [(NoSpace("no pages"), 503), (Internal("a bug"), 500)])
async def test_other_failures_are_told_at_once(tmp_path: Path, error: MoonpoolError, status: int) -> None:
    async with ToyCluster(tmp_path) as cluster:
        cluster.decode.errors = [error]
        reply = await complete(cluster)
        assert reply.status_code == status
        assert str(error) in reply.json()["error"]["message"]
        assert cluster.num_seen == 1


async def test_a_failure_in_the_middle_of_a_stream_is_told_in_it(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path, worker_wait_s=0.2) as cluster:
        cluster.decode.die_after = 5
        with pytest.raises(openai.APIError, match="no decode worker"):
            await streamed(cluster)
        async with cluster.client() as http:
            page = (await http.get("/metrics")).text
        assert 'outcome="unavailable"' in page


async def test_every_request_ends_by_its_deadline(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path, request_timeout_s=0.5) as cluster:
        cluster.prefill.may_go_on.clear()
        started_s = time.monotonic()
        reply = await complete(cluster)
        assert reply.status_code == 504
        assert "within 0.5 s" in reply.json()["error"]["message"]
        assert time.monotonic() - started_s < HANG_S / 2  # the worker itself would never answer
        await cluster.until_idle()


async def test_without_any_worker_it_is_503_and_not_a_hang(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path, num_prefill=0, worker_wait_s=0.2) as cluster:
        reply = await complete(cluster)
        assert reply.status_code == 503
        assert "no prefill worker is registered" in reply.json()["error"]["message"]


async def test_a_front_end_that_has_just_started_waits_for_workers(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path, num_prefill=0) as cluster:
        asking = asyncio.create_task(complete(cluster))
        async with cluster.client() as http:
            await http.get("/health")  # the request is there by now
        assert not asking.done()
        await cluster.add_worker("prefill0", WorkerRole.PREFILL)
        check(await asking)


async def test_waiting_for_a_worker_that_never_returns_ends(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path, worker_wait_s=0.3) as cluster:
        check(await complete(cluster))
        await cluster.decode.kill()
        reply = await complete(cluster)
        assert reply.status_code == 503
        assert "no decode worker" in reply.json()["error"]["message"]


async def test_deaths_around_a_request_cost_it_no_attempt(tmp_path: Path) -> None:
    """More workers die than it may have attempts; each of them after it has computed for a while."""
    async with ToyCluster(tmp_path, num_decode=7, max_attempts=1) as cluster:
        for number in range(6):
            cluster.workers[f"decode{number}"].die_after = 5
        check(await complete(cluster))


async def test_a_request_that_workers_die_of_is_computed_alone_and_then_given_up(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path, num_decode=5) as cluster:
        decodes = [worker for worker in cluster.workers.values() if worker.role is WorkerRole.DECODE]
        for worker in decodes:
            worker.die_after = 2
        reply = await complete(cluster)
        assert reply.status_code == 500
        assert reply.json()["error"]["code"] == "fatal_request"
        assert "no other request in its batch" in reply.json()["error"]["message"]
        specs = sorted((spec for worker in decodes for spec in worker.specs), key=lambda spec: spec.epoch)
        assert [spec.alone for spec in specs] == [False, False, True]
        async with cluster.client() as http:
            page = (await http.get("/metrics")).text
        assert "moonpool_fatal_requests_total" in page
        assert 'outcome="fatal_request"' in page
        await cluster.until_idle()


async def test_a_prompt_that_prefill_workers_die_of_is_given_up_too(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path, num_prefill=4) as cluster:
        prefills = [worker for worker in cluster.workers.values() if worker.role is WorkerRole.PREFILL]
        for worker in prefills:
            worker.die_during_prefill = True
        reply = await complete(cluster)
        assert reply.json()["error"]["code"] == "fatal_request"
        assert sorted(len(worker.specs) for worker in prefills) == [0, 1, 1, 1]
        assert [spec.alone for worker in prefills for spec in worker.specs].count(True) == 1


async def test_a_suspect_that_outlives_its_own_batch_is_none_any_more(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path, num_decode=2) as cluster:
        for worker in list(cluster.workers.values()):
            if worker.role is WorkerRole.DECODE:
                worker.die_after = 1
        asking = asyncio.create_task(complete(cluster))
        await asyncio.gather(cluster.decode.gone.wait(), cluster.workers["decode1"].gone.wait())
        for name in ("decode2", "decode3", "decode4"):
            suspected = await cluster.add_worker(name, WorkerRole.DECODE)
            suspected.die_after = 6
            await suspected.gone.wait()
            assert suspected.specs[0].alone == (name == "decode2")
        await cluster.add_worker("decode5", WorkerRole.DECODE)
        check(await asking)
