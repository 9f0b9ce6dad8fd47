"""When a connection's time is over, phase by phase, on a clock of the test's own."""

from __future__ import annotations

from dataclasses import replace

from moonpool.frontend.connection import ConnectionLimits, ConnectionWatch, Phase

LIMITS = ConnectionLimits(
    idle_s=30, keep_alive_s=20, head_s=10, body_s=5, body_rate=100, write_s=7, drain_s=2, max_drain_nbytes=1000
)


def watch(at_s: float = 0.0) -> ConnectionWatch:
    return ConnectionWatch(LIMITS, at_s)


def test_a_silent_connection() -> None:
    silent = watch(5)
    assert silent.overdue(34.9) is None
    assert silent.overdue(35) is Phase.IDLE


def test_headers_that_trickle_gain_no_time() -> None:
    trickling = watch()
    trickling.head_began(1)
    trickling.header(10)
    assert trickling.overdue(10.9) is None
    assert trickling.overdue(11) is Phase.HEAD


def test_a_body_gains_time_by_progress_alone() -> None:
    slow, fast = watch(), watch()
    for one in (slow, fast):
        one.head_began(0)
        one.head_ended(0)
    for _ in range(10):
        slow.body(1)  # 10 bytes are worth 0.1 s
        fast.body(1000)
    assert slow.overdue(5.0) is None
    assert slow.overdue(5.2) is Phase.BODY
    assert fast.overdue(104) is None


def test_an_answer_may_take_as_long_as_the_app_wants() -> None:
    one = watch()
    one.head_began(0)
    one.head_ended(0)
    one.body_ended(0)
    assert one.overdue(1e9) is None
    one.answered(1e9)
    assert one.overdue(1e9 + 19) is None
    assert one.overdue(1e9 + 20) is Phase.IDLE


def test_a_reader_that_stops_reading() -> None:
    one = watch()
    one.head_began(0)
    one.head_ended(0)
    one.body_ended(0)
    one.write_paused(100)
    assert one.overdue(106.9) is None
    assert one.overdue(107) is Phase.ANSWER
    one.write_resumed()
    assert one.overdue(1e9) is None


def test_the_rest_of_a_refused_body_is_bounded_in_time_and_bytes() -> None:
    for nbytes, now_s in ((0, 2.0), (1001, 0.0)):
        one = watch()
        one.head_began(0)
        one.head_ended(0)
        one.answered(0)
        assert one.phase is Phase.DRAINING
        one.body(nbytes)
        assert one.overdue(now_s) is Phase.DRAINING
    one = watch()
    one.head_began(0)
    one.head_ended(0)
    one.answered(0)
    one.body_ended(1)  # it was short after all: the connection goes on
    assert one.is_idle
    assert one.overdue(20.9) is None


def test_the_size_of_a_head() -> None:
    many, large = (
        ConnectionWatch(replace(LIMITS, max_headers=3), 0),
        ConnectionWatch(replace(LIMITS, max_head_nbytes=50), 0),
    )
    for one in (many, large):
        one.head_began(0)
        one.header(10)  # the request line
    for _ in range(3):
        many.header(5)
    before = many.is_head_too_large
    many.header(5)
    assert (before, many.is_head_too_large) == (False, True)
    large.header(41)
    assert large.is_head_too_large
    large.head_began(1)
    assert not large.is_head_too_large
