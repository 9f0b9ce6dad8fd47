"""The metrics page of a running service: every role is there once, and names and labels follow Prometheus' rules."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path

import httpx
import pytest
from e2e_service import Service
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from waiting import HANG_S, wait_until

ROLES = {
    ("frontend", "frontend"),
    ("conductor", "conductor"),
    ("master", "master"),
    ("node", "node"),
    ("prefill", "prefill-0"),
    ("decode", "decode-0"),
}
OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
VLLM_TIMES = {f"vllm:{name}_seconds" for name in (
    "time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue_time",
)}  # fmt: skip
PROCESS = {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"}
PROMETHEUS_OWN = {"instance", "job", "role"}  # set by Prometheus, or by the ways in which it finds what to read


def scrape(service: Service) -> dict[str, Metric]:
    reply = httpx.get(f"{service.url}/metrics", trust_env=False, timeout=HANG_S)
    assert reply.headers["content-type"].startswith("text/plain")
    return {family.name: family for family in text_string_to_metric_families(reply.text)}


def roles_of(families: dict[str, Metric], sample_name: str) -> set[tuple[str, str]]:
    samples = [sample for family in families.values() for sample in family.samples if sample.name == sample_name]
    return {(sample.labels["moonpool_role"], sample.labels["moonpool_name"]) for sample in samples}


def count_of(families: dict[str, Metric], histogram: str, role: str) -> float:
    counts = [each for each in families[histogram].samples if each.name == f"{histogram}_count"]
    return sum(each.value for each in counts if each.labels["moonpool_role"] == role)


def documented() -> set[str]:
    """The metrics in the tables of docs/operations.md, where `_x` stands for the first name's beginning with x."""
    found = set()
    for row in re.findall(r"^\| (`(?:moonpool_|process_|vllm:).*?) \|", OPERATIONS.read_text(), re.M):
        names = re.findall(r"`([a-z0-9_:]+)`", row)
        beginning = "_".join(names[0].split("_")[:2])
        found |= {beginning + name if name.startswith("_") else name for name in names}
    return found


@pytest.fixture(scope="module")
def families(one_each: Service) -> dict[str, Metric]:
    """After a request whose prompt has full blocks; nodes have reported."""
    body = {"model": "small", "prompt": "one two three " * 40, "max_tokens": 4}
    reply = httpx.post(f"{one_each.url}/v1/completions", json=body, trust_env=False, timeout=HANG_S)
    assert reply.status_code == 200, reply.text
    wait_until(lambda: roles_of(scrape(one_each), "process_open_fds") >= ROLES, "all roles are on the page")
    counted = "moonpool_missing_roles"  # every 2 s: the last time may have been before the workers had registered
    wait_until(lambda: value_of(scrape(one_each), counted) == 0, "no role is counted as missing")
    return scrape(one_each)


def test_every_process_is_there_once_with_its_cpu_memory_and_files(families: dict[str, Metric]) -> None:
    for name in PROCESS:
        assert roles_of(families, name) == ROLES
    figures = defaultdict(list)
    for family in (families[name] for name in families if name.startswith("process_")):
        for sample in family.samples:
            figures[sample.labels["moonpool_name"]].append(sample.value)
    assert len(set(map(tuple, figures.values()))) == len(ROLES), "each of a process of its own"


def test_no_series_is_there_twice(families: dict[str, Metric]) -> None:
    samples = [sample for family in families.values() for sample in family.samples]
    series = Counter((sample.name, tuple(sorted(sample.labels.items()))) for sample in samples)
    assert [each for each, count in series.items() if count > 1] == []


