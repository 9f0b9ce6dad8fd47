"""Which block continues which outlives the master: what the eviction order knew before, it knows again."""

from __future__ import annotations

import random

import msgspec
import pytest
from state_pool import SESSION, Pool, offload

from moonpool.master.state import records
from moonpool.store import messages as m


@pytest.fixture(params=["journal", "snapshot", "snapshot and journal"])
def memory(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def come_back(pool: Pool, memory: str) -> None:
    """The journal goes on behind the snapshot where there are both."""
    if memory == "snapshot":
        pool.snapshot()
    pool.restart()


def put_chain(pool: Pool, *keys: bytes) -> None:
    for parent, key in zip((b"", *keys), keys, strict=False):
        pool.put(key, parents=parent)


def parents_of(pool: Pool) -> dict[bytes, bytes | None]:
    table = pool.state.index.table
    return {key: table.parent_key(slot) for slot, key in enumerate(table.keys) if key is not None}


def evicted_first(pool: Pool, *keys: bytes) -> list[bytes]:
    """In which order puts drive them out."""
    gone: list[bytes] = []
    for number in range(len(keys)):
        pool.put(b"filler %d" % number, hard_pin=True)
        gone += sorted(key for key in keys if key not in gone and not pool.has(key))
    return gone


def prefix_pool(granules: int) -> Pool:
    return Pool("a", granules=granules, eviction="prefix", lease_s=1, high_watermark=1.0, low_watermark=1.0)


def test_a_chain_still_goes_from_its_end(memory: str) -> None:
    pool = prefix_pool(granules=4)
    if memory == "snapshot and journal":
        put_chain(pool, b"1", b"2")
        pool.snapshot()
        pool.put(b"3", parents=b"2")
        pool.put(b"4", parents=b"3")
    else:
        put_chain(pool, b"1", b"2", b"3", b"4")
    before = parents_of(pool)
    assert before == {b"1": None, b"2": b"1", b"3": b"2", b"4": b"3"}
    come_back(pool, memory)
    assert parents_of(pool) == before
    pool.tick(2)
    assert evicted_first(pool, b"1", b"2", b"3", b"4") == [b"4", b"3", b"2", b"1"]


def test_a_child_may_stand_before_its_parent_in_a_snapshot() -> None:
    pool = prefix_pool(granules=3)
    put_chain(pool, b"x", b"y", b"root")
    pool.remove(b"x")
    pool.put(b"leaf", parents=b"root")
    table = pool.state.index.table
    assert table.find(b"leaf") == 0, "the slot is used again"
    come_back(pool, "snapshot")
    assert parents_of(pool)[b"leaf"] == b"root"
    pool.tick(2)
    pool.remove(b"y")
    assert evicted_first(pool, b"root", b"leaf")[0] == b"leaf"


def test_a_whole_batch_is_written_down_shortly() -> None:
    pool = prefix_pool(granules=4)
    keys = [b"%032d" % number for number in range(4)]
    reply = pool.state.put_start(keys, [1] * 4, m.PutOptions(), pool.now_s, parents=[b"", *keys[:-1]])
    pool.check()
    assert [b"".join(pool.journal).count(key) for key in keys] == [1, 1, 1, 1], "not again as parents"
    pool.state.put_end(keys, reply.generations, {}, pool.now_s)
    come_back(pool, "journal")
    assert list(parents_of(pool).values()) == [None, *keys[:-1]]


def test_a_put_under_way_keeps_its_parent(memory: str) -> None:
    pool = prefix_pool(granules=4)
    pool.put(b"root")
    going = pool.start(b"leaf", parents=b"root", session=SESSION)
    come_back(pool, memory)
    assert pool.end(going) is None
    assert parents_of(pool) == {b"root": None, b"leaf": b"root"}
    come_back(pool, memory)
    assert parents_of(pool) == {b"root": None, b"leaf": b"root"}


def test_the_place_of_a_parent_that_is_gone_means_nothing(memory: str) -> None:
    pool = prefix_pool(granules=4)
    put_chain(pool, b"root", b"leaf")
    pool.remove(b"root")
    pool.put(b"stranger")
    assert parents_of(pool) == {b"leaf": None, b"stranger": None}
    come_back(pool, memory)
    assert parents_of(pool) == {b"leaf": None, b"stranger": None}
    pool.put(b"root")
    assert parents_of(pool)[b"leaf"] is None


def test_blocks_on_ssd_keep_their_parents(memory: str) -> None:
    pool = Pool("a", granules=6, ssd_granules=50, eviction="prefix", lease_s=1)
    put_chain(pool, b"1", b"2", b"3")
    offload(pool)
    pool.put(b"filler", 6)
    assert pool.places(b"3") == ["a.ssd"]
    before = parents_of(pool)
    come_back(pool, memory)
    assert parents_of(pool) == before == {b"1": None, b"2": b"1", b"3": b"2", b"filler": None}


def test_what_was_evicted_to_ssd_before_is_in_no_order_after(memory: str) -> None:
    pool = Pool("a", granules=6, ssd_granules=50, eviction="prefix", lease_s=1)
    put_chain(pool, b"1", b"2", b"3")
    offload(pool)
    pool.put(b"filler", 6)
    pool.remove(b"filler", force=True)
    come_back(pool, memory)
    assert pool.exist(b"1", b"2", b"3") == [True] * 3
    pool.put(b"4", parents=b"3")
    assert parents_of(pool)[b"4"] == b"3"


@pytest.mark.parametrize("seed", range(20))
def test_parents_and_order_are_the_same_by_journal_and_by_snapshot(seed: int) -> None:
    chance, found = random.Random(seed), []
    for memory in ("journal", "snapshot"):
        chance.seed(seed)
        pool = prefix_pool(granules=12)
        for _ in range(60):
            live = [key for key in pool.state.index.table.keys if key is not None]
            if chance.random() < 0.25 and live:
                pool.remove(chance.choice(live), force=True)
            else:
                parent = chance.choice([b"", *live])
                grant = pool.try_start(b"%d" % chance.randrange(40), parents=parent, replace=chance.random() < 0.2)
                assert isinstance(grant, m.Refusal) or pool.end(grant) is None
            pool.tick(0.3)
        before = parents_of(pool)
        come_back(pool, memory)
        pool.state.check_integrity()
        assert parents_of(pool) == before
        pool.tick(2)
        table = pool.state.index.table
        found.append([table.keys[slot] for slot in pool.state.index.policy.victims()])
    assert found[0] == found[1]


def test_records_of_before_parents_are_read() -> None:
    """They are shorter: nobody's parent is known."""
    granted = records.Granted([b"k"], [1], [7], [[(1, 0)]], 0, 0, 0, 0.0, False, None)
    placed = records.Placed([b"k"], [7], [1], [0], [0], [[]], [None], {}, {})
    lists = [msgspec.to_builtins(each, builtin_types=(bytes,)) for each in (granted, placed)]
    old = [lists[0][:11], lists[1][:10]]
    assert records.decode(msgspec.msgpack.encode(old)) == [granted, placed]
