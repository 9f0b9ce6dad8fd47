"""The planner's priorities and cancellation, on a virtual clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_world import MIB, RATE, Planner, Rail, World

from moonpool.base.errors import Cancelled, DeadlineExceeded, PeerLost
from moonpool.transfer.paths.path_load import PlanConfig
from moonpool.transfer.paths.priority import Priority

HANDOFF, PREFETCH, REPLICATION = Priority


def test_a_higher_task_overtakes() -> None:
    world = World([Rail(), Rail()])
    bulk = world.submit([512 * MIB], priority=REPLICATION)
    world.run(0.02)
    urgent = world.submit([8 * MIB], priority=HANDOFF)
    world.run()
    # Its own time on both rails, and at first what is under way: two slices of a MiB on each.
    assert world.ended[urgent][0] - 0.02 < 1.2 * (8 * MIB + 4 * MIB) / (2 * RATE)
    assert world.ended[bulk][1] is None


def test_equals_take_turns_whatever_is_below() -> None:
    world = World([Rail(), Rail()])
    world.submit([256 * MIB], priority=REPLICATION)
    ends = [world.ended[task][0] for task in _submit_and_run(world, [64 * MIB] * 3, HANDOFF)]
    assert max(ends) - min(ends) < 0.1


def _submit_and_run(world: World, sizes: list[int], priority: Priority) -> list[int]:
    tasks = [world.submit([nbytes], priority=priority) for nbytes in sizes]
    world.run()
    return tasks


def test_constant_high_work_leaves_a_share_to_the_rest() -> None:
    world = World([Rail()])
    low = world.submit([4 * MIB], priority=REPLICATION)
    for _ in range(130):  # more than the rail can carry, all the time, for longer than the bound below
        world.submit([MIB], priority=HANDOFF)
        world.run(world.now_s + 0.5 * MIB / RATE)
    assert world.ended[low][1] is None
    # Waits 0.1 s, then has a quarter of the rail.
    assert world.ended[low][0] < 0.1 + 1.5 * 4 * (4 * MIB / RATE) + 0.1


def test_low_work_waiting_does_not_push_urgent_work_onto_a_slow_path() -> None:
    world = World([Rail(), Rail(RATE / 50)])
    world.submit([64 * MIB])
    world.run()  # this one learns the speeds
    started_s = world.now_s
    world.submit([256 * MIB], priority=REPLICATION)
    urgent = world.submit([MIB], priority=HANDOFF)
    world.run()
    assert world.ended[urgent][0] - started_s < 5 * MIB / RATE


def test_cancel_drops_what_waits_and_ends_when_nothing_is_under_way() -> None:
    planner = Planner(2)
    task = planner.submit([100 * MIB], 10.0, 0.0)
    under_way = planner.next_assignments(0.0)
    assert under_way
    planner.cancel(task)
    planner.check_integrity()
    assert planner.next_assignments(0.1) == []
    for number, given_ in enumerate(under_way):
        assert planner.take_ended() == []
        if number % 2:
            planner.failed(given_, PeerLost("x"), 0.1)
        else:
            planner.completed(given_, 0.1)
    [(ended, error)] = planner.take_ended()
    assert ended == task
    assert isinstance(error, Cancelled)
    planner.cancel(task)
    planner.cancel(77)
    assert planner.take_ended() == []


def test_cancel_when_all_is_under_way_leaves_it_to_arrive() -> None:
    planner = Planner(1)
    task = planner.submit([10], 10.0, 0.0)
    [given_] = planner.next_assignments(0.0)
    planner.cancel(task)
    planner.completed(given_, 0.1)
    assert planner.take_ended() == [(task, None)]


@pytest.mark.parametrize("error", [PeerLost("x"), DeadlineExceeded("x")])
def test_a_cancelled_slice_is_not_tried_again(error: PeerLost | DeadlineExceeded) -> None:
    planner = Planner(2)
    task = planner.submit([10], 10.0, 0.0)
    [given_] = planner.next_assignments(0.0)
    planner.cancel(task)
    planner.failed(given_, error, 0.1)
    planner.check_integrity()
    [(ended, found)] = planner.take_ended()
    assert ended == task
    assert isinstance(found, Cancelled)
    assert planner.next_assignments(0.2) == []


def test_many_tasks_are_planned_in_little_time_each() -> None:
    """An event looks at a few of the waiting tasks, not at all of them."""
    planner = Planner(2, PlanConfig(max_slice_nbytes=MIB))
    for _ in range(5_000):
        planner.submit([4096], 1e6, 0.0)
        for given_ in planner.next_assignments(0.0):
            planner.completed(given_, 0.0)
    assert len(planner.take_ended()) > 4_750


spans = st.lists(
    st.tuples(st.floats(0, 3), st.floats(0.001, 2)).map(lambda s: (s[0], s[0] + s[1])), max_size=2
)  # fmt: skip
rails_ = st.lists(st.builds(Rail, st.floats(1e6, 1e9), spans, spans), min_size=1, max_size=3)
tasks_ = st.lists(
    st.tuples(
        st.lists(st.integers(0, 20 * MIB), min_size=1, max_size=3),
        st.floats(0.01, 10),
        st.sampled_from(Priority),
        st.floats(0, 0.5),
        st.none() | st.integers(0, 5),
    ),
    min_size=1,
    max_size=8,
)


@given(rails_, tasks_)
def test_whatever_is_cancelled_a_task_is_whole_or_failed_and_in_time(
    rails: list[Rail], tasks: list[tuple[list[int], float, Priority, float, int | None]]
) -> None:
    world = World(rails)  # checks that what is reported done was acknowledged, and that nothing is then under way
    made = []
    cancelled_s: dict[object, float] = {}
    for sizes, timeout_s, priority, pause_s, victim in tasks:
        made.append(world.submit(sizes, timeout_s, priority))
        world.run(world.now_s + pause_s)
        if victim is not None and victim < len(made):
            cancelled_s.setdefault(made[victim], world.now_s)
            world.cancel(made[victim])
    world.run()
    for task, (ended_s, error) in world.ended.items():
        assert ended_s <= world.deadlines[task] + 1e-6
        assert not isinstance(error, Cancelled) or task in cancelled_s
        if task in cancelled_s:  # what is under way is over soon, nothing new begins
            assert ended_s <= cancelled_s[task] + world.config.slice_timeout_s + 1e-6
    assert all(path.num_under_way == 0 and path.in_flight_nbytes == 0 for path in world.planner.paths)
