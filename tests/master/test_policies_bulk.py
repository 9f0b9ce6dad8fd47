"""insert_many() is insert() of each: the same slots and chains, and the same order of victims but among equals."""

from __future__ import annotations

from itertools import islice
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.master.policies import POLICIES, EvictionPolicy, PrefixAware, make_policy


def fingerprint(key: int) -> int:
    return crc32(key.to_bytes(8, "little"))


def order(policy: EvictionPolicy) -> list[int]:
    found = []
    for slot in policy.victims():
        found.append(slot)
        policy.remove(slot)
    return found


def uses(policy: PrefixAware) -> bytes:
    """How often each slot was used."""
    policy._apply_pending()
    return bytes(policy._uses)


@pytest.mark.parametrize("name", POLICIES)
@given(
    chains=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=12), max_size=8),
    accessed=st.lists(st.integers(0, 60), max_size=10),
)
def test_many_are_as_one_by_one(name: str, chains: list[list[int]], accessed: list[int]) -> None:
    """`chains` are keys, each continuing the one before it; a key that is there already is only a parent."""
    one, many = make_policy(name), make_policy(name)
    slot_of: dict[int, int] = {}
    parent_of: dict[int, int | None] = {}
    for chain in chains:
        slots: list[int] = []
        parents: list[int | None] = []
        marks: list[int] = []
        parent: int | None = None
        for key in chain:
            if key not in slot_of:
                slot_of[key] = len(slot_of)
                slots.append(slot_of[key])
                parents.append(parent)
                parent_of[slot_of[key]] = parent
                marks.append(fingerprint(key))
            parent = slot_of[key]
        for slot, above, mark in zip(slots, parents, marks, strict=True):
            one.insert(slot, above, 0, mark)
        if slots:
            many.insert_many(slots, parents, marks)
        found = [slot for slot in accessed if slot < len(slot_of)]
        one.access(found)
        many.access(found)
        many.check_integrity()
    assert len(one) == len(many) == len(slot_of)
    first, second = order(one), order(many)
    many.check_integrity()
    if name == "prefix":  # equals go in the order in which they became candidates, and that differs
        assert sorted(first) == sorted(second)
        went = {slot: at for at, slot in enumerate(second)}
        assert all(above is None or went[slot] < went[above] for slot, above in parent_of.items())
    else:
        assert first == second


@pytest.mark.parametrize("name", POLICIES)
def test_what_comes_back_is_recognised(name: str) -> None:
    """Evicted, put again and evicted again: both policies have the same memory of it."""
    one, many = make_policy(name), make_policy(name)
    keys = list(range(600))
    for turn in range(4):
        for policy in (one, many):
            gone = list(islice(policy.victims(), 0)) if not turn else order(policy)
            assert sorted(gone) == ([] if not turn else keys)
        marks = [fingerprint(key * 7 + turn % 2) for key in keys]
        for key, mark in zip(keys, marks, strict=True):
            one.insert(key, None, 0, mark)
        many.insert_many(keys, None, marks)
        one.access(keys[::3])
        many.access(keys[::3])
    if isinstance(one, PrefixAware) and isinstance(many, PrefixAware):
        uses_of_one, uses_of_many = uses(one), uses(many)
        # Of two fingerprints with one place in the table the later to go is remembered, and equals go in any order.
        assert sum(a != b for a, b in zip(uses_of_one, uses_of_many, strict=True)) < 20
        assert len(set(uses_of_one[:600])) > 1, "some were used more often than others"
    else:
        assert order(one) == order(many)
