"""GET /v1/status of a front end, and who may read it and the records."""

from __future__ import annotations

import asyncio
import json
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from frontend_cluster import MODEL, ToyCluster
from waiting import HANG_S
from worker_info import info

from moonpool.base.cluster import WorkerLoad, WorkerRole
from moonpool.base.errors import ConfigError
from moonpool.base.rpc import RpcPeer
from moonpool.conductor.messages import Status, WorkerStatus
from moonpool.frontend.status_reply import StatusReply
from moonpool.frontend.status_rows import ByteRates, worker_row
from moonpool.frontend.tenants import ADMIN_KEY_FILE, load_admin_key, load_tenants
from moonpool.master.service import Master, MasterConfig

BODY = {"model": MODEL, "prompt": "once upon a time", "seed": 3, "max_tokens": 5, "ignore_eos": True}
TENANTS = {
    "tenants": [{"name": "a", "api_keys": ["key-a"]}, {"name": "b", "api_keys": ["key-b"]}],
    "admin_keys": ["key-admin"],
}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def read(http: httpx.AsyncClient, path: str = "/v1/status", **options: Any) -> StatusReply:
    """The answer has the type that it promises."""
    reply = await http.get(path, **options)
    assert reply.status_code == 200, reply.text
    return msgspec.json.decode(reply.content, type=StatusReply)


async def until_status(http: httpx.AsyncClient, holds: Callable[[StatusReply], object], **options: Any) -> StatusReply:
    async with asyncio.timeout(HANG_S):
        while not holds(status := await read(http, **options)):  # noqa: ASYNC110 - asked over the wire
            await asyncio.sleep(0.05)
    return status


async def test_status_of_a_service_that_answered_a_request(tmp_path: Path) -> None:
    expected = ("prefill0", "prefill1", "decode0")
    async with ToyCluster(tmp_path, expected_workers=expected) as cluster:
        async with cluster.client() as http:
            before = await read(http)
            assert (await http.post("/v1/completions", json=BODY)).status_code == 200
            status = await until_status(http, lambda each: each.totals.by_outcome == {"done": 1})
            assert (status.model, status.policy, status.tenant) == (MODEL, "cost", None)
            assert (status.health.status, status.health.missing) == ("degraded", ["prefill1"])
            assert status.health.sentence == "Worker prefill1 is not registered."
            assert [(each.name, each.role, each.is_up) for each in status.workers] == [
                ("prefill0", "prefill", True), ("prefill1", "prefill", False), ("decode0", "decode", True),
            ]  # fmt: skip
            totals = status.totals
            assert (totals.prompt_tokens, totals.own_tokens, totals.dram_tokens) == (16, 4, 8)
            assert status.pool is None
            status = await until_status(http, lambda each: any(point.output_tokens_s for point in each.history.points))
            assert status.history.points[0].at_s >= before.at_s - 1
            rest = await read(http, params={"since": status.history.points[-1].at_s})
            assert len(rest.history.points) < len(status.history.points), "only what came since"


async def test_a_worker_that_dies_is_shown_as_gone_and_then_as_back(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path) as cluster, cluster.client() as http:
        assert (await read(http)).health.status == "ok"
        await cluster.decode.kill()
        status = await until_status(http, lambda each: not each.workers[1].is_up)
        assert (status.workers[1].name, status.health.status) == ("decode0", "unavailable")
        await cluster.add_worker("decode0", WorkerRole.DECODE)
        await until_status(http, lambda each: each.workers[1].is_up and each.health.status == "ok")


async def test_status_without_conductor_and_with_a_pool_that_comes_and_goes(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="mp") as folder:
        address = f"unix:{folder}/m.sock"
        master = Master(MasterConfig(data_dir=f"{folder}/m", listen=address))
        await master.start()
        pool: dict[str, Any] = {"master_address": address, "expected_nodes": ("node",)}
        async with ToyCluster(tmp_path, **pool) as cluster, cluster.client() as http:
            status = await read(http)
            assert status.pool is not None
            assert status.pool.is_up
            assert [(node.name, node.is_up) for node in status.nodes] == [("node", False)]
            await master.close()
            await until_status(http, lambda each: each.pool is not None and not each.pool.is_up)
            await cluster.conductor.close()
            status = await until_status(http, lambda each: each.health.missing == ["conductor", "master"])
            assert not any(each.is_up for each in status.workers)


