"""Kills of a running service's processes under load: clients that compare every answer, and a tally of what became of
their requests."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
from e2e_service import Service, wait_until

LONGEST_S = 120.0  # a request that takes longer hangs
MakeBody = Callable[[int], dict[str, Any]]


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

    def __init__(self, service: Service, expected: Sequence[str], body_of: MakeBody, tally: Tally) -> None:
        self._service, self._expected, self._body_of, self._tally = service, expected, body_of, tally
        self._lock = threading.Lock()

    def ask(self, number: int) -> None:
        number %= len(self._expected)
        started_s, text = time.monotonic(), ""
        try:
            for event in self._service.stream("/v1/completions", self._body_of(number), timeout_s=LONGEST_S):
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


def answers(service: Service, count: int, body_of: MakeBody) -> list[str]:
    """What an undisturbed service says."""
    return [
        "".join(event["choices"][0]["text"] for event in service.stream("/v1/completions", body_of(number)))
        for number in range(count)
    ]


def storm(
    service: Service,
    victims: Sequence[str],
    pause_s: float | None,
    expected: Sequence[str],
    body_of: MakeBody,
    num_clients: int,
    on_last: Callable[[Tally], None] | None = None,
) -> Tally:
    """Kills one victim after another under load, and returns when the last request has ended.

    `pause_s` is the time between two kills; None waits for an answer instead. `on_last` is called after the last kill,
    while the load goes on.
    """
    tally, is_over, numbers = Tally(), threading.Event(), iter(range(10**9))
    client = Client(service, expected, body_of, tally)

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
        if on_last is not None:
            on_last(tally)
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


def is_whole(service: Service) -> bool:
    """Whether every role is there."""
    try:
        return bool(httpx.get(f"{service.url}/health", timeout=5).json()["status"] == "ok")
    except (httpx.HTTPError, ValueError):
        return False
