"""The prefix index: leading runs only, gaps, tiers, bounds, and agreement with a plain model."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st
from leading_runs import leading_blocks, num_keys, num_slots

from moonpool.base.keys import object_key
from moonpool.conductor.placement.prefix_index import PrefixIndex, fingerprints
from moonpool.conductor.placement.tables import Slots, slot_index, slots_in
from moonpool.store.messages import Tier

KEYS = [bytes([number]) * 32 for number in range(16)]
PRINTS = fingerprints(KEYS)
SUBSET = st.sets(st.sampled_from(KEYS)).map(tuple)


def objects(keys: Iterable[bytes]) -> list[bytes]:
    return [object_key(key, 0, 0) for key in keys]


def entry_nbytes(index: PrefixIndex) -> int:
    """What the module says one key costs at most."""
    return 170 + 4 * (num_slots(index) // 30)


def test_only_the_leading_run_counts() -> None:
    index = PrefixIndex()
    index.add_worker("a", 100)
    index.add_worker("b", 100)
    assert index.report("a", 1, KEYS[:5], ())
    assert index.report("b", 1, KEYS[1:9], ())
    index.replace_pool(objects([*KEYS[:3], *KEYS[4:9]]))
    assert leading_blocks(index, KEYS[:10]) == (3, {"a": 5, "b": 0})
    assert leading_blocks(index, []) == (0, {"a": 0, "b": 0})


def test_workers_with_the_same_run_are_one_group() -> None:
    index = PrefixIndex()
    slots = {name: index.add_worker(name, 100) for name in "abcd"}
    for name in "ab":
        index.report(name, 1, KEYS[:4], ())
    index.report("c", 1, KEYS, ())
    among = sum(1 << slot for name, slot in slots.items() if name != "b")
    leading = index.leading(PRINTS, among)
    assert leading.groups == ((0, 1 << slots["d"]), (4, 1 << slots["a"]), (16, 1 << slots["c"]))
    assert index.leading(PRINTS, 0).groups == ()


PARTS = ("a", "b", "pool")


@given(
    st.lists(st.tuples(st.sampled_from(PARTS), SUBSET, SUBSET), max_size=9),
    st.lists(st.sampled_from(KEYS), unique=True),
)
def test_agrees_with_plain_sets(
    changes: list[tuple[str, tuple[bytes, ...], tuple[bytes, ...]]], keys: list[bytes]
) -> None:
    index = PrefixIndex()
    plain: dict[str, set[bytes]] = {part: set() for part in PARTS}
    sequences = dict.fromkeys(PARTS, 0)
    for name in "ab":
        index.add_worker(name, 100)
    for part, added, removed in changes:
        sequences[part] += 1
        if part == "pool":
            index.update_pool(objects(added), objects(removed))
        else:
            assert index.report(part, sequences[part], added, removed)
        plain[part] = (plain[part] | set(added)) - set(removed)
    runs = {part: next((at for at, key in enumerate(keys) if key not in plain[part]), len(keys)) for part in PARTS}
    assert leading_blocks(index, keys) == (runs["pool"], {"a": runs["a"], "b": runs["b"]})
    assert (index.worker_blocks("a"), index.pool_blocks) == (len(plain["a"]), len(plain["pool"]))
    assert num_keys(index) == len(set().union(*plain.values()))


def test_a_missing_report_makes_the_part_unknown_until_the_worker_registers_again() -> None:
    index = PrefixIndex()
    index.add_worker("a", 100)
    assert index.report("a", 1, KEYS, ())
    assert not index.report("a", 3, KEYS[:1], ())
    assert not index.report("a", 4, KEYS, ())
    assert not index.report("a", 1, KEYS, ())
    assert leading_blocks(index, KEYS) == (0, {"a": 0})
    index.add_worker("a", 100)
    assert index.report("a", 1, KEYS[:2], ())
    assert leading_blocks(index, KEYS) == (0, {"a": 2})


def test_a_worker_that_goes_takes_its_keys_along_and_its_slot_is_used_again() -> None:
    index = PrefixIndex()
    first = index.add_worker("a", 100)
    index.report("a", 1, KEYS, ())
    index.expect("a", PRINTS)
    index.drop_worker("a")
    assert leading_blocks(index, KEYS) == (0, {})
    index.unexpect("a", PRINTS)
    index.add_worker("b", 100)
    assert leading_blocks(index, KEYS) == (0, {"b": 0})  # not what "a" had, whatever its slot
    for sequence in range(1, 1100):  # one shard is swept with each report
        index.report("b", sequence, (), ())
    assert num_keys(index) == 0
    assert index.add_worker("c", 100) == first
    assert leading_blocks(index, KEYS) == (0, {"b": 0, "c": 0})


def test_a_pool_that_comes_and_goes_leaves_nothing_behind() -> None:
    index = PrefixIndex()
    for _ in range(3000):
        index.replace_pool(objects(KEYS[:4]))
        index.replace_pool(())
    assert num_slots(index) < 4 * 1100
    for _ in range(2100):
        index.update_pool((), ())
    assert (num_keys(index), index.pool_blocks) == (0, 0)
    before = num_slots(index)
    for _ in range(500):
        index.replace_pool(objects(KEYS[:4]))
    assert num_slots(index) == before  # old slots are taken


def test_what_was_sent_there_is_expected_there() -> None:
    index = PrefixIndex()
    index.add_worker("a", 100)
    index.expect("a", PRINTS[:4])
    index.expect("a", PRINTS[:2])
    index.expect("a", PRINTS[:2])
    assert leading_blocks(index, KEYS)[1] == {"a": 4}
    index.unexpect("a", PRINTS[:4])
    assert leading_blocks(index, KEYS)[1] == {"a": 2}
    index.report("a", 1, KEYS[:1], ())
    index.unexpect("a", PRINTS[:2])
    assert leading_blocks(index, KEYS)[1] == {"a": 2}
    index.unexpect("a", PRINTS[:2])
    assert leading_blocks(index, KEYS)[1] == {"a": 1}


def test_tiers_follow_the_stores_events() -> None:
    index = PrefixIndex()
    stored = objects(KEYS[:6])
    index.replace_pool(stored, [(stored[1], Tier.SSD), (stored[2], Tier.SSD | Tier.DRAM), (stored[4], Tier.SSD)])
    leading = index.leading(PRINTS, 0)
    assert (leading.pool, leading.on_ssd) == (6, (1, 4))
    assert [leading.num_on_ssd(*span) for span in ((0, 6), (2, 4), (1, 2), (4, 4))] == [2, 0, 1, 0]
    index.update_pool((), stored[2:3], [(stored[1], Tier.DRAM), (stored[5], Tier.SSD), (stored[2], Tier.SSD)])
    assert index.leading(PRINTS, 0)[:2] == (2, ())  # a tier of what is not there says nothing
    index.update_pool(stored[2:3], ())
    assert index.leading(PRINTS, 0)[:2] == (6, (4, 5))
    assert index.pool_blocks == 6


def test_a_snapshot_replaces_and_other_objects_do_not_count() -> None:
    index = PrefixIndex()
    index.replace_pool([*objects(KEYS), b"checkpoint/1", b"x" * 100], [(b"checkpoint/1", Tier.SSD)])
    assert index.pool_blocks == 16
    index.replace_pool(objects(KEYS[:1]))
    assert index.pool_blocks == 1
    assert leading_blocks(index, KEYS)[0] == 1


def test_bounds() -> None:
    index = PrefixIndex(max_pool_blocks=3)
    index.add_worker("a", 2)
    index.report("a", 1, KEYS[:5], ())
    index.replace_pool(objects(KEYS[:5]))
    assert (index.worker_blocks("a"), index.pool_blocks, index.left_out) == (2, 3, 5)
    index.update_pool(objects(KEYS[:3]), ())  # known ones are not left out
    assert index.left_out == 5
    index.update_pool((), objects(KEYS[:1]))
    index.update_pool(objects(KEYS[:1]), ())
    assert leading_blocks(index, KEYS)[0] == 3


def test_many_times_more_prefixes_than_the_bounds_stay_within_the_stated_memory() -> None:
    pages, pool_blocks, batch = 2_000, 5_000, 500
    index, rng = PrefixIndex(max_pool_blocks=pool_blocks), random.Random(1)
    index.add_worker("a", pages)
    held: list[tuple[bytes, ...]] = []
    tracemalloc.start()
    for sequence in range(1, 201):
        keys = tuple(rng.randbytes(32) for _ in range(batch))
        held.append(keys)
        index.update_pool(objects(keys), ())
        index.report("a", sequence, keys[: batch // 2], held[-9][: batch // 2] if len(held) > 8 else ())
    held.clear()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert index.pool_blocks == pool_blocks
    assert num_keys(index) <= pages + pool_blocks
    assert used <= (pages + pool_blocks) * entry_nbytes(index) + 300_000  # the empty shards


def test_a_key_costs_no_more_than_stated() -> None:
    rng = random.Random(2)
    for count in (20_000, 87_500):  # the second: the dicts of the shards have just grown, each has 85 keys on average
        keys = [rng.randbytes(32) for _ in range(count)]
        index = PrefixIndex()
        index.add_worker("a", count)
        tracemalloc.start()
        index.report("a", 1, keys, ())
        keys.clear()
        used, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert used / count <= entry_nbytes(index)


@given(st.sets(st.integers(0, 1500)))
def test_masks_and_slots_are_the_same_thing(slots: set[int]) -> None:
    mask = sum(1 << slot for slot in slots)
    assert slots_in(mask) == [int(slot) for slot in slot_index(mask)] == sorted(slots)


@given(st.lists(st.integers(0, 3), max_size=60))
@settings(deadline=None)
def test_a_slot_has_one_owner_and_a_retired_one_rests_for_a_whole_sweep(steps: list[int]) -> None:
    slots = Slots()
    owned: set[int] = set()
    unswept: set[int] = set()
    for step in steps:
        if step == 0 and owned:
            slot = owned.pop()
            slots.retire(slot)
            unswept.add(slot)
        elif step == 1:
            unswept -= set(slots_in(slots.sweeping))
            slots.finish_sweep()
        else:
            slot = slots.allocate()
            assert slot not in owned | unswept
            owned.add(slot)
