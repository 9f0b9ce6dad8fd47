"""When a server counts as away and when it is asked again, in virtual time; and its shell, with sockets."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from late_threads import no_thread_begins
from waiting import HANG_S, wait_until

from moonpool.base.errors import BreakerOpen, ConfigError, PeerLost, PeerSilent
from moonpool.base.rpc import BlockingClient, Call, RpcServer
from moonpool.base.rpc.breaker import Breaker, BreakerLimits, CallWait, ProbedBreaker

LIMITS = BreakerLimits()
LOOK_S = LIMITS.look_every_s


class Echo(Call[int]):
    number: int


# one call's wait, pure


def waited_s(lateness_s: list[float]) -> float | None:
    """When a frozen server is found out by a caller whose looks are late by so much; None: not within these."""
    wait = CallWait(LIMITS, 0.0)
    for late_s in lateness_s:
        now_s = wait.next_look_s + late_s
        if wait.is_silent(now_s):
            return now_s
    return None


def test_a_frozen_server_is_found_out_in_time() -> None:
    found_s = waited_s([0.004] * 100)  # the kernel's grain
    assert found_s is not None
    assert LIMITS.silence_s <= found_s <= 0.25


def test_a_coarse_timer_does_not_delay_it() -> None:
    """A kernel with 100 ticks a second ends a wait of 20 ms after 28 ms. A call's first look makes the CallWait."""
    now_s = LOOK_S + 0.008
    wait = CallWait(LIMITS, now_s - LOOK_S)
    while not wait.is_silent(now_s):
        now_s += LOOK_S + 0.008
    assert LIMITS.silence_s <= now_s < 0.225


def test_a_busy_server_keeps_it_closed() -> None:
    """Its longest measured wait, with room to spare."""
    wait, now_s = CallWait(LIMITS, 0.0), 0.0
    while now_s < 3 * 0.058:
        now_s = wait.next_look_s
        assert not wait.is_silent(now_s)


@given(st.lists(st.floats(0.0, 100.0), max_size=7))
def test_standing_still_oneself_is_nobodys_silence(stops_s: list[float]) -> None:
    """However long this process was stopped, a server gets seven looks before it is suspected."""
    assert waited_s(stops_s) is None


@given(st.lists(st.floats(0.0, 0.3), min_size=60, max_size=60))
def test_a_lame_caller_still_finds_a_frozen_server_out(lateness_s: list[float]) -> None:
    assert waited_s(lateness_s) is not None


@given(st.lists(st.floats(0.0, 0.19), min_size=1, max_size=50))
def test_a_server_that_is_heard_is_never_silent(gaps_s: list[float]) -> None:
    now_s = 0.0
    for gap_s in gaps_s:
        wait = CallWait(LIMITS, now_s)  # it begins anew with every byte
        until_s = now_s + gap_s
        while wait.next_look_s < until_s:
            now_s = wait.next_look_s
            assert not wait.is_silent(now_s)
        now_s = until_s


@pytest.mark.parametrize("limits", [{"look_every_s": 0.15}, {"look_every_s": 0.0}, {"first_probe_s": 1.0}])
def test_limits_that_cannot_work_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        BreakerLimits(**limits)


# the breaker, pure


def test_it_opens_once_per_outage_and_probes_soon_then_seldom() -> None:
    breaker = Breaker(LIMITS)
    assert breaker.open(100.0)
    assert not breaker.open(100.1), "others find the same outage"
    assert [breaker.next_probe_s() for _ in range(6)] == [0.02, 0.04, 0.08, 0.16, 0.25, 0.25]
    assert breaker.close(106.0) == pytest.approx(6.0)
    assert breaker.num_openings == 1


def test_a_server_that_comes_and_goes_is_probed_more_slowly() -> None:
    breaker = Breaker(LIMITS)
    breaker.open(0.0)
    assert breaker.next_probe_s() == 0.02
    breaker.close(0.1)
    breaker.open(0.4)
    assert breaker.next_probe_s() == 0.04, "it has not been calm in between"
    breaker.close(0.5)
    breaker.open(0.5 + LIMITS.calm_s)
    assert breaker.next_probe_s() == 0.02


# with sockets


