"""Master, node and client together, over sockets and shared memory, with the master's clock in the test's hand."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from store_pool import MIB, LocalPool
from waiting import HANG_S, wait_until

from moonpool.base.errors import (
    AlreadyExists,
    ConfigError,
    Corrupt,
    IdentityMismatch,
    InvalidInput,
    MoonpoolError,
    NoSpace,
    Overloaded,
    PeerLost,
    StaleGeneration,
)
from moonpool.base.metrics import GetMetrics
from moonpool.base.object_header import ALIGN_NBYTES, ObjectKind
from moonpool.base.rpc import AsyncClient
from moonpool.master.state.changes import Changes
from moonpool.node.config import NodeConfig
from moonpool.node.service import Node
from moonpool.store import Store
from moonpool.store.client import OPAQUE_PIECE_NBYTES, ClientConfig, Put
from moonpool.store.client.put_request import PutRequest
from moonpool.store.client.put_session import PutSession
from moonpool.store.messages import SERVICE, ObjectInfo, Subscribe
from moonpool.transfer.config import TransferConfig
from moonpool.transfer.engine import TransferEngine

# For pools of a few granules, where one object is over every mark.
NO_WATERMARK: dict[str, Any] = {"high_watermark": 1.0, "low_watermark": 1.0}


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[LocalPool]:
    pool = LocalPool(tmp_path, 16 * MIB)
    yield pool
    pool.check_integrity()
    pool.close()


def begin(client: Store, request: PutRequest) -> PutSession:
    session = client.piece_puts.begin([request])[0]
    assert isinstance(session, PutSession), session
    return session


def info_of(client: Store, key: bytes) -> ObjectInfo:
    info = client.lookup([key])[0]
    assert info is not None
    return info


def flip(pool: LocalPool, info: ObjectInfo, at: int, node: int = 0) -> None:
    """Changes one bit of the object in the node's memory."""
    name = pool.nodes[node].segment_name
    offset = next(each.offset for each in info.replicas if each.segment == name)
    pool.nodes[node].segment.memory[offset + at] ^= 0x10


@pytest.mark.parametrize("shm", [True, False], ids=["shm", "tcp"])
@pytest.mark.parametrize("nbytes", [0, 1, 4096, 100_000, OPAQUE_PIECE_NBYTES + 5])
def test_what_is_put_is_got(pool: LocalPool, shm: bool, nbytes: int) -> None:
    client, data = pool.client(shm=shm), random.Random(nbytes).randbytes(nbytes)
    assert client.get(b"k") is None
    assert client.put(b"k", data)
    assert client.counters()["bytes_written"] == nbytes
    assert not client.put(b"k", b"other"), "the old value stays"
    assert client.get(b"k") == data
    into = bytearray(nbytes + 3)
    assert client.get_into(b"k", into) == nbytes
    assert into[:nbytes] == data
    assert client.exist_many([b"k", b"l"]) == [True, False]
    counters = client.counters()
    assert counters["bytes_read"] == 2 * nbytes
    assert (counters["hits"], counters["misses"], counters["refused_already_exists"]) == (2, 1, 1)
    if nbytes:
        with pytest.raises(InvalidInput):
            client.get_into(b"k", bytearray(nbytes - 1))


def test_pieces_one_by_one(pool: LocalPool) -> None:
    client, identity = pool.client(), b"i" * 32
    request = PutRequest(b"block", (100, 200), kind=ObjectKind.BLOCK, identity=identity, valid_tokens=64)
    session = begin(client, request)
    assert isinstance(client.piece_puts.begin([request])[0], AlreadyExists)
    session.write_piece(1, b"b" * 200)
    with pytest.raises(InvalidInput):
        session.write_piece(0, b"a" * 99)
    session.write_piece(0, memoryview(b"a" * 100))
    assert client.lookup([b"block"]) == [None], "not visible yet"
    assert client.piece_puts.finish([session]) == [None]

    read = client.piece_reads.open(info_of(client, b"block"), identity)
    assert (read.fields.valid_tokens, read.fields.kind, read.nbytes) == (64, ObjectKind.BLOCK, 300)
    into = bytearray(200)
    read.read_piece(1, into)
    assert into == b"b" * 200
    read.finish()
    with pytest.raises(InvalidInput):
        read.read_piece(0, into)
    with pytest.raises(IdentityMismatch):
        client.piece_reads.open(info_of(client, b"block"), b"j" * 32)
    assert client.counters()["refused_identity_mismatch"] == 1


