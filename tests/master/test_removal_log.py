"""The reasons of removals: what is remembered, and that a snapshot reads them in bounded steps while they change."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moonpool.master.rules import PoolRules
from moonpool.master.state.changes import NEVER_STORED, RemovalLog, RemovalReason
from moonpool.master.state.pool import PoolState
from moonpool.master.state.snapshot import STEP_SLOTS, snapshot_records

KEYS = [b"%d" % number for number in range(8)]
STEPS = st.lists(st.tuples(st.sampled_from(["removed", "stored"]), st.sampled_from(KEYS)), max_size=60)


def apply(log: RemovalLog, model: list[bytes | None], steps: list[tuple[str, bytes]]) -> None:
    """`model` has every removal, oldest first; None where the key was removed again or stored since."""
    for what, key in steps:
        if key in model:
            model[model.index(key)] = None
        if what == "removed":
            log.record(key, RemovalReason.REMOVED, float(len(model)))
            model.append(key)
        else:
            log.forget_many([key])


def remembered(model: list[bytes | None], limit: int) -> list[bytes]:
    return [key for key in model[-limit:] if key is not None]


@given(STEPS, st.integers(1, 10), st.integers(1, 4))
def test_the_last_removals_are_remembered_in_order(steps: list[tuple[str, bytes]], limit: int, part: int) -> None:
    log, model = RemovalLog(limit), list[bytes | None]()
    apply(log, model, steps)
    wanted = remembered(model, limit)
    parts = list(log.parts(part))
    assert [key for each in parts for key, _, _ in each] == wanted
    assert all(len(each) <= part for each in parts)
    assert len(log) == len(wanted)
    for key in KEYS:
        assert (log.reason(key) is RemovalReason.REMOVED) == (key in wanted)
        assert log.explain(key, 100.0).startswith(NEVER_STORED) == (key not in wanted)


@given(STEPS, STEPS, st.integers(1, 10), st.integers(1, 4))
def test_a_log_that_changes_while_it_is_read_loses_nothing_that_stays(
    before: list[tuple[str, bytes]], meanwhile: list[tuple[str, bytes]], limit: int, part: int
) -> None:
    """The parts, and then the removals recorded meanwhile, give the log as it is: so a snapshot and its journal do."""
    log, model = RemovalLog(limit), list[bytes | None]()
    apply(log, model, before)
    reading, num_before = log.parts(part), len(model)
    read = list(next(reading, []))
    apply(log, model, meanwhile)
    read += [each for rest in reading for each in rest]
    later = [key for key in model[num_before:] if key is not None]
    known = [key for key, _, _ in read]
    assert set(remembered(model, limit)) <= {*known, *later}
    assert len(set(known)) == len(known)


def test_no_step_of_a_snapshot_reads_all_reasons() -> None:
    """In one step 65,536 of them kept every caller waiting for 190 ms."""
    state = PoolState(PoolRules(), epoch=1, journalled=True)
    log = state.index.removals
    for number in range(3 * STEP_SLOTS):
        log.record(b"%d" % number, RemovalReason.REMOVED, 0.0)
    reads: list[int] = []
    original = log.parts
    log.parts = lambda num_keys: (reads.append(len(part)) or part for part in original(num_keys))  # type: ignore[func-returns-value,method-assign]
    per_step = []
    for _ in snapshot_records(state, 1.0):
        per_step.append(sum(reads))
        reads.clear()
    assert per_step == [0, STEP_SLOTS, STEP_SLOTS, STEP_SLOTS]
