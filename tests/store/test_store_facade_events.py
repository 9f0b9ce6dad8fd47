"""Store.events(): changes as they happen, replayed after breaks, ended by close()."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from facade_pool import FacadePool, facade_pool
from waiting import HANG_S, wait_until

from moonpool.base.errors import PeerLost
from moonpool.store import Store
from moonpool.store.client import ClientConfig
from moonpool.store.event_feed import EventFeed


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[FacadePool]:
    yield from facade_pool(tmp_path)


def stored(feed: EventFeed, num_keys: int) -> set[bytes]:
    """What the feed says is stored, from as many batches as it takes."""
    keys: set[bytes] = set()
    while len(keys) < num_keys:
        batch = feed.next_batch(20)
        assert batch is not None, f"only {keys} came"
        keys = set(batch.stored) if batch.snapshot else (keys | set(batch.stored)) - set(batch.removed)
    return keys


def test_a_snapshot_then_changes(pool: FacadePool) -> None:
    store = pool.store()
    store.put("before", b"1")
    with store.events() as feed:
        assert stored(feed, 1) == {b"before"}
        assert feed.since is None  # its snapshot might have had another part
        assert feed.next_batch(0.01) is None
        store.put("after", b"2")
        assert stored(feed, 1) == {b"after"}
        store.remove("before", force=True)
        batch = next(feed)
        assert batch.removed == (b"before",)
        assert feed.since == batch.sequence


def test_a_later_feed_goes_on_where_an_earlier_one_ended(pool: FacadePool) -> None:
    store = pool.store()
    with store.events() as feed:
        next(feed)
        store.put("a", b"1")
        stored(feed, 1)
        since = feed.since
    store.put("b", b"2")
    with store.events(since) as feed:
        batch = next(feed)
        assert (batch.snapshot, batch.stored) == (False, (b"b",))


def test_a_feed_outlives_its_master(pool: FacadePool) -> None:
    store = pool.store()
    store.put("a", b"1")
    with store.events() as feed:
        assert stored(feed, 1) == {b"a"}
        pool.loop.run(pool.master.close())
        pool.start_master()
        wait_until(lambda: store.put_many([("b", b"2")]) == [None], "its node has been heard again")
        assert stored(feed, 2) == {b"a", b"b"}


def test_a_master_that_stays_away_is_given_up(pool: FacadePool, tmp_path: Path) -> None:
    store = pool.store(config=ClientConfig(rpc_timeout_s=0.2))
    with store.events() as feed:
        next(feed)
        pool.loop.run(pool.master.close())
        with pytest.raises(PeerLost):
            next(feed)
        pool.start_master()
        assert next(feed).snapshot  # who asks again is answered


def test_close_wakes_who_waits(pool: FacadePool) -> None:
    store: Store = pool.store()
    feed = store.events()
    next(feed)
    rest: list[object] = []
    reader = threading.Thread(target=lambda: rest.extend(feed))
    reader.start()
    store.close()
    reader.join(HANG_S)
    assert not reader.is_alive()
    assert rest == []
