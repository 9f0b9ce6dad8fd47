"""The prefix-aware policy: chains from their ends, and what it learns about when blocks come back."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.master.policies import LeastRecentlyUsed, PrefixAware
from moonpool.master.policies.base import EvictionPolicy
from moonpool.master.policies.columns import Ghosts
from moonpool.master.policies.prefix import EDGES, NUM_BINS, NUM_CLASSES, ReuseModel, bin_of, bins_of, count

KEYS = iter(range(1, 1 << 32, 104_729))


def chain(policy: PrefixAware, slots: range, parent: int | None = None) -> None:
    for slot in slots:
        policy.insert(slot, parent, 1, next(KEYS))
        parent = slot


def evict(policy: EvictionPolicy, num: int) -> list[int]:
    gone: list[int] = []
    for slot in policy.victims():
        policy.remove(slot)
        gone.append(slot)
        if len(gone) == num:
            break
    return gone


def test_a_chain_goes_from_its_end() -> None:
    policy = PrefixAware()
    chain(policy, range(10))
    assert evict(policy, 10) == list(range(9, -1, -1))


def test_a_shared_beginning_goes_last() -> None:
    policy = PrefixAware()
    chain(policy, range(3))
    chain(policy, range(3, 6), parent=2)
    chain(policy, range(6, 9), parent=2)
    order = evict(policy, 9)
    assert order[-3:] == [2, 1, 0]
    assert [slot for slot in order if 3 <= slot < 6] == [5, 4, 3]
    assert [slot for slot in order if 6 <= slot < 9] == [8, 7, 6]


def test_a_cold_chain_goes_whole_before_a_warm_one_is_touched() -> None:
    policy = PrefixAware()
    for first in range(0, 1000, 10):
        chain(policy, range(first, first + 10))
    for _ in range(3):
        policy.access([slot for slot in range(1000) if slot % 20 < 10])
    gone = evict(policy, 200)
    assert all(slot % 20 >= 10 for slot in gone)
    assert len({slot // 10 for slot in gone}) == 20  # whole chains


def test_a_pinned_child_does_not_hold_its_parent() -> None:
    policy = PrefixAware()
    chain(policy, range(3))
    policy.remove(2)
    assert list(policy.victims()) == [1, 0]
    policy.insert(2, 1, 1, next(KEYS))
    assert next(iter(policy.victims())) == 2
    policy.check_integrity()


def test_a_pinned_parent_comes_back_with_its_children() -> None:
    policy = PrefixAware()
    policy.insert(0, None, 1, 100)
    policy.insert(1, 0, 1, 101)
    policy.remove(0)
    policy.insert(0, None, 1, 100)
    policy.check_integrity()
    assert list(policy.victims()) == [1, 0]


def test_another_object_in_the_parents_slot_has_no_children() -> None:
    policy = PrefixAware()
    policy.insert(0, None, 1, 100)
    policy.insert(1, 0, 1, 101)
    policy.remove(0)
    policy.insert(0, None, 1, 200)
    policy.remove(1)
    policy.check_integrity()
    assert list(policy.victims()) == [0]


def test_when_the_ends_are_kept_the_rest_is_given_too() -> None:
    policy = PrefixAware()
    chain(policy, range(5))
    chain(policy, range(5, 8), parent=1)
    given = list(policy.victims())
    assert set(given[:2]) == {4, 7}  # the two ends first
    assert sorted(given) == list(range(8))
    assert given.index(3) < given.index(2)
    assert given.index(6) < given.index(5)


def test_a_circle_of_parents_is_not_made() -> None:
    policy = PrefixAware()
    policy.insert(0, None, 1, 100)
    policy.insert(1, 0, 1, 101)
    policy.remove(0)
    policy.insert(0, 1, 1, 100)  # told wrong: 1 continues 0
    policy.check_integrity()
    assert evict(policy, 2) == [1, 0]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["store", "store", "look", "evict"]), st.integers(0, 30)), max_size=60))
def test_no_block_goes_before_its_child(steps: list[tuple[str, int]]) -> None:
    policy = PrefixAware()
    parents: dict[int, int | None] = {}
    for verb, number in steps:
        stored = sorted(parents)
        if verb == "store":
            slot = next(slot for slot in range(100) if slot not in parents)
            parents[slot] = stored[number % len(stored)] if stored and number else None
            policy.insert(slot, parents[slot], 1, next(KEYS))
        elif verb == "look" and stored:
            policy.access(path(parents, stored[number % len(stored)]))
        elif verb == "evict":
            for slot in evict(policy, number % 5 + 1):
                assert slot not in {parents[each] for each in parents}
                del parents[slot]
        policy.check_integrity()


def path(parents: dict[int, int | None], slot: int) -> list[int]:
    slots = [slot]
    while (parent := parents[slots[-1]]) is not None:
        slots.append(parent)
    return slots[::-1]


def hits_of_a_loop(policy: EvictionPolicy, num_keys: int, capacity: int, rounds: int) -> int:
    """The keys come round and round, and not all of them fit."""
    slots: dict[int, int] = {}
    keys = dict[int, int]()
    free, hits = list(range(capacity)), 0
    for use in range(rounds * num_keys):
        key = use % num_keys
        if key in slots:
            hits += 1
            policy.access([slots[key]])
            continue
        if not free:
            [slot] = evict(policy, 1)
            del slots[keys[slot]]
            free.append(slot)
        slots[key] = free.pop()
        keys[slots[key]] = key
        policy.insert(slots[key], None, 1, key * 0x9E37_79B1 & 0xFFFF_FFFF)
    return hits


def test_learns_to_keep_a_part_of_a_loop_that_does_not_fit() -> None:
    """Where LRU never hits: what was used just now comes back last."""
    assert hits_of_a_loop(LeastRecentlyUsed(), 600, 300, rounds=20) == 0
    assert hits_of_a_loop(PrefixAware(), 600, 300, rounds=20) > 0.25 * 600 * 20


# the model


def test_bins_are_the_same_one_by_one_and_all_at_once() -> None:
    ages = [0, 1, 15, 16, 17, 22, 23, 1000, EDGES[-1], 1 << 40]
    assert [bin_of(age) for age in ages] == bins_of(np.array(ages)).tolist()


def test_before_it_learned_anything_older_and_less_used_is_worth_less() -> None:
    table = ReuseModel().table
    assert (np.diff(table[:, 1:], axis=1) < 0).all()
    assert (np.diff(table, axis=0) > 0).all()


def test_learns_that_what_is_near_its_return_is_worth_most() -> None:
    model = ReuseModel()
    observed = np.zeros((NUM_CLASSES, NUM_BINS))
    observed[0, bin_of(4096)] = 10_000  # all come back at that age
    model.ended_many(observed)
    model.learn(np.zeros_like(observed))
    worth = model.table[0]
    assert worth[bin_of(0)] < worth[bin_of(1024)] < worth[bin_of(4096)]
    assert worth[bin_of(4096)] > 10 * worth[bin_of(16_384)]
    model.forget_half()
    model.learn(np.zeros_like(observed))
    assert worth[bin_of(1024)] < model.table[0][bin_of(4096)]


def test_waiting_ones_count_against_a_return() -> None:
    model = ReuseModel()
    for _ in range(100):
        model.ended(0, 1000)
    none = np.zeros((NUM_CLASSES, NUM_BINS))
    model.learn(none)
    before = model.table[0][0]
    model.learn(count(np.zeros(10_000, np.uint8), np.full(10_000, 5000), each=1))
    assert model.table[0][0] < 0.1 * before


def test_ghosts_are_taken_once_and_make_room_for_newer_ones() -> None:
    ghosts = Ghosts()
    assert ghosts.put(7, 3, now=100, age=40) is None
    assert ghosts.pop(8, now=150) is None
    assert ghosts.pop(7, now=150) == (3, 90)
    assert ghosts.pop(7, now=150) is None
    displaced = [ghosts.put(key, 1, now=200) for key in range(0, 1 << 32, 1 << 14)]
    assert (1, 0) in displaced
    marks, ages = ghosts.sample(slice(None), now=250)
    assert set(marks.tolist()) == {1}
    assert set(ages.tolist()) == {50}


def test_ghosts_live_through_the_wrap_of_their_count() -> None:
    ghosts = Ghosts()
    ghosts.put(7, 0, now=(1 << 32) - 10)
    _, ages = ghosts.sample(slice(None), now=(1 << 32) + 5)
    assert ages.tolist() == [15]
    assert ghosts.pop(7, now=(1 << 32) + 5) == (0, 15)
