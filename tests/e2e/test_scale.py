"""`moonpool scale` and `moonpool drain` on a running service: workers come and go, a node is emptied, and no request is
lost or different."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from typing import Any

import httpx
import pytest
from e2e_service import Service
from forked_cli import Command
from random_model import token_prompt
from waiting import HANG_S, wait_until

from moonpool.base.cluster import CONDUCTOR_SERVICE, WorkerRole
from moonpool.base.errors import MoonpoolError
from moonpool.conductor.messages import Status
from moonpool.store.messages import Tier


@pytest.fixture(scope="module")
def scale(moonpool: Command, two_of_all: Service) -> Command:
    return lambda *counts: moonpool("scale", *counts, "--run-dir", two_of_all.run_dir)


@pytest.fixture(scope="module")
def drain(moonpool: Command, two_of_all: Service) -> Command:
    return lambda *words: moonpool("drain", *words, "--master", two_of_all.address("master"))


def roles(service: Service) -> dict[str, WorkerRole]:
    return {one.info.name: one.info.role for one in service.status().workers}


def health(service: Service) -> dict[str, Any]:
    return dict(httpx.get(f"{service.url}/health", timeout=HANG_S).json())


def is_running(service: Service, name: str) -> bool:
    return service.role_pid(name) is not None


def left(service: Service, conductor: str) -> set[str]:
    """Return the workers that have left, as that conductor knows them; none while it starts."""
    with contextlib.suppress(MoonpoolError):
        return set(service.ask(service.address(conductor), CONDUCTOR_SERVICE, Status()).left)
    return set()


def metric(service: Service, name: str) -> float:
    """The sum over all roles."""
    page = httpx.get(f"{service.url}/metrics?roles=all", timeout=HANG_S).text
    return sum(float(line.split()[-1]) for line in page.splitlines() if re.match(rf"{name}[{{ ]", line))


@pytest.mark.parametrize("longest_pause_s", [HANG_S, pytest.param(10.0, marks=pytest.mark.soak)])
def test_a_worker_is_drained_while_it_answers(two_of_all: Service, drain: Command, longest_pause_s: float) -> None:
    """Two decode workers answer; one of them is told to leave. Its answers go on at the other one: no answer begins
    again, and no more than a block of each is computed again. On a quiet machine (soak) none pauses for 10 s."""
    body = {"model": "small", "prompt": token_prompt(40, 3), "max_tokens": 600, "temperature": 0, "ignore_eos": True}
    expected = "".join(event["choices"][0]["text"] for event in two_of_all.stream("/v1/completions", body))
    begun, texts, pauses_s = threading.Barrier(5), list[str](), list[float]()
    watched = ("moonpool_replans_total", "moonpool_worker_prefill_seconds_count", "moonpool_moves_total")
    before, stats_before = {name: metric(two_of_all, name) for name in watched}, two_of_all.stats("decode-0")

    def ask() -> None:
        events = two_of_all.stream("/v1/completions", body)
        text, last_s, longest_s = next(events)["choices"][0]["text"], time.monotonic(), 0.0
        begun.wait(HANG_S)
        for event in events:
            text, now_s = text + event["choices"][0]["text"], time.monotonic()
            last_s, longest_s = now_s, max(longest_s, now_s - last_s)
        texts.append(text)
        pauses_s.append(longest_s)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    begun.wait(HANG_S)
    done = drain("decode-1")
    for thread in threads:
        thread.join(HANG_S)
    assert (done.returncode, done.stdout) == (0, "decode-1 is drained and has ended\n"), done.stderr
    assert texts == [expected] * 4
    replans, prefills, moves = (metric(two_of_all, name) - before[name] for name in watched)
    assert (replans, prefills) == (0, 4), "no answer begins again"
    assert moves > 0
    stats, block_tokens = two_of_all.stats("decode-0"), two_of_all.status().workers[0].info.block_tokens
    assert stats.resumed_answers - stats_before.resumed_answers == moves
    assert stats.recomputed_tokens - stats_before.recomputed_tokens <= moves * block_tokens
    print(f"{moves:g} answers moved; longest pauses between events: {[round(each, 3) for each in sorted(pauses_s)]} s")
    assert max(pauses_s) < longest_pause_s
    assert not is_running(two_of_all, "decode-1")
    assert health(two_of_all) == {"status": "ok", "missing": []}, "nobody misses a worker that was drained"
    two_of_all.role("conductor-1").kill()
    wait_until(lambda: left(two_of_all, "conductor-1") == {"decode-1"}, "one that starts again is told what has left")


def test_what_is_refused(two_of_all: Service, drain: Command) -> None:
    unknown = drain("decode0")
    assert unknown.returncode == 1
    assert "no worker and no node is called 'decode0'" in unknown.stderr
    assert "did you mean 'decode-0'?" in unknown.stderr
    last = drain("decode-0")
    assert last.returncode == 1
    assert "decode-0 is the only decode worker" in last.stderr
    assert roles(two_of_all)["decode-0"] is WorkerRole.DECODE


def test_the_service_grows(two_of_all: Service, scale: Command) -> None:
    prompt = token_prompt(300, 1)
    expected = two_of_all.generate(prompt).tokens
    done = scale("prefill=3", "decode=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["starting prefill-2, decode-1", "done"]
    assert roles(two_of_all).keys() == {"prefill-0", "prefill-1", "prefill-2", "decode-0", "decode-1"}
    assert two_of_all.stats("prefill-2").handoff_nbytes == 0
    answers = two_of_all.generate_all([prompt, *(token_prompt(300, seed) for seed in range(2, 8))])
    assert answers[0].tokens == expected
    assert [answer.num_attempts for answer in answers] == [1] * len(answers)
    wait_until(lambda: two_of_all.stats("prefill-2").handoff_nbytes > 0, "the new worker computes prompts")
    again = scale("prefill=3", "decode=2")
    assert again.stdout == "nothing changes: the service has that many workers\n"
    none = scale("decode=0")
    assert none.returncode == 1
    assert "no decode worker would be left" in none.stderr


def test_the_service_shrinks_and_what_left_does_not_come_back(two_of_all: Service, scale: Command) -> None:
    """decode-1 is killed while it drains; its answers go on elsewhere, and the launcher does not start it again."""
    body = {"model": "small", "prompt": token_prompt(40, 4), "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    expected = "".join(event["choices"][0]["text"] for event in two_of_all.stream("/v1/completions", body))
    streams = [two_of_all.stream("/v1/completions", body) for _ in range(4)]
    firsts = [next(stream)["choices"][0]["text"] for stream in streams]
    victim = two_of_all.role("decode-1")
    done = scale("prefill=2", "decode=1", "--no-wait")
    assert done.stdout == "draining prefill-2, decode-1\n", done.stderr
    victim.kill()
    for first, stream in zip(firsts, streams, strict=True):
        assert first + "".join(event["choices"][0]["text"] for event in stream) == expected
    wait_until(lambda: roles(two_of_all).keys() == {"prefill-0", "prefill-1", "decode-0"}, "both have left")
    wait_until(lambda: not is_running(two_of_all, "prefill-2"), "it has ended")
    assert not is_running(two_of_all, "decode-1")
    wait_until(lambda: health(two_of_all) == {"status": "ok", "missing": []}, "no role is missing")
    for conductor in ("conductor", "conductor-1"):
        assert left(two_of_all, conductor) == {"prefill-2", "decode-1"}, "each knows, whichever has told them to leave"


def test_a_node_is_drained_and_stopped_without_loss(two_of_all: Service, drain: Command) -> None:
    values = {f"kept-{number}": bytes([number]) * 50_000 for number in range(40)}
    with two_of_all.store() as store:
        for key, value in values.items():
            store.put(key, value)

        def on(node: str) -> int:
            segments = [each for each in store.stats().segments if each.node == node and each.tier is Tier.DRAM]
            return sum(each.num_objects for each in segments)

        assert on("node-1") > 0, store.stats()
        done = drain("node-1")
        assert done.returncode == 0, done.stderr
        moved, on_disk = done.stdout.splitlines()
        assert re.fullmatch(r"node-1 is drained: \S+ \S+ moved to node; it can be stopped", moved)
        assert re.fullmatch(r"\d+ objects are on its SSD; those .* can be read again when node-1 is back", on_disk)
        assert on("node-1") == 0
        last = drain("node")
        assert last.returncode == 1
        assert "node is the only node that takes objects" in last.stderr
        before = two_of_all.role_pid("node-1")
        two_of_all.role("node-1").kill()
        wait_until(lambda: two_of_all.role_pid("node-1") not in (None, before), "it is back")
        assert {key: store.get(key) for key in values} == values
        wait_until(lambda: all(each.status == "ok" for each in store.stats().segments), "it takes objects again")
