"""The thread that owns the engine: what is posted runs between steps, and it never spins."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest
from waiting import HANG_S, wait_until

from moonpool.base.clock import SystemClock
from moonpool.base.errors import Cancelled, NotFound
from moonpool.engine.engine import Engine
from moonpool.worker import loop
from moonpool.worker.loop import EngineLoop
from moonpool.worker.watchdog import EngineProgress


class ScriptedEngine:
    """Has `work` steps to do; `can_compute` False means that none of them can be done now."""

    def __init__(self) -> None:
        self.work = 0
        self.can_compute = True
        self.num_steps = 0
        self.num_tries = 0
        self.in_step = False
        self.failure: Exception | None = None
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def has_work(self) -> bool:
        return self.work > 0

    def step(self) -> list[Any]:
        self.num_tries += 1
        if self.failure is not None:
            raise self.failure
        if not self.can_compute:
            return []
        self.in_step = True
        self.entered.set()
        assert self.go_on.wait(HANG_S)
        self.work -= 1
        self.num_steps += 1
        self.in_step = False
        return [self.num_steps]


class Bench:
    def __init__(self) -> None:
        self._before = set(threading.enumerate())
        self.engine = ScriptedEngine()
        self.outputs: list[Any] = []
        self.num_boundaries = 0
        self.fatal: list[BaseException] = []
        self.loop = EngineLoop(
            cast(Engine, self.engine),
            on_step=self.outputs.extend,
            at_boundary=self._boundary,
            on_fatal=self.fatal.append,
            progress=EngineProgress(SystemClock(), launches=False),
        )

    def _boundary(self) -> None:
        assert not self.engine.in_step
        self.num_boundaries += 1

    def runs(self) -> bool:
        return any(thread.name == "engine" for thread in set(threading.enumerate()) - self._before)

    def give_work(self, num_steps: int) -> None:
        self.loop.call(lambda: setattr(self.engine, "work", num_steps)).result(HANG_S)


def set_closed(loop: EngineLoop, is_closed: bool) -> None:
    loop._closed = is_closed


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    bench.loop.start()
    yield bench
    bench.engine.go_on.set()
    bench.loop.close()
    assert not bench.runs()


def test_what_is_posted_runs_between_steps_and_in_order(bench: Bench) -> None:
    bench.engine.go_on.clear()
    bench.give_work(3)
    assert bench.engine.entered.wait(HANG_S)
    seen: list[tuple[int, bool, int]] = []
    for number in range(3):
        bench.loop.post(lambda n=number: seen.append((n, bench.engine.in_step, bench.engine.num_steps)))  # type: ignore[misc]
    time.sleep(0.02)
    assert seen == [], "nothing runs inside a step"
    bench.engine.go_on.set()
    bench.loop.call(lambda: None).result(HANG_S)
    assert seen == [(0, False, 1), (1, False, 1), (2, False, 1)], "all of them before the next step"


def test_all_steps_are_done_and_their_outputs_told(bench: Bench) -> None:
    bench.give_work(5)
    while bench.loop.call(bench.engine.has_work).result(HANG_S):
        pass
    assert bench.outputs == [1, 2, 3, 4, 5]
    assert bench.num_boundaries >= 5


def test_an_error_goes_to_the_caller_and_not_to_the_engine(bench: Bench) -> None:
    def fail() -> None:
        raise NotFound("no such thing")

    with pytest.raises(NotFound):
        bench.loop.call(fail).result(HANG_S)
    assert bench.loop.call(lambda: 7).result(HANG_S) == 7
    assert bench.fatal == []


def test_a_call_given_up_before_its_turn_does_not_run(bench: Bench) -> None:
    bench.engine.go_on.clear()
    bench.give_work(1)
    assert bench.engine.entered.wait(HANG_S)
    ran: list[int] = []
    future = bench.loop.call(lambda: ran.append(1))
    assert future.cancel()
    bench.engine.go_on.set()
    bench.loop.call(lambda: None).result(HANG_S)
    assert ran == []


def test_nothing_to_do_costs_nothing(bench: Bench) -> None:
    bench.loop.call(lambda: None).result(HANG_S)
    before = bench.num_boundaries
    time.sleep(0.1)
    assert bench.num_boundaries <= before + 1
    assert bench.engine.num_tries == 0


def test_work_that_cannot_be_done_now_is_tried_again_without_spinning(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.engine.can_compute = False
    started_s = time.monotonic()
    bench.give_work(1)
    wait_until(lambda: bench.engine.num_tries >= 6, "it is tried six times")
    num_tries = bench.engine.num_tries
    assert num_tries <= 2 + (time.monotonic() - started_s) / loop.STALLED_WAIT_S
    monkeypatch.setattr(loop, "STALLED_WAIT_S", 5 * HANG_S)
    started_s = time.monotonic()
    for _ in range(20):
        bench.loop.call(lambda: None).result(HANG_S)
    assert time.monotonic() - started_s < HANG_S / 2, "a post is not kept waiting"
    bench.loop.call(lambda: setattr(bench.engine, "can_compute", True)).result(HANG_S)
    while bench.loop.call(bench.engine.has_work).result(HANG_S):
        pass
    assert bench.outputs == [1]


def test_a_failed_step_is_told_once_and_ends_the_thread(bench: Bench) -> None:
    bench.engine.failure = ValueError("the model broke")
    bench.give_work(1)
    wait_until(lambda: not bench.runs(), "the thread ends")
    assert bench.fatal == [bench.engine.failure]


def test_calls_that_close_overtakes_are_cancelled() -> None:
    bench = Bench()
    bench.loop.start()
    bench.engine.go_on.clear()
    bench.give_work(2)
    assert bench.engine.entered.wait(HANG_S)
    early = bench.loop.call(lambda: "done before")
    bench.loop.close(timeout_s=0)  # the step is still running
    set_closed(bench.loop, False)  # somebody who looked just before
    late = bench.loop.call(lambda: "never")
    set_closed(bench.loop, True)
    bench.engine.go_on.set()
    assert early.result(HANG_S) == "done before"
    with pytest.raises(Cancelled):
        late.result(HANG_S)
    wait_until(lambda: not bench.runs(), "the thread ends")
    with pytest.raises(Cancelled):
        bench.loop.call(lambda: None).result(HANG_S)
    bench.loop.close()


def test_a_loop_that_was_never_started_can_be_closed() -> None:
    bench = Bench()
    waiting = bench.loop.call(lambda: None)
    bench.loop.close()
    with pytest.raises(Cancelled):
        waiting.result(1)


def test_what_may_run_inside_a_step_runs_there_or_else_after_it(bench: Bench) -> None:
    ran: list[tuple[str, bool]] = []
    work = bench.engine.step

    def step() -> list[Any]:
        bench.engine.in_step = True
        early = bench.loop.call_inside(lambda: ran.append(("early", bench.engine.in_step)))
        assert bench.loop.run_inside()
        assert not bench.loop.run_inside()
        assert early.done()
        bench.loop.call_inside(lambda: ran.append(("late", bench.engine.in_step)))
        return work()

    bench.engine.step = step  # type: ignore[method-assign]
    bench.give_work(1)
    wait_until(lambda: len(ran) == 2, "both have run")
    assert ran == [("early", True), ("late", False)]


def test_what_may_run_inside_a_step_is_refused_when_the_loop_has_ended(bench: Bench) -> None:
    bench.loop.close()
    with pytest.raises(Cancelled):
        bench.loop.call_inside(lambda: None).result(HANG_S)
