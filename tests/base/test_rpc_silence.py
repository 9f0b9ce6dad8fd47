"""When a peer counts as lost, in virtual time: decided by Silence, without sockets."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from moonpool.base.errors import ConfigError
from moonpool.base.rpc import SilenceLimits
from moonpool.base.rpc.silence import AttendedTimer, Silence, SilenceVerdict

WAIT, PING, LOST = SilenceVerdict.WAIT, SilenceVerdict.PING, SilenceVerdict.LOST
PATIENCE = SilenceLimits(ping_interval_s=3.0, silence_limit_s=10.0)


def looks(silence: Silence, upto: int) -> list[tuple[float, SilenceVerdict]]:
    """What an idle watcher does at the moments it planned, until the peer is lost."""
    seen: list[tuple[float, SilenceVerdict]] = []
    while len(seen) < upto and (not seen or seen[-1][1] is not LOST):
        now_s = silence.next_look_s
        seen.append((now_s, silence.look(now_s)))
    return seen


def test_a_frozen_peer_is_pinged_and_lost_at_the_limit() -> None:
    assert looks(Silence(PATIENCE, 0.0), 9) == [(3.0, PING), (6.0, PING), (9.0, PING), (10.0, LOST)]


def test_traffic_both_ways_needs_no_ping() -> None:
    silence = Silence(PATIENCE, 0.0)
    for _ in range(100):
        now_s = silence.next_look_s
        silence.heard_s = silence.said_s = now_s - 0.1
        assert silence.look(now_s) is WAIT
        assert silence.next_look_s == pytest.approx(now_s + 2.9)


@pytest.mark.parametrize("quiet", ["heard_s", "said_s"])
def test_one_quiet_direction_is_enough_for_a_ping(quiet: str) -> None:
    """Only listening would look frozen to the server; only talking brings no answer while its handlers work."""
    silence = Silence(PATIENCE, 0.0)
    for moment_s in (3.0, 6.0, 9.0):
        setattr(silence, "said_s" if quiet == "heard_s" else "heard_s", moment_s - 0.1)
        assert silence.next_look_s == moment_s
        assert silence.look(moment_s) is PING


def test_a_sleeper_gives_its_peer_a_full_interval_when_it_wakes() -> None:
    silence = Silence(PATIENCE, 0.0)
    assert [verdict for _, verdict in looks(silence, 3)] == [PING] * 3
    assert silence.look(5000.0) is PING  # planned for 10.0
    assert looks(silence, 9) == [(5003.0, LOST)]


def test_time_in_which_nobody_listened_is_not_silence() -> None:
    silence = Silence(PATIENCE, 0.0)
    assert silence.look(3.0) is PING
    assert silence.look(8.5) is PING  # 2.5 s late
    assert looks(silence, 9) == [(11.5, PING), (12.5, LOST)]


def test_data_read_just_before_a_late_look_counts_once() -> None:
    silence = Silence(PATIENCE, 0.0)
    silence.heard_s = 99.0
    assert silence.look(100.0) is PING  # nothing was said
    assert silence.heard_s == 100.0


@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1000.0)), max_size=60), st.floats(0.0, 0.99))
def test_no_stop_of_our_own_costs_a_healthy_peer(stops: list[tuple[float, float]], round_trip: float) -> None:
    """Each wait is cut by a stop at some part of it; what the peer answered lies unread until after the late look."""
    patience = SilenceLimits(ping_interval_s=1.0, silence_limit_s=3.0)
    silence = Silence(patience, 0.0)
    now_s, answer_s = 0.0, None
    for part, stop_s in stops:
        wait_s = silence.next_look_s - now_s
        stopped_at_s = now_s + part * wait_s
        if answer_s is not None and answer_s <= stopped_at_s:
            silence.heard_s, answer_s = answer_s, None
        now_s = max(silence.next_look_s, stopped_at_s + stop_s)
        verdict = silence.look(now_s)
        if answer_s is not None and answer_s <= now_s:
            silence.heard_s, answer_s = now_s, None  # read right after the look
        assert verdict is not LOST
        if verdict is PING:
            answer_s = now_s + round_trip


@given(st.lists(st.floats(0.0, 2.9), min_size=5, max_size=5))
def test_a_lame_watcher_still_notices_a_frozen_peer(lateness: list[float]) -> None:
    silence = Silence(PATIENCE, 0.0)
    verdicts = [silence.look(silence.next_look_s + late_s) for late_s in lateness]
    assert LOST in verdicts


@pytest.mark.parametrize(("interval_s", "limit_s"), [(3.0, 8.0), (0.0, 10.0), (-1.0, 10.0)])
def test_impatience_that_would_cut_healthy_peers_is_refused(interval_s: float, limit_s: float) -> None:
    with pytest.raises(ConfigError, match="needs pings"):
        SilenceLimits(ping_interval_s=interval_s, silence_limit_s=limit_s)


async def test_a_late_timer_lets_what_came_meanwhile_be_heard_first() -> None:
    """The loop stands still for longer than the limit; the peer's word lies ready when it moves again."""
    ended: list[str] = []
    timer = AttendedTimer(0.2, lambda: ended.append("cut off"))

    def heard() -> None:
        ended.append("heard")
        timer.cancel()

    asyncio.get_running_loop().call_later(0.19, heard)
    time.sleep(1.0)  # noqa: ASYNC251 - this is the standstill
    await asyncio.sleep(0.25)
    assert ended == ["heard"]


async def test_a_timer_fires_when_nobody_stood_still() -> None:
    over = asyncio.Event()
    AttendedTimer(0.01, over.set)
    await until(over.is_set, "the timer fires")
