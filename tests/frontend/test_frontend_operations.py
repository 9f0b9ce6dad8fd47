"""Disconnects, health, metrics, records, and how the front end starts and stops."""

from __future__ import annotations

import asyncio
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import httpx
import openai
import pytest
from frontend_cluster import MODEL, ToyCluster, chat_prompt, expected, load_toy, until_page
from waiting import HANG_S, until

from moonpool.base.cluster import WorkerRole
from moonpool.base.errors import ConfigError, InvalidInput, Unavailable
from moonpool.frontend.http_errors import public_text
from moonpool.frontend.service import Frontend, FrontendConfig, bind, url_of
from moonpool.master.service import Master, MasterConfig

BODY = {"model": MODEL, "prompt": "once upon a time", "seed": 3, "max_tokens": 300, "ignore_eos": True}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[ToyCluster]:
    async with ToyCluster(tmp_path) as cluster:
        yield cluster


@pytest.fixture
async def http(cluster: ToyCluster) -> AsyncIterator[httpx.AsyncClient]:
    async with cluster.client() as http:
        yield http


async def wait_active(cluster: ToyCluster, name: str) -> None:
    await until(lambda: cluster.workers[name].num_active > 0, f"{name} has begun")


async def outcome(cluster: ToyCluster) -> str:
    """How the conductor was told that the last request ended."""

    def last() -> str:
        records = cluster.records(limit=1)
        return records[-1].outcome if records else "open"

    await until(lambda: last() != "open", "the last request has ended")
    return last()


async def test_leaving_a_stream_cancels_its_work(cluster: ToyCluster, http: httpx.AsyncClient) -> None:
    cluster.decode.token_s = 0.005
    async with http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as reply:
        async for line in reply.aiter_lines():
            if line:
                break
        assert cluster.decode.num_active == 1
    await cluster.until_idle()
    assert await outcome(cluster) == "cancelled"
    page = (await http.get("/metrics")).text
    labels = 'endpoint="/v1/completions",moonpool_name="frontend",moonpool_role="frontend",outcome="cancelled"'
    assert f"moonpool_requests_total{{{labels}" in page


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stalled", ["prefill0", "decode0"])
async def test_leaving_before_the_answer_cancels_its_work(
    cluster: ToyCluster, http: httpx.AsyncClient, stalled: str, stream: bool
) -> None:
    cluster.workers[stalled].may_go_on.clear()
    asking = asyncio.create_task(http.post("/v1/completions", json={**BODY, "stream": stream, "n": 2}))
    await wait_active(cluster, stalled)
    asking.cancel()
    await asyncio.wait((asking,))
    await cluster.until_idle()
    assert await outcome(cluster) == "cancelled"


async def test_health_says_what_is_missing(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path, num_prefill=0, num_decode=0, worker_wait_s=0.2) as cluster:
        async with cluster.client() as http:
            reply = await http.get("/health")
            assert (reply.status_code, reply.json()["missing"]) == (503, ["prefill", "decode"])
            await cluster.add_worker("d", WorkerRole.DECODE)
            assert (await http.get("/health")).json()["missing"] == ["prefill"]
            await cluster.add_worker("p", WorkerRole.PREFILL)
            assert (await http.get("/health")).status_code == 200
            await cluster.conductor.close()
            reply = await http.get("/health")
            assert (reply.status_code, reply.json()["missing"]) == (503, ["conductor"])
            refused = await http.post("/v1/completions", json=BODY)
            assert refused.status_code == 503
            for text in (reply.text, refused.text):
                assert cluster.conductor_address not in text
                assert "(internal address)" in text


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("cannot connect to unix:/tmp/moonpool-x/c.sock: refused", "cannot connect to (internal address) refused"),
        ("cannot reach tcp:10.0.0.1:7800 (timed out)", "cannot reach (internal address) (timed out)"),
        ("[Errno 2] No such file: '/run/moonpool/a.sock'", "[Errno 2] No such file: '(internal address)'"),
        ("3/4 workers at 10 tokens/s", "3/4 workers at 10 tokens/s"),
    ],
)
def test_failures_do_not_tell_where_our_processes_are(message: str, shown: str) -> None:
    assert public_text(Unavailable(message)) == shown
    assert public_text(InvalidInput(message)) == message, "the client's own words stay"


async def test_health_does_not_miss_a_worker_that_was_drained_before_the_conductor_restarted(tmp_path: Path) -> None:
    async with ToyCluster(tmp_path, expected_workers=("prefill0", "prefill1", "decode0")) as cluster:
        async with cluster.client() as http:
            assert (await http.get("/health")).json()["missing"] == ["prefill1"]
            cluster.state.roles.left.add("prefill1")
            assert (await http.get("/health")).json()["missing"] == []
            cluster.state.roles.left.clear()  # as one that has just started
            assert (await http.get("/health")).json()["missing"] == []
            await cluster.add_worker("prefill1", WorkerRole.PREFILL)
            assert (await http.get("/health")).json()["missing"] == []
            await cluster.workers["prefill1"].kill()
            await until(lambda: len(cluster.state.workers) == 2, "the third is lost")
            assert (await http.get("/health")).json()["missing"] == ["prefill1"], "it was started again, and is lost"


