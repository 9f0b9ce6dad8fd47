"""Listing and removing by pattern, in steps."""

from __future__ import annotations

import pytest
from state_pool import SESSION, G, Pool

from moonpool.base.errors import InvalidInput
from moonpool.master.state import listing
from moonpool.store import messages as m

NORMAL_STEP_SLOTS = listing.STEP_SLOTS


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


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$", "(^(a|a?)+$)", "^(([a-z])+.)+[A-Z]([a-z])+$"])
def test_patterns_that_make_backtracking_engines_hang(pattern: str) -> None:
    pool = Pool("a", granules=20)
    pool.put(b"a" * 60 + b"!")
    pool.put(b"a" * 60)
    expected = [b"a" * 60] if pattern.startswith("(") else []
    assert keys(pool, pattern) == expected


def test_a_step_ends_when_its_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest pattern that is taken, on the longest keys, is searched for in a few keys per step."""
    monkeypatch.setattr(listing, "STEP_SLOTS", NORMAL_STEP_SLOTS)
    pool = Pool("a", granules=100)
    names = [b"%03d" % number + b"ab" * 510 for number in range(60)]
    for name in names:
        pool.put(name)
    costly = "[ab]*a[ab]{300}c|[ab]*b[ab]{300}d|ab$"
    first = pool.state.list_objects(costly, 0, 1000, pool.now_s)
    assert first.cursor is not None
    assert 1 <= first.cursor <= 10
    assert keys(pool, costly) == names
    assert pool.state.list_objects("ab$", 0, 1000, pool.now_s).cursor is None  # a cheap one is done in one step


def test_a_step_removes_a_bounded_number_of_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "STEP_SLOTS", NORMAL_STEP_SLOTS)
    monkeypatch.setattr(listing, "STEP_REMOVALS", 4)
    pool = filled()
    counts = [pool.state.remove_matching(None, False, 0, pool.now_s)]
    while (cursor := counts[-1].cursor) is not None:
        counts.append(pool.state.remove_matching(None, False, cursor, pool.now_s))
    assert [each.num_removed for each in counts] == [4, 4, 2]
    assert keys(pool) == []


def test_a_pattern_is_searched_for_in_bytes() -> None:
    pool = filled()
    assert keys(pool, r"\xff\x00") == [b"\xff\x00raw"]
    assert keys(pool, "^raw") == []
    pool.put("block/ü".encode())
    assert keys(pool, "ü$") == ["block/ü".encode()]


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"(a)\1", "backreferences"),
        ("(?=a)", "look-ahead"),
        ("(?<!a)b", "look-behind"),
        ("a{9999}", "repetition"),
        ("([a-z]{1,30}){30}", "too large"),
        ("a" * 5000, "4096 characters"),
    ],
)
def test_patterns_without_a_bound_are_refused(pattern: str, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        filled().state.list_objects(pattern, 0, 10, 0.0)


@pytest.mark.parametrize(("pattern", "cursor"), [("(", 0), ("\ud800", 0), (None, -1)])
def test_questions_that_make_no_sense(pattern: str | None, cursor: int) -> None:
    pool = filled()
    with pytest.raises(InvalidInput):
        pool.state.list_objects(pattern, cursor, 10, 0.0)
    with pytest.raises(InvalidInput):
        pool.state.remove_matching(pattern, True, cursor, 0.0)
    assert pool.state.list_objects(None, 10**9, 10, 0.0) == m.ObjectPage([], None)
