"""Puts while the master is restarted or its disk is full: they wait, or are told, and no space is lost to them."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from store_pool import LocalPool
from waiting import HANG_S, wait_until

from moonpool.base.errors import AlreadyExists, MoonpoolError, NoSpace, Unavailable
from moonpool.master.journal.frames import JournalFile
from moonpool.master.state.members import Members
from moonpool.store import Store
from moonpool.store.client import Put
from moonpool.store.client.put_request import PutRequest
from moonpool.store.client.put_session import PutSession


def held_recounts(pool: LocalPool, monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """From the master's next start on recounts are only noted; call them to let them happen."""
    held: list[Callable[[], None]] = []
    original = Members.recount
    monkeypatch.setattr(Members, "recount", lambda *args: held.append(lambda: original(*args)))
    return held


def test_puts_ride_through_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The master is back and cannot place anything before its nodes have spoken: who can wait sees nothing of it."""
    pool = LocalPool(tmp_path)
    try:
        client, hasty = pool.client(rpc_timeout_s=HANG_S, retry_s=HANG_S), pool.client(retry_s=0.05)
        assert client.put(b"old", b"1")
        assert hasty.put(b"other", b"1")
        held = held_recounts(pool, monkeypatch)
        pool.loop.run(pool.master.close())
        pool.start_master()
        wait_until(lambda: bool(held), "the node is asked to recount")
        with pytest.raises(Unavailable, match="nodes are being recounted"):
            hasty.put(b"new", b"1")
        before = client.stats().counters["refused"]
        outcomes: list[list[MoonpoolError | None]] = []
        puts = [Put(b"old", [b"2"]), Put(b"new", [b"2"]), Put(b"more", [b"3"])]
        putting = threading.Thread(target=lambda: outcomes.append(client.put_objects(puts)))
        putting.start()
        wait_until(lambda: client.stats().counters["refused"] >= before + 12, "the puts are refused")
        assert not outcomes
        pool.on_loop(held[0])
        putting.join(HANG_S)
        assert isinstance(outcomes[0][0], AlreadyExists)
        assert outcomes[0][1:] == [None, None]
        assert [client.get(key) for key in (b"old", b"new", b"more")] == [b"1", b"2", b"3"]
        assert isinstance(client.piece_puts.begin([PutRequest(b"begun", (1,))])[0], PutSession)
    finally:
        pool.close()


def test_a_put_that_waits_ends_with_its_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = LocalPool(tmp_path)
    try:
        client = pool.client(retry_s=600.0, rpc_timeout_s=600.0)
        assert client.put(b"old", b"1")
        held = held_recounts(pool, monkeypatch)
        pool.loop.run(pool.master.close())
        pool.start_master()
        wait_until(lambda: bool(held), "the node is asked to recount")
        outcomes: list[list[MoonpoolError | None]] = []
        putting = threading.Thread(target=lambda: outcomes.append(client.put_objects([Put(b"new", [b"2"])])))
        putting.start()
        wait_until(lambda: pool.master.state.stats().counters["refused"] >= 2, "the put is asked for again")
        client.close()
        putting.join(HANG_S / 2)
        assert isinstance(outcomes[0][0], Unavailable)
    finally:
        pool.close()


def test_a_view_is_a_copy_until_the_node_has_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client whose grant the restarted master has lost may write there until the node refuses it."""
    pool = LocalPool(tmp_path)
    try:
        client = pool.client(rpc_timeout_s=HANG_S, retry_s=HANG_S)
        assert client.put(b"old", b"1")
        with client.view(b"old") as view:
            assert not view.is_copy
        held = held_recounts(pool, monkeypatch)
        pool.loop.run(pool.master.close())
        pool.start_master()
        wait_until(lambda: bool(held), "the node is asked to recount")
        client.exist_many([b"other"])  # connects: the pin of the view above does not count any more
        with client.view(b"old") as view:
            assert (view.is_copy, bytes(view.pieces[0])) == (True, b"1")
        pool.on_loop(held[0])
        with client.view(b"old") as view:
            assert (view.is_copy, bytes(view.pieces[0])) == (False, b"1")
    finally:
        pool.close()


@contextmanager
def full_disk() -> Iterator[None]:
    """Under every journal of this process."""

    def write(self: JournalFile, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JournalFile, "write", write)
        yield


def begun(client: Store, key: bytes) -> PutSession:
    session = client.piece_puts.begin([PutRequest(key, (3,))])[0]
    assert isinstance(session, PutSession), session
    session.write_piece(0, b"123")
    return session


def used(pool: LocalPool) -> int:
    return pool.on_loop(lambda: pool.master.state.stats().used_nbytes)


@pytest.mark.parametrize("shm", [True, False], ids=["shm", "tcp"])
def test_space_that_could_not_be_written_down_is_free_at_once(tmp_path: Path, shm: bool) -> None:
    """Its client has never heard of it, lives on and says nothing more."""
    pool = LocalPool(tmp_path)
    try:
        client, other = pool.client(shm=shm), pool.client()
        assert client.put(b"old", b"1")
        before = used(pool)
        with full_disk():
            with pytest.raises(NoSpace, match="journal"):
                client.put(b"new", b"1")
            assert used(pool) == before
            assert pool.on_loop(lambda: len(pool.master.state.puts.pending)) == 0
            assert client.get(b"old") == b"1"
        assert other.put(b"new", b"2"), "the key is free as well"
        pool.check_integrity()
        pool.loop.run(pool.master.close())
        pool.start_master()
        assert other.get(b"new") == b"2"
        assert used(pool) == 2 * before
    finally:
        pool.close()


def test_an_end_that_was_not_written_down_is_written_later(tmp_path: Path) -> None:
    """The caller is told that it may be forgotten; once the disk has room it is not, and its space is an object's."""
    pool = LocalPool(tmp_path)
    try:
        client = pool.client()
        session = begun(client, b"k")
        before = used(pool)
        with full_disk(), pytest.raises(NoSpace, match="journal"):
            client.piece_puts.finish([session])
        pool.advance(700)
        wait_until(lambda: client.stats().num_objects == 1, "the object is there")
        journal = pool.master.pool.journal
        wait_until(lambda: journal.health().durable, "it is written again, or a snapshot is complete")
        pool.loop.run(pool.master.close())
        pool.start_master()
        assert client.get(b"k") == b"123"
        assert used(pool) == before
        assert client.remove_many([b"k"], force=True) == [True]
        pool.advance(11)
        assert used(pool) == 0
    finally:
        pool.close()


def test_an_end_that_was_never_written_down_keeps_no_space(tmp_path: Path) -> None:
    """The master dies while the disk is full: the put is under way for the next one, and ends by itself."""
    pool = LocalPool(tmp_path)
    try:
        client = pool.client(ahead_nbytes=0)  # space that it held would count as used
        session = begun(client, b"k")
        with full_disk():
            with pytest.raises(NoSpace, match="journal"):
                client.piece_puts.finish([session])
            pool.loop.run(pool.master.close())
        pool.start_master()
        assert client.get(b"k") is None
        assert client.put(b"other", b"1")
        pool.advance(31)
        assert client.put(b"k", b"2"), "the key is free"
        pool.advance(601)
        assert used(pool) == 2 * 2 * 4096, "of the two that are there"
    finally:
        pool.close()
