"""Which workers `moonpool scale` starts and drains."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.cluster import WorkerRole
from moonpool.base.errors import InvalidInput
from moonpool.cli.scale import parse_counts
from moonpool.launch.scaling import plan_scale

P, D = WorkerRole.PREFILL, WorkerRole.DECODE


def test_missing_workers_get_the_lowest_free_numbers() -> None:
    plan = plan_scale({"prefill-0": P, "decode-0": D}, {P: 3, D: 1}, {"prefill-0", "prefill-1", "decode-0"})
    assert plan.starts == ((P, 2), (P, 3)), "prefill-1 still drains: its name is taken"
    assert plan.drains == ()


def test_the_highest_numbers_drain() -> None:
    names = [f"a-decode-{number}" for number in range(12)]
    plan = plan_scale(dict.fromkeys(names, D), {D: 2}, names, "a-")
    assert plan.drains == tuple(reversed(names[2:]))


def test_workers_count_in_the_role_that_they_have() -> None:
    """decode-1 computes prompts now, so a second prefill worker is there."""
    present = {"prefill-0": P, "decode-0": D, "decode-1": P}
    assert plan_scale(present, {P: 2, D: 1}, present) == plan_scale(present, {}, present)
    plan = plan_scale(present, {P: 1}, present)
    assert (plan.starts, plan.drains) == ((), ("decode-1",))


ROLES = st.sampled_from([P, D])


@given(
    st.dictionaries(st.integers(0, 20), ROLES),
    st.dictionaries(ROLES, st.integers(0, 20)),
    st.sets(st.integers(0, 20)),
)
def test_there_are_as_many_as_wanted_and_names_are_unique(
    workers: dict[int, WorkerRole], wanted: dict[WorkerRole, int], draining: set[int]
) -> None:
    present = {f"prefill-{number}": role for number, role in workers.items()}
    taken = {*present, *(f"decode-{number}" for number in draining)}
    plan = plan_scale(present, wanted, taken)
    started = [f"{role}-{number}" for role, number in plan.starts]
    assert len({*started, *taken}) == len(started) + len(taken)
    for role in WorkerRole:
        kept = [name for name, each in present.items() if each is role and name not in plan.drains]
        new = [number for each, number in plan.starts if each is role]
        assert len(kept) + len(new) == wanted.get(role, list(present.values()).count(role))
        assert not new or len(kept) == list(present.values()).count(role), "nothing is replaced"


def test_what_a_person_writes() -> None:
    assert parse_counts(["prefill=3", "decode=1"]) == {"prefill": 3, "decode": 1}
    for wrong, says in (("prefil=3", "did you mean 'prefill'"), ("decode", "decode=3"), ("decode=-1", "decode=3")):
        with pytest.raises(InvalidInput, match=says):
            parse_counts([wrong])
    with pytest.raises(InvalidInput, match="twice"):
        parse_counts(["decode=1", "decode=2"])
