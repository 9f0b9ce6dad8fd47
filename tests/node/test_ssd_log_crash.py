"""The log against a dict, with restarts and power losses at random moments: what was synced is there, in the state of
the last sync or a later one; what comes back is right.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from ssd_world import FAST_DIR, KIB, SMALL, PowerLoss, inventory, is_object, item_of, parts_of, read_object

from moonpool.base.errors import MoonpoolError, NoSpace
from moonpool.node.ssd import LogLocation, SsdLog

KEYS = [bytes([65 + i]) * 36 for i in range(7)]
SIZES: list[tuple[int, ...]] = [(100,), (5000,), (8192,), (4096, 4096, 17), (20 * KIB,)]
keys = st.sampled_from(KEYS)


def sizes_of(generation: int) -> tuple[int, ...]:
    return SIZES[generation % len(SIZES)]


class LogMachine(RuleBasedStateMachine):
    """`states[key]`: generations (None: not there) that a crash may leave, the present one last."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="ssd-log-", dir=FAST_DIR))
        self.lives = 0
        self.states: dict[bytes, list[int | None]] = {key: [None] for key in KEYS}
        self.next_generation = 1
        self.stack = ExitStack()
        self.open(self.home / "0")

    def open(self, folder: Path) -> None:
        self.folder = folder
        self.power = PowerLoss(folder)
        self.stack.enter_context(self.power.watching())
        self.log = self.stack.enter_context(SsdLog.open(folder, SMALL))

    def teardown(self) -> None:
        self.stack.close()
        shutil.rmtree(self.home)

    @rule(chosen=st.lists(keys, min_size=1, max_size=5, unique=True), again=st.booleans())
    def append(self, chosen: list[bytes], again: bool) -> None:
        items = []
        for key in chosen:
            generation = self.states[key][-1] if again else None
            if generation is None:
                generation, self.next_generation = self.next_generation, self.next_generation + 1
            items.append(item_of(key, generation, sizes_of(generation)))
        for item, result in zip(items, self.log.append_many(items), strict=True):
            if isinstance(result, LogLocation):
                self.states[item.key].append(item.generation)
            else:
                assert isinstance(result, NoSpace)

    @rule(chosen=st.lists(keys, min_size=1, max_size=4, unique=True), stale=st.booleans())
    def remove(self, chosen: list[bytes], stale: bool) -> None:
        there = [(key, present) for key in chosen if (present := self.states[key][-1]) is not None]
        if stale:
            assert self.log.remove([(key, generation - 1) for key, generation in there]) == 0
            return
        assert self.log.remove(there) == len(there)
        for key, _ in there:
            self.states[key].append(None)

    @rule(key=keys)
    def append_what_was_removed(self, key: bytes) -> None:
        """Of the same generation: an object that is still in DRAM comes to the disk a second time."""
        generation = self.states[key][-1]
        if generation is not None:
            self.log.remove([(key, generation)])
            self.states[key].append(None)
            result = self.log.append_many([item_of(key, generation, sizes_of(generation))])[0]
            if not isinstance(result, MoonpoolError):
                self.states[key].append(generation)

    @rule()
    def sync(self) -> None:
        try:
            self.log.sync()
        except NoSpace:
            assert self.log.stats().num_pending_tombstones
            return
        self.states = {key: states[-1:] for key, states in self.states.items()}

    @rule(nbytes=st.sampled_from([1, 20 * KIB, 200 * KIB]))
    def compact(self, nbytes: int) -> None:
        for moved in self.log.compact(nbytes):
            assert moved.new is not None
            assert self.log.find(moved.key, moved.generation) == moved.new

    @precondition(lambda self: self.log.drained())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.sync()
        if not self.log.stats().num_pending_tombstones:
            self.log.release(data.draw(st.sampled_from(self.log.drained())))

    @rule()
    def restart(self) -> None:
        pending = self.log.stats().num_pending_tombstones
        self.stack.close()
        self.open(self.folder)
        if pending:
            self.adopt()
        else:
            self.states = {key: states[-1:] for key, states in self.states.items()}

    @rule(seed=st.integers(0, 2**32))
    def lose_power(self, seed: int) -> None:
        self.lives += 1
        target = self.home / str(self.lives)
        self.power.crash(target, random.Random(seed))
        self.stack.close()
        shutil.rmtree(self.folder)
        self.open(target)
        self.adopt()

    def adopt(self) -> None:
        found = inventory(self.log)
        for key, states in self.states.items():
            assert found.get(key) in states, f"{key!r} may be {states} and is {found.get(key)}"
        self.states = {key: [found.get(key)] for key in KEYS}

    @invariant()
    def everything_is_right(self) -> None:
        self.log.check_integrity()
        present = {key: states[-1] for key, states in self.states.items() if states[-1] is not None}
        assert inventory(self.log) == present
        for key, generation in present.items():
            assert is_object(read_object(self.log, key, generation), parts_of(key, generation, sizes_of(generation)))
        stats = self.log.stats()
        assert stats.num_corrupt == 0
        assert stats.free_nbytes >= 0
        assert stats.dead_nbytes >= 0


def run(max_examples: int, steps: int) -> None:
    run_state_machine_as_test(
        LogMachine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


def test_nothing_synced_is_lost_and_nothing_removed_comes_back() -> None:
    run(max_examples=60, steps=40)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_nothing_synced_is_lost_for_long() -> None:
    run(max_examples=2000, steps=60)