def test_names_and_labels_follow_the_rules(families: dict[str, Metric]) -> None:
    wrong = defaultdict(list)
    for family in families.values():
        if not re.fullmatch(r"((moonpool|process)_|vllm:)[a-z0-9_]+", family.name):
            wrong["name"].append(family.name)
        if not family.documentation:
            wrong["without help"].append(family.name)
        for unit in ("bytes", "seconds"):
            if unit in family.name and not family.name.endswith(unit):
                wrong["unit not at the end"].append(family.name)
        if re.search(r"nbytes|_s$|_ms$|_milliseconds|_(kilo|mega)bytes", family.name):
            wrong["unit"].append(family.name)
        for sample in family.samples:
            if family.type == "counter" and not sample.name.endswith("_total"):
                wrong["counter without _total"].append(sample.name)
            if not {"moonpool_role", "moonpool_name"} <= sample.labels.keys() or sample.labels.keys() & PROMETHEUS_OWN:
                wrong["labels"].append(str(sample))
    assert not wrong


def test_every_metric_is_documented(families: dict[str, Metric]) -> None:
    shown = {f"{family.name}_total" if family.type == "counter" else family.name for family in families.values()}
    assert shown - documented() == set()


def value_of(families: dict[str, Metric], sample_name: str, **labels: str) -> float:
    """The sum over the samples that have these labels; there is at least one."""
    samples = [sample for family in families.values() for sample in family.samples if sample.name == sample_name]
    found = [each.value for each in samples if labels.items() <= each.labels.items()]
    assert found, f"{sample_name} is not on the page"
    return sum(found)


def test_what_vllm_measures_too_has_its_names(families: dict[str, Metric]) -> None:
    own_names = ("moonpool_ttft", "moonpool_tbt", "moonpool_answer", "moonpool_queue")
    for name in VLLM_TIMES:
        assert count_of(families, name, "frontend") >= 1
    assert sum(value_of(families, f"{name}_sum", model_name="small") for name in VLLM_TIMES) == pytest.approx(
        sum(value_of(families, f"{name}_seconds_sum") for name in own_names)
    )
    tokens = value_of(families, "moonpool_prompt_tokens_total")
    assert value_of(families, "vllm:prefix_cache_queries_total", model_name="small") == tokens > 0
    for name, source in (("prefix", "local"), ("external_prefix", "pool")):
        hits = value_of(families, f"vllm:{name}_cache_hits_total", model_name="small")
        assert hits == value_of(families, "moonpool_cached_tokens_total", source=source)
    for worker in ("prefill-0", "decode-0"):
        used = value_of(families, "vllm:kv_cache_usage_perc", moonpool_name=worker)
        assert 0 <= used <= 1
        assert value_of(families, "vllm:num_requests_running", moonpool_name=worker) >= 0
    waits = {sample.labels["moonpool_role"] for sample in families["vllm:num_requests_waiting"].samples}
    assert waits == {"conductor", "prefill", "decode"}


def test_counters_begin_at_zero(families: dict[str, Metric]) -> None:
    """Prometheus sees no increase when a counter appears with its first event."""
    assert value_of(families, "moonpool_requests_total", outcome="internal") == 0
    assert value_of(families, "moonpool_worker_kv_failures_total", code="corrupt") == 0
    assert value_of(families, "moonpool_conductor_events_total", event="report_gaps") == 0
    assert value_of(families, "moonpool_node_orders_total", kind="copy", outcome="done") == 0
    assert value_of(families, "moonpool_node_connections_ended_total", reason="stalled") == 0
    assert value_of(families, "moonpool_missing_roles") == 0


def test_the_parts_of_a_request_have_histograms(families: dict[str, Metric]) -> None:
    parts = ("_request_seconds", "_queue_seconds", "_prefill_seconds", "_pull_seconds", "_handoff_seconds")
    assert {families[name].type for name in families if name.endswith(parts)} == {"histogram"}
    assert count_of(families, "moonpool_request_seconds", "frontend") >= 1
    for role in ("prefill", "decode"):
        assert count_of(families, "moonpool_worker_queue_seconds", role) >= 1
    assert count_of(families, "moonpool_worker_decode_step_seconds", "decode") >= 1
    for part in ("prefill", "handoff"):
        assert count_of(families, f"moonpool_worker_{part}_seconds", "prefill") >= 1
    assert {"moonpool_worker_pull_seconds", "moonpool_conductor_queue_seconds"} <= families.keys()
