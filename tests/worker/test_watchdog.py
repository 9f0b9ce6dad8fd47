"""The watchdog of the engine's thread: the rule on a virtual clock, and processes that hang, stand still, are late."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import psutil
import pytest
from forked_script import ForkedProcess, ForkServer, fork_server
from hypothesis import given
from hypothesis import strategies as st
from waiting import HANG_S, wait_until
from watched_process import LIMIT_S

from moonpool.base.clock import AttendedClock, SystemClock, VirtualClock
from moonpool.base.errors import ConfigError, Stalled
from moonpool.base.process import EXIT_HANGS
from moonpool.engine.engine import Engine
from moonpool.engine.sequence import Chunk
from moonpool.worker.loop import EngineLoop
from moonpool.worker.watchdog import (
    LOOK_S,
    EngineProgress,
    EngineTask,
    StepCosts,
    TaskLimits,
    TaskWatch,
    Watchdog,
    WatchedTask,
    work_of,
    work_of_step,
)

LIMITS = TaskLimits(step_limit_s=6.0, prepare_limit_s=60.0)
STANDSTILL_S = 2 * LOOK_S


class World:
    """A watchdog's looks at one task: every LOOK_S while the process runs, and late when it stood still."""

    def __init__(self, task: EngineTask) -> None:
        self.clock = VirtualClock(100.0)
        self._attended, self._watch = AttendedClock(STANDSTILL_S, self.clock), TaskWatch(LIMITS)
        self.task = task
        self.seen = self._watch.look(None, self._attended.now_s())

    def run(self, seconds: float, stopped_s: float = 0.0) -> WatchedTask:
        """Let the process run and then stop; return what the look after that says."""
        while seconds > LOOK_S:
            seconds -= LOOK_S
            self._look(LOOK_S)
        return self._look(seconds + stopped_s)

    def _look(self, after_s: float) -> WatchedTask:
        self.clock.advance(after_s)
        self.seen = self._watch.look(self.task, self._attended.now_s())
        assert self.seen is not None
        return self.seen


TASKS = st.builds(EngineTask, st.just("a step"), st.none() | st.floats(0, 10), st.floats(0, 5))
SPELLS = st.lists(st.tuples(st.floats(0.01, 8), st.just(0.0) | st.floats(0, 1000)), min_size=1, max_size=12)


@given(TASKS, SPELLS)
def test_what_a_task_takes_counts_and_what_a_stopped_process_takes_does_not(
    task: EngineTask, spells: list[tuple[float, float]]
) -> None:
    world, limit_s, run_s, num_stops = World(task), LIMITS.limit_s(task), 0.0, 0
    for seconds, stopped_s in spells:
        seen = world.run(seconds, stopped_s)
        run_s += seconds
        num_stops += stopped_s > 0
        most_s = run_s + num_stops * STANDSTILL_S  # of a stop so much may count: it is not told from a late look
        assert most_s - 1e-6 >= seen.seconds >= run_s - num_stops * LOOK_S - LOOK_S - 1e-6
        assert not (seen.hangs and most_s < limit_s - 1e-6), "it has not taken so long"
        assert seen.hangs or run_s < limit_s + (1 + num_stops) * LOOK_S + 1e-6, "it has taken longer"
        assert seen.is_overdue or not seen.hangs


def test_a_step_that_goes_on_is_slow_and_does_not_hang() -> None:
    world = World(EngineTask("a step"))
    for _ in range(20):
        assert not world.run(LIMITS.due_s(world.task)).is_overdue
        world.task = EngineTask(*world.task)  # as went_on() does
    assert world.run(2 * LIMITS.limit_s(world.task)).hangs


def test_limits_follow_what_is_expected_and_waits_are_added() -> None:
    assert LIMITS.limit_s(EngineTask("a step", 0.1)) == 6.0, "at least step_limit_s"
    assert LIMITS.limit_s(EngineTask("a step", 4.0)) == 20.0, "five times what is expected"
    assert LIMITS.limit_s(EngineTask("a step", 4.0, waits_s=10.0)) == 30.0
    assert LIMITS.due_s(EngineTask("a step", 4.0, waits_s=10.0)) == 20.0, "a pull may take its time"
    assert LIMITS.limit_s(EngineTask("a capture", None)) == 60.0
    assert TaskLimits(100.0, 60.0).limit_s(EngineTask("a capture", None)) == 100.0, "never less than a step"
    with pytest.raises(ConfigError, match="step_limit_s"):
        TaskLimits(0.0, 60.0)


@given(st.lists(st.tuples(st.floats(1, 1e5), st.floats(1e-3, 10)), min_size=1), st.floats(1, 1e6))
def test_a_step_is_expected_to_take_no_longer_in_proportion_than_those_before(
    steps: list[tuple[float, float]], work: float
) -> None:
    costs = StepCosts()
    assert costs.expected_s(work) is None
    for done, seconds in steps:
        costs.learn(done, seconds)
    expected_s = costs.expected_s(work)
    assert expected_s is not None
    assert expected_s >= min(seconds for _, seconds in steps) * 0.999, "no less than the fastest"
    more_s = costs.expected_s(2 * work)
    assert more_s is not None
    assert expected_s <= more_s <= 2.001 * expected_s


def test_a_slow_step_is_forgotten_with_those_after_it() -> None:
    costs = StepCosts()
    costs.learn(100, 10.0)
    for _ in range(100):
        costs.learn(100, 0.1)
    assert costs.expected_s(100) == pytest.approx(0.1)


