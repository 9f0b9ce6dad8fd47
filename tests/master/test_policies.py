"""What every eviction policy promises, and what each of them promises beyond that."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.base.errors import ConfigError
from moonpool.master.policies import POLICIES, EvictionPolicy, LeastRecentlyUsed, S3Fifo, make_policy
from moonpool.master.rules import PoolRules

Steps = list[tuple[str, int, int]]
VERBS = st.sampled_from(["insert", "insert", "access", "remove", "evict", "keep"])
STEPS = st.lists(st.tuples(VERBS, st.integers(0, 9), st.integers(0, 9)), max_size=80)


@pytest.fixture(params=sorted(POLICIES))
def policy(request: pytest.FixtureRequest) -> EvictionPolicy:
    return make_policy(request.param)


def fill(policy: EvictionPolicy, slots: Iterable[int]) -> None:
    for slot in slots:
        policy.insert(slot, None, 1, fingerprint(slot))


def fingerprint(slot: int) -> int:
    return (slot + 1) * 0x9E37_79B1 & 0xFFFF_FFFF


def evict(policy: EvictionPolicy, num: int) -> list[int]:
    gone: list[int] = []
    for slot in policy.victims():
        if len(gone) == num:
            break
        policy.remove(slot)
        gone.append(slot)
    return gone


def test_there_is_a_default_and_no_other_names() -> None:
    assert PoolRules.eviction in POLICIES
    assert len(make_policy(PoolRules.eviction)) == 0
    with pytest.raises(ConfigError, match="no eviction policy 'mru'"):
        make_policy("mru")


def test_an_empty_policy_has_no_victims(policy: EvictionPolicy) -> None:
    assert list(policy.victims()) == []
    assert 0 not in policy
    policy.check_integrity()


def test_every_slot_is_given_once(policy: EvictionPolicy) -> None:
    fill(policy, range(5000))
    policy.access(list(range(0, 5000, 3)))
    assert sorted(policy.victims()) == list(range(5000))
    assert len(policy) == 5000
    policy.check_integrity()


def test_victims_may_be_removed_while_walking(policy: EvictionPolicy) -> None:
    fill(policy, range(5000))
    assert sorted(evict(policy, 5000)) == list(range(5000))
    assert len(policy) == 0
    assert list(policy.victims()) == []
    policy.check_integrity()


def test_other_slots_may_be_removed_while_walking(policy: EvictionPolicy) -> None:
    fill(policy, range(100))
    given: list[int] = []
    for slot in policy.victims():
        given.append(slot)
        for each in {slot, slot ^ 1}:
            if each in policy:
                policy.remove(each)
    assert len(given) == 50
    assert len({slot // 2 for slot in given}) == 50


def test_a_slot_may_stand_for_another_object_before_the_next_is_asked_for(policy: EvictionPolicy) -> None:
    fill(policy, range(100))
    for mark, slot in zip(range(1000, 1400), policy.victims(), strict=False):
        policy.remove(slot)
        policy.insert(slot, None, 1, fingerprint(mark))
        policy.check_integrity()
    assert mark == 1399  # it is never out of victims: none was kept


def test_what_is_kept_waits_for_all_others(policy: EvictionPolicy) -> None:
    """Even when each iteration is a new one that sees a few slots only, as the master's steps do."""
    fill(policy, range(300))
    seen = set[int]()
    for _ in range(60):  # the seventh was given when the caller went away: it may come again at once
        seen.update(islice(policy.victims(), 7))
    assert seen == set(range(300))
    policy.check_integrity()


def test_what_is_kept_is_not_kept_for_ever(policy: EvictionPolicy) -> None:
    fill(policy, range(300))
    kept = set(islice(policy.victims(), 20))
    mark = 1000
    for _ in range(100):
        for slot in evict(policy, 30):
            kept.discard(slot)
            mark += 1
            policy.insert(slot, None, 1, fingerprint(mark))
    assert not kept


def test_a_removed_slot_is_gone_and_may_come_again(policy: EvictionPolicy) -> None:
    fill(policy, range(10))
    policy.remove(4)
    assert 4 not in policy
    assert 4 not in list(policy.victims())
    policy.insert(4, None, 1, 77)
    assert 4 in list(policy.victims())
    with pytest.raises(AssertionError):
        policy.insert(4, None, 1, 77)