def test_more_pieces_than_one_header_page_holds(pool: LocalPool) -> None:
    client = pool.client()
    session = begin(client, PutRequest(b"many", (8,) * 1000))
    for index in range(1000):
        session.write_piece(index, index.to_bytes(8, "little"))
    assert client.piece_puts.finish([session]) == [None]
    found = client.get(b"many")
    assert found == b"".join(index.to_bytes(8, "little") for index in range(1000))


def test_an_unfinished_piece_or_an_abort_frees_the_key(pool: LocalPool) -> None:
    client = pool.client()
    first, second = begin(client, PutRequest(b"1", (10,))), begin(client, PutRequest(b"2", (10,)))
    second.write_piece(0, bytes(10))
    errors = client.piece_puts.finish([first, second])
    assert isinstance(errors[0], InvalidInput)
    assert errors[1] is None
    assert client.put(b"1", b"again")
    third = begin(client, PutRequest(b"3", (10,)))
    client.piece_puts.abort([third])
    assert "gave the put up" in client.why(b"3")
    assert isinstance(client.piece_puts.finish([third])[0], InvalidInput)


def test_flipped_bits_are_a_miss_and_quarantined(pool: LocalPool) -> None:
    client, chance = pool.client(), random.Random(5)
    places = [*chance.sample(range(64 + 2), 20), *chance.sample(range(ALIGN_NBYTES, ALIGN_NBYTES + 5000), 30)]
    for number, at in enumerate(places):
        key, data = b"k%d" % number, chance.randbytes(5000)
        assert client.put(key, data)
        flip(pool, info_of(client, key), at)
        found = client.get(key)
        assert found is None, at
        assert "wrong bytes" in client.why(key)
        assert client.put(key, data), "the key can be stored again"
        assert client.get(key) == data
    assert client.counters()["corrupt_replicas"] == len(places)
    assert client.stats().counters["corrupt_replicas"] == len(places)


def test_a_session_says_corrupt(pool: LocalPool) -> None:
    client = pool.client()
    client.put(b"k", b"x" * 5000)
    info = info_of(client, b"k")
    read = client.piece_reads.open(info, None)
    flip(pool, info, ALIGN_NBYTES + 17)
    with pytest.raises(Corrupt):
        read.read_piece(0, bytearray(5000))


def test_the_other_replica_is_read(tmp_path: Path) -> None:
    pool = LocalPool(tmp_path, num_nodes=2)
    try:
        client, data = pool.client(), random.Random(1).randbytes(50_000)
        for number, at in enumerate((3, ALIGN_NBYTES + 3)):  # in the header, in the piece
            key = b"k%d" % number
            assert client.put(key, data, num_replicas=2)
            info = info_of(client, key)
            assert len(info.replicas) == 2
            flip(pool, info, at, node=0)
            assert client.get(key) == data
            assert [each.segment for each in info_of(client, key).replicas] == [pool.nodes[1].segment_name]
        assert client.counters()["corrupt_replicas"] == 2
        pool.check_integrity()
    finally:
        pool.close()


