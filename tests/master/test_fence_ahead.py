"""Generations that were never given out: refused at the tcp port, and taken back where they were stamped even so."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from state_pool import G, Pool
from store_pool import MIB, LocalPool
from waiting import HANG_S, wait_until

from moonpool.base.errors import StaleGeneration
from moonpool.master.state.space import EPOCH_BITS, Generations
from moonpool.store import messages as m
from moonpool.store.client import Put
from moonpool.transfer.config import TransferConfig
from moonpool.transfer.engine import TransferEngine
from moonpool.transfer.memory.fence import Fence
from moonpool.transfer.memory.segment import Segment

AHEAD = 2**60
RANGE = 1 << EPOCH_BITS


# the fence


def make_fence(num_granules: int = 8) -> Fence:
    return Fence(np.zeros(num_granules, dtype=np.uint64), 4096)


@pytest.mark.parametrize("nbytes", [1, 8 * 4096, 30 * 4096], ids=["one", "few", "many"])
def test_no_generation_above_the_limit_gets_in(nbytes: int) -> None:
    fence = make_fence(32)
    fence.limit = 100
    fence.admit(0, nbytes, 100)
    with pytest.raises(StaleGeneration, match="no generation above 100 was given out"):
        fence.admit(0, nbytes, 101)
    assert fence.stamps_above(100) == []


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(0, 5))
def test_stamps_above_are_found_in_runs(stamps: list[int], above: int) -> None:
    fence = make_fence(len(stamps))
    for at, stamp in enumerate(stamps):
        fence.stamp(4096 * at, 1, stamp)
    runs = fence.stamps_above(above)
    flat = [(offset + 4096 * at, stamp) for offset, nbytes, stamp in runs for at in range(nbytes // 4096)]
    assert flat == [(4096 * at, stamp) for at, stamp in enumerate(stamps) if stamp > above]
    assert all(one[0] + one[1] < two[0] or one[2] != two[2] for one, two in pairwise(runs))


def test_only_the_stamp_that_was_found_is_replaced() -> None:
    fence = make_fence()
    for at, stamp in enumerate([9, 9, 7, 9]):
        fence.stamp(4096 * at, 1, stamp)
    fence.restamp(0, 3 * 4096, 9, 5)
    assert [fence.generation_at(4096 * at) for at in range(5)] == [5, 5, 7, 9, 0]


# the master


@given(st.integers(1, 2**20), st.integers(0, 2**33))
def test_the_limit_is_the_end_of_a_range_and_well_ahead(epoch: int, count: int) -> None:
    generations = Generations(epoch)
    if count:
        generations.issue(count)
    limit = generations.limit
    assert (limit + 1) % RANGE == 0
    assert RANGE // 2 <= limit - generations.last < 2 * RANGE
    assert generations.are_admitted_up_to(limit)
    assert not generations.are_admitted_up_to(generations.last)
    if count < RANGE // 2:
        assert limit >> EPOCH_BITS == epoch


def ahead(pool: Pool, *spans: tuple[int, int, int]) -> list[tuple[int, int, int, int]]:
    found = pool.state.members.fence_ahead("a.dram", pool.incarnations["a.dram"], list(spans))
    pool.check()
    return sorted(found)


def test_stamps_are_lowered_where_no_grant_is_open() -> None:
    """Free space gets a generation that nobody has, an object's space its own, a put under way keeps what is there."""
    pool = Pool("a", granules=10)
    pool.put(b"stored", 2)
    info = pool.state.lookup([b"stored"], pool.now_s)[0]
    assert info is not None
    writing = pool.start(b"writing", 3)
    place, last = info.replicas[0], pool.state.generations.last
    answer = ahead(pool, (0, 10 * G, AHEAD))
    fresh = pool.state.generations.last
    assert fresh == last + 1
    assert (place.offset, 2 * G, AHEAD, place.generation) in answer
    taken = range(writing.replicas[0].offset, writing.replicas[0].offset + 3 * G)
    assert not any(at in taken for offset, nbytes, _, _ in answer for at in range(offset, offset + nbytes, G))
    assert sum(nbytes for _, nbytes, _, generation in answer if generation == fresh) == 5 * G
    assert pool.start(b"next").generation > fresh


