"""The prefix index: leading runs only, gaps, bounds, and agreement with a plain model."""

from __future__ import annotations

import os
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.keys import object_key
from moonpool.conductor.prefix_index import BYTES_PER_KEY, PrefixIndex

KEYS = [bytes([number]) * 32 for number in range(16)]
SUBSET = st.sets(st.sampled_from(KEYS)).map(tuple)


def objects(keys, shard: int = 0) -> list[bytes]:
    return [object_key(key, 0, shard) for key in keys]


def test_only_the_leading_run_counts() -> None:
    index = PrefixIndex()
    index.add_worker("a", 100)
    index.add_worker("b", 100)
    assert index.report("a", 1, KEYS[:5], ())
    assert index.report("b", 1, KEYS[1:9], ())
    index.replace_pool(objects([*KEYS[:3], *KEYS[4:9]]))
    assert index.leading_blocks(KEYS[:10]) == (3, {"a": 5, "b": 0})
    assert index.leading_blocks([]) == (0, {"a": 0, "b": 0})


@given(st.lists(st.tuples(SUBSET, SUBSET), max_size=6), st.lists(st.sampled_from(KEYS), unique=True))
def test_agrees_with_plain_sets(changes, keys) -> None:
    index, plain = PrefixIndex(), set()
    index.add_worker("a", 100)
    for sequence, (added, removed) in enumerate(changes, 1):
        assert index.report("a", sequence, added, removed)
        index.update_pool(objects(added), objects(removed))
        plain = (plain | set(added)) - set(removed)
    run = next((at for at, key in enumerate(keys) if key not in plain), len(keys))
    assert index.leading_blocks(keys) == (run, {"a": run})
    assert index.worker_blocks("a") == index.pool_blocks == len(plain)


def test_a_missing_report_makes_the_part_unknown_until_the_worker_registers_again() -> None:
    index = PrefixIndex()
    index.add_worker("a", 100)
    assert index.report("a", 1, KEYS, ())
    assert not index.report("a", 3, KEYS[:1], ())
    assert not index.report("a", 4, KEYS, ())
    assert not index.report("a", 1, KEYS, ())
    assert index.leading_blocks(KEYS).workers == {"a": 0}
    index.add_worker("a", 100)
    assert index.report("a", 1, KEYS[:2], ())
    assert index.leading_blocks(KEYS).workers == {"a": 2}


def test_a_worker_that_goes_takes_its_keys_along() -> None:
    index = PrefixIndex()
    index.add_worker("a", 100)
    index.report("a", 1, KEYS, ())
    index.drop_worker("a")
    assert index.leading_blocks(KEYS).workers == {}
    index.unexpect("a", KEYS)


def test_what_was_sent_there_is_expected_there() -> None:
    index = PrefixIndex()
    index.add_worker("a", 100)
    index.expect("a", KEYS[:4])
    index.expect("a", KEYS[:2])
    assert index.leading_blocks(KEYS).workers == {"a": 4}
    index.unexpect("a", KEYS[:4])
    assert index.leading_blocks(KEYS).workers == {"a": 2}
    index.report("a", 1, KEYS[:1], ())
    index.unexpect("a", KEYS[:2])
    assert index.leading_blocks(KEYS).workers == {"a": 1}


def test_a_block_is_in_the_pool_when_all_its_shards_are() -> None:
    index = PrefixIndex(shards_per_block=2)
    index.replace_pool(objects(KEYS[:4], 0))
    assert index.pool_blocks == 0
    index.update_pool(objects(KEYS[:3], 1), ())
    assert index.leading_blocks(KEYS).pool == 3
    index.update_pool((), objects(KEYS[1:2], 0))
    assert index.leading_blocks(KEYS).pool == 1
    index.update_pool((), objects(KEYS[1:2], 1))
    index.update_pool(objects(KEYS[1:2], 0), ())
    assert index.leading_blocks(KEYS).pool == 1


def test_a_snapshot_replaces_and_other_objects_do_not_count() -> None:
    index = PrefixIndex()
    index.replace_pool([*objects(KEYS), b"checkpoint/1", b"x" * 100])
    assert index.pool_blocks == 16
    index.replace_pool(objects(KEYS[:1]))
    assert index.pool_blocks == 1


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
    assert index.leading_blocks(KEYS).pool == 3


def test_a_key_costs_no_more_than_stated() -> None:
    for count, bound in ((20_000, BYTES_PER_KEY), (39_400, BYTES_PER_KEY), (80_000, 90), (157_300, 90)):
        keys = [os.urandom(32) for _ in range(count)]
        index = PrefixIndex()
        index.add_worker("a", count)
        tracemalloc.start()
        index.report("a", 1, keys, ())
        used, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert used / count <= bound
