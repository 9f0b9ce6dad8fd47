"""Generations that a node or the journal names and this master has not issued: of another master, or of none."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from state_pool import G, Pool, descriptor, offload
from store_pool import MIB, LocalPool
from waiting import HANG_S, wait_until

from moonpool.base.errors import InvalidInput
from moonpool.base.rpc import BlockingClient
from moonpool.master.journal.folder import JournalFolder, epoch_now, read_epoch
from moonpool.master.state import PoolState, records
from moonpool.master.state.recovery import restore
from moonpool.master.state.segments import MountedSegment
from moonpool.master.state.space import EPOCH_BITS, Generations
from moonpool.master.state.table import Replica
from moonpool.store import messages as m

DAY = 86_400
MOST = 2**63 - 1  # that a message can name
IMPOSSIBLE = MOST - 2


def of_epoch(epoch: int, count: int = 1) -> int:
    return (epoch << EPOCH_BITS) + count


# what is possible


@given(st.integers(1, 2**20), st.integers(0, 2**20), st.lists(st.integers(0, MOST), max_size=20))
def test_no_names_move_the_epoch_beyond_a_day_from_now(epoch: int, now: int, named: list[int]) -> None:
    generations = Generations(epoch, lambda: now)
    for generation in named:
        before = generations.last
        if generations.is_possible(generation):
            generations.rise_above(generation)
            assert generations.last >= max(before, generation)
        assert generations.epoch <= max(epoch, now) + DAY + 1
    assert generations.issue(1000) + 1000 < 2**62
    assert generations.counters["generations_refused"] <= len(named)


@pytest.mark.parametrize("times", [1, 3])
def test_naming_the_latest_again_and_again_moves_the_epoch_once(times: int) -> None:
    generations = Generations(5)
    for _ in range(times):
        latest = of_epoch(5 + DAY, 7)
        assert generations.is_possible(latest)
        generations.rise_above(latest)
    assert generations.last == (5 + DAY + 1) << EPOCH_BITS
    assert generations.is_possible(generations.issue()), "what this master itself has issued"
    assert not generations.is_possible(of_epoch(5 + DAY + 2))
    assert generations.counters == {"generations_refused": 1}


# a node names them


def test_a_record_of_no_master_is_refused_and_puts_go_on() -> None:
    pool = Pool("a", ssd_granules=100)
    pool.put(b"before")
    items = offload(pool)
    strange = m.HeldItem(b"strange", IMPOSSIBLE, G, 50 * G)
    pool.now_s += 5
    pool.mount("a")
    pool.mount_ssd("a", 100, last=False)
    assert pool.inventory("a", [strange, items[b"before"]]) == [False, True]
    assert pool.counters["generations_refused"] == 1
    pool.put(b"after")
    pool.restart()
    pool.put(b"after the restart")
    assert pool.has(b"before")
    assert pool.has(b"after")


def test_a_node_of_a_later_master_moves_the_epoch() -> None:
    """The master's folder is an old copy: what its node has was written by a master that came later."""
    pool = Pool("a")
    later = m.HeldItem(b"k", of_epoch(90, 3), G, 0)
    pool.mount_ssd("a", 100, last=False)
    assert pool.inventory("a", [later]) == [True], "a master without a journal adopts what it does not know"
    assert pool.state.generations.epoch == 91
    assert pool.counters["generations_refused"] == 0
    pool.beat("a")
    assert pool.start(b"new").generation > later.generation


@pytest.mark.parametrize(
    ("nbytes", "offset"), [(0, 0), (101 * G, 0), (MOST, 0), (G, MOST), (2 * G, (1 << 32) - G)], ids=str
)
def test_a_record_that_its_disk_cannot_hold_is_refused(nbytes: int, offset: int) -> None:
    pool = Pool("a")
    pool.mount_ssd("a", 100, last=False)
    assert pool.inventory("a", [m.HeldItem(b"k", 7, nbytes, offset)]) == [False]
    assert pool.state.stats().segments[-1].used_nbytes == 0
    assert msgspec.msgpack.encode(pool.state.stats())