def test_context_is_work() -> None:
    chunks = [Chunk("r1/1", 0, (5,) * 100, (), False), Chunk("r2/1", 8192, (5,), (), True)]
    assert work_of_step(chunks) == work_of(100, 0) + work_of(1, 8192) == 103
    names = [Chunk(f"r{number}", 0, (5, 6), (), True) for number in range(5)]
    assert EngineTask("a step", chunks=names).describe() == "a step of 10 tokens for r0, r1, r2, ..."
    assert EngineTask("a step", chunks=chunks).describe() == "a step of 101 tokens for r1/1, r2/1"


def progress_of(clock: VirtualClock, *, launches: bool) -> EngineProgress:
    """One whose first step is over."""
    progress = EngineProgress(clock, launches=launches)
    progress.begin_step("the first", 10)
    assert progress.task == EngineTask("the first", None), "it may prepare anything"
    progress.end_step(is_read=True)
    return progress


def test_a_launched_chunk_counts_until_a_step_is_read() -> None:
    clock = VirtualClock()
    progress = progress_of(clock, launches=True)
    for _ in range(3):
        progress.begin_step("a chunk", 100)
        clock.advance(0.001)  # launched
        progress.end_step(is_read=False)
    progress.begin_step("the last chunk", 100)
    clock.advance(4.0)
    progress.end_step(is_read=True)
    assert progress.costs.expected_s(400) == pytest.approx(4.003)


def test_a_chunk_on_a_cpu_is_computed_when_it_ends() -> None:
    clock = VirtualClock()
    progress = progress_of(clock, launches=False)
    progress.begin_step("a chunk", 100)
    clock.advance(1.0)
    progress.end_step(is_read=False)
    progress.begin_step("the next", 50, waits_s=3.0)
    assert progress.task == EngineTask("the next", 1.0, 3.0)


def test_nothing_is_learnt_from_a_step_that_prepares_something() -> None:
    clock = VirtualClock()
    progress = progress_of(clock, launches=True)
    progress.begin_step("a step", 64, waits_s=1.0)
    progress.prepare("a capture")
    assert progress.task == EngineTask("a capture", None, 1.0)
    clock.advance(30.0)
    progress.end_step(is_read=True)
    assert progress.costs.expected_s(64) is None


# -- processes -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with fork_server(Path(__file__).parent / "watched_process.py") as server:
        yield server


@contextmanager
def running(server: ForkServer, what: str, log: Path) -> Iterator[ForkedProcess]:
    with log.open("wb") as file:
        process = server.start(what, stderr=file.fileno())
    try:
        assert process.stdout.readline() == "began\n"
        yield process
    finally:
        process.kill()
        process.stdin.close()
        process.stdout.close()


@pytest.mark.parametrize("what", ["hangs", "hangs_with_the_log"])
def test_a_process_whose_engine_hangs_ends(server: ForkServer, tmp_path: Path, what: str) -> None:
    with running(server, what, tmp_path / "log") as process:
        assert process.wait(HANG_S) == EXIT_HANGS
    text = (tmp_path / "log").read_text()
    if what == "hangs":  # otherwise the engine's thread keeps the log to itself
        assert "the engine's thread is late: what a test does has taken" in text
        assert "the engine's thread hangs, so this process ends: what a test does has taken" in text
        assert text.count("in hangs") == 2, "where it is"


def test_a_process_that_stood_still_for_longer_goes_on(server: ForkServer, tmp_path: Path) -> None:
    with running(server, "stops_itself", tmp_path / "log") as process:
        status_of = psutil.Process(process.pid).status
        wait_until(lambda: status_of() == psutil.STATUS_STOPPED, "it has stopped")
        time.sleep(2 * LIMIT_S)
        process.send_signal(signal.SIGCONT)
        assert process.wait(HANG_S) == 0
    assert "hangs" not in (tmp_path / "log").read_text()


def test_the_log_says_when_a_late_engine_goes_on(server: ForkServer, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running(server, "is_late", log) as process:
        wait_until(lambda: "is late" in log.read_text(), "it is late")
        process.stdin.write("go on\n")
        process.stdin.flush()
        wait_until(lambda: "goes on: what a test does took" in log.read_text(), "it goes on")
        process.stdin.close()
        assert process.wait(HANG_S) == 0


# -- with the engine's loop ------------------------------------------------------------------------------------------


async def test_calls_for_an_engine_that_is_late_fail_and_go_on_afterwards() -> None:
    go_on, hung = threading.Event(), threading.Event()
    loop = EngineLoop(
        cast(Engine, IdleEngine()),
        on_step=lambda outputs: None,
        at_boundary=lambda: None,
        on_fatal=lambda error: None,
        progress=EngineProgress(SystemClock(), launches=False),
    )
    watchdog = Watchdog(loop.progress, TaskLimits(LIMIT_S, LIMIT_S), hung.set)
    loop.start()
    watchdog.start()
    try:
        assert await loop.ask(lambda: 7) == 7
        blocked = loop.call(lambda: go_on.wait(HANG_S))
        ran: list[int] = []
        with pytest.raises(Stalled, match="does not go on"):
            await loop.ask(lambda: ran.append(1))
        assert await asyncio.to_thread(hung.wait, HANG_S)
        go_on.set()
        assert await asyncio.wrap_future(loop.call(lambda: 8)) == 8
        assert (blocked.result(), ran) == (True, [1]), "in its turn"
    finally:
        go_on.set()
        watchdog.close()
        loop.close()


class IdleEngine:
    num_steps = 0

    def has_work(self) -> bool:
        return False