def test_reused_space_is_never_read_as_the_old_object(tmp_path: Path) -> None:
    pool = LocalPool(tmp_path, dram_nbytes=4 * ALIGN_NBYTES, lease_s=10, **NO_WATERMARK)
    try:
        client = pool.client()
        client.put(b"old", b"o" * 3 * ALIGN_NBYTES)
        info = info_of(client, b"old")
        unread, read = client.piece_reads.open(info, None), client.piece_reads.open(info, None)
        into = bytearray(3 * ALIGN_NBYTES)
        read.read_piece(0, into)
        read.finish()
        pool.advance(10)
        assert client.put(b"new", b"n" * 3 * ALIGN_NBYTES), "evicts the old one and takes its space"
        with pytest.raises(StaleGeneration):
            read.finish()
        with pytest.raises(StaleGeneration):
            unread.read_piece(0, into)
        with pytest.raises(StaleGeneration):
            client.piece_reads.open(info, None)
        assert client.get(b"old") is None
        assert client.get(b"new") == b"n" * 3 * ALIGN_NBYTES
        assert client.counters()["corrupt_replicas"] == 0, "nobody was corrupt, somebody was late"
    finally:
        pool.close()


def test_a_late_writer_cannot_touch_the_new_owner(tmp_path: Path) -> None:
    pool = LocalPool(tmp_path, dram_nbytes=2 * ALIGN_NBYTES, **NO_WATERMARK)
    try:
        slow, client = pool.client(shm=False), pool.client()
        late = begin(slow, PutRequest(b"k", (100,)))
        pool.advance(30)
        with pytest.raises(NoSpace):
            client.put(b"k", b"new")
        pool.advance(570)
        assert client.put(b"k", b"new" * 30)
        with pytest.raises(StaleGeneration):
            late.write_piece(0, b"late" * 25)
        assert isinstance(slow.piece_puts.finish([late])[0], StaleGeneration)
        assert client.get(b"k") == b"new" * 30
    finally:
        pool.close()


def test_space_written_in_place_waits_for_its_writer(tmp_path: Path) -> None:
    """However late: a process that is stopped in the middle of a copy cannot be kept from going on with it."""
    pool = LocalPool(tmp_path, dram_nbytes=2 * ALIGN_NBYTES, **NO_WATERMARK)
    try:
        slow, client = pool.client(), pool.client()
        late = begin(slow, PutRequest(b"k", (100,)))
        pool.advance(10_000)
        with pytest.raises(NoSpace):
            client.put(b"k", b"new")
        late.write_piece(0, b"late" * 25)
        assert isinstance(slow.piece_puts.finish([late])[0], StaleGeneration)
        slow.close()
        wait_until(lambda: isinstance(client.put_objects([Put(b"k", [b"new" * 30])])[0], type(None)), "the put works")
        assert client.get(b"k") == b"new" * 30
    finally:
        pool.close()


def test_a_put_ended_too_late_is_refused(pool: LocalPool) -> None:
    client = pool.client()
    late = begin(client, PutRequest(b"k", (100,)))
    late.write_piece(0, bytes(100))
    pool.advance(30)
    assert isinstance(client.piece_puts.finish([late])[0], StaleGeneration)
    assert client.put(b"k", b"new")


def test_pressure_spares_leased_and_pinned(tmp_path: Path) -> None:
    pool = LocalPool(tmp_path, dram_nbytes=40 * 2 * ALIGN_NBYTES)
    try:
        client = pool.client()
        for number in range(36):  # with the places that the client holds for puts to come, just below the watermark
            client.put(b"%d" % number, b"v%d" % number)
        assert client.pin_many([b"0"]) == [True]
        client.lookup([b"1"])
        for number in range(100, 200):
            client.put(b"%d" % number, b"x")
        assert client.get(b"0") == b"v0"
        assert client.get(b"1") == b"v1"
        assert client.get(b"2") is None
        assert "evicted" in client.why(b"2")
        client.close()
        wait_until(
            lambda: pool.on_loop(lambda: pool.master.state.remove([b"0"], False, 1e6)[0]), "the object can be removed"
        )
        pool.check_integrity()
    finally:
        pool.close()