async def test_tenants_see_their_own_rows_and_an_admin_key_sees_all(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps(TENANTS))
    async with ToyCluster(tmp_path / "state", tenants_file=str(path)) as cluster:
        async with cluster.client() as http:
            assert (await http.get("/v1/status")).status_code == 401
            assert (await http.get("/v1/records", headers=bearer("wrong"))).status_code == 401
            for key in ("key-a", "key-b", "key-b"):
                assert (await http.post("/v1/completions", json=BODY, headers=bearer(key))).status_code == 200
            refused = await http.post("/v1/completions", json=BODY, headers=bearer("key-admin"))
            assert refused.status_code == 401, "an admin key sends no prompts"
            generated = load_admin_key(tmp_path / "state")
            assert stat.S_IMODE((tmp_path / "state" / ADMIN_KEY_FILE).stat().st_mode) == 0o600
            seen = {}
            for key in ("key-a", "key-b", "key-admin", generated):
                status = await read(http, headers=bearer(key))
                rows = (await http.get("/v1/records", headers=bearer(key))).json()["data"]
                seen[key] = (status.tenant, len(rows))
            assert seen == {"key-a": ("a", 1), "key-b": ("b", 2), "key-admin": (None, 3), generated: (None, 3)}
            own = (await http.get("/v1/records?tenant=b", headers=bearer("key-admin"))).json()["data"]
            assert len(own) == 2
            assert (await http.get("/v1/records?tenant=b", headers=bearer("key-a"))).status_code == 400
            other = f"/v1/records/{own[0]['request_id']}"
            assert (await http.get(other, headers=bearer("key-a"))).status_code == 404
            assert (await http.get(other, headers=bearer(generated))).status_code == 200


async def test_readers_at_the_same_time_share_one_collection(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path) as cluster, cluster.client() as http:
        replies = await asyncio.gather(*(read(http) for _ in range(20)))
        assert len({each.at_s for each in replies}) <= 2


async def test_a_collection_asks_the_conductor_once(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path) as cluster:
        collector, asked = cluster.frontend._collector, []
        assert collector is not None
        handlers = cluster.conductor._server.handlers
        answer = handlers[Status]

        def count(call: Status, peer: RpcPeer) -> object:
            asked.append(call)
            return answer(call, peer)

        handlers[Status] = count
        await collector.close()  # which otherwise collects every 2 s
        status = await collector._collect()
        assert (status.health.status, len(status.workers), len(asked)) == ("ok", 2, 1)


async def test_plain_reads_answer_what_the_described_route_answers(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path) as cluster, cluster.client() as http:
        await until_status(http, lambda each: each.history.points)
        for plain, other in (("", "?other=1"), ("?since=1000000000.5", "?since=1000000000.50&other=1")):

            async def both(plain: str = plain, other: str = other) -> bool:
                first, second = await http.get(f"/v1/status{plain}"), await http.get(f"/v1/status{other}")
                assert first.headers["content-type"] == second.headers["content-type"] == "application/json"
                return first.content == second.content

            assert any([await both() for _ in range(5)]), "a collection between the two cannot be the reason each time"
        assert [(await http.get(f"/v1/status?since={bad}")).status_code for bad in ("-1", "x", "")] == [400, 400, 400]
        assert (await http.post("/v1/status")).status_code == 405


async def test_the_description_has_the_type(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path) as cluster, cluster.client() as http:
        spec = (await http.get("/openapi.json")).json()
        content = spec["paths"]["/v1/status"]["get"]["responses"]["200"]["content"]["application/json"]
        assert content["schema"] == {"$ref": "#/components/schemas/StatusReply"}
        assert {"StatusReply", "WorkerRow", "HistoryReply", "PredictionError"} <= spec["components"]["schemas"].keys()


@pytest.mark.parametrize("key", ["", "key-a"])
def test_an_admin_key_that_is_empty_or_a_tenants_is_refused(tmp_path: Path, key: str) -> None:
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps({**TENANTS, "admin_keys": [key]}))
    with pytest.raises(ConfigError, match="empty or given twice"):
        load_tenants(tmp_path, path)


def test_a_row_says_that_its_worker_is_late() -> None:
    worker = WorkerStatus(info=info("p0"), load=WorkerLoad(), indexed_blocks=0, assigned=0, is_late=True)
    row = worker_row(worker, None, ByteRates())
    assert (row.is_up, row.is_late) == (True, True)
    on_time = msgspec.structs.replace(worker, is_late=False)
    assert not worker_row(on_time, None, ByteRates()).is_late
