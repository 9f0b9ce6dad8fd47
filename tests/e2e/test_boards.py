"""A real Prometheus reads a live service with two of everything but the master, and a third front end at a port of its
own: every query of the boards and alerts has an answer, boards made for vLLM show data, and sums count everything once.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from e2e_service import Service
from programs import find_program
from prometheus_server import JOB, Prometheus, running_prometheus
from random_model import small_model, token_prompt
from waiting import HANG_S, wait_until

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana"
DESCRIPTION = tomllib.loads((FOLDER / "boards.toml").read_text())
# More blocks than the pages of both prefill workers hold: prompts that come again are pulled from the pool.
NUM_PROMPTS, NUM_AT_OWN_PORT = 24, 4
MODEL = "small"
PROMPT_TOKENS, OUTPUT_TOKENS = 300, 6
DONE = 'sum(moonpool_requests_total{outcome="done"})'


class Watched(NamedTuple):
    service: Service
    own_port_url: str  # of the front end that does not share the port
    prometheus: Prometheus
    num_requests: int


@pytest.fixture(scope="module")
def watched(two_of_all: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """After requests at all front ends, all of them read by Prometheus: each prompt twice. These tests are the
    first of the service, so its counters begin at 0."""
    program = find_program("prometheus", needed_by="the tests of boards and alert rules")
    folder = tmp_path_factory.mktemp("boards")
    model = small_model(folder / MODEL)
    service = two_of_all
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(front_end(service, folder, model))
        targets = [url.removeprefix("http://") for url in (service.url, other)]
        server = running_prometheus(folder, targets, interval_s=1, rules=FOLDER / "alerts.yml", program=program)
        prometheus = stack.enter_context(server)
        # Prometheus must see the counters at 0 first: it shows increases only.
        wait_until(lambda: value(prometheus, "count(moonpool_missing_roles)") == 3, "all front ends are read")
        wait_until(lambda: value(prometheus, "count(moonpool_node_sessions)") == 2, "all nodes have reported")
        for _ in range(2):
            ask_all(service.url, range(NUM_PROMPTS))
            ask_all(other, range(NUM_PROMPTS, NUM_PROMPTS + NUM_AT_OWN_PORT))
        num_requests = 2 * (NUM_PROMPTS + NUM_AT_OWN_PORT)
        wait_until(lambda: value(prometheus, DONE) == num_requests, f"{num_requests} requests are counted")
        yield Watched(service, other, prometheus, num_requests)


@contextlib.contextmanager
def front_end(service: Service, folder: Path, model: Path) -> Iterator[str]:
    """One more front end of the service, at a port of its own, as on another machine; yields its URL."""
    ready, told = os.pipe()
    options = {
        "conductor-address": ",".join(service.address(name) for name in ("conductor", "conductor-1")),
        "master-address": service.address("master"),
        "state-dir": str(folder),
        "model": str(model),
        "name": "apart",
        "listen": "tcp:127.0.0.1:0",
        "ready-fd": str(told),
    }
    words = [word for name, text in options.items() for word in (f"--{name}", text)]
    process = subprocess.Popen([sys.executable, "-m", "moonpool", "frontend", *words], pass_fds=(told,))
    os.close(told)
    try:
        with os.fdopen(ready) as lines:
            yield json.loads(lines.readline())["ready"]
    finally:
        process.terminate()
        process.wait(HANG_S)


def ask_all(url: str, numbers: range) -> None:
    """Each request over a connection of its own, so that the kernel chooses a front end for it."""

    common = {"model": MODEL, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}

    def ask(number: int) -> None:
        body = {**common, "prompt": token_prompt(PROMPT_TOKENS, seed=number)}
        reply = httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=HANG_S)
        assert reply.status_code == 200, reply.text

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ask, numbers))


def value(prometheus: Prometheus, query: str) -> float | None:
    """The one number that a query answers with; None without one."""
    found = prometheus.query(query)
    assert len(found) <= 1, f"{query}: {found}"
    return found[0][1] if found else None


def without_data(prometheus: Prometheus, queries: list[str]) -> list[str]:
    """The queries that have no number now."""
    return [each for each in queries if not any(math.isfinite(number) for _, number in prometheus.query(each))]


def assert_data(prometheus: Prometheus, queries: list[str]) -> None:
    """Nodes report every 5 s only, so some figures come late."""
    assert queries
    left = list(queries)

    def all_have() -> bool:
        left[:] = without_data(prometheus, left)
        return not left

    with contextlib.suppress(AssertionError):
        wait_until(all_have, "all queries have data")
    assert left == []


def of_service(query: str) -> str:
    """The query as Grafana sends it; over a time that a slow machine needs for all tests."""
    return query.replace("$__rate_interval", "10m").replace("$job", JOB).replace("$model_name", MODEL)


@pytest.mark.parametrize("name", [each["name"] for each in DESCRIPTION["board"]])
def test_every_panel_has_data(watched: Watched, name: str) -> None:
    panels = json.loads((FOLDER / f"{name}.json").read_text())["panels"]
    assert_data(watched.prometheus, [of_service(each["expr"]) for panel in panels for each in panel["targets"]])


def test_every_alert_has_a_value_and_is_evaluated(watched: Watched) -> None:
    alerts: list[dict[str, Any]] = DESCRIPTION["alert"]
    assert_data(watched.prometheus, [alert["query"] for alert in alerts])
    rules = watched.prometheus.rules()
    assert rules.keys() == {alert["name"] for alert in alerts}
    assert {name: rule["lastError"] for name, rule in rules.items() if rule.get("lastError")} == {}
    for name in ("MoonpoolPageUnreadable", "MoonpoolRoleMissing", "MoonpoolRequestsFail", "MoonpoolCorruptReplicas"):
        assert rules[name]["state"] == "inactive"


def test_an_alert_notices_a_worker_that_stands_still(watched: Watched) -> None:
    def state() -> str:
        return str(watched.prometheus.rules()["MoonpoolRoleMissing"]["state"])

    worker = watched.service.role("decode-1").pid
    os.kill(worker, signal.SIGSTOP)
    try:
        wait_until(lambda: state() == "pending", "the alert waits for its minute")
    finally:
        os.kill(worker, signal.SIGCONT)
    wait_until(lambda: state() == "inactive", "the worker is back")


OF = '{model_name="$model_name"}'
RATE = "[$__rate_interval]"


def quantile(name: str) -> str:
    return f"histogram_quantile(0.99, sum by(le) (rate(vllm:{name}_bucket{OF}{RATE})))"


def mean(name: str) -> str:
    return f"rate(vllm:{name}_sum{OF}{RATE}) / rate(vllm:{name}_count{OF}{RATE})"


def hit_rate(name: str) -> str:
    return f"sum(rate(vllm:{name}_hits_total{RATE})) / sum(rate(vllm:{name}_queries_total{RATE}))"


VLLM_BOARD = (
    quantile("time_to_first_token_seconds"),
    mean("time_to_first_token_seconds"),
    quantile("inter_token_latency_seconds"),
    mean("inter_token_latency_seconds"),
    quantile("e2e_request_latency_seconds"),
    mean("e2e_request_latency_seconds"),
    f"rate(vllm:request_queue_time_seconds_sum{OF}{RATE})",
    f"vllm:num_requests_running{OF}",
    f"vllm:num_requests_waiting{OF}",
    f"vllm:kv_cache_usage_perc{OF}",
    f"rate(vllm:prompt_tokens_total{OF}{RATE})",
    f"rate(vllm:generation_tokens_total{OF}{RATE})",
    hit_rate("prefix_cache"),
    hit_rate("external_prefix_cache"),
)


def test_the_panels_of_vllms_board_have_data(watched: Watched) -> None:
    assert_data(watched.prometheus, [of_service(query) for query in VLLM_BOARD])


def test_sums_over_all_front_ends_count_every_request_once(watched: Watched) -> None:
    prometheus, num_requests = watched.prometheus, watched.num_requests
    found = prometheus.query('sum by (moonpool_name) (moonpool_requests_total{outcome="done"})')
    by_name = {labels["moonpool_name"]: count for labels, count in found}
    assert by_name.keys() == {"frontend", "frontend-1", "apart"}
    assert by_name["apart"] == 2 * NUM_AT_OWN_PORT
    assert min(by_name.values()) > 0, "the kernel gave connections to both front ends of the port"
    assert sum(by_name.values()) == num_requests == value(prometheus, DONE)
    expected = {
        "sum(vllm:e2e_request_latency_seconds_count)": num_requests,
        "sum(vllm:time_to_first_token_seconds_count)": num_requests,
        "sum(vllm:request_queue_time_seconds_count)": num_requests,
        "sum(vllm:generation_tokens_total)": num_requests * OUTPUT_TOKENS,
        "sum(vllm:prefix_cache_queries_total)": num_requests * PROMPT_TOKENS,
    }
    assert {query: value(prometheus, query) for query in expected} == expected


def test_roles_that_front_ends_share_are_read_once(watched: Watched) -> None:
    expected = {
        "count(moonpool_pool_objects)": 1,
        "count(moonpool_conductor_waiting)": 2,
        "count(vllm:kv_cache_usage_perc)": 4,
        "count(moonpool_node_sessions)": 2,
        "count(up == 1)": 2,
    }

    def found() -> dict[str, float | None]:
        return {query: value(watched.prometheus, query) for query in expected}

    wait_until(lambda: found() == expected, f"each is read once: {found()}")
