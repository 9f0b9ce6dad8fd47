"""Admission, priorities and records through the HTTP front end: a real conductor, toy workers, real sockets."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from frontend_cluster import MODEL, ToyCluster
from waiting import until

from moonpool.base.cluster import DecodeSample, PrefillSample, ReportWorker, WorkerLoad
from moonpool.conductor.admission.forms import AdmissionForm
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.conductor.request_queue import _Waiting
from moonpool.conductor.service import ConductorConfig
from moonpool.frontend.choice import ChoiceRunner

PROMPT = "once upon a time"  # 16 tokens
BODY = {"model": MODEL, "prompt": PROMPT, "seed": 3, "max_tokens": 20, "ignore_eos": True}
KEYS = {"alice": "sk-a", "bob": "sk-b"}


async def teach(cluster: ToyCluster, prefill_s: float = 0.01, step_s: float = 0.01) -> None:
    """Tells the conductor, as workers would, how long a prompt and each sequence of a batch take."""
    for worker in cluster.workers.values():
        await worker.conductor.call(
            ReportWorker(
                name=worker.name,
                incarnation=worker.incarnation,
                sequence=1,
                load=WorkerLoad(free_pages=worker.num_pages),
                prefills=tuple(PrefillSample(len(PROMPT), 0, prefill_s) for _ in range(9)),
                decodes=tuple(DecodeSample(num, num * 16, step_s * num) for num in (1, 5, 10, 20)),
            )
        )


def cluster_with(tmp_path: Path, **policy: Any) -> ToyCluster:
    return ToyCluster(tmp_path, conductor=ConductorConfig(policy=PolicyConfig(**policy)))


async def test_a_prompt_that_is_too_long_for_the_target_is_a_429(tmp_path: Path) -> None:
    async with cluster_with(tmp_path, ttft_slo_s=5.0) as cluster, cluster.client() as http:
        await teach(cluster, prefill_s=60.0)
        reply = await http.post("/v1/completions", json=BODY)
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        error = reply.json()["error"]
        assert error["code"] == "overloaded"
        assert "a shorter prompt may pass" in error["message"]
        explained = (await http.get(f"/v1/records/{reply.headers['x-request-id']}")).json()["data"][0]
        assert error["message"] in explained["lines"][1]
        page = (await http.get("/metrics")).text
        assert (
            'moonpool_conductor_refused_total{cause="too_long",moonpool_name="conductor",moonpool_role="conductor"} 1.0'
            in page
        )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_wasted_prefill_is_a_429_too(tmp_path: Path, stream: bool) -> None:
    async with (
        cluster_with(tmp_path, tbt_slo_s=0.015, admission=AdmissionForm.NONE) as cluster,
        cluster.client() as http,
    ):
        await teach(cluster)
        cluster.decode.may_go_on.clear()
        first = asyncio.create_task(http.post("/v1/completions", json=BODY))
        await until(lambda: any(one.outcome == "open" for one in cluster.records()), "a request is open")
        await until(lambda: cluster.state._num_joined == 1, "it decodes")
        reply = await http.post("/v1/completions", json={**BODY, "stream": stream})
        assert reply.status_code == 429
        assert "apart" in reply.json()["error"]["message"]
        cluster.decode.may_go_on.set()
        assert (await first).status_code == 200
        await cluster.until_idle()
        assert cluster.state.counters["wasted_prefills"] == 1
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200  # there is room again


async def test_a_request_waits_for_its_turn_and_low_numbers_go_first(tmp_path: Path) -> None:
    async with cluster_with(tmp_path, ttft_slo_s=300.0) as cluster, cluster.client() as http:
        await teach(cluster, prefill_s=80.0)
        cluster.prefill.may_go_on.clear()
        tasks = [asyncio.create_task(http.post("/v1/completions", json=BODY))]
        await until(lambda: cluster.prefill.num_active == 1, "the prefill has begun")
        for priority, letter in ((5, "x"), (0, "y"), (-5, "z")):
            body = {**BODY, "prompt": PROMPT[:-1] + letter, "priority": priority}
            tasks.append(asyncio.create_task(http.post("/v1/completions", json=body)))
            await until(lambda: cluster.num_waiting == len(tasks) - 1, "the next one waits")
        cluster.prefill.may_go_on.set()
        assert {(await task).status_code for task in tasks} == {200}
        assert "".join(chr(spec.tokens[-1]) for spec in cluster.prefill.specs[1:]) == "zyx"
        assert all(one.waited_s > 0 for one in cluster.records()[1:])


async def test_a_client_that_leaves_the_queue_is_forgotten(tmp_path: Path) -> None:
    async with cluster_with(tmp_path, ttft_slo_s=300.0) as cluster, cluster.client() as http:
        await teach(cluster, prefill_s=80.0)
        cluster.prefill.may_go_on.clear()
        first = asyncio.create_task(http.post("/v1/completions", json=BODY))
        await until(lambda: cluster.prefill.num_active == 1, "the prefill has begun")
        second = asyncio.create_task(http.post("/v1/completions", json={**BODY, "prompt": "another one here"}))
        await until(lambda: cluster.num_waiting == 1, "the second waits")
        second.cancel()
        await until(lambda: cluster.num_waiting == 0, "nobody waits")
        cluster.prefill.may_go_on.set()
        assert (await first).status_code == 200


async def test_a_storm_of_cancelled_requests_reaches_no_worker_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async with cluster_with(tmp_path) as cluster, cluster.client() as http:
        await teach(cluster, prefill_s=80.0)
        cluster.prefill.may_go_on.clear()
        first = asyncio.create_task(http.post("/v1/completions", json=BODY))
        await until(lambda: cluster.prefill.num_active == 1, "the prefill has begun")
        num_seen = cluster.num_seen
        for _ in range(2):
            storm = [asyncio.create_task(http.post("/v1/completions", json={**BODY, "seed": n})) for n in range(40)]
            await until(lambda: cluster.num_waiting == 40, "all of them wait")
            for task in storm:
                task.cancel()
            await asyncio.gather(*storm, return_exceptions=True)
            await until(lambda: cluster.num_waiting == 0, "none of them waits")
            await until(lambda: count_held() == 1, "only the first request is held")
        assert cluster.num_seen == num_seen, "no worker has got one of them"
        cluster.prefill.may_go_on.set()
        assert (await first).status_code == 200


def count_held() -> int:
    """Return how many requests the front end and the conductor of this process hold, in whatever place."""
    gc.collect()
    found = [type(each) for each in gc.get_objects() if isinstance(each, ChoiceRunner | _Waiting)]
    return len(found)


@pytest.mark.parametrize("priority", [11, -11, "high", 1.5])
async def test_a_priority_that_is_none(tmp_path: Path, priority: object) -> None:
    async with ToyCluster(tmp_path) as cluster, cluster.client() as http:
        reply = await http.post("/v1/completions", json={**BODY, "priority": priority})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "priority")


@pytest.fixture
async def two_tenants(tmp_path: Path) -> AsyncIterator[ToyCluster]:
    path = tmp_path / "tenants.json"
    weights = {"alice": 1.0, "bob": 2.0}
    tenants = [{"name": name, "api_keys": [key], "weight": weights[name]} for name, key in KEYS.items()]
    path.write_text(json.dumps({"tenants": tenants}))
    async with ToyCluster(tmp_path, tenants_file=str(path)) as cluster:
        yield cluster


async def test_tenants_take_turns_by_their_weights_and_a_priority_is_worth_nothing_to_others(
    two_tenants: ToyCluster,
) -> None:
    """There are no targets. A prompt takes 80 s by its prediction: one is sent, the others wait."""
    alice = two_tenants.client(authorization=f"Bearer {KEYS['alice']}")
    bob = two_tenants.client(authorization=f"Bearer {KEYS['bob']}")
    async with alice, bob:
        await teach(two_tenants, prefill_s=80.0)
        two_tenants.prefill.may_go_on.clear()
        tasks = [asyncio.create_task(alice.post("/v1/completions", json=BODY))]
        await until(lambda: two_tenants.prefill.num_active == 1, "the prefill has begun")
        for client, letters in ((alice, "abcdef"), (bob, "ABCD")):
            for letter in letters:
                body = {**BODY, "prompt": PROMPT[:-1] + letter, "priority": -10 if client is alice else 10}
                tasks.append(asyncio.create_task(client.post("/v1/completions", json=body)))
                await until(lambda: two_tenants.num_waiting == len(tasks) - 1, "the next one waits")
        two_tenants.prefill.may_go_on.set()
        assert {(await task).status_code for task in tasks} == {200}
    order = "".join(chr(spec.tokens[-1]) for spec in two_tenants.prefill.specs[1:])
    assert sorted(order[:6]) == sorted("abABCD"), order
    assert [one for one in order if one.islower()] == list("abcdef")


async def test_records_belong_to_their_tenant(two_tenants: ToyCluster) -> None:
    alice = two_tenants.client(authorization=f"Bearer {KEYS['alice']}")
    bob = two_tenants.client(authorization=f"Bearer {KEYS['bob']}")
    async with alice, bob, two_tenants.client() as nobody:
        answer = (await alice.post("/v1/completions", json=BODY)).json()
        await alice.post("/v1/completions", json=BODY)
        await bob.post("/v1/completions", json=BODY)
        await until(lambda: all(one.outcome == "done" for one in two_tenants.records()), "all are done")
        assert len((await alice.get("/v1/records")).json()["data"]) == 2
        assert len((await bob.get("/v1/records", params={"tenant": "bob"})).json()["data"]) == 1
        assert len((await alice.get("/v1/records", params={"outcome": "overloaded"})).json()["data"]) == 0
        assert (await alice.get("/v1/records", params={"tenant": "bob"})).status_code == 400
        [explained] = (await alice.get(f"/v1/records/{answer['id']}")).json()["data"]
        assert explained["lines"][-1] == "It ended as done with 20 tokens of answer."
        assert (await bob.get(f"/v1/records/{answer['id']}")).status_code == 404
        trace = (await alice.get("/v1/records/trace")).text.splitlines()
        assert [json.loads(line)["output_length"] for line in trace] == [20, 20]
        assert (await alice.get("/v1/records/trace", params={"block_tokens": 510})).status_code == 400
        for path in ("/v1/records", "/v1/records/x", "/v1/records/trace"):
            assert (await nobody.get(path)).status_code == 401