def test_pinned_slots_may_be_looked_up(policy: EvictionPolicy) -> None:
    fill(policy, range(100))
    policy.remove(4)
    policy.access([3, 4, 5])
    policy.access(list(range(100)))
    policy.insert(4, None, 1, fingerprint(4))
    assert sorted(policy.victims()) == list(range(100))
    policy.check_integrity()


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_agrees_with_a_set(name: str, steps: Steps) -> None:
    """Whatever is done, and whatever parents are told, the policy holds what was inserted and not removed."""
    policy, model = make_policy(name), set[int]()
    known = set[int]()
    for step in steps:
        play(policy, model, known, step)
        policy.check_integrity()
        assert len(policy) == len(model)
        assert all((slot in policy) == (slot in model) for slot in range(10))
    assert sorted(policy.victims()) == sorted(model)


def play(policy: EvictionPolicy, model: set[int], known: set[int], step: tuple[str, int, int]) -> None:
    verb, slot, other = step
    if verb == "insert" and slot not in model:
        policy.insert(slot, other if other in known else None, 1, fingerprint(slot + 10 * (other % 2)))
        model.add(slot)
        known.add(slot)
    elif verb == "access":
        policy.access([each for each in (slot, other, slot) if each in known])
    elif verb == "remove" and slot in model:
        policy.remove(slot)
        model.remove(slot)
    elif verb == "evict":
        model -= set(evict(policy, slot))
    elif verb == "keep":
        kept = list(islice(policy.victims(), slot))
        assert len(kept) == len(set(kept))


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_the_order_is_a_function_of_the_calls(name: str) -> None:
    def run() -> list[int]:
        policy = make_policy(name)
        for round_ in range(20):
            fill(policy, range(500 * round_, 500 * round_ + 500))
            policy.access(range(0, 500 * round_, 7))
            evict(policy, 250)
        return list(policy.victims())

    assert run() == run()


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_memory_is_bounded_by_the_slots(name: str) -> None:
    num_slots = 1 << 15
    tracemalloc.start()
    try:
        policy = make_policy(name)
        fill(policy, range(num_slots))
        most = tracemalloc.get_traced_memory()[0]
        for _ in range(2):  # look-ups, pins and turnover add nothing
            policy.access(range(num_slots))
            for slot in evict(policy, num_slots // 4):
                policy.insert(slot, None, 1, fingerprint(slot + num_slots))
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert most / num_slots < 120  # of which the ghosts, bounded in number, are up to 72
    assert after - most < 1 << 20


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_lookups_without_end_take_no_memory(name: str) -> None:
    policy = make_policy(name)
    fill(policy, range(1000))
    tracemalloc.start()
    try:
        for _ in range(300):
            policy.access(range(1000))
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()


# least recently used


def test_lru_looking_up_a_chain_keeps_its_beginning() -> None:
    policy = LeastRecentlyUsed()
    fill(policy, range(6))
    policy.access([1, 2, 3])
    assert list(policy.victims()) == [0, 4, 5, 3, 2, 1]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["insert", "access", "remove"]), st.integers(0, 9)), max_size=60))
def test_lru_agrees_with_a_dict(steps: list[tuple[str, int]]) -> None:
    policy, model = LeastRecentlyUsed(), dict[int, None]()  # oldest first
    for verb, slot in steps:
        if verb == "insert" and slot not in model:
            policy.insert(slot, None, 1, slot)
            model[slot] = None
        elif verb == "access" and slot in model:
            policy.access([slot])
            del model[slot]
            model[slot] = None
        elif verb == "remove" and slot in model:
            policy.remove(slot)
            del model[slot]
    assert evict(policy, 10) == list(model)


def test_lru_of_many_slots_is_near() -> None:
    policy = LeastRecentlyUsed()
    fill(policy, range(50_000))
    gone = evict(policy, 5000)
    assert max(gone) < 10_000  # the oldest tenth, from the oldest fifth


# S3-FIFO


def test_s3fifo_one_look_up_passes_the_trial() -> None:
    policy = S3Fifo()
    fill(policy, range(20))
    policy.access([3])
    gone = evict(policy, 19)
    assert 3 not in gone
    assert 3 in policy


def test_s3fifo_what_comes_back_soon_is_not_on_trial_again() -> None:
    policy = S3Fifo()
    fill(policy, range(20))
    assert evict(policy, 2) == [0, 1]
    policy.insert(0, None, 1, fingerprint(0))  # again
    policy.insert(1, None, 1, 12345)  # another one
    assert evict(policy, 19)[-1] == 1
    assert 0 in policy


def test_s3fifo_a_scan_does_not_flush_what_is_used() -> None:
    policy = S3Fifo()
    used, free, mark = range(50), list(range(50, 100)), 1000
    fill(policy, range(100))
    for _ in range(100):
        policy.access(used)
        for slot in evict(policy, 10):
            assert slot in free
            mark += 1
            policy.insert(slot, None, 1, mark)