def test_many_threads_and_clients(pool: LocalPool) -> None:
    shared, failures = pool.client(), []

    def work(seed: int) -> None:
        client = shared if seed % 2 else pool.client()
        for step in range(40):
            key = b"%d" % ((seed + step) % 25)
            client.put(key, key * 500)
            if client.get(key) not in (key * 500, None):
                failures.append(key)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert not failures
    assert shared.stats().num_objects == 25


def test_listeners_get_a_snapshot_and_then_changes(pool: LocalPool) -> None:
    client = pool.client()
    client.put(b"before", b"1")

    async def listen() -> tuple[set[bytes], set[bytes], list[int]]:
        subscriber = await AsyncClient.connect(pool.address, SERVICE)
        stored: set[bytes] = set()
        removed: set[bytes] = set()
        sequence: list[int] = []
        async with aclosing(subscriber.stream(Subscribe(), timeout_s=10)) as batches:
            async for batch in batches:
                assert batch.snapshot == (not sequence)
                sequence.append(batch.sequence)
                if batch.snapshot:
                    assert batch.stored == (b"before",)
                    pool.loop.loop.run_in_executor(None, change)
                stored.update(batch.stored)
                removed.update(batch.removed)
                if b"last" in stored:
                    break
        subscriber.close()
        return stored, removed, sequence

    def change() -> None:
        client.put(b"after", b"2")
        client.remove_many([b"before"])
        client.put(b"last", b"3")

    stored, removed, sequence = pool.loop.run(listen())
    assert stored == {b"before", b"after", b"last"}
    assert removed == {b"before"}
    assert sequence == list(range(sequence[0], sequence[0] + len(sequence)))


def test_a_slow_listener_is_dropped(tmp_path: Path) -> None:
    pool = LocalPool(tmp_path, max_pending_event_keys=10)
    try:

        async def listen() -> None:
            feed = pool.master.pool.feed
            async with aclosing(pool.master.pool.subscribe(None)) as batches:
                assert (await anext(batches)).snapshot
                feed.publish(Changes(tuple(b"%d" % number for number in range(11)), (), (), ()))
                with pytest.raises(Overloaded):
                    await anext(batches)
            assert len(feed) == 0

        pool.loop.run(listen())
    finally:
        pool.close()


def test_a_forgotten_node_mounts_again_empty(tmp_path: Path) -> None:
    pool = LocalPool(tmp_path, segment_ttl_s=10)
    try:
        client = pool.client()
        client.put(b"k", b"old")
        late = begin(client, PutRequest(b"late", (100,)))
        incarnation = pool.nodes[0].segment.incarnation
        pool.advance(10)
        wait_until(lambda: pool.nodes[0].segment.incarnation != incarnation, "the node mounts other memory")
        assert client.get(b"k") is None
        assert "node that left" in client.why(b"k")
        wait_until(
            lambda: not isinstance(client.piece_puts.begin([PutRequest(b"probe", (1,))])[0], NoSpace), "there is space"
        )
        assert client.put(b"k", b"new")
        with pytest.raises(MoonpoolError, match=r"mounted anew|is gone|out of reach"):
            late.write_piece(0, bytes(100))
        assert client.get(b"k") == b"new"
    finally:
        pool.close()


