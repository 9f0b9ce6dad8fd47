"""kill -9 of the roles of a service that has two of everything but the master, while clients stream: every stream ends
with exactly the undisturbed tokens, unless its own front end was killed, and nothing is left behind.
test_kills.py has the long runs with one of each."""

from __future__ import annotations

import functools
import random
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from e2e_service import Service, running
from kill_storm import Storm, answers, is_whole, storm
from random_model import small_model, token_prompt
from waiting import wait_until

OPTIONS = (
    "--nodes",
    "2",
    "--conductors",
    "2",
    "--frontends",
    "2",
    "--random-weights",
    "--kv",
    "64MB",
    "--dram",
    "64MB",
)
SINGLE = ["master", "node", "node-1", "conductor", "conductor-1", "frontend", "frontend-1"]


def body_of(number: int, max_tokens: int) -> dict[str, Any]:
    """Half of the prompts share their first blocks."""
    prompt = token_prompt(128, seed=0) * (number % 2) + token_prompt(60 + 17 * (number % 9), seed=number)
    return {"model": "small", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def check(service: Service, found: Storm) -> None:
    found.check()
    wait_until(lambda: is_whole(service), "every role is back")
    for one in service.status().workers:
        name = one.info.name
        wait_until(lambda name=name: _is_idle(service, name), f"{name} holds nothing")  # type: ignore[misc]


def _is_idle(service: Service, name: str) -> bool:
    stats = service.stats(name)
    return not (stats.num_running or stats.num_waiting or stats.reserved_pages)


def test_any_role_is_killed_while_clients_stream(tmp_path: Path) -> None:
    make_body = functools.partial(body_of, max_tokens=48)
    model = small_model(tmp_path / "small")
    with running(tmp_path, "--model", str(model), "--prefill", "2", "--decode", "2", *OPTIONS) as service:
        expected = answers(service, 4, make_body)
        victims = ["conductor", "decode-1", "node-1", "frontend", "prefill-0", "master"]
        check(service, storm(service, victims, None, expected, make_body, num_clients=3))
        assert answers(service, 1, make_body) == expected[:1]
        run_dir = service.run_dir
    assert not run_dir.exists()


def seconds_until(storm_so_far: Storm, rate: float) -> float:
    """Wait until the clients get `rate` answers per second over 2.5 s; return the time until these 2.5 s begin."""
    started_s = time.monotonic()
    seen = deque([(started_s, storm_so_far.num_done)], maxlen=26)
    while time.monotonic() < started_s + 30:
        time.sleep(0.1)
        (since_s, done), now_s = seen[0], time.monotonic()
        seen.append((now_s, storm_so_far.num_done))
        if len(seen) == 26 and (storm_so_far.num_done - done) / (now_s - since_s) >= rate:
            return since_s - started_s
    raise AssertionError(f"not {rate:.1f} answers/s within 30 s: {storm_so_far}")


@pytest.mark.soak
def test_a_kill_every_5_s_for_60_s(tmp_path: Path) -> None:
    """4P4D and 50 streams; afterwards the throughput is what it was, within 5 s."""
    rng, make_body = random.Random(4), functools.partial(body_of, max_tokens=64)
    model = small_model(tmp_path / "small")
    roles = [*SINGLE, *(f"{role}-{number}" for role in ("prefill", "decode") for number in range(4))]
    with running(tmp_path, "--model", str(model), "--prefill", "4", "--decode", "4", *OPTIONS) as service:
        expected = answers(service, 16, make_body)
        before = storm(service, [], 10.0, expected, make_body, num_clients=50)
        rate = before.num_done / 10.0
        recovered_s: list[float] = []

        def recover(storm_so_far: Storm) -> None:
            wait_until(lambda: is_whole(service), "every role is back")
            recovered_s.append(seconds_until(storm_so_far, 0.7 * rate))

        victims = [rng.choice(roles) for _ in range(12)]
        check(service, storm(service, victims, 5.0, expected, make_body, num_clients=50, on_last=recover))
        print(f"{rate:.1f} answers/s before; back after {recovered_s} s")
        assert recovered_s[0] <= 5.0
