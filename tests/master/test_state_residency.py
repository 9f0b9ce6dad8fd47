"""Objects listed with their prefixes and their places in the order of eviction."""

from __future__ import annotations

import pytest
from state_pool import G, Pool

from moonpool.base.errors import InvalidInput
from moonpool.master.state import residency
from moonpool.master.state.residency import list_blocks
from moonpool.store import messages as m


def listed(pool: Pool, limit: int = 1000) -> list[m.StoredBlock]:
    found: list[m.StoredBlock] = []
    cursor: int | None = 0
    while cursor is not None:
        page = list_blocks(pool.state.index, cursor, limit, pool.now_s)
        found += page.blocks
        cursor = page.cursor
    return found


def chain(pool: Pool, name: bytes, number: int) -> list[bytes]:
    """Blocks of which each continues the one before."""
    keys = [name + bytes([at]) for at in range(number)]
    parents = [b"", *keys[:-1]]
    reply = pool.state.put_start(keys, [G] * number, m.PutOptions(), pool.now_s, parents=parents)
    assert not reply.refusals
    assert not pool.state.put_end(keys, reply.generations, {}, pool.now_s)
    pool.check()
    return keys


@pytest.mark.parametrize("eviction", ["prefix", "lru", "s3fifo"])
@pytest.mark.parametrize("limit", [1, 2, 1000])
def test_the_tree_with_uses_and_what_goes_next(eviction: str, limit: int) -> None:
    pool = Pool("a", granules=20, eviction=eviction)
    hot, cold = chain(pool, b"hot", 4), chain(pool, b"cold", 3)
    for _ in range(3):
        pool.state.lookup(hot, pool.now_s, prefix=True, lease=True, session=0, reads=True)
    pool.now_s += 100
    found = {block.key: block for block in listed(pool, limit)}
    assert found.keys() == {*hot, *cold}
    assert [found[key].parent for key in hot] == [b"", *hot[:-1]]
    assert all(block.segments == ("a.dram",) and block.nbytes == G for block in found.values())
    assert not any(block.is_kept for block in found.values())
    if eviction == "prefix":
        assert [found[key].uses for key in (*hot, *cold)] == [3, 3, 3, 3, 0, 0, 0]
    if eviction != "s3fifo":
        first, last = found[cold[-1]].rank, found[hot[-1]].rank
        assert first is not None
        assert last is not None
        assert first < last, "the cold conversation goes first"


def test_what_is_leased_or_pinned_is_kept() -> None:
    pool = Pool("a", granules=20)
    one, _ = chain(pool, b"x", 2)
    pool.state.lookup([one], pool.now_s, prefix=False, lease=True, session=0, reads=True)
    assert [block.is_kept for block in listed(pool)] == [True, False]
    pool.now_s += 100
    assert [block.is_kept for block in listed(pool)] == [False, False]


def test_a_page_is_a_bounded_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "STEP_SLOTS", 2)
    pool = Pool("a", granules=20)
    chain(pool, b"x", 5)
    page = list_blocks(pool.state.index, 0, 1000, pool.now_s)
    assert (len(page.blocks), page.cursor) == (2, 2)
    assert len(listed(pool)) == 5
    for cursor, limit in ((-1, 1), (0, 0)):
        with pytest.raises(InvalidInput):
            list_blocks(pool.state.index, cursor, limit, pool.now_s)
