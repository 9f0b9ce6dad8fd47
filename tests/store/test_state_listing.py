"""Listing and removing by pattern, in steps."""

from __future__ import annotations

import pytest
from state_pool import SESSION, G, Pool

from moonpool.base.errors import InvalidInput
from moonpool.store import messages as m
from moonpool.store.state import listing


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "STEP_SLOTS", 3)


def keys(pool: Pool, pattern: str | None = None, limit: int = 1000) -> list[bytes]:
    found: list[bytes] = []
    cursor: int | None = 0
    while cursor is not None:
        page = pool.state.list_objects(pattern, cursor, limit, pool.now_s)
        assert len(page.objects) <= limit
        found += [each.key for each in page.objects]
        cursor = page.cursor
    return found


def filled() -> Pool:
    pool = Pool("a", granules=20, lease_s=5)
    for number in range(10):
        pool.put(b"block/%d" % number)
    pool.put(b"\xff\x00raw")
    pool.remove(b"block/4")
    return pool


def test_every_object_is_listed_once_whatever_the_page() -> None:
    pool = filled()
    expected = sorted([b"block/%d" % number for number in range(10) if number != 4] + [b"\xff\x00raw"])
    for limit in (1, 2, 3, 5, 1000):
        assert sorted(keys(pool, None, limit)) == expected
    assert keys(pool, "block/[0-2]$") == [b"block/0", b"block/1", b"block/2"]
    assert keys(pool, "^no") == []


def test_a_listing_says_how_things_are_and_leases_nothing() -> None:
    pool = Pool("a", "b", ssd_granules=10, lease_s=5)
    pool.put(b"plain", 2, num_replicas=2)
    pool.put(b"pinned", hard_pin=True)
    pool.exist(b"pinned")
    pool.carry_out("a", "b")
    first, second = pool.state.list_objects(None, 0, 10, pool.now_s).objects
    assert first == m.ListedObject(b"plain", 2 * G, m.Tier.DRAM | m.Tier.SSD, 3, False, False)
    assert (second.key, second.is_leased, second.is_pinned) == (b"pinned", True, True)
    assert pool.remove(b"plain")


def test_what_is_away_is_listed_in_no_tier() -> None:
    pool = Pool("a", ssd_granules=10)
    pool.put(b"k")
    pool.carry_out("a")
    pool.unmount("a.dram")
    pool.unmount("a.ssd")
    pool.tick()
    (only,) = pool.state.list_objects(None, 0, 10, pool.now_s).objects
    assert (only.tier, only.num_replicas) == (m.Tier(0), 0)


def test_removing_by_pattern_keeps_what_is_kept() -> None:
    pool = filled()
    pool.exist(b"block/0")
    pool.pin(SESSION, b"block/7")
    removed = kept = 0
    cursor: int | None = 0
    while cursor is not None:
        counts = pool.state.remove_matching("block", False, cursor, pool.now_s)
        removed, kept, cursor = removed + counts.num_removed, kept + counts.num_kept, counts.cursor
        pool.check()
    assert (removed, kept) == (7, 2)
    assert sorted(keys(pool)) == [b"block/0", b"block/7", b"\xff\x00raw"]
    cursor = 0
    while cursor is not None:
        cursor = pool.state.remove_matching(None, True, cursor, pool.now_s).cursor
    assert keys(pool) == []


def test_a_page_without_room_is_refused() -> None:
    with pytest.raises(InvalidInput):
        filled().state.list_objects(None, 0, 0, 0.0)


@pytest.mark.parametrize(("pattern", "cursor"), [("(", 0), ("\ud800", 0), (None, -1)])
def test_questions_that_make_no_sense(pattern: str | None, cursor: int) -> None:
    pool = filled()
    with pytest.raises(InvalidInput):
        pool.state.list_objects(pattern, cursor, 10, 0.0)
    with pytest.raises(InvalidInput):
        pool.state.remove_matching(pattern, True, cursor, 0.0)
    assert pool.state.list_objects(None, 10**9, 10, 0.0) == m.ObjectPage([], None)
