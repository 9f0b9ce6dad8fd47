"""Kills of a running service's processes under load: clients that write down what they saw of every answer, a log of
the kills, and the rule by which an answer may be lost.

An answer is whole and right, or ends with an error. Only one thing excuses an error: the answer's connection was held
by a front end at the moment that this front end was killed. A request on any other process that is killed is answered
all the same.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
from e2e_service import Service
from severe import WrongToken
from stream_clients import SeenAnswer, ask
from waiting import HANG_S, wait_until

MakeBody = Callable[[int], dict[str, Any]]


@dataclass(frozen=True)
class Kill:
    """One process that was killed. `ports`: the clients' ends of the connections that it held, or that waited for a
    front end to take them."""

    role: str
    pid: int
    created_s: float  # with the pid, which process it was
    stopped_s: float  # it was stopped before it was killed, so that `ports` is exact
    gone_s: float
    ports: frozenset[int]

    @property
    def is_front_end(self) -> bool:
        return self.role.startswith("frontend")

    def excuses(self, answer: SeenAnswer) -> bool:
        """Return whether that process had the answer's connection, or the connection began while it was stopped."""
        if not self.is_front_end or answer.connected_s is None:
            return False
        was_open = answer.connected_s <= self.gone_s and self.stopped_s <= answer.ended_s
        return was_open and (answer.port in self.ports or answer.connected_s >= self.stopped_s)


@dataclass
class Storm:
    """What the clients saw and which processes were killed."""

    expected: Sequence[str]
    answers: list[SeenAnswer] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)

    @property
    def num_done(self) -> int:
        return sum(each.error is None for each in self.answers)

    def wrong(self) -> list[SeenAnswer]:
        """Answers with a text that is not the expected one: a whole one that differs, or a part that is no beginning
        of it."""
        return [
            each
            for each in self.answers
            if (each.error is None and each.text != self.expected[each.number])
            or not self.expected[each.number].startswith(each.text)
        ]

    def unexcused(self) -> list[SeenAnswer]:
        """Answers that ended with an error although their front end was not killed."""
        failed = [each for each in self.answers if each.error is not None]
        return [each for each in failed if not self._was_refused(each) and not self._was_lost(each)]

    def _was_lost(self, answer: SeenAnswer) -> bool:
        return any(kill.excuses(answer) for kill in self.kills)

    def _was_refused(self, answer: SeenAnswer) -> bool:
        """Return whether no front end listened, as is right between the kill of the last one and its successor."""
        if answer.connected_s is not None:
            return False
        killed = [kill for kill in self.kills if kill.is_front_end and kill.stopped_s <= answer.ended_s]
        if not killed:
            return False
        # What connected before it had gone may have been in its own queue.
        since_s = max(kill.gone_s for kill in killed)
        connected_s = (each.connected_s for each in self.answers if each.connected_s is not None)
        return not any(since_s < each_s < answer.began_s for each_s in connected_s)

    def check(self) -> None:
        """Raise WrongToken for a wrong answer, AssertionError for one that was lost and not on a killed front end."""
        print(self)
        if self.wrong():
            raise WrongToken(str(self.wrong()))
        assert not self.unexcused(), (self.unexcused(), self.kills)
        assert self.num_done, self

    def __str__(self) -> str:
        errors = Counter(each.error for each in self.answers if each.error is not None)
        slowest_s = max((each.ended_s - each.began_s for each in self.answers), default=0.0)
        return (
            f"{len(self.answers)} requests, {self.num_done} answered; {len(self.kills)} kills; "
            f"errors: {dict(errors)}; the slowest took {slowest_s:.1f} s"
        )


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
    on_last: Callable[[Storm], None] | None = None,
) -> Storm:
    """Kill one victim after another under load, and return when the last request has ended.

    `pause_s` is the time between two kills; None waits for two answers instead. `on_last` is called after the last
    kill, while the load goes on.
    """
    found, is_over, numbers = Storm(expected), threading.Event(), itertools.count()

    def keep_asking() -> None:
        while not is_over.is_set():
            number = next(numbers) % len(expected)
            seen = ask(service.url, number, body_of(number))
            found.answers.append(seen)
            if seen.connected_s is None:
                is_over.wait(0.2)  # no front end listens: as a client that tries again

    def pause() -> None:
        if pause_s is not None:
            is_over.wait(pause_s)
            return
        before = found.num_done
        wait_until(lambda: found.num_done > before + 1, "two more answers")

    threads = [threading.Thread(target=keep_asking) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        for name in victims:
            pause()
            found.kills += kill(service, name)
        pause()
        if on_last is not None:
            on_last(found)
    finally:
        is_over.set()
        for thread in threads:
            thread.join(2 * HANG_S)
    assert not any(thread.is_alive() for thread in threads), "a request hangs"
    return found


def kill(service: Service, name: str) -> Iterator[Kill]:
    """Kill the role; yield the log's entry, or nothing if it is being started again just now."""
    with contextlib.suppress(AssertionError, psutil.NoSuchProcess):
        victim = service.role(name)
        created_s = victim.create_time()
        stopped_s = time.monotonic()
        victim.send_signal(signal.SIGSTOP)
        ports = _client_ports(service, victim.pid) if name.startswith("frontend") else frozenset()
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait(HANG_S)
        yield Kill(name, victim.pid, created_s, stopped_s, time.monotonic(), ports)


def _client_ports(service: Service, pid: int) -> frozenset[int]:
    """Return the ports of the clients whose connections this process holds; those that no process has taken from the
    queue of the service's port yet have no owner and count as well."""
    own_port = urlsplit(service.url).port
    return frozenset(
        each.raddr.port
        for each in psutil.net_connections("tcp")
        if each.laddr.port == own_port and each.raddr and each.pid in (pid, None)
    )


def is_whole(service: Service) -> bool:
    """Whether every role is there."""
    try:
        return bool(httpx.get(f"{service.url}/health", timeout=HANG_S).json()["status"] == "ok")
    except (httpx.HTTPError, ValueError):
        return False
