"""The admin HTTP server of `moonpool mooncake master`: upstream's paths, fields and codes, on a real pool."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
from store_pool import MIB, LoopThread
from waiting import HANG_S, wait_until

from moonpool.base.address import parse_address
from moonpool.integrations.mooncake import MooncakeDistributedStore
from moonpool.integrations.mooncake.master_flags import MASTER_FLAGS, master_config
from moonpool.integrations.mooncake.mooncake_master import MooncakeMaster


class AdminPool:
    """A master with its HTTP servers at free ports, and clients that offer memory."""

    def __init__(self) -> None:
        flags = ["--rpc_port=0", "--metrics_port=0", "--enable_http_metadata_server", "--http_metadata_server_port=0"]
        self.loop = LoopThread()
        self.master = MooncakeMaster(master_config(MASTER_FLAGS.parse(flags)))
        address = parse_address(self.loop.run(self.master.start()))
        self.address = f"{address.host}:{address.port}"
        self.stores: list[MooncakeDistributedStore] = []

    def store(self, hostname: str, nbytes: int = 16 * MIB) -> MooncakeDistributedStore:
        made = MooncakeDistributedStore()
        assert made.setup(hostname, "P2PHANDSHAKE", nbytes, 0, "tcp", "", self.address) == 0
        self.stores.append(made)
        return made

    def ask(self, method: str, url: str, body: str | None = None, port: int | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", port or self.master.admin_port, timeout=HANG_S)
        connection.request(method, url, body)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text

    def json(self, method: str, url: str, body: str | None = None) -> Any:
        return json.loads(self.ask(method, url, body)[1])

    def close(self) -> None:
        for store in self.stores:
            store.close()
        self.loop.run(self.master.close())
        self.loop.close()


@pytest.fixture
def pool() -> Iterator[AdminPool]:
    made = AdminPool()
    yield made
    made.close()


def test_an_empty_pool(pool: AdminPool) -> None:
    assert pool.json("GET", "/health")["service_ready"] is True
    assert pool.ask("GET", "/role") == (200, "leader")
    assert pool.ask("GET", "/get_all_segments") == (200, "")
    assert pool.ask("GET", "/get_all_keys") == (200, "")
    assert pool.ask("GET", "/query_segment?segment=x")[0] == 500
    status, text = pool.ask("GET", "/api/v1/segments/status?segment=x")
    assert (status, json.loads(text)["error_code"]) == (404, -101)
    assert pool.ask("GET", "/api/v1/segments/status")[0] == 400
    assert pool.ask("GET", "/api/v1/tenant_quotas")[0] == 501
    assert pool.ask("DELETE", "/api/v1/tenant_quotas")[0] == 501
    assert pool.json("GET", "/kv_events/status")["enabled"] is False
    assert pool.ask("PUT", "/health")[0] == 405
    assert pool.master.metadata_port is not None
    assert pool.ask("GET", "/health", port=pool.master.metadata_port)[0] == 200


def test_keys_and_metrics(pool: AdminPool) -> None:
    store = pool.store("127.0.0.1:19101")
    assert store.put("a/b c", b"x" * 1000) == 0
    found = pool.json("GET", "/query_key?key=a%2Fb%20c")
    assert found["success"] is True
    assert [each["transport_endpoint_"] for each in found["data"]] == ["127.0.0.1:19101"]
    status, text = pool.ask("GET", "/query_key?key=none")
    assert (status, json.loads(text)["error_code"]) == (404, -704)
    both = pool.json("GET", "/batch_query_keys?keys=a%2Fb%20c,none")["data"]
    assert (both["a/b c"]["ok"], both["none"]["ok"], both["none"]["error"]) == (True, False, "OBJECT_NOT_FOUND")
    assert pool.ask("GET", "/batch_query_keys")[0] == 400
    assert pool.ask("GET", "/get_all_keys") == (200, "a/b c\n")
    assert pool.ask("GET", "/get_all_keys?tenant_id=other") == (200, "")
    status, metrics = pool.ask("GET", "/metrics")
    assert status == 200
    assert 'master_key_count{moonpool_name="master",moonpool_role="master"} 1.0' in metrics
    assert "Keys: 1" in pool.ask("GET", "/metrics/summary")[1]
    assert pool.json("POST", "/api/v1/remove_all?force=true")["removed_count"] == 1
    assert pool.ask("GET", "/get_all_keys") == (200, "")


def test_segments_and_a_drain(pool: AdminPool) -> None:
    source, target = pool.store("127.0.0.1:19102"), pool.store("127.0.0.1:19103")
    assert pool.ask("GET", "/get_all_segments") == (200, "127.0.0.1:19102\n127.0.0.1:19103\n")
    detail = pool.json("GET", "/get_segments_detail")
    assert detail["total_segments"] == 2
    assert {each["size_bytes"] for each in detail["segments"]} == {16 * MIB}
    assert "Capacity(bytes) : 16777216" in pool.ask("GET", "/query_segment?segment=127.0.0.1:19102")[1]
    for number in range(20):
        assert source.put(f"k{number}", b"%d" % number * 1000) == 0
    body = json.dumps({"segments": ["127.0.0.1:19102"], "target_segments": ["127.0.0.1:19103"]})
    job = pool.json("POST", "/api/v1/drain_jobs", body)
    assert (job["success"], job["status"]) == (True, "CREATED")
    query = f"/api/v1/drain_jobs/query?job_id={job['job_id']}"
    wait_until(lambda: pool.json("GET", query)["status_name"] == "SUCCEEDED", "the job is done")
    over = pool.json("GET", query)
    assert (over["active_units"], over["failed_units"], over["segments"]) == (0, 0, ["127.0.0.1:19102"])
    status = pool.json("GET", "/api/v1/segments/status?segment=127.0.0.1:19102")
    assert (status["status"], status["status_name"]) == (3, "DRAINED")
    assert source.put("new", b"x") == 0
    source.close()
    assert target.get("new") == b"x"
    assert [target.get(f"k{number}") for number in range(20)] == [b"%d" % number * 1000 for number in range(20)]


def test_drain_jobs_that_cannot_be(pool: AdminPool) -> None:
    for hostname in ("127.0.0.1:19104", "127.0.0.1:19105", "127.0.0.1:19106"):
        pool.store(hostname)
    post = "/api/v1/drain_jobs"
    assert pool.ask("POST", post, "{")[0] == 400
    assert pool.ask("POST", post, '{"segments": []}')[0] == 400
    assert pool.ask("POST", post, '{"segments": ["127.0.0.1:1"]}')[0] == 404
    some = json.dumps({"segments": ["127.0.0.1:19104"], "target_segments": ["127.0.0.1:19105"]})
    status, text = pool.ask("POST", post, some)
    assert status == 400
    assert "127.0.0.1:19106" in json.loads(text)["error_message"]
    assert pool.ask("GET", "/api/v1/drain_jobs/query?job_id=x")[0] == 400
    assert pool.ask("GET", "/api/v1/drain_jobs/query?job_id=123456")[0] == 404
    job = pool.json("POST", post, '{"segments": ["127.0.0.1:19104", "127.0.0.1:19105"]}')["job_id"]
    assert pool.ask("POST", f"/api/v1/drain_jobs/cancel?job_id={job}")[0] == 200
    assert pool.json("GET", f"/api/v1/drain_jobs/query?job_id={job}")["status_name"] in ("CANCELED", "SUCCEEDED")
