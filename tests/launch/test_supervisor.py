"""The launcher's decisions, under virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.launch.supervisor import (
    BACKOFF_MAX_S,
    KILL_AFTER_S,
    MAX_EARLY_CRASHES,
    STAYS_S,
    STOP_ALL_AFTER_S,
    Action,
    Added,
    ChildSpec,
    Complete,
    Exited,
    Finish,
    Kill,
    Ready,
    Restarting,
    Retired,
    Start,
    State,
    StopRequested,
    Supervisor,
    Terminate,
    Tick,
)

SPECS = [
    ChildSpec("master"),
    ChildSpec("node", after=("master",)),
    ChildSpec("worker", after=("node",), start_timeout_s=100),
    ChildSpec("frontend", after=("master",), first_after=("worker",)),
]


def serving() -> Supervisor:
    """A supervisor whose children are all ready, at time 0."""
    supervisor = Supervisor(SPECS)
    supervisor.handle(Tick(), 0)
    for spec in SPECS:
        supervisor.handle(Ready(spec.name), 0)
    return supervisor


def test_children_start_when_those_they_need_are_ready() -> None:
    supervisor = Supervisor(SPECS)
    assert supervisor.handle(Tick(), 0) == [Start("master")]
    assert supervisor.handle(Tick(), 1) == []
    assert supervisor.handle(Ready("master"), 2) == [Start("node")]
    assert supervisor.handle(Ready("node"), 3) == [Start("worker")]
    assert supervisor.handle(Ready("worker"), 4) == [Start("frontend")]
    assert supervisor.handle(Ready("frontend"), 5) == [Complete()]
    assert supervisor.next_wake_s() is None


def test_independent_children_start_together() -> None:
    supervisor = Supervisor([ChildSpec("m"), *(ChildSpec(f"w{i}", after=("m",)) for i in range(4))])
    supervisor.handle(Tick(), 0)
    assert supervisor.handle(Ready("m"), 1) == [Start(f"w{i}") for i in range(4)]


def test_a_dead_child_is_started_again_after_a_growing_pause() -> None:
    supervisor, now_s = serving(), 100.0
    for delay_s in (0.2, 0.4, 0.8):
        why = "killed by SIGKILL"
        assert supervisor.handle(Exited("worker", why), now_s) == [Restarting("worker", why, delay_s)]
        assert supervisor.next_wake_s() == pytest.approx(now_s + delay_s)
        assert supervisor.handle(Tick(), now_s + delay_s / 2) == []
        now_s += delay_s
        assert supervisor.handle(Tick(), now_s) == [Start("worker")]
        assert supervisor.handle(Ready("worker"), now_s) == []  # complete only once


def test_pauses_are_short_again_once_a_child_has_stayed() -> None:
    supervisor, now_s = serving(), 0.0
    for _ in range(20):
        now_s += STAYS_S
        assert supervisor.handle(Exited("worker", "exit code 1"), now_s) == [Restarting("worker", "exit code 1", 0.2)]
        now_s += 1
        supervisor.handle(Tick(), now_s)
        supervisor.handle(Ready("worker"), now_s)


@pytest.mark.parametrize("name", [spec.name for spec in SPECS])
def test_one_that_ends_again_and_again_never_stops_the_others(name: str) -> None:
    supervisor, now_s, delays_s = serving(), 0.0, []
    for _ in range(100):
        (restarting,) = supervisor.handle(Exited(name, "exit code 3", "a reason"), now_s)
        assert isinstance(restarting, Restarting)
        delays_s.append(restarting.delay_s)
        now_s += restarting.delay_s
        assert supervisor.handle(Tick(), now_s) == [Start(name)]
        now_s += 1
    assert delays_s == sorted(delays_s)
    assert delays_s[-1] == BACKOFF_MAX_S
    assert not supervisor.stopping
    assert all(supervisor.state_of(spec.name) is State.READY for spec in SPECS if spec.name != name)


def test_one_that_never_comes_up_ends_the_first_start() -> None:
    supervisor = Supervisor(SPECS)
    supervisor.handle(Tick(), 0)
    supervisor.handle(Ready("master"), 0)
    for crash in range(MAX_EARLY_CRASHES - 1):
        supervisor.handle(Exited("node", "exit code 3"), 10.0 * crash)
        supervisor.handle(Tick(), 10.0 * crash + 9)
    now_s = 10.0 * MAX_EARLY_CRASHES
    assert supervisor.handle(Exited("node", "exit code 3"), now_s) == [Terminate("master")]
    (finish,) = supervisor.handle(Exited("master", "exit code 0"), now_s)
    assert isinstance(finish, Finish)
    assert finish.failure == "node ended 5 times before the service was complete, the last time: exit code 3"


def test_a_reason_given_before_the_service_was_complete_ends_it_at_once() -> None:
    supervisor = Supervisor(SPECS)
    supervisor.handle(Tick(), 0)
    supervisor.handle(Ready("master"), 0)
    assert supervisor.handle(Exited("node", "exit code 1", "no memory"), 1) == [Terminate("master")]
    assert supervisor.handle(Exited("master", "exit code 0"), 2) == [Finish("node: no memory")]


def test_a_reason_given_later_is_a_crash() -> None:
    supervisor = serving()
    actions = supervisor.handle(Exited("node", "exit code 1", "address taken"), 1)
    assert actions == [Restarting("node", "address taken", 0.2)]


def test_a_restart_waits_for_what_it_needs_but_not_for_what_only_the_first_start_needed() -> None:
    supervisor = serving()
    supervisor.handle(Exited("worker", "x"), 0)
    supervisor.handle(Exited("node", "x"), 0)
    supervisor.handle(Exited("frontend", "x"), 0)
    assert supervisor.handle(Tick(), 1) == [Start("node"), Start("frontend")]
    assert supervisor.handle(Ready("node"), 2) == [Start("worker")]


def test_a_start_that_takes_too_long_is_killed_and_counted() -> None:
    supervisor = Supervisor(SPECS)
    supervisor.handle(Tick(), 0)
    assert supervisor.next_wake_s() == 60
    assert supervisor.handle(Tick(), 60) == [Kill("master")]
    assert supervisor.handle(Ready("master"), 60) == []  # too late
    assert supervisor.handle(Exited("master", "killed by SIGKILL"), 61) == [
        Restarting("master", "not ready within 60 s", 0.2)
    ]


def test_stop_goes_against_the_order_of_need() -> None:
    supervisor = serving()
    assert supervisor.handle(StopRequested(), 0) == [Terminate("frontend")]
    assert supervisor.next_wake_s() == STOP_ALL_AFTER_S
    assert supervisor.handle(Exited("frontend", "exit code 0"), 0.1) == [Terminate("worker")]
    assert supervisor.handle(Exited("worker", "exit code 0"), 0.2) == [Terminate("node")]
    assert supervisor.handle(Exited("node", "exit code 0"), 0.3) == [Terminate("master")]
    assert supervisor.handle(Exited("master", "exit code 0"), 0.4) == [Finish()]
    assert supervisor.next_wake_s() is None


def test_a_stop_that_takes_long_terminates_all_and_then_kills() -> None:
    supervisor = serving()
    supervisor.handle(StopRequested(), 0)
    assert supervisor.handle(Tick(), STOP_ALL_AFTER_S) == [Terminate("master"), Terminate("node"), Terminate("worker")]
    assert supervisor.next_wake_s() == KILL_AFTER_S
    names = [spec.name for spec in SPECS]
    assert supervisor.handle(Tick(), KILL_AFTER_S) == [Kill(name) for name in names]
    assert supervisor.next_wake_s() is None
    for name in names[:-1]:
        assert supervisor.handle(Exited(name, "killed by SIGKILL"), 4) == []
    assert supervisor.handle(Exited(names[-1], "killed by SIGKILL"), 4) == [Finish()]


def test_a_second_stop_kills_at_once() -> None:
    supervisor = serving()
    supervisor.handle(StopRequested(), 0)
    assert supervisor.handle(StopRequested(), 0.5) == [Kill(spec.name) for spec in SPECS]


def test_stop_before_anything_runs_finishes_at_once() -> None:
    assert Supervisor(SPECS).handle(StopRequested(), 0) == [Finish()]


def test_a_child_in_its_pause_is_not_started_during_a_stop() -> None:
    supervisor = serving()
    supervisor.handle(Exited("frontend", "x"), 0)
    assert supervisor.handle(StopRequested(), 0.1) == [Terminate("worker")]
    assert supervisor.state_of("frontend") is State.GONE


def test_needs_must_come_earlier() -> None:
    with pytest.raises(AssertionError, match="needs"):
        Supervisor([ChildSpec("a", after=("b",)), ChildSpec("b")])


def test_a_child_that_was_drained_is_not_started_again() -> None:
    supervisor = serving()
    assert supervisor.handle(Exited("worker", "exit code 3", left=True), 1) == []
    assert supervisor.handle(Tick(), 100) == []
    assert supervisor.state_of("worker") is State.GONE
    assert supervisor.handle(Added(SPECS[2]), 101) == [Start("worker")], "its name is free again"


def test_a_child_is_added_to_a_running_service() -> None:
    supervisor = serving()
    assert supervisor.handle(Added(ChildSpec("worker-1", after=("node",))), 1) == [Start("worker-1")]
    supervisor.handle(Ready("worker-1"), 2)
    assert supervisor.handle(Exited("worker-1", "killed by SIGKILL"), 3) == [
        Restarting("worker-1", "killed by SIGKILL", 0.2)
    ]
    assert supervisor.last_end_of("worker-1") == "killed by SIGKILL"


def test_a_retired_child_ends_for_good_however_it_ends() -> None:
    supervisor = serving()
    assert supervisor.handle(Retired("worker"), 1) == [], "somebody else has told it to drain"
    assert supervisor.is_retired("worker")
    assert supervisor.state_of("worker") is State.READY
    assert supervisor.handle(Exited("worker", "killed by SIGKILL"), 2) == []
    assert supervisor.handle(Tick(), 100) == []
    assert supervisor.handle(Retired("worker"), 101) == [], "it is gone already"


def test_a_retired_child_that_nobody_uses_yet_ends_at_once() -> None:
    supervisor = serving()
    assert supervisor.handle(Retired("worker", at_once=True), 1) == [Terminate("worker")]
    assert supervisor.handle(Exited("worker", "exit code 0"), 2) == []
    supervisor.handle(Added(SPECS[2]), 3)
    assert supervisor.handle(Retired("worker"), 4) == [Terminate("worker")], "it is starting"
    supervisor.handle(Exited("worker", "exit code 0"), 5)
    supervisor.handle(Exited("node", "killed by SIGKILL"), 6)
    supervisor.handle(Added(SPECS[2]), 6)
    assert supervisor.state_of("worker") is State.WAITING, "for the node"
    assert supervisor.handle(Retired("worker"), 6) == []
    assert supervisor.state_of("worker") is State.GONE


class World:
    """Processes as the shell would see them: obeys actions, dies at random."""

    def __init__(self) -> None:
        self.supervisor = Supervisor(SPECS)
        self.running: set[str] = set()
        self.finished = False
        self.now_s = 0.0

    def apply(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Start(name):
                    assert name not in self.running, "started twice"
                    self.running.add(name)
                case Terminate(name) | Kill(name):
                    assert name in self.running, "signalled what does not run"
                case Finish():
                    assert not self.running
                    self.finished = True
                case _:
                    pass

    def change(self, name: str) -> None:
        """Adds the child, or retires it if it is there."""
        if self.supervisor.state_of(name) is State.GONE:
            self.apply(self.supervisor.handle(Added(ChildSpec(name, after=("node",))), self.now_s))
        else:
            self.apply(self.supervisor.handle(Retired(name, at_once=bool(int(self.now_s) % 2)), self.now_s))

    def step(self, choice: int, advance_s: float) -> None:
        self.now_s += advance_s
        names = sorted(self.running)
        if choice < 4:
            self.apply(self.supervisor.handle(Tick(), self.now_s))
        elif choice < 8 and names:
            self.apply(self.supervisor.handle(Ready(names[choice % len(names)]), self.now_s))
        elif choice >= 12:
            self.change("worker" if choice == 12 else "extra")
        elif names:
            name = names[choice % len(names)]
            self.running.discard(name)
            self.apply(self.supervisor.handle(Exited(name, "exit code 9"), self.now_s))


@given(st.lists(st.tuples(st.integers(0, 13), st.floats(0, 20)), max_size=60))
def test_whatever_happens_a_stop_ends_with_nothing_running(steps: list[tuple[int, float]]) -> None:
    world = World()
    for choice, advance_s in steps:
        if not world.finished:
            world.step(choice, advance_s)
    if not world.finished:
        world.apply(world.supervisor.handle(StopRequested(), world.now_s))
    deadline_s = world.now_s + KILL_AFTER_S
    while not world.finished:
        wake_s = world.supervisor.next_wake_s()
        if wake_s is not None and wake_s < deadline_s:
            world.now_s = max(world.now_s, wake_s)
            world.apply(world.supervisor.handle(Tick(), world.now_s))
        else:  # nothing obeys SIGTERM: only force ends it
            world.now_s = deadline_s
            world.apply(world.supervisor.handle(Tick(), world.now_s))
            for name in sorted(world.running):
                world.running.discard(name)
                world.apply(world.supervisor.handle(Exited(name, "killed by SIGKILL"), world.now_s))
    assert not world.running