async def test_health_names_what_a_service_goes_on_without(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="mp") as folder:
        address = f"unix:{folder}/m.sock"
        pool: dict[str, Any] = {"master_address": address, "expected_workers": ("prefill0", "prefill1", "decode0")}
        async with ToyCluster(tmp_path, **pool) as cluster, cluster.client() as http:
            reply = await http.get("/health")
            assert reply.status_code == 200, "requests run without the pool"
            assert (reply.json()["status"], reply.json()["missing"]) == ("degraded", ["prefill1", "master"])
            assert "worker prefill1 is not registered" in reply.json()["reason"]
            assert "without the pool: its master does not answer" in reply.json()["reason"]
            master = Master(MasterConfig(data_dir=f"{folder}/m", listen=address))
            await master.start()
            await cluster.add_worker("prefill1", WorkerRole.PREFILL)
            reply = await http.get("/health")
            assert (reply.status_code, reply.json()["missing"]) == (200, ["node"])
            assert "no node has mounted memory" in reply.json()["reason"]
            await master.close()


async def test_metrics_of_all_roles_on_one_page(cluster: ToyCluster, http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json={**BODY, "max_tokens": 5})
    assert answer.status_code == 200
    page = (await http.get("/metrics")).text
    for line in (
        'moonpool_requests_total{endpoint="/v1/completions",moonpool_name="frontend",moonpool_role="frontend",'
        'outcome="done"} 1.0',
        'moonpool_request_seconds_count{endpoint="/v1/completions",moonpool_name="frontend",moonpool_role="frontend"}',
        'moonpool_ttft_seconds_count{moonpool_name="frontend",moonpool_role="frontend"} 1.0',
        'moonpool_tbt_seconds_count{moonpool_name="frontend",moonpool_role="frontend"} 4.0',
        'moonpool_prompt_tokens_total{moonpool_name="frontend",moonpool_role="frontend"} 16.0',
        'moonpool_output_tokens_total{moonpool_name="frontend",moonpool_role="frontend"} 5.0',
        'moonpool_cached_tokens_total{moonpool_name="frontend",moonpool_role="frontend",source="local"} 4.0',
        'moonpool_cached_tokens_total{moonpool_name="frontend",moonpool_role="frontend",source="pool"} 8.0',
        'toy_steps_total{moonpool_name="prefill0",moonpool_role="prefill"} 7.0',
        'toy_steps_total{moonpool_name="decode0",moonpool_role="decode"} 7.0',
        'moonpool_conductor_assigned{moonpool_name="conductor",moonpool_role="conductor",worker="decode0"} 0.0',
    ):
        assert line in page


async def test_metrics_without_a_conductor(cluster: ToyCluster, http: httpx.AsyncClient) -> None:
    await cluster.conductor.close()
    page = (await http.get("/metrics")).text
    assert 'moonpool_scrapes_unanswered_total{moonpool_name="frontend",moonpool_role="frontend"} 1.0' in page


async def test_front_ends_of_one_port_show_each_other(cluster: ToyCluster, tmp_path: Path) -> None:
    """The kernel chooses who answers, so every page has both, and the shared roles once."""
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    siblings = tuple(f"{name}=unix:{tmp_path / name}.sock" for name in ("one", "two"))
    shared = {"port": port, "siblings": siblings}
    one, two = (
        Frontend(replace(cluster.frontend.config, name=name, state_dir=str(tmp_path / name), **shared), load_toy)
        for name in ("one", "two")
    )
    assert await one.start() == await two.start() == f"http://127.0.0.1:{port}"

    async def read(path: str) -> httpx.Response:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=HANG_S) as client:  # a connection of its own
            return await client.get(path)

    try:
        for _ in range(8):
            page = (await read("/metrics")).text
            assert page.count("moonpool_requests_running{") == 2
            assert page.count("moonpool_conductor_open_requests{") == 1
            own = (await read("/metrics?roles=own")).text
            assert own.count("moonpool_requests_running{") == 1
        assert (await read("/health")).json()["missing"] == []
        await two.close()
        for _ in range(8):
            reply = await read("/health")
            assert (reply.status_code, reply.json()["missing"]) == (200, ["two"]), "the other has the port"
        assert (await read("/metrics")).text.count("moonpool_requests_running{") == 1
    finally:
        await one.close()
        await two.close()