class Loop:
    """A server on a loop of its own, which can be frozen."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.server: RpcServer | None = None
        self._moving = threading.Event()

    def start(self) -> None:
        async def listen() -> None:
            self.server = RpcServer("echo", {Echo: lambda call, _: call.number})
            await self.server.listen(self.address)

        asyncio.run_coroutine_threadsafe(listen(), self.loop).result(HANG_S)

    def freeze(self) -> None:
        """Until thaw(); returns when it stands."""
        self._moving.clear()
        stands = threading.Event()

        def stand() -> None:
            stands.set()
            self._moving.wait(HANG_S)

        self.loop.call_soon_threadsafe(stand)
        assert stands.wait(HANG_S)

    def thaw(self) -> None:
        self._moving.set()

    def stop(self) -> None:
        server, self.server = self.server, None
        if server is not None:
            asyncio.run_coroutine_threadsafe(server.close(), self.loop).result(HANG_S)

    def close(self) -> None:
        self.thaw()
        self.stop()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Loop]:
    made = Loop(f"unix:{tmp_path}/s.sock")
    made.start()
    yield made
    made.close()


def ask(client: BlockingClient, number: int) -> int:
    return client.call(Echo(number=number), timeout_s=HANG_S)


def test_a_silent_server_ends_the_call_and_keeps_the_connection(server: Loop) -> None:
    """What the server holds for the connection is there when it moves again; the late answer is nobody's."""
    client = BlockingClient(server.address, "echo", limits=LIMITS)
    assert ask(client, 1) == 1
    server.freeze()
    for number in (2, 3):
        with pytest.raises(PeerSilent):
            ask(client, number)
    server.thaw()
    assert server.server is not None
    assert [ask(client, number) for number in (4, 5)] == [4, 5]
    assert len(server.server.peers) == 1, "the same connection"
    client.close()


def test_a_server_that_takes_connections_and_says_nothing_is_silent(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"{tmp_path}/s.sock")
        listener.listen(1)
        client = BlockingClient(f"unix:{tmp_path}/s.sock", "echo", limits=LIMITS)
        with pytest.raises(PeerSilent):
            ask(client, 1)
        client.close()


def test_a_large_call_to_a_frozen_server_ends_too(server: Loop) -> None:
    """It cannot even be sent; half a frame is under way, so the connection cannot be kept."""

    class Large(Call[int]):
        body: bytes

    client = BlockingClient(server.address, "echo", limits=LIMITS)
    assert ask(client, 1) == 1
    server.freeze()
    with pytest.raises(PeerSilent):
        client.call(Large(body=bytes(8 << 20)), timeout_s=HANG_S)
    server.thaw()
    assert ask(client, 2) == 2
    client.close()


@pytest.fixture
def client(server: Loop) -> Iterator[BlockingClient]:
    made = BlockingClient(server.address, "echo", limits=LIMITS)
    yield made
    made.close()


@pytest.fixture
def breaker(server: Loop, client: BlockingClient) -> Iterator[ProbedBreaker]:
    made = ProbedBreaker(server.address, lambda: client.ping(timeout_s=0.5))
    yield made
    made.stop()
    client.close()
    made.join()
    wait_until(lambda: "rpc-probe" not in {each.name for each in threading.enumerate()}, "the probes end")


def wait_until_closed(breaker: ProbedBreaker) -> None:
    assert breaker.wait_closed(HANG_S, threading.Event())


def test_probes_close_it_when_the_server_is_back(
    server: Loop, breaker: ProbedBreaker, caplog: pytest.LogCaptureFixture
) -> None:
    server.stop()
    with caplog.at_level("WARNING"):
        breaker.trip(PeerLost("gone"))
        breaker.trip(PeerLost("gone too"))
        for _ in range(100):
            with pytest.raises(BreakerOpen):
                breaker.check()
        server.start()
        wait_until_closed(breaker)
    breaker.check()
    assert (breaker.num_openings, breaker.num_refused) == (1, 100)
    assert len(caplog.records) == 1, "one line per outage"


def test_probes_close_it_when_a_frozen_server_moves(
    server: Loop, breaker: ProbedBreaker, client: BlockingClient
) -> None:
    assert ask(client, 1) == 1
    server.freeze()
    with pytest.raises(PeerSilent):
        ask(client, 2)
    breaker.trip(PeerSilent("silent"))
    assert not breaker.wait_closed(1.0, threading.Event())
    server.thaw()
    wait_until_closed(breaker)
    assert ask(client, 3) == 3, "answers and pongs of the time before are skipped"
    assert server.server is not None
    assert len(server.server.peers) == 1, "the same connection"


def test_a_server_that_takes_in_nobody_else_still_answers_whom_it_knows(
    server: Loop, breaker: ProbedBreaker, client: BlockingClient
) -> None:
    assert ask(client, 1) == 1
    Path(server.address.removeprefix("unix:")).unlink()  # no new connection finds it
    breaker.trip(PeerSilent("silent for a moment"))
    wait_until_closed(breaker)
    assert ask(client, 2) == 2


def test_a_fork_that_lost_the_probing_thread_probes_again(breaker: ProbedBreaker) -> None:
    breaker._core.open(time.monotonic())  # as a child finds it: open, and no thread
    breaker._is_closed.clear()
    with pytest.raises(BreakerOpen):
        breaker.check()
    wait_until_closed(breaker)


def test_whoever_finds_the_server_away_does_not_wait_for_the_probing_thread(breaker: ProbedBreaker) -> None:
    with no_thread_begins() as free:
        breaker.trip(PeerSilent("silent"))
        with pytest.raises(BreakerOpen):
            breaker.check()
        free.set()
        wait_until_closed(breaker)