def test_a_disk_of_more_than_there_is_is_refused() -> None:
    pool = Pool("a")
    where = descriptor("a.ssd", 100)
    with pytest.raises(InvalidInput, match="at most 4503599627370496 bytes"):
        pool.state.mount("a", where, pool.now_s, tier=m.Tier.SSD, capacity_nbytes=MOST)
    for number in range(3):
        most = descriptor(f"{number}.ssd", 100)
        pool.state.mount(str(number), most, pool.now_s, tier=m.Tier.SSD, capacity_nbytes=2**52)
    assert msgspec.msgpack.encode(pool.state.stats()), "the sum can be told"


# the journal names them


def poisoned_journal() -> list[bytes]:
    """Of a master that was told of IMPOSSIBLE before it was refused."""
    pool = Pool("a", ssd_granules=100)
    pool.put(b"good")
    pool.check()
    placed = [
        placed_at(b"in memory", [Replica(1, 5 * G, IMPOSSIBLE + 1)], None),
        placed_at(b"on disk", [], Replica(2, 50 * G, IMPOSSIBLE)),
    ]
    more = [
        records.Granted([b"begun"], [G], [IMPOSSIBLE + 2], [[(1, 7 * G)]], 0, 0, 0, 0.0, False, None),
        records.HeldPut(IMPOSSIBLE + 1, 0, [(1, 8 * G)], G),
        records.Mounted(3, "b", descriptor("b.dram", 10), m.Tier.DRAM, None, 10 * G, IMPOSSIBLE),
    ]
    return [*pool.journal, records.encode([*placed, *more])]


def placed_at(key: bytes, dram: list[Replica], ssd: Replica | None) -> records.Placed:
    return records.Placed([key], [G], [IMPOSSIBLE], [0], [0], [dram], [ssd], {}, {})


def test_a_master_that_is_poisoned_already_comes_up_again() -> None:
    pool = Pool("a", ssd_granules=100)
    pool.crash(poisoned_journal())
    assert pool.counters["generations_refused"] == 5
    pool.answer_recounts("a")
    assert pool.has(b"good")
    assert not pool.has(b"in memory")
    assert not pool.has(b"on disk")
    assert "when its node, or the master, came back" in pool.why(b"on disk")
    for number in range(8):
        pool.put(b"%d" % number)
    assert pool.state.generations.epoch == pool.epoch


def test_its_first_journal_named_the_last_generation() -> None:
    began = records.encode([records.Began(1, 0, IMPOSSIBLE, False, [])])
    state = PoolState(Pool().rules, 7, journalled=True)
    restore(state, iter([began]), 0.0)
    assert state.generations.last == 7 << EPOCH_BITS


# the whole master


def test_one_call_of_a_node_does_not_end_all_puts(tmp_path: Path) -> None:
    pool = LocalPool(tmp_path, num_nodes=0)
    try:
        pool.start_node("n0", ssd_dir=str(tmp_path / "ssd"), ssd_nbytes=64 * MIB)
        client = pool.client(retry_s=HANG_S)
        assert client.put(b"before", b"1")
        wait_until(lambda: ssd_of(pool) is not None, "the node has listed its records")
        ssd = ssd_of(pool)
        assert ssd is not None
        caller = BlockingClient(pool.address, m.SERVICE, name="n")
        later = of_epoch(epoch_now() + DAY // 2)
        items = [m.HeldItem(b"strange", IMPOSSIBLE, G, 0), m.HeldItem(b"later", later, G, 0)]
        kept = caller.call(m.Inventory(ssd.name, ssd.descriptor.incarnation, items, True), timeout_s=HANG_S)
        caller.close()
        assert kept == [False, False]
        assert client.put(b"after", b"2")
        folder = JournalFolder(tmp_path / "master")
        wait_until(lambda: read_epoch(folder) == epoch_of(later) + 1, "the next master will have a later one")
        pool.loop.run(pool.master.close())
        pool.start_master()
        assert client.put(b"after the restart", b"3")
        assert client.get(b"before") == b"1"
        assert client.get(b"after") == b"2"
    finally:
        pool.close()


def ssd_of(pool: LocalPool) -> MountedSegment | None:
    """Return the SSD that the master uses, None before the node has listed its records."""
    state = pool.master.state
    return next((each for each in state.table_of_segments.all() if each.name in state.members.listed), None)


def epoch_of(generation: int) -> int:
    return generation >> EPOCH_BITS