@pytest.mark.parametrize("siblings", [("other=unix:/o",), ("frontend",), ("=unix:/o",), ("frontend=nowhere",)])
def test_siblings_are_named_and_this_one_is_among_them(siblings: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        FrontendConfig(conductor_address="unix:/c", state_dir="/s", siblings=siblings)


async def test_with_two_front_ends_the_shared_roles_are_on_one_page(
    cluster: ToyCluster, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    """Prometheus reads both pages and must not collect a series twice."""
    config = replace(cluster.frontend.config, state_dir=str(tmp_path / "other"), name="other")
    other = Frontend(config, load_toy)
    other_url = await other.start()
    try:
        async with httpx.AsyncClient(base_url=other_url, timeout=HANG_S) as second:
            pages = [(await http.get("/metrics")).text, (await second.get("/metrics")).text]
            shared = [page.count("moonpool_conductor_open_requests{") for page in pages]
            assert shared == [1, 0], "the first that was asked has them, again and again"
            assert 'moonpool_name="other"' in pages[1]
            assert "/metrics?roles=all" in pages[1]
            assert "moonpool_conductor_open_requests{" in (await second.get("/metrics?roles=all")).text
            assert "moonpool_conductor_open_requests{" not in (await http.get("/metrics?roles=own")).text
            await cluster.frontend.close()
            await until_page(second, "/metrics", "moonpool_conductor_open_requests{")  # it has taken over
    finally:
        await other.close()


async def test_decision_records(cluster: ToyCluster, http: httpx.AsyncClient) -> None:
    await http.post("/v1/completions", json={**BODY, "max_tokens": 5})
    assert await outcome(cluster) == "done"
    record = (await http.get("/v1/records", params={"limit": 1})).json()["data"][0]
    assert (record["prefill"], record["decode"], record["outcome"]) == ("prefill0", "decode0", "done")
    assert (record["cached_tokens"], record["pool_tokens"], record["output_tokens"]) == (12, 8, 5)
    assert record["measured_ttft_s"] > 0


async def test_openapi_describes_the_endpoints(http: httpx.AsyncClient) -> None:
    spec = (await http.get("/openapi.json")).json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health"} <= set(spec["paths"])
    schemas = spec["components"]["schemas"]
    assert "temperature" in schemas["ChatBody"]["properties"]
    assert {"ChatCompletion", "ChatChoice", "Completion", "CompletionChoice", "Usage"} <= schemas.keys()
    answer = spec["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert answer == {"$ref": "#/components/schemas/Completion"}


async def test_a_bug_is_a_500_in_the_same_shape(
    cluster: ToyCluster, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> NoReturn:
        raise ZeroDivisionError("internals")

    with monkeypatch.context() as patch:
        patch.setattr(cluster.frontend._handler, "_choices", fail)
        reply = await http.post("/v1/completions", json=BODY)
    assert reply.status_code == 500
    assert reply.headers["x-request-id"]
    assert "internals" not in reply.text
    assert reply.json()["error"]["type"] == "server_error"
    connection = reply.extensions["network_stream"].get_extra_info("client_addr")
    reply = await http.post("/v1/completions", json={**BODY, "max_tokens": 1})
    assert reply.status_code == 200
    assert reply.extensions["network_stream"].get_extra_info("client_addr") == connection, "the connection was reset"


async def test_a_taken_port_is_one_clear_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = FrontendConfig(conductor_address="unix:/none", state_dir=str(tmp_path / "state"), port=port)
        frontend = Frontend(config, load_toy)
        with pytest.raises(ConfigError, match=f"cannot serve at 127.0.0.1:{port}: .*in use"):
            await frontend.start()
        await frontend.close()
        assert not (tmp_path / "state").exists()


def test_an_unknown_host_is_one_clear_sentence() -> None:
    with pytest.raises(ConfigError, match="cannot serve at"):
        bind("no.such.host.invalid", 0)


def test_urls() -> None:
    with bind("127.0.0.1", 0) as sock:
        assert url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"


@pytest.mark.parametrize("wrong", [{"port": 70000}, {"max_model_len": 0}, {"request_timeout_s": -1}])
def test_bad_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        FrontendConfig(conductor_address="unix:/c", state_dir="/s", **wrong)


async def test_stopping_tells_streams_why_and_does_not_wait_for_their_end(
    cluster: ToyCluster, http: httpx.AsyncClient
) -> None:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="any", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        cluster.decode.token_s = 600.0
        started_s = time.monotonic()
        closing = asyncio.create_task(cluster.frontend.close())
        with pytest.raises(openai.APIError, match="stopping"):
            async for _ in stream:
                pass
        await closing
        assert time.monotonic() - started_s < HANG_S / 2  # after GRACE_S, and not after the next token
    await cluster.until_idle()
    with pytest.raises(httpx.ConnectError):
        await http.get("/health")


async def test_stopping_lets_short_requests_finish(cluster: ToyCluster, http: httpx.AsyncClient) -> None:
    cluster.decode.token_s = 0.02
    asking = asyncio.create_task(
        http.post(
            "/v1/chat/completions",
            json={"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 10, "seed": 0},
        )
    )
    await wait_active(cluster, "decode0")
    await cluster.frontend.close()
    assert (await asking).json()["choices"][0]["message"]["content"] == expected(chat_prompt("x"), 10)[0]
