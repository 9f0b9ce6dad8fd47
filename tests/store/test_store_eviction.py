"""The order in which a policy gives entries up."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.store.eviction import Evictable, LeastRecentlyUsed


class Entry(Evictable):
    __slots__ = ("name",)

    def __init__(self, name: int) -> None:
        self.name = name


def names(policy: LeastRecentlyUsed[Entry]) -> list[int]:
    return [entry.name for entry in policy.victims()]


def test_access_moves_to_the_end() -> None:
    policy: LeastRecentlyUsed[Entry] = LeastRecentlyUsed()
    first, second, third = (Entry(name) for name in range(3))
    for entry in (first, second, third):
        policy.on_insert(entry)
    policy.on_access(first)
    policy.on_access(first)
    assert names(policy) == [1, 2, 0]
    policy.on_remove(second)
    assert names(policy) == [2, 0]
    policy.check_integrity()


def test_victims_may_be_removed_while_walking() -> None:
    policy: LeastRecentlyUsed[Entry] = LeastRecentlyUsed()
    for name in range(5):
        policy.on_insert(Entry(name))
    for entry in policy.victims():
        policy.on_remove(entry)
    assert len(policy) == 0
    assert names(policy) == []


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["insert", "access", "remove"]), st.integers(0, 7)), max_size=60))
def test_agrees_with_an_ordered_dict(steps: list[tuple[str, int]]) -> None:
    policy: LeastRecentlyUsed[Entry] = LeastRecentlyUsed()
    model: OrderedDict[int, Entry] = OrderedDict()
    for verb, name in steps:
        if verb == "insert" and name not in model:
            model[name] = Entry(name)
            policy.on_insert(model[name])
        elif verb == "access" and name in model:
            model.move_to_end(name)
            policy.on_access(model[name])
        elif verb == "remove" and name in model:
            policy.on_remove(model.pop(name))
        policy.check_integrity()
        assert names(policy) == list(model)
        assert len(policy) == len(model)
