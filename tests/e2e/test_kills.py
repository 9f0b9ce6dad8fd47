"""Any process of a running service is killed, again and again, under load: no wrong token, no hang, few failures.

Greedy answers are compared with those of the same service before the first kill. A request whose front end was killed
loses its connection, which nothing can help; of the others at most 3 % may fail.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from e2e_service import Service, running, wait_until

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

POOL_AND_FRONT = ["master", "node", "conductor", "frontend"]
LONGEST_S = 120.0  # a request that takes longer hangs
MAX_FAILED_SHARE = 0.03


def body_of(number: int) -> dict[str, Any]:
    """Half of the prompts share their first blocks with others, so that the pool is used too."""
    shared = [(7 * i) % 4000 + 500 for i in range(128 * (number % 2))]
    own = [(11 * i + 131 * number) % 4000 + 500 for i in range(60 + 17 * (number % 9))]
    limits = {"max_tokens": 24 + 8 * (number % 5), "temperature": 0, "ignore_eos": True}
    return {"model": "smollm2", "prompt": shared + own, **limits}


@dataclass
class Tally:
    """What became of the requests."""

    done: int = 0
    lost_front_end: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0

    def __str__(self) -> str:
        total = self.done + self.lost_front_end + len(self.failed)
        reasons = ", ".join(f"{count} x {why}" for why, count in Counter(self.failed).items())
        return (
            f"{total} requests: {self.done} answered, {self.lost_front_end} lost their front end, "
            f"{len(self.failed)} failed ({reasons or 'none'}); the slowest took {self.slowest_s:.1f} s"
        )


class Client:
    """Asks one question after another and compares the answers."""

    def __init__(self, service: Service, expected: Sequence[str], tally: Tally) -> None:
        self._service, self._expected, self._tally = service, expected, tally
        self._lock = threading.Lock()

    def ask(self, number: int) -> None:
        number %= len(self._expected)
        started_s, text = time.monotonic(), ""
        try:
            for event in self._service.stream("/v1/completions", body_of(number), timeout_s=LONGEST_S):
                if "error" in event:
                    self._failed(f"{event['error']['code']}: {event['error']['message']}")
                    break
                text += event["choices"][0]["text"]
            else:
                self._ended(number, text)
        except AssertionError as error:  # a status other than 200
            self._failed(str(error).splitlines()[0])
        except httpx.TimeoutException as error:
            self._failed(f"hangs: {type(error).__name__}")
        except httpx.ConnectError:
            time.sleep(0.2)  # nobody has heard of this request: the front end is being started again
        except (httpx.TransportError, json.JSONDecodeError):
            with self._lock:
                self._tally.lost_front_end += 1
        with self._lock:
            self._tally.slowest_s = max(self._tally.slowest_s, time.monotonic() - started_s)
            if not self._expected[number].startswith(text):
                self._tally.wrong.append(f"{number}: {text!r}")

    def _ended(self, number: int, text: str) -> None:
        """A stream that breaks off between two events looks like its end; then the front end was killed."""
        with self._lock:
            if text == self._expected[number]:
                self._tally.done += 1
            else:
                self._tally.lost_front_end += 1

    def _failed(self, why: str) -> None:
        with self._lock:
            self._tally.failed.append(why)


def answers(service: Service, count: int) -> list[str]:
    """What an undisturbed service says."""
    return [
        "".join(event["choices"][0]["text"] for event in service.stream("/v1/completions", body_of(number)))
        for number in range(count)
    ]


def storm(
    service: Service, victims: Sequence[str], pause_s: float | None, expected: Sequence[str], num_clients: int
) -> Tally:
    """Kills one victim after another under load, and returns when the last request has ended.

    `pause_s` is the time between two kills; None waits for an answer instead.
    """
    tally, is_over, numbers = Tally(), threading.Event(), iter(range(10**9))
    client = Client(service, expected, tally)

    def keep_asking() -> None:
        while not is_over.is_set():
            client.ask(next(numbers))

    def pause() -> None:
        if pause_s is not None:
            is_over.wait(pause_s)
            return
        before = tally.done
        wait_until(lambda: tally.done > before, LONGEST_S, "an answer")

    threads = [threading.Thread(target=keep_asking) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        for name in victims:
            pause()
            kill(service, name)
        pause()
    finally:
        is_over.set()
        for thread in threads:
            thread.join(LONGEST_S + 10)
    assert not any(thread.is_alive() for thread in threads), "a request hangs"
    return tally


def kill(service: Service, name: str) -> None:
    """Kills the role; one that is being started again just now is spared."""
    try:
        service.role(name).kill()
    except (AssertionError, psutil.NoSuchProcess):
        print(f"{name} was down already")


def check(service: Service, tally: Tally) -> None:
    print(tally)
    assert not tally.wrong, tally.wrong
    assert not [why for why in tally.failed if why.startswith("hangs")], tally
    asked = tally.done + len(tally.failed)
    assert len(tally.failed) <= MAX_FAILED_SHARE * asked, tally
    wait_until(lambda: is_whole(service), 90, "every role is back")


def is_whole(service: Service) -> bool:
    try:
        return bool(httpx.get(f"{service.url}/health", timeout=5).json()["status"] == "ok")
    except httpx.HTTPError:
        return False


def test_each_role_is_killed_once_under_load(two_each: Service) -> None:
    expected = answers(two_each, 4)
    victims = ["decode-0", "master", "prefill-1", "node", "conductor", "frontend"]
    check(two_each, storm(two_each, victims, None, expected, num_clients=2))
    assert answers(two_each, 1) == expected[:1]


@pytest.mark.soak
def test_28_kills_in_150_s(tmp_path: Path) -> None:
    with running(tmp_path, "--prefill", "2", "--decode", "2") as service:
        expected = answers(service, 16)
        rng, victims = random.Random(11), []
        while len(victims) < 28:
            victims += rng.sample([*POOL_AND_FRONT, "prefill-0", "prefill-1", "decode-0", "decode-1"], 8)
        check(service, storm(service, victims[:28], 150 / 28, expected, num_clients=4))
        assert answers(service, 2) == expected[:2]
