"""Two nodes and two front ends: a node and a front end are killed; answers before, meanwhile and after are
the same, the pool uses the node that came back, and the metrics name and sum every process.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e_service import Service
from random_model import token_prompt
from waiting import HANG_S, wait_until

from moonpool.base.cluster import FRONTEND_SERVICE
from moonpool.base.metrics import GetMetrics
from moonpool.cli.doctor_services import check_services

NUM_PROMPTS = 8


@pytest.fixture(scope="module")
def expected(two_of_all: Service) -> list[str]:
    """What the undisturbed service answers."""
    return [ask(two_of_all, number) for number in range(NUM_PROMPTS)]


def body_of(number: int) -> dict[str, Any]:
    prompt = token_prompt(300, seed=number)
    return {"model": "small", "prompt": prompt, "max_tokens": 32, "temperature": 0, "ignore_eos": True}


def ask(service: Service, number: int) -> str:
    """One request over a connection of its own, so that the kernel chooses a front end for it."""
    reply = httpx.post(f"{service.url}/v1/completions", json=body_of(number), timeout=HANG_S)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def samples(service: Service, metric: str) -> dict[str, float]:
    """The values on one page, summed by the process or, for the pool's, by the node."""
    found: dict[str, float] = {}
    for labels, value in re.findall(rf"^{metric}{{(.*)}} (\S+)$", httpx.get(f"{service.url}/metrics").text, re.M):
        names = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        name = str(names.get("node", names["moonpool_name"]))
        found[name] = found.get(name, 0.0) + float(value)
    return found


def health(service: Service) -> dict[str, Any]:
    reply = httpx.get(f"{service.url}/health", timeout=HANG_S)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def wait_healthy(service: Service) -> None:
    wait_until(lambda: health(service)["status"] == "ok", f"all roles are back: {health(service)}")


def test_all_are_named_and_counted(two_of_all: Service, expected: Sequence[str], tmp_path: Path) -> None:
    assert "in 2 nodes of 64 MB and 10 GB each (node, node-1)" in two_of_all.log()
    assert health(two_of_all) == {"status": "ok", "missing": []}
    fronts, nodes = {"frontend", "frontend-1"}, {"node", "node-1"}
    before = sum(samples(two_of_all, "moonpool_requests_total").values())
    assert [ask(two_of_all, number) for number in range(NUM_PROMPTS)] == list(expected)
    for _ in range(4):  # whichever front end answers
        assert sum(samples(two_of_all, "moonpool_requests_total").values()) == before + NUM_PROMPTS
        assert samples(two_of_all, "process_cpu_seconds_total").keys() >= fronts
    wait_until(lambda: samples(two_of_all, "process_cpu_seconds_total").keys() >= nodes, "both nodes have reported")
    replicas = samples(two_of_all, "moonpool_pool_segment_objects")
    assert replicas["node"] > 0
    assert replicas["node-1"] > 0, "blocks are spread over the nodes"
    command = [sys.executable, "-m", "moonpool", "stat", "--json", "--master", two_of_all.address("master")]
    shown = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=HANG_S).stdout)
    assert {each["name"] for each in shown["segments"]} == {
        f"{node}.{kind}" for node in nodes for kind in ("dram", "ssd")
    }
    (found,) = check_services([two_of_all.run_dir])
    assert (found.status, found.says) == ("ok", f"{two_of_all.url}: pool of node, node-1")
    templates = [process for process in two_of_all.family() if "moonpool.cli.template" in process.cmdline()]
    assert [process.num_threads() for process in templates] == [1, 1], "one has imported torch; both can fork"
    words = two_of_all.role("node-1").cmdline()
    assert words[words.index("--ssd") + 1].endswith("/ssd/node-1")


def test_a_killed_node_loses_no_request(two_of_all: Service, expected: Sequence[str]) -> None:
    before, stop, wrong = two_of_all.role("node-1").pid, threading.Event(), list[str]()
    num_ended = two_of_all.log().count("node-1 ended")

    def keep_asking(first: int) -> None:
        number = first
        while not stop.is_set() or number < first + NUM_PROMPTS:
            answer = ask(two_of_all, number % NUM_PROMPTS)
            if answer != expected[number % NUM_PROMPTS]:
                wrong.append(f"{number % NUM_PROMPTS}: {answer!r}")
            number += 1

    with ThreadPoolExecutor(2) as threads:
        asking = [threads.submit(keep_asking, first) for first in (0, 4)]
        os.kill(before, 9)
        wait_until(lambda: two_of_all.log().count("node-1 ended") > num_ended, "the launcher has noticed")
        wait_until(lambda: _is_mounted(two_of_all), "node-1 is mounted again")
        stop.set()
        for each in asking:
            each.result()
    assert wrong == []
    assert two_of_all.role("node-1").pid != before
    wait_healthy(two_of_all)
    numbers = iter(range(100, 200))

    def is_used() -> bool:
        ask(two_of_all, next(numbers))
        return samples(two_of_all, "moonpool_pool_segment_objects").get("node-1", 0) > 0

    wait_until(is_used, "the node that came back has new blocks")


def _is_mounted(service: Service) -> bool:
    return "node-1" not in health(service)["missing"] and "node-1" in samples(service, "moonpool_pool_capacity_bytes")


def test_a_killed_front_end_leaves_the_other_serving(two_of_all: Service, expected: Sequence[str]) -> None:
    victim = two_of_all.role("frontend-1")
    outcomes: list[str] = []

    def ask_and_note(number: int) -> None:
        try:
            outcomes.append("right" if ask(two_of_all, number) == expected[number] else "wrong")
        except httpx.TransportError:
            outcomes.append("lost")  # its front end died with it

    with ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(ask_and_note, number % NUM_PROMPTS) for number in range(12)]
        victim.kill()
        victim.wait(HANG_S)
        assert ask(two_of_all, 0) == expected[0], "the other front end has the port"
        for each in asking:
            each.result()
    assert "wrong" not in outcomes
    assert "right" in outcomes, "those of the other front end have ended well"
    assert [ask(two_of_all, number) for number in range(NUM_PROMPTS)] == list(expected)
    wait_healthy(two_of_all)
    assert two_of_all.role("frontend-1").pid != victim.pid
    assert two_of_all.ask(two_of_all.address("frontend-1"), FRONTEND_SERVICE, GetMetrics())
    assert samples(two_of_all, "process_cpu_seconds_total").keys() >= {"frontend", "frontend-1"}
