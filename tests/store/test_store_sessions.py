"""Many sessions at once: pieces of many objects move in few transfers, and an error concerns its own object."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from store_pool import MIB, LocalPool, patient_config

from moonpool.base.checksum import crc32c
from moonpool.base.clock import VirtualClock
from moonpool.base.errors import (
    Corrupt,
    IdentityMismatch,
    InvalidInput,
    MoonpoolError,
    NotFound,
    PeerLost,
    StaleGeneration,
    Unavailable,
)
from moonpool.base.object_header import ALIGN_NBYTES, ObjectKind
from moonpool.store import Store
from moonpool.store.client import PutOptions
from moonpool.store.client.put_request import PutRequest
from moonpool.store.client.put_session import PutSession
from moonpool.store.client.read_session import ReadSession
from moonpool.store.messages import Lookup, ObjectInfo
from moonpool.transfer.config import TransferConfig
from moonpool.transfer.engine import TransferEngine
from moonpool.transfer.transports.mapped import MappedRemote
from moonpool.transfer.transports.tcp.transport import TcpRemote

SIZES = (700, 0, 5000)
IDENTITY = b"i" * 32
KEYS = [b"block-%d" % number for number in range(12)]
TWO = PutOptions(num_replicas=2, all_replicas=True)


@pytest.fixture(params=[True, False], ids=["shm", "tcp"])
def shm(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[LocalPool]:
    made = LocalPool(tmp_path, 4 * MIB)
    yield made
    made.check_integrity()
    made.close()


@pytest.fixture
def client(pool: LocalPool, shm: bool) -> Store:
    return pool.client(shm=shm)


@pytest.fixture
def two_nodes(tmp_path: Path) -> Iterator[LocalPool]:
    made = LocalPool(tmp_path, 4 * MIB, num_nodes=2)
    yield made
    made.close()


def pieces_of(key: bytes) -> list[bytes]:
    chance = random.Random(key)
    return [chance.randbytes(size) for size in SIZES]


def begin(client: Store, keys: Sequence[bytes] = KEYS, options: PutOptions | None = None) -> list[PutSession]:
    requests = [
        PutRequest(key, SIZES, kind=ObjectKind.BLOCK, identity=IDENTITY, options=options or PutOptions())
        for key in keys
    ]
    begun = [each for each in client.piece_puts.begin(requests) if isinstance(each, PutSession)]
    assert len(begun) == len(keys)
    return begun


def layer(sessions: Sequence[PutSession], index: int, known: bool = False) -> list[tuple[PutSession, int, bytes, Any]]:
    parts = [pieces_of(each.key)[index] for each in sessions]
    return [(each, index, part, crc32c(part) if known else None) for each, part in zip(sessions, parts, strict=True)]


def store_all(client: Store, keys: Sequence[bytes] = KEYS, options: PutOptions | None = None) -> None:
    sessions = begin(client, keys, options)
    for index in range(len(SIZES)):
        assert client.piece_puts.write(layer(sessions, index, known=index == 0)) == [None] * len(keys)
    assert client.piece_puts.finish(sessions) == [None] * len(keys)


def look_up(client: Store, keys: Sequence[bytes] = KEYS) -> list[ObjectInfo]:
    infos = [info for info in client.lookup(keys) if info is not None]
    assert len(infos) == len(keys)
    return infos


def open_all(client: Store, keys: Sequence[bytes] = KEYS) -> list[ReadSession]:
    sessions = [
        each for each in client.piece_reads.open_many(look_up(client, keys), IDENTITY) if isinstance(each, ReadSession)
    ]
    assert len(sessions) == len(keys)
    return sessions


def read_layers(client: Store, sessions: Sequence[ReadSession]) -> dict[bytes, list[bytes] | MoonpoolError]:
    """The pieces of each object, or its first error."""
    buffers = [[bytearray(size) for size in SIZES] for _ in sessions]
    errors: list[MoonpoolError | None] = [None] * len(sessions)
    for index in range(len(SIZES)):
        reads = [(session, index, buffers[at][index]) for at, session in enumerate(sessions)]
        errors = [old or new for old, new in zip(errors, client.piece_reads.read(reads), strict=True)]
    errors = [old or new for old, new in zip(errors, client.piece_reads.finish(sessions), strict=True)]
    return {
        session.info.key: error or [bytes(buffer) for buffer in some]
        for session, some, error in zip(sessions, buffers, errors, strict=True)
    }


def right(keys: Sequence[bytes] = KEYS) -> dict[bytes, list[bytes]]:
    return {key: pieces_of(key) for key in keys}


def damage(pool: LocalPool, client: Store, key: bytes, at: int) -> None:
    """One byte of the object's first replica."""
    (info,) = look_up(client, [key])
    place = client.directory.best_first(info.replicas)[0]  # the one that it reads
    node = next(each for each in pool.nodes if each.segment_name == place.segment)
    node.segment.memory[place.offset + at] ^= 0x10


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many times each way to move bytes was used."""
    counted: Counter[str] = Counter()

    def count(kind: type[Any], name: str) -> None:
        plain = getattr(kind, name)

        def counting(self: Any, *args: Any, **more: Any) -> Any:
            counted[name] += 1
            return plain(self, *args, **more)

        monkeypatch.setattr(kind, name, counting)

    for name in ("read_into", "read_many", "read_in_turn", "write_each", "write_many"):
        count(MappedRemote, name)
        count(TcpRemote, name)
    return counted


def test_layers_of_many_objects_go_there_and_back(client: Store) -> None:
    store_all(client)
    assert read_layers(client, open_all(client)) == right()
    counters = client.counters()
    assert counters["bytes_written"] == counters["bytes_read"] == len(KEYS) * sum(SIZES)
    assert client.get_many(KEYS) == [b"".join(pieces_of(key)) for key in KEYS]


def test_one_transfer_for_all_objects_of_a_segment(client: Store, transfers: Counter[str]) -> None:
    sessions = begin(client)
    assert client.piece_puts.write(layer(sessions, 0)) == [None] * len(KEYS)
    assert transfers == {"write_each": 1}
    for index in (1, 2):
        assert client.piece_puts.write(layer(sessions, index)) == [None] * len(KEYS)
    transfers.clear()
    assert client.piece_puts.finish(sessions) == [None] * len(KEYS)
    assert transfers == {"write_each": 1}
    infos = look_up(client)
    transfers.clear()
    opened = [each for each in client.piece_reads.open_many(infos, IDENTITY) if isinstance(each, ReadSession)]
    assert len(opened) == len(KEYS)
    assert transfers == {"read_many": 1}
    transfers.clear()
    assert client.piece_reads.read([(each, 2, bytearray(SIZES[2])) for each in opened]) == [None] * len(KEYS)
    assert transfers == {"read_many": 1}
    transfers.clear()
    assert client.piece_reads.finish(opened) == [None] * len(KEYS)
    assert transfers == {"read_many": 1}


def test_nothing_to_do_is_done(client: Store) -> None:
    assert client.piece_reads.open_many([], None) == []
    assert client.piece_reads.read([]) == client.piece_reads.finish([]) == client.piece_puts.write([]) == []


def test_more_than_one_bundle(pool: LocalPool, client: Store) -> None:
    keys = [b"many-%d" % number for number in range(300)]
    store_all(client, keys)
    damage(pool, client, keys[270], ALIGN_NBYTES + 1)
    got = read_layers(client, open_all(client, keys))
    assert isinstance(got.pop(keys[270]), Corrupt)
    assert got == right([key for key in keys if key != keys[270]])


def test_a_damaged_piece_concerns_its_object_only(pool: LocalPool, client: Store) -> None:
    store_all(client)
    sessions = open_all(client)
    damage(pool, client, KEYS[3], ALIGN_NBYTES + SIZES[0] + 17)
    got = read_layers(client, sessions)
    assert isinstance(got.pop(KEYS[3]), Corrupt)
    assert got == right([key for key in KEYS if key != KEYS[3]])
    assert client.counters()["corrupt_replicas"] == 1


def test_a_header_that_cannot_be_used_concerns_its_object_only(pool: LocalPool, client: Store) -> None:
    store_all(client)
    infos = look_up(client)
    damage(pool, client, KEYS[1], 90)
    gone = msgspec.structs.replace(infos[0], key=b"gone", replicas=[])
    opened = client.piece_reads.open_many([*infos, gone], IDENTITY)
    assert isinstance(opened[1], Corrupt)
    assert isinstance(opened[-1], NotFound)
    good = [each for each in opened if isinstance(each, ReadSession)]
    assert read_layers(client, good) == right([key for key in KEYS if key != KEYS[1]])
    others = client.piece_reads.open_many([infos[0]], b"j" * 32)
    assert [type(each) for each in others] == [IdentityMismatch]
    counters = client.counters()
    assert counters["refused_corrupt"] == counters["refused_not_found"] == counters["refused_identity_mismatch"] == 1


def test_a_buffer_of_another_size_concerns_its_item_only(client: Store) -> None:
    sessions = begin(client, KEYS[:2])
    errors = client.piece_puts.write(
        [(sessions[0], 0, bytes(699), None), (sessions[1], 0, pieces_of(KEYS[1])[0], None)]
    )
    assert [type(error) for error in errors] == [InvalidInput, type(None)]
    errors = client.piece_puts.finish(sessions)
    assert [type(error) for error in errors] == [InvalidInput, InvalidInput], "neither has all of its pieces"
    store_all(client, KEYS[2:4])
    opened = open_all(client, KEYS[2:4])
    into = bytearray(SIZES[2])
    errors = client.piece_reads.read([(opened[0], 2, bytearray(3)), (opened[1], 2, into)])
    assert [type(error) for error in errors] == [InvalidInput, type(None)]
    assert into == pieces_of(KEYS[3])[2]


def test_space_that_was_reused_is_noticed_at_the_end(pool: LocalPool, client: Store) -> None:
    store_all(client)
    sessions = open_all(client)
    damage(pool, client, KEYS[5], 24)  # another generation stands there now
    got = read_layers(client, sessions)
    assert isinstance(got.pop(KEYS[5]), StaleGeneration)
    assert got == right([key for key in KEYS if key != KEYS[5]])


def test_another_replica_is_read_where_one_is_damaged(two_nodes: LocalPool, shm: bool) -> None:
    client = two_nodes.client(shm=shm)
    store_all(client, options=TWO)
    sessions = open_all(client)
    damage(two_nodes, client, KEYS[0], ALIGN_NBYTES + 3)
    damage(two_nodes, client, KEYS[1], ALIGN_NBYTES + SIZES[0] + 3)
    assert read_layers(client, sessions) == right()
    assert client.counters()["corrupt_replicas"] == 2


def test_another_replica_is_read_where_a_node_is_lost(two_nodes: LocalPool, shm: bool) -> None:
    client = two_nodes.client(shm=shm)
    store_all(client, options=TWO)
    sessions = open_all(client)
    two_nodes.break_memory(0)
    assert read_layers(client, sessions) == right()
    assert read_layers(client, open_all(client)) == right(), "nor do headers have to come from there"
    two_nodes.break_memory(1)
    errors = client.piece_reads.finish(sessions)
    assert all(isinstance(error, Unavailable | NotFound) for error in errors)
    outcomes = client.piece_reads.read([(each, 0, bytearray(SIZES[0])) for each in sessions])
    assert all(isinstance(error, Unavailable | NotFound) for error in outcomes)


def test_a_lost_node_is_left_out_of_the_writes(two_nodes: LocalPool, shm: bool) -> None:
    client = two_nodes.client(shm=shm)
    both = begin(client, options=TWO)
    assert client.piece_puts.write(layer(both, 0)) == [None] * len(KEYS)
    two_nodes.break_memory(0)
    for index in (1, 2):
        assert client.piece_puts.write(layer(both, index)) == [None] * len(KEYS)
    assert {each.failed for each in both} == {(two_nodes.nodes[0].segment_name,)}
    assert {error.code for error in client.piece_puts.finish(both) if error is not None} == {"fewer_replicas"}
    assert read_layers(client, open_all(client)) == right()
    more = begin(client, [b"more"], TWO)
    two_nodes.break_memory(1)
    (error,) = client.piece_puts.write(layer(more, 0))
    assert isinstance(error, Unavailable), "none is left"
    client.piece_puts.abort(more)


@pytest.mark.parametrize("renew_after_s", [10.0, 1e9])
def test_puts_that_last_are_renewed_together(pool: LocalPool, renew_after_s: float) -> None:
    clock = VirtualClock()
    config = patient_config(renew_after_s=renew_after_s)
    with (
        TransferEngine(TransferConfig(run_dir=str(pool.tmp_path / "run"), tcp_host=None)) as engine,
        Store(pool.address, engine=engine, config=config, clock=clock) as client,
    ):
        sessions = begin(client)
        for index in range(len(SIZES)):
            pool.advance(12)
            clock.advance(12)
            client.piece_puts.write(layer(sessions, index))
        errors = client.piece_puts.finish(sessions)
    if renew_after_s == 10.0:
        assert errors == [None] * len(KEYS)
    else:
        assert {type(error) for error in errors} == {StaleGeneration}


def test_a_put_that_was_discarded_fails_alone(pool: LocalPool) -> None:
    clock = VirtualClock()
    with (
        TransferEngine(TransferConfig(run_dir=str(pool.tmp_path / "run"), tcp_host=None)) as engine,
        Store(pool.address, engine=engine, config=patient_config(renew_after_s=10.0), clock=clock) as client,
    ):
        old = begin(client, KEYS[:1])
        pool.advance(1000)
        clock.advance(1000)
        new = begin(client, KEYS[1:2])
        errors = client.piece_puts.write(layer([*old, *new], 0))
        assert [type(error) for error in errors] == [StaleGeneration, type(None)]
        client.piece_puts.abort([*old, *new])


def test_a_place_is_opened_for_writing_only_by_who_is_registered_there_now(pool: LocalPool) -> None:
    client = pool.client(shm=True)
    client.put("a", b"1")
    (info,) = client.master.call(Lookup([b"a"]))
    assert info is not None
    sessions = client.piece_puts.tools.sessions
    place, number = info.replicas[0], sessions.session()
    assert sessions.open_for_writing(place, number) is sessions.open_for_writing(place, number)
    with pytest.raises(PeerLost):
        sessions.open_for_writing(place, 0)
    sessions.open_for_writing(place, number)
    sessions._registered = frozenset()  # as after the node has left
    with pytest.raises(PeerLost):
        sessions.open_for_writing(place, number)
