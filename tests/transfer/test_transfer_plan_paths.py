"""The planner against paths that are slow, uneven, silent, refused and flapping, on a virtual clock."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_world import CONFIG, MIB, RATE, Planner, Rail, World
from waiting import HANG_S

from moonpool.base.errors import DeadlineExceeded, InvalidInput, MoonpoolError, NotFound, PeerLost, StaleGeneration
from moonpool.transfer.paths.path_load import PathState, PlanConfig


def share(rail: Rail) -> int:
    return sum(nbytes for _, nbytes in rail.moved)


def test_equal_paths_carry_equal_shares() -> None:
    world = World([Rail(), Rail()])
    task = world.submit([64 * MIB])
    world.run()
    assert world.ended[task][1] is None
    assert world.ended[task][0] < 1.05 * 64 * MIB / (2 * RATE)


@pytest.mark.parametrize("ratio", [2, 4, 20])
@pytest.mark.parametrize("nbytes", [8 * MIB, 64 * MIB])
def test_uneven_paths_finish_together(ratio: int, nbytes: int) -> None:
    rails = [Rail(), Rail(RATE / ratio)]
    world = World(rails)
    world.submit([nbytes])
    world.run()  # this one learns the speeds
    started_s = world.now_s
    world.submit([nbytes])
    world.run()
    best_s = nbytes / (RATE + RATE / ratio)
    assert world.now_s - started_s < (1.25 if nbytes < 10 * MIB else 1.1) * best_s
    assert share(rails[1]) > 0


def test_a_very_slow_path_does_not_hold_the_tail() -> None:
    world = World([Rail(), Rail(RATE / 1000)])
    world.submit([32 * MIB])
    world.run()
    started_s = world.now_s
    world.submit([4 * MIB])
    world.run()
    assert world.now_s - started_s < 1.1 * 4 * MIB / RATE


def test_small_requests_are_one_slice_on_one_path() -> None:
    world = World([Rail(), Rail()])
    world.submit([4096])
    world.run()
    assert len(world.rails[0].moved) + len(world.rails[1].moved) == 1


def test_tasks_take_turns() -> None:
    world = World([Rail(), Rail()])
    large = world.submit([256 * MIB])
    small = world.submit([MIB])
    world.run()
    assert world.ended[small][0] < 0.1 < world.ended[large][0]


def test_a_request_of_no_bytes_is_asked_for_and_answered() -> None:
    world = World([Rail(), Rail()])
    task = world.submit([0, 10, 0])
    world.run()
    assert world.ended[task][1] is None
    assert {request for _, request in world.acknowledged} == {0, 1, 2}


def test_a_silent_path_costs_less_than_a_second_and_is_used_again_when_it_returns() -> None:
    rails = [Rail(), Rail(silent=[(0.3, 6.0)])]
    world = World(rails)
    task = world.submit([1500 * MIB])
    world.run()
    assert world.ended[task][1] is None
    times = sorted(t for rail in rails for t, _ in rail.moved)
    assert max(b - a for a, b in itertools.pairwise(times)) < 0.1
    assert min(t for t, _ in rails[1].moved if t > 0.4) < 6.0 + CONFIG.max_rest_s + CONFIG.slice_timeout_s + 0.1


def test_a_path_silent_from_the_start_delays_one_timeout_only() -> None:
    world = World([Rail(silent=[(0.0, 1e9)]), Rail()])
    world.submit([MIB])
    world.run()
    assert world.now_s < 1.0
    started_s = world.now_s
    for _ in range(20):  # probes carry nobody's bytes: later requests do not notice
        world.submit([MIB])
        world.run()
        world.now_s += 0.5
    assert world.now_s - started_s < 20 * (0.5 + 0.02)


def state_of(planner: Planner, path: int) -> PathState:
    return planner.paths[path].state


def test_rests_double_up_to_their_bound() -> None:
    planner = Planner(2)
    now_s, rests = 0.0, []
    planner.submit([1 << 40], 1e9, 0.0)
    for _ in range(6):
        planner.paths[1].broke(PeerLost("x"), now_s, CONFIG)
        rests.append(planner.paths[1].rest_until_s - now_s)
        now_s = planner.paths[1].rest_until_s
        assert planner.probes_due(now_s) == [1]
    assert rests == [0.25, 0.5, 1.0, 2.0, 2.0, 2.0]
    planner.probed(1, None, now_s)
    assert state_of(planner, 1) is PathState.TRIAL
    trial = [a for a in planner.next_assignments(now_s) if a.path == 1]
    assert [a.nbytes for a in trial] == [CONFIG.min_slice_nbytes]
    planner.completed(trial[0], now_s + 0.001)
    assert state_of(planner, 1) is PathState.UP
    assert planner.paths[1].num_failures == 0


@pytest.mark.parametrize("error", [InvalidInput("x"), StaleGeneration("x"), NotFound("x")])
def test_the_peers_own_answer_is_final(error: MoonpoolError) -> None:
    planner = Planner(2)
    task = planner.submit([10 * MIB], 10.0, 0.0)
    first, *rest = planner.next_assignments(0.0)
    planner.failed(first, error, 0.1)
    assert planner.take_ended() == []  # others are under way
    assert planner.next_assignments(0.1) == []
    for other in rest:
        planner.completed(other, 0.2)
    assert planner.take_ended() == [(task, error)]
    assert all(path.state is PathState.UP for path in planner.paths)


def test_all_paths_refused_fails_at_once_and_asks_again_next_time() -> None:
    world = World([Rail(refusing=[(0.0, 5.0)]), Rail(refusing=[(0.0, 5.0)])])
    task = world.submit([MIB])
    world.run()
    assert isinstance(world.ended[task][1], PeerLost)
    assert world.now_s < 0.1
    world.now_s = 5.0
    task = world.submit([MIB])
    world.run()
    assert world.ended[task][1] is None
    assert world.now_s < 5.1


def test_all_paths_silent_is_waited_out_until_the_deadline() -> None:
    silent = [(0.0, 3.0)]
    world = World([Rail(silent=silent), Rail(silent=silent)])
    late = world.submit([MIB], timeout_s=2.0)
    lucky = world.submit([MIB], timeout_s=HANG_S)
    world.run()
    assert isinstance(world.ended[late][1], DeadlineExceeded)
    assert world.ended[late][0] <= 2.001
    assert world.ended[lucky][1] is None


def test_a_short_deadline_still_leaves_time_for_another_path() -> None:
    world = World([Rail(silent=[(0.0, 1e9)]), Rail()])
    task = world.submit([4096], timeout_s=0.5)
    world.run()
    assert world.ended[task][1] is None


def test_a_slice_is_given_up_after_its_attempts() -> None:
    planner = Planner(1, PlanConfig(max_attempts=3))
    task = planner.submit([10], 100.0, 0.0)
    now_s = 0.0
    for _ in range(3):
        [given_] = planner.next_assignments(now_s)
        planner.failed(given_, DeadlineExceeded("silence"), now_s)
        planner.check_integrity()
        now_s += 10
        for path in planner.probes_due(now_s):
            planner.probed(path, None, now_s)
    [(ended, error)] = planner.take_ended()
    assert ended == task
    assert isinstance(error, DeadlineExceeded)


spans = st.lists(
    st.tuples(st.floats(0, 5), st.floats(0.001, 3)).map(lambda s: (s[0], s[0] + s[1])), max_size=3
)  # fmt: skip
rails_ = st.lists(st.builds(Rail, st.floats(1e5, 1e9), spans, spans), min_size=1, max_size=4)
tasks_ = st.lists(
    st.tuples(st.lists(st.integers(0, 20 * MIB), min_size=1, max_size=3), st.floats(0.01, 20), st.floats(0, 2)),
    min_size=1,
    max_size=6,
)


@given(rails_, tasks_)
def test_whatever_fails_a_task_is_whole_or_fails_in_time(
    rails: list[Rail], tasks: list[tuple[list[int], float, float]]
) -> None:
    world = World(rails)
    for sizes, timeout_s, pause_s in tasks:
        world.submit(sizes, timeout_s)
        world.run(world.now_s + pause_s)
    world.run()  # _check_whole() is called for each that is reported done
    for task, (ended_s, _) in world.ended.items():
        assert ended_s <= world.deadlines[task] + 1e-6
    assert all(path.num_under_way == 0 and path.in_flight_nbytes == 0 for path in world.planner.paths)


@given(rails_, st.lists(st.integers(0, 20 * MIB), min_size=1, max_size=4), st.integers(0, 4))
def test_no_stall_while_a_healthy_path_exists(rails: list[Rail], sizes: list[int], place: int) -> None:
    healthy = Rail(RATE)
    rails.insert(min(place, len(rails)), healthy)
    world = World(rails)
    for nbytes in sizes:
        started_s = world.now_s
        task = world.submit([nbytes], timeout_s=HANG_S)
        world.run()
        assert world.ended[task][1] is None
        # Each other path may hold some slices for a timeout, one path after the other at worst, and fail once more
        # after a successful probe.
        alone_s = nbytes / RATE
        assert world.now_s - started_s < alone_s + 2 * len(rails) * CONFIG.slice_timeout_s + 0.5
