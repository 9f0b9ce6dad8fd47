"""Objects that several clients write: whole when one of them ends the puts, and their space free when all have left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from store_pool import LocalPool
from waiting import wait_until

from moonpool.base.errors import AlreadyExists, InvalidInput, MoonpoolError
from moonpool.base.object_header import ObjectKind
from moonpool.store import Store
from moonpool.store.client.put_request import PutRequest
from moonpool.store.client.put_session import PutSession
from moonpool.store.client.shared_puts import SharedPut, SharedPuts
from moonpool.store.messages.shared_space import SharedSpace

PIECES = [bytes([number]) * 100 for number in range(4)]
OWN, OTHERS = range(2, 4), range(2)
REQUEST = PutRequest(key=b"k", piece_nbytes=(100,) * 4, kind=ObjectKind.BLOCK, identity=bytes(32), valid_tokens=16)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[LocalPool]:
    made = LocalPool(tmp_path)
    yield made
    made.check_integrity()
    made.close()


def begin(owner: Store) -> tuple[SharedPut, PutSession]:
    shared = SharedPuts(owner.piece_puts).begin([REQUEST])
    [put] = shared.puts
    assert isinstance(put, PutSession), put
    return shared, put


def join(other: Store, shared: SharedPut, put: PutSession) -> PutSession:
    space = SharedSpace(put.generation, put.replicas)
    [joined] = SharedPuts(other.piece_puts).join(shared.session, [REQUEST], [space])
    return joined


def write(put: PutSession, pieces: range) -> MoonpoolError | None:
    for index in pieces:
        put.write_piece(index, PIECES[index])
    return None


def num_puts(pool: LocalPool) -> int:
    return pool.on_loop(lambda: pool.master.state.stats().counters["puts_in_progress"])


def used(pool: LocalPool) -> int:
    return pool.on_loop(lambda: pool.master.state.stats().used_nbytes)


@pytest.mark.parametrize("shm", [True, False])
def test_the_owner_ends_what_all_have_written(pool: LocalPool, shm: bool) -> None:
    owner, other = pool.client(shm=shm), pool.client(shm=shm)
    shared, put = begin(owner)
    joined = join(other, shared, put)
    write(put, OWN)
    write(joined, OTHERS)
    sums = joined.checksums(OTHERS)
    assert sums is not None
    assert joined.checksums(OWN) is None
    SharedPuts(other.piece_puts).leave(shared.session)
    assert owner.get(b"k") is None, "not visible before its end"
    put.add_written(OTHERS, sums, joined.failed)
    assert SharedPuts(owner.piece_puts).end(shared, [put]) == [None]
    assert other.get(b"k") == b"".join(PIECES)
    [again] = SharedPuts(owner.piece_puts).begin([REQUEST]).puts
    assert isinstance(again, AlreadyExists)


def test_an_object_that_lacks_a_writers_pieces_is_not_stored(pool: LocalPool) -> None:
    owner, other = pool.client(), pool.client()
    shared, put = begin(owner)
    join(other, shared, put)
    write(put, OWN)
    SharedPuts(other.piece_puts).leave(shared.session)
    [error] = SharedPuts(owner.piece_puts).end(shared, [put])
    assert isinstance(error, InvalidInput)
    assert owner.get(b"k") is None
    wait_until(lambda: num_puts(pool) == 0 and used(pool) == 0, "the put ends and its space is free")


@pytest.mark.parametrize("owner_dies", [False, True])
def test_space_is_free_only_when_the_last_writer_has_left(pool: LocalPool, owner_dies: bool) -> None:
    owner, other = pool.client(), pool.client()
    shared, put = begin(owner)
    joined = join(other, shared, put)
    if owner_dies:
        owner.close()
    else:
        SharedPuts(owner.piece_puts).end(shared, [])
    write(joined, OTHERS)  # it may still write, and nobody else has the space
    assert used(pool) > 0
    SharedPuts(other.piece_puts).leave(shared.session)
    wait_until(lambda: num_puts(pool) == 0 and used(pool) == 0, "the put ends and its space is free")


def test_a_writer_that_dies_lets_go(pool: LocalPool) -> None:
    owner, other = pool.client(), pool.client()
    shared, put = begin(owner)
    join(other, shared, put)
    SharedPuts(owner.piece_puts).end(shared, [])
    assert used(pool) > 0
    other.close()
    wait_until(lambda: num_puts(pool) == 0 and used(pool) == 0, "the put ends and its space is free")


def test_a_session_that_is_over_cannot_be_joined(pool: LocalPool) -> None:
    owner, other = pool.client(), pool.client()
    shared, put = begin(owner)
    SharedPuts(owner.piece_puts).end(shared, [])
    wait_until(lambda: num_puts(pool) == 0, "the put ends")
    joined = join(other, shared, put)
    with pytest.raises(MoonpoolError):
        write(joined, OTHERS)