def test_a_put_that_ended_is_free_once_its_writer_cannot_write() -> None:
    pool = Pool("a", granules=4, put_release_s=600)
    writing = pool.start(b"writing", 4)
    assert ahead(pool, (0, 4 * G, AHEAD)) == []
    pool.state.put_revoke([b"writing"], [writing.generation], False, pool.now_s)
    assert ahead(pool, (0, 4 * G, AHEAD)) == [], "it rests"
    pool.tick(601)
    assert [span[:3] for span in ahead(pool, (0, 4 * G, AHEAD))] == [(0, 4 * G, AHEAD)]


def test_what_was_given_out_is_left_alone() -> None:
    pool = Pool("a", granules=4)
    pool.put(b"k")
    assert ahead(pool, (0, G, pool.state.generations.last)) == []
    assert pool.state.members.fence_ahead("a.dram", 99, [(0, G, AHEAD)]) == []


def test_nothing_is_placed_where_its_writers_would_be_refused() -> None:
    """A disk that comes back knows generations of a master whose memory is lost: they are not given out again."""
    pool = Pool("a", granules=10)
    beat = pool.state.heartbeat("a.dram", 1, pool.now_s)
    assert pool.state.heartbeat("a.dram", 1, pool.now_s, beat.generation_limit).known
    pool.put(b"before")
    known = 7 * RANGE + 5
    pool.mount_ssd("a", 10, [m.HeldItem(b"old", known, G, 0)])
    assert pool.refused(b"k") == "unavailable"
    again = pool.state.heartbeat("a.dram", 1, pool.now_s, beat.generation_limit)
    assert again.generation_limit > known
    assert pool.refused(b"k") == "unavailable", "the node has not heard of it"
    pool.state.heartbeat("a.dram", 1, pool.now_s, again.generation_limit)
    assert pool.start(b"k").generation > known


# a real node


@pytest.fixture
def pool(tmp_path: Any) -> Iterator[LocalPool]:
    made = LocalPool(tmp_path, dram_nbytes=MIB)
    yield made
    made.close()


def test_a_stranger_cannot_stamp_what_was_never_given_out(pool: LocalPool, tmp_path: Any) -> None:
    segment = pool.nodes[0].segment
    with TransferEngine(TransferConfig(run_dir=str(tmp_path / "run"), shm=False, tcp_host=None)) as engine:
        remote = engine.open(pool.on_loop(lambda: pool.master.state.segments()[0].descriptor))
        for generation in (2**62, AHEAD, pool.master.state.generations.limit + 1):
            with pytest.raises(StaleGeneration, match="given out"):
                remote.write_from(0, [b"x" * 10_000], generation=generation, timeout_s=HANG_S)
    assert not any(segment.memory)
    assert pool.client(shm=False).put_objects([Put(b"k", [b"x" * (MIB // 2)])]) == [None]


@pytest.mark.parametrize("shm", [True, False], ids=["shm", "tcp"])
def test_a_poisoned_fence_heals_and_late_writers_stay_out(pool: LocalPool, shm: bool) -> None:
    node, client = pool.nodes[0], pool.client(shm=shm)
    assert client.put_objects([Put(b"kept", [b"k" * 5000])]) == [None]
    fence = node.segment.fence
    assert fence is not None
    late = pool.on_loop(lambda: pool.master.state.generations.last)  # of a writer whose grant has ended
    fence.stamp(0, MIB, AHEAD)
    wait_until(lambda: not fence.stamps_above(AHEAD - 1), "the stamps are lowered")
    assert client.get(b"kept") == b"k" * 5000
    free = next(offset for offset in range(0, MIB, 4096) if fence.generation_at(offset) > late)
    with pytest.raises(StaleGeneration):
        fence.admit(free, 4096, late)
    assert client.put_objects([Put(b"new", [b"n" * (MIB // 2)])]) == [None]
    assert client.get(b"new") == b"n" * (MIB // 2)
    assert node.work.dram.num_restamped == MIB // 4096
    pool.check_integrity()


def test_memory_taken_anew_has_the_limit_too(pool: LocalPool) -> None:
    segment: Segment = pool.nodes[0].segment
    assert segment.fence is not None
    assert segment.fence.limit == pool.master.state.generations.limit