def test_master_restart(tmp_path: Path) -> None:
    pool = LocalPool(tmp_path, journal_sync_s=0.0)  # so that what is found is remembered at once
    try:
        client, hasty = pool.client(), pool.client(retry_s=0.0)
        client.put(b"k", b"old")
        old = info_of(client, b"k")
        session = begin(client, PutRequest(b"begun", (3,)))
        assert hasty.exist_many([b"k"]) == [True]
        pool.loop.run(pool.master.close())
        assert hasty.exist_many([b"k"]) == [True], "the memory here tells so"
        asked = [b"k", b"absent"]
        with pytest.raises(PeerLost):
            hasty.exist_many(asked)
        answers: list[list[bool]] = []
        asking = threading.Thread(target=lambda: answers.append(client.exist_many(asked)))
        asking.start()
        pool.start_master()
        asking.join(HANG_S)
        assert answers == [[True, False]], "who can wait sees nothing of it"
        assert info_of(client, b"k").replicas == old.replicas
        assert client.get(b"k") == b"old"
        session.write_piece(0, b"new")
        assert client.piece_puts.finish([session]) == [None], "what was begun before is ended after"
        assert client.get(b"begun") == b"new"
        wait_until(lambda: client.put_objects([Put(b"more", [b"1"])])[0] is None, "the put works")
        placed = info_of(client, b"more").replicas[0]
        assert placed.generation > old.replicas[0].generation
        wrong = msgspec.structs.replace(placed, generation=old.replicas[0].generation)
        with pytest.raises(StaleGeneration):
            client.piece_reads.open(ObjectInfo(b"more", old.nbytes, (wrong,), 1), None)
    finally:
        pool.close()


def test_metrics(pool: LocalPool) -> None:
    pool.client().put(b"k", b"v")

    async def ask() -> dict[str, float]:
        client = await AsyncClient.connect(pool.address, SERVICE)
        families = await client.call(GetMetrics())
        client.close()
        return {
            sample.name + str(sample.labels.get("event", "")): sample.value for f in families for sample in f.samples
        }

    values = pool.loop.run(ask())
    assert values["moonpool_pool_objects"] == 1
    assert values["moonpool_pool_used_bytes"] == 2 * ALIGN_NBYTES
    assert values["moonpool_pool_events_totalstored"] == 1


def test_a_node_leaves(pool: LocalPool) -> None:
    client = pool.client()
    client.put(b"k", b"v")
    info = info_of(client, b"k")
    pool.loop.run(pool.nodes[0].close())
    assert client.get(b"k") is None
    assert client.stats().capacity_nbytes == 0
    assert isinstance(client.piece_puts.begin([PutRequest(b"l", (1,))])[0], NoSpace)
    with pytest.raises(MoonpoolError, match=r"gone|left|closed|mounted anew|out of reach"):
        client.piece_reads.open(info, None)


async def test_a_node_without_memory_or_master_says_so(tmp_path: Path) -> None:
    config: dict[str, Any] = {"name": "n", "master_address": f"unix:{tmp_path}/none.sock", "run_dir": str(tmp_path)}
    with pytest.raises(NoSpace):
        await Node(NodeConfig(dram_nbytes=1 << 50, **config)).start()
    with pytest.raises(PeerLost):
        await Node(NodeConfig(dram_nbytes=MIB, start_timeout_s=0.2, **config)).start()
    with pytest.raises(ConfigError):
        NodeConfig(dram_nbytes=100, **config)


def test_no_master_is_peer_lost(tmp_path: Path) -> None:
    with TransferEngine(TransferConfig(run_dir=str(tmp_path), tcp_host=None)) as engine:
        client = Store(f"unix:{tmp_path}/none.sock", engine=engine, config=ClientConfig(retry_s=0.1))
        with pytest.raises(PeerLost):
            client.get(b"k")
        client.close()
        client.close()


def test_a_relative_run_dir_works_for_clients_in_other_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    monkeypatch.chdir(here)
    pool = LocalPool(tmp_path, num_nodes=0)
    try:
        config = {"dram_nbytes": MIB, "master_address": pool.address, "retry_s": 0.02}
        node = Node(NodeConfig(name="n0", run_dir="run", **config))  # type: ignore[arg-type]
        pool.loop.run(node.start())
        pool.nodes.append(node)
        monkeypatch.chdir(there)
        client = pool.client()
        assert client.put(b"k", b"value")
        assert client.get(b"k") == b"value"
        assert (here / "run").is_dir()
    finally:
        pool.close()
