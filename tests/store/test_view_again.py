"""An object that was viewed a moment ago is viewed again without a message, as long as its key has that value."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from facade_pool import FacadePool, facade_pool
from store_pool import MIB, break_connection
from waiting import HANG_S, wait_until

from moonpool.base.errors import NotFound
from moonpool.store import Store
from moonpool.store.client import view_ledger

VALUE = bytes(range(256)) * 64


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[FacadePool]:
    yield from facade_pool(tmp_path, dram_nbytes=16 * MIB, journal_sync_s=0.0)  # remembered at once


@pytest.fixture(autouse=True)
def spare_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_ledger, "SPARE_S", HANG_S)  # longer than a step of these tests takes on a busy machine


class ViewingStore:
    """A Store that counts the look-ups of its views."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = store
        self.sessions: list[int] = []  # of the look-ups
        original = store.master.call_noting_repeats

        def call(call: Any, meanwhile: Any = None) -> Any:
            if type(call).__name__ == "Lookup":
                self.sessions.append(call.session)
            return original(call, meanwhile)

        monkeypatch.setattr(store.master, "call_noting_repeats", call)

    @property
    def num_lookups(self) -> int:
        return len(self.sessions)

    def look(self, key: str) -> bytes:
        with self.store.view(key) as view:
            assert not view.is_copy
            return bytes(view.pieces[0])


@pytest.fixture
def viewer(pool: FacadePool, monkeypatch: pytest.MonkeyPatch) -> ViewingStore:
    pool.store().put("k", VALUE)
    return ViewingStore(pool.store(), monkeypatch)


def test_the_second_view_asks_nobody_and_counts_as_a_hit(viewer: ViewingStore) -> None:
    assert [viewer.look("k") for _ in range(20)] == [VALUE] * 20
    assert viewer.num_lookups == 1
    assert viewer.store.counters()["hits"] == 20


def test_two_views_at_once_have_a_pin_each(viewer: ViewingStore) -> None:
    with viewer.store.view("k") as one, viewer.store.view("k") as other:
        assert bytes(one.pieces[0]) == bytes(other.pieces[0]) == VALUE
    assert viewer.num_lookups == 2
    assert viewer.look("k") == VALUE
    assert viewer.num_lookups == 2


def test_a_removed_object_is_not_viewed_again(pool: FacadePool, viewer: ViewingStore) -> None:
    viewer.look("k")
    assert pool.store().remove("k", force=True)
    with pytest.raises(NotFound):
        viewer.look("k")
    pool.store().put("k", b"new")
    assert viewer.look("k") == b"new"


def test_a_replaced_object_is_not_viewed_again_and_its_open_view_stays(pool: FacadePool, viewer: ViewingStore) -> None:
    writer = pool.store()
    viewer.look("k")
    with viewer.store.view("k") as old:
        assert viewer.num_lookups == 1
        writer.upsert("k", b"new")
        assert viewer.look("k") == b"new"
        assert bytes(old.pieces[0]) == VALUE
    assert viewer.look("k") == b"new"
    for number in range(20):
        writer.upsert("k", b"%d" % number)
        assert viewer.look("k") == b"%d" % number


def test_a_pin_from_before_a_lost_connection_is_not_used(pool: FacadePool, viewer: ViewingStore) -> None:
    """The master may have lost power, and the pin with it."""
    viewer.look("k")
    break_connection(viewer.store.master)
    viewer.store.exist("another key")  # connects: of "k" the memory here tells that it exists
    assert viewer.look("k") == VALUE
    assert viewer.num_lookups == 2


def test_views_after_a_lost_connection_have_another_session(pool: FacadePool, viewer: ViewingStore) -> None:
    """A master that lost power may have lost the pin of the open view. If the pins had one session, the end of that
    view would end the pin of a newer one.
    """
    with viewer.store.view("k") as old:
        break_connection(viewer.store.master)
        viewer.store.exist("another key")  # connects
        pool.store().upsert("k", b"new")
        with viewer.store.view("k") as new, viewer.store.view("k"):
            assert bytes(old.pieces[0]) == VALUE
            assert bytes(new.pieces[0]) == b"new"
    before, after, again = viewer.sessions
    assert before != after == again


def test_a_look_up_that_connects_again_is_the_last_of_its_session(viewer: ViewingStore) -> None:
    with viewer.store.view("k"):
        break_connection(viewer.store.master)
        with viewer.store.view("k"), viewer.store.view("k"), viewer.store.view("k"):
            pass
    before, while_connecting, after, again = viewer.sessions
    assert before == while_connecting != after == again


def test_the_end_of_a_view_is_told_over_its_own_connection_only(
    pool: FacadePool, viewer: ViewingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that ends pins waits for its turn while a look-up connects again, for the same session. A master that
    lost power has lost the old pin; told of its end, it would end that of the new view.
    """
    monkeypatch.setattr(view_ledger, "SPARE_S", 0.0)
    master, begun, may_send, ended = viewer.store.master, *(threading.Event() for _ in range(3))
    call_once = master.call_once

    def call_late(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        may_send.wait(HANG_S)
        try:
            return call_once(*args, **kwargs)
        finally:
            ended.set()

    monkeypatch.setattr(master, "call_once", call_late)
    viewer.look("k")
    assert begun.wait(HANG_S)
    pins, key = pool.master.state.index.pins, b"k"
    pool.on_loop(lambda: pool.master.state.unpin(viewer.sessions[0], [key], 0.0))  # as if its record had been lost
    break_connection(master)
    with viewer.store.view("k") as new:
        assert viewer.sessions[0] == viewer.sessions[1]
        may_send.set()
        assert ended.wait(HANG_S)
        assert pool.on_loop(pins.owners)
        assert bytes(new.pieces[0]) == VALUE
    wait_until(lambda: not pool.on_loop(pins.owners), "all pins end")


def test_the_pin_ends_some_time_after_the_last_view(
    pool: FacadePool, viewer: ViewingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_ledger, "SPARE_S", 0.1)
    viewer.look("k")
    wait_until(lambda: not pool.on_loop(pool.master.state.index.pins.owners), "the pin ends")
    assert viewer.look("k") == VALUE
    assert viewer.num_lookups == 2
