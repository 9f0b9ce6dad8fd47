"""Preferred and secondary paths, on a virtual clock. World checks at every slice that a secondary path was taken only
when no preferred one was there to be taken.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from plan_world import CONFIG, MIB, RATE, Planner, Rail, World

from moonpool.base.errors import PeerLost
from moonpool.transfer.paths.path_load import PathState

FOREVER = [(0.0, 1e9)]
BACK_S = CONFIG.max_rest_s + 2 * CONFIG.slice_timeout_s + 0.1  # a rest, a probe and a trial


def cut(fault: str, times: list[tuple[float, float]], rate: float = RATE) -> Rail:
    return Rail(rate, **{fault: times})  # type: ignore[arg-type]  # "silent" or "refusing"


def carried(rail: Rail, after_s: float = 0.0, before_s: float = 1e9) -> int:
    return sum(nbytes for at_s, nbytes in rail.moved if after_s <= at_s < before_s)


def test_a_healthy_preferred_path_carries_all_however_slow_it_is() -> None:
    rails = [Rail(RATE / 10), Rail()]
    world = World(rails, num_secondary=1)
    for _ in range(3):
        world.submit([16 * MIB])
        world.run()
    assert carried(rails[1]) == 0


def test_preferred_paths_share_what_secondary_ones_do_not_see() -> None:
    rails = [Rail(), Rail(), Rail()]
    world = World(rails, num_secondary=1)
    task = world.submit([64 * MIB])
    world.run()
    assert world.ended[task][0] < 1.05 * 64 * MIB / (2 * RATE)
    assert carried(rails[2]) == 0


@pytest.mark.parametrize("fault", ["silent", "refusing"])
def test_cut_and_returned(fault: str) -> None:
    rails = [cut(fault, [(0.5, 4.0)]), Rail()]
    world = World(rails, num_secondary=1)
    task = world.submit([1500 * MIB])
    world.run()
    assert world.ended[task][1] is None
    assert carried(rails[1], before_s=0.5) == 0
    times = sorted(at_s for rail in rails for at_s, _ in rail.moved)
    assert max(b - a for a, b in itertools.pairwise(times)) < 2 * CONFIG.slice_timeout_s
    assert carried(rails[1], 1.5, 4.0) > 0.9 * 2.5 * RATE, "the secondary path works meanwhile"
    assert carried(rails[1], after_s=4.0 + BACK_S) == 0
    assert carried(rails[0], after_s=4.0 + BACK_S) > 0


def test_a_trial_that_hangs_holds_nobody_up() -> None:
    """A path that answers probes and swallows data: the secondary one goes on meanwhile."""
    planner = Planner(2, CONFIG, num_secondary=1)
    planner.submit([100 * MIB], 100.0, 0.0)
    for given_ in planner.next_assignments(0.0):
        planner.failed(given_, PeerLost("x"), 0.0)
    assert {given_.path for given_ in planner.next_assignments(0.0)} == {1}
    [path] = planner.probes_due(1.0)
    planner.probed(path, None, 1.0)
    assert planner.paths[0].state is PathState.TRIAL
    # Its other slices came back and are to be tried by paths they have not failed on: only a fresh one is for path 0.
    planner.submit([MIB], 100.0, 1.0)
    taken = planner.next_assignments(1.0)
    assert [given_.path for given_ in taken if not given_.failed_on][:1] == [0]
    for number, load in enumerate(planner.paths):
        assert load.num_under_way == (1 if number == 0 else CONFIG.slices_per_path)


spans = st.lists(
    st.tuples(st.floats(0, 5), st.floats(0.001, 3)).map(lambda s: (s[0], s[0] + s[1])), max_size=3
)  # fmt: skip
faulty = st.builds(Rail, st.floats(1e5, 1e9), spans, spans)
sizes_ = st.lists(st.integers(0, 20 * MIB), min_size=1, max_size=4)


@example([Rail(491794439.0, [], [])], [Rail(1e5, [], []), Rail(1e5, [], [(0.0, 1.0)])], [([11403266], 0.015625, 0.0)])
@given(
    st.lists(faulty, min_size=1, max_size=3),
    st.lists(faulty, min_size=1, max_size=2),
    st.lists(st.tuples(sizes_, st.floats(0.01, 20), st.floats(0, 2)), min_size=1, max_size=5),
)
def test_whatever_fails_a_task_is_whole_or_fails_in_time(
    preferred: list[Rail], secondary: list[Rail], tasks: list[tuple[list[int], float, float]]
) -> None:
    world = World([*preferred, *secondary], num_secondary=len(secondary))
    for sizes, timeout_s, pause_s in tasks:
        world.submit(sizes, timeout_s)
        world.run(world.now_s + pause_s)
    world.run()
    for task, (ended_s, _) in world.ended.items():
        assert ended_s <= world.deadlines[task] + 1e-6


@given(st.integers(1, 3), st.sampled_from(["silent", "refusing"]), sizes_, st.lists(faulty, max_size=1))
def test_without_preferred_paths_a_healthy_secondary_one_does_it(
    num_dead: int, fault: str, sizes: list[int], others: list[Rail]
) -> None:
    dead, healthy = [cut(fault, FOREVER) for _ in range(num_dead)], Rail()
    world = World([*dead, *others, healthy], num_secondary=1 + len(others))
    for nbytes in sizes:
        started_s = world.now_s
        task = world.submit([nbytes])
        world.run()
        assert world.ended[task][1] is None
        longest_s = nbytes / RATE + 2 * len(world.rails) * CONFIG.slice_timeout_s + 0.5
        assert world.now_s - started_s < longest_s
    assert not any(carried(rail) for rail in dead)


@given(
    st.lists(st.tuples(st.floats(RATE / 50, RATE / 10), spans), min_size=1, max_size=3),
    st.sampled_from(["silent", "refusing"]),
    st.floats(0.05, 2),
)
def test_preferred_paths_that_return_carry_everything_again(
    lines: list[tuple[float, list[tuple[float, float]]]], fault: str, secondary_speed: float
) -> None:
    preferred = [cut(fault, times, rate) for rate, times in lines]
    secondary = Rail(RATE / 10 * secondary_speed)
    world = World([*preferred, secondary], num_secondary=1)
    healed_s = max((high for _, times in lines for _, high in times), default=0.0) + BACK_S
    while world.now_s < healed_s + 1.0:  # somebody asks all the time
        world.submit([8 * MIB])
        world.run()
    # What it had begun before they were back may still have been on its way.
    assert carried(secondary, after_s=healed_s + 2 * CONFIG.slice_timeout_s) == 0
