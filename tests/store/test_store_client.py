"""The client against a real pool: batches, scattered buffers, ranges, views, sessions that last."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_pool import MIB, LocalPool
from waiting import HANG_S, wait_until

from moonpool.base.clock import VirtualClock
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import (
    AlreadyExists,
    FewerReplicas,
    IdentityMismatch,
    InvalidInput,
    NoSpace,
    NotFound,
    StaleGeneration,
    Unavailable,
)
from moonpool.base.object_header import ALIGN_NBYTES, ObjectKind
from moonpool.store import Store
from moonpool.store.client import OPAQUE_PIECE_NBYTES, ClientConfig, ObjectView, Put, PutOptions
from moonpool.store.client.batch_read import BatchRead
from moonpool.store.client.directory import SegmentDirectory
from moonpool.store.client.put_request import PutRequest
from moonpool.store.client.put_session import PutSession
from moonpool.store.messages import Placement, SegmentInfo, Tier
from moonpool.transfer.config import TransferConfig
from moonpool.transfer.engine import TransferEngine
from moonpool.transfer.memory.location import host_id

NUMBERS = itertools.count()
FEW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    made = LocalPool(tmp_path_factory.mktemp("p"), 48 * MIB)
    yield made
    made.close()


def empty(pool: LocalPool, client: Store) -> None:
    """Leaves the pool to the next test as it was: space of removed objects rests as long as they were leased."""
    client.remove_all(force=True)
    client.close()
    pool.advance(1000)
    pool.check_integrity()


@pytest.fixture(params=[True, False], ids=["shm", "tcp"])
def client(request: pytest.FixtureRequest, pool: LocalPool) -> Iterator[Store]:
    client = pool.client(shm=request.param)
    yield client
    empty(pool, client)


@pytest.fixture
def near(pool: LocalPool) -> Iterator[Store]:
    client = pool.client()
    yield client
    empty(pool, client)


def view_of(client: Store, key: bytes, **how: str) -> ObjectView:
    view = client.view_many([key], **how)[0]  # type: ignore[arg-type]
    assert isinstance(view, ObjectView), view
    return view


def damage(pool: LocalPool, client: Store, key: bytes, at: int) -> None:
    info = client.lookup([key])[0]
    assert info is not None
    pool.nodes[0].segment.memory[info.replicas[0].offset + at] ^= 0x10


def test_many_at_once(client: Store) -> None:
    chance = random.Random(1)
    values = {b"key-%d" % n: chance.randbytes(chance.choice([0, 1, 100, 4096, 20_000])) for n in range(2100)}
    puts = [Put(key, [value]) for key, value in values.items()]
    assert client.put_objects(puts) == [None] * len(puts)
    assert client.get_many([*values, b"none"]) == [*values.values(), None]
    again = client.put_objects([puts[5], Put(b"new", [b"1", b"", b"23"])])
    assert isinstance(again[0], AlreadyExists)
    assert again[1] is None
    assert client.get(b"new") == b"123"
    counters = client.counters()
    assert counters["bytes_written"] == sum(map(len, values.values())) + 3
    assert (counters["hits"], counters["misses"]) == (2101, 1)


@FEW
@given(data=st.data())
def test_any_cut_in_and_any_cut_out(client: Store, data: st.DataObject) -> None:
    sizes = st.lists(st.integers(0, 3000), min_size=1, max_size=6)
    pieces = [random.Random(n).randbytes(size) for n, size in enumerate(data.draw(sizes))]
    whole = b"".join(pieces)
    key = b"cut-%d" % next(NUMBERS)
    assert client.put_objects([Put(key, pieces)]) == [None]
    buffers = [bytearray(size) for size in data.draw(sizes)]
    [got] = client.get_many_into([key], [buffers])
    if sum(map(len, buffers)) < len(whole):
        assert isinstance(got, InvalidInput)
    else:
        assert got == len(whole)
        assert b"".join(buffers)[: len(whole)] == whole
    starts = data.draw(st.lists(st.integers(0, len(whole)), max_size=4))
    parts = [bytearray(data.draw(st.integers(0, len(whole) - start))) for start in starts]
    assert client.get_ranges(key, list(zip(starts, parts, strict=True))) == sum(map(len, parts))
    assert parts == [whole[start : start + len(part)] for start, part in zip(starts, parts, strict=True)]
    assert client.size(key) == len(whole)


def test_ranges_of_large_objects(client: Store) -> None:
    value = random.Random(3).randbytes(3 * OPAQUE_PIECE_NBYTES + 77)
    client.put(b"k", value)
    before = client.counters()["bytes_read"]
    into = bytearray(10)
    assert client.get_ranges(b"k", [(OPAQUE_PIECE_NBYTES - 4, into)]) == 10
    assert into == value[OPAQUE_PIECE_NBYTES - 4 :][:10]
    assert client.counters()["bytes_read"] - before == 2 * OPAQUE_PIECE_NBYTES, "the pieces it touches, and no others"
    assert client.get_ranges(b"none", [(0, into)]) is None
    for offset in (-1, len(value) - 9):
        with pytest.raises(InvalidInput):
            client.get_ranges(b"k", [(offset, into)])


def test_damage_outside_the_range_is_found_in_its_piece(pool: LocalPool, client: Store) -> None:
    client.put(b"k", bytes(5000))
    damage(pool, client, b"k", ALIGN_NBYTES + 4000)
    assert client.get_ranges(b"k", [(0, bytearray(10))]) is None
    assert client.counters()["corrupt_replicas"] == 1


def test_one_bad_item_fails_alone(pool: LocalPool, client: Store) -> None:
    keys = [b"%d" % n for n in range(5)]
    assert client.put_objects([Put(key, [key * 2000]) for key in keys]) == [None] * 5
    damage(pool, client, b"1", ALIGN_NBYTES + 5)
    damage(pool, client, b"2", 30)
    buffers = [[bytearray(2000)] for _ in keys]
    buffers[3] = [bytearray(1999)]
    got = client.get_many_into([*keys[:4], b"none", keys[4]], [*buffers[:4], [], buffers[4]])
    codes = [each if isinstance(each, int) else each.code for each in got]
    assert codes[0] == codes[5] == 2000
    assert codes[1] in ("corrupt", "not_found")
    assert codes[2] in ("corrupt", "not_found", "stale_generation")
    assert codes[3:5] == ["invalid_input", "not_found"]
    assert client.counters()["corrupt_replicas"] == 2
    outcomes = client.put_objects(
        [Put(b"a", [b"1"]), Put(b"b", [np.zeros((4, 4))[:, 1]]), Put(b"c", [bytes(90 * MIB)])]
    )
    assert outcomes[0] is None
    assert isinstance(outcomes[1], InvalidInput)
    assert isinstance(outcomes[2], NoSpace)
    with pytest.raises(InvalidInput):
        client.get_many_into([b"a"], [])


def test_replacing(client: Store) -> None:
    assert client.put(b"k", b"old")
    assert not client.put(b"k", b"new")
    assert client.put(b"k", b"newer", replace=True)
    assert client.get(b"k") == b"newer"
    [error] = client.put_objects([Put(b"k", [b"newest"], options=PutOptions(replace=True, soft_pin_s=5))])
    assert error is None
    assert client.get(b"k") == b"newest"


def test_another_identity_gets_no_bytes(client: Store) -> None:
    put = Put(b"k", [b"x" * 100, b"y" * 50], kind=ObjectKind.BLOCK, identity=b"i" * 32, valid_tokens=16)
    assert client.put_objects([put]) == [None]
    into = bytearray(150)
    assert client.get_many_into([b"k"], [[into]], identity=b"i" * 32) == [150]
    [got] = client.get_many_into([b"k"], [[bytearray(150)]], identity=b"j" * 32)
    assert isinstance(got, IdentityMismatch)
    [view] = client.view_many([b"k"], identity=b"j" * 32)
    assert isinstance(view, IdentityMismatch)
    info = client.lookup([b"k"])[0]
    assert info is not None
    header = client.piece_reads.open(info, b"i" * 32).fields
    assert (header.kind, header.valid_tokens, header.sizes) == (1, 16, (100, 50))


def test_views(client: Store, near: Store) -> None:
    value = random.Random(4).randbytes(2 * OPAQUE_PIECE_NBYTES + 9)
    client.put_objects([Put(b"k", [value]), Put(b"empty", [b""])])
    with view_of(client, b"k") as view:
        assert b"".join(view.pieces) == value
        assert (view.nbytes, len(view.pieces)) == (len(value), 3)
        assert all(piece.readonly for piece in view.pieces)
    assert view.pieces == ()
    assert view_of(client, b"empty").pieces == ()
    [missing] = client.view_many([b"none"])
    assert isinstance(missing, NotFound)
    assert not view_of(near, b"k").is_copy


def test_a_view_pins_until_its_last_array_is_gone(near: Store) -> None:
    near.put(b"k", b"x" * 9000)
    view = view_of(near, b"k")
    assert not view.is_copy
    part = np.frombuffer(view.pieces[0], np.uint8)[5:10]
    view.close()
    assert near.remove_many([b"k"]) == [False]
    assert bytes(part) == b"x" * 5
    del part
    wait_until(lambda: not is_pinned(near, b"k"), "the pin ends")


def is_pinned(client: Store, key: bytes) -> bool:
    return any(each.is_pinned for each in client.objects() if each.key == key)


def test_beyond_the_limit_views_are_copies(pool: LocalPool, near: Store) -> None:
    near.put_objects([Put(b"a", [b"a" * 6000]), Put(b"b", [b"b" * 6000])])
    client = pool.client(max_view_nbytes=10_000)
    first, second = client.view_many([b"a", b"b"])
    assert isinstance(first, ObjectView)
    assert isinstance(second, ObjectView)
    assert (first.is_copy, second.is_copy) == (False, True)
    assert bytes(second.pieces[0]) == b"b" * 6000
    first.close()
    wait_until(lambda: not view_of(client, b"b").is_copy, "there is room for a view")
    client.close()


def test_views_are_verified_once_or_always(pool: LocalPool, near: Store) -> None:
    near.put(b"k", bytes(5000))
    view_of(near, b"k").close()
    damage(pool, near, b"k", ALIGN_NBYTES + 17)
    view_of(near, b"k").close()  # the same allocation, known to be right
    [found] = near.view_many([b"k"], verify="always")
    assert not isinstance(found, ObjectView)
    assert near.counters()["corrupt_replicas"] == 1


def test_a_process_that_never_saw_it_does_not_trust_it(pool: LocalPool, near: Store) -> None:
    near.put(b"k", bytes(5000))
    damage(pool, near, b"k", ALIGN_NBYTES + 17)
    [found] = near.view_many([b"k"])
    assert not isinstance(found, ObjectView)


def test_a_replaced_object_stays_in_view(near: Store) -> None:
    near.put(b"k", b"old" * 3000)
    old = view_of(near, b"k")
    near.put(b"k", b"new" * 3000, replace=True)
    new = view_of(near, b"k")
    assert bytes(new.pieces[0]) == b"new" * 3000
    new.close()
    near.put_objects([Put(b"%d" % n, [b"?" * 9000]) for n in range(50)])
    assert bytes(old.pieces[0]) == b"old" * 3000, "closing the newer view did not let go of the older"


def test_the_end_of_a_client_ends_its_views(pool: LocalPool, near: Store) -> None:
    near.put(b"k", bytes(100))
    other = pool.client()
    view = view_of(other, b"k")
    assert is_pinned(near, b"k")
    other.close()
    wait_until(lambda: not is_pinned(near, b"k"), "the pin ends")
    assert bytes(view.pieces[0]) == bytes(100), "readable still, though nobody promises for how long"


@pytest.fixture
def slow_pool(tmp_path: Path) -> Iterator[LocalPool]:
    made = LocalPool(tmp_path, MIB)
    yield made
    made.check_integrity()
    made.close()


@pytest.mark.parametrize("renews", [True, False])
def test_a_session_that_lasts_is_renewed(slow_pool: LocalPool, renews: bool) -> None:
    engine = TransferEngine(TransferConfig(run_dir=str(slow_pool.tmp_path / "run"), tcp_host=None))
    clock = VirtualClock()
    limit_s = 10.0 if renews else 1e9
    with (
        engine,
        Store(slow_pool.address, engine=engine, config=ClientConfig(renew_after_s=limit_s), clock=clock) as client,
    ):
        session = client.piece_puts.begin([PutRequest(b"k", (10,) * 5)])[0]
        assert isinstance(session, PutSession)
        for index in range(5):
            slow_pool.advance(12)
            clock.advance(12)
            try:
                session.write_piece(index, bytes(10))
            except StaleGeneration:
                break
        [error] = client.piece_puts.finish([session])
        assert (error is None) is renews
        assert client.exist_many([b"k"]) == [renews]


def test_renewing_by_hand(slow_pool: LocalPool) -> None:
    client = slow_pool.client()
    begun = client.piece_puts.begin([PutRequest(b"a", (1,)), PutRequest(b"b", (1,))])
    sessions = [each for each in begun if isinstance(each, PutSession)]
    slow_pool.advance(20)
    assert client.piece_puts.renew(sessions[:1]) == [True]
    slow_pool.advance(20)
    assert client.piece_puts.renew(sessions) == [True, False]
    client.piece_puts.abort(sessions)


def test_puts_and_views_of_a_process_are_known_to_the_node(slow_pool: LocalPool) -> None:
    reader = slow_pool.client()
    reader.get(b"k")
    assert slow_pool.sessions_at(0) == [], "who only copies holds nothing"
    reader.put(b"k", b"1")
    assert len(slow_pool.sessions_at(0)) == 1
    slow_pool.client(shm=False).put(b"far", b"1")
    assert len(slow_pool.sessions_at(0)) == 1, "nor does who writes by tcp"
    reader.close()
    wait_until(lambda: slow_pool.sessions_at(0) == [], "the node sees the end of the client")


def test_memory_before_disks_and_here_before_there(tmp_path: Path) -> None:
    def info(name: str, tier: Tier, host: str) -> SegmentInfo:
        return SegmentInfo(
            SegmentDescriptor(name=name, nbytes=1, incarnation=1, host=host, endpoints=()), "n", tier, None
        )

    found = [
        info("far.ssd", Tier.SSD, "elsewhere"),
        info("near.ssd", Tier.SSD, host_id()),
        info("far.dram", Tier.DRAM, "elsewhere"),
        info("near.dram", Tier.DRAM, host_id()),
    ]
    with TransferEngine(TransferConfig(run_dir=str(tmp_path), shm=False, tcp_host=None)) as engine:
        directory = SegmentDirectory(engine, lambda: found)
        assert directory.local_segment() == "near.dram"
        names = [each.descriptor.name for each in found]
        order = directory.best_first([Placement(name, 0, 1, 1) for name in ["unknown", *names]])
        assert [place.segment for place in order] == ["near.dram", "far.dram", "near.ssd", "far.ssd", "unknown"]


def test_equally_good_replicas_and_local_nodes_take_turns(tmp_path: Path) -> None:
    """So a hot prefix is read over the links of all nodes that have it, and new blocks are spread over nodes."""
    names = ["a.dram", "b.dram"]
    found = [
        SegmentInfo(
            SegmentDescriptor(name=name, nbytes=1, incarnation=1, host=host_id(), endpoints=()), "n", Tier.DRAM, None
        )
        for name in names
    ]
    with TransferEngine(TransferConfig(run_dir=str(tmp_path), shm=False, tcp_host=None)) as engine:
        directory = SegmentDirectory(engine, lambda: found)
        assert Counter(directory.local_segment() for _ in range(10)) == {"a.dram": 5, "b.dram": 5}
        prefix = [[Placement(name, 0, 1, number) for name in names] for number in range(64)]
        first = [directory.best_first(replicas)[0].segment for replicas in prefix]
        assert Counter(first) == {"a.dram": 32, "b.dram": 32}
        assert [directory.best_first(replicas)[0].segment for replicas in prefix] == first, "always the same"
        directory.unreadable.add(prefix[0][0], Unavailable("it is away"))
        assert {directory.best_first(replicas)[0].segment for replicas in prefix} == {"b.dram"}


def test_objects_of_several_nodes_are_read_at_the_same_time(tmp_path: Path) -> None:
    """By tcp. Two nodes answer in turns only if both are asked before one has answered."""
    pool = LocalPool(tmp_path, 16 * MIB, num_nodes=2)
    try:
        client, values = pool.client(shm=False), {b"%d" % n: random.Random(n).randbytes(MIB) for n in range(8)}
        for number, (key, value) in enumerate(values.items()):
            client.put(key, value, preferred=(f"n{number % 2}.dram",))
        both, read_segment = threading.Barrier(2), BatchRead._read_segment

        def meet(self: BatchRead, *arguments: Any) -> None:
            both.wait(HANG_S)
            read_segment(self, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BatchRead, "_read_segment", meet)
            assert client.get_many(values) == list(values.values())
        pool.break_memory(1)
        buffers = [bytearray(MIB) for _ in values]
        outcomes = client.get_many_into(values, buffers)
        assert outcomes[::2] == [MIB] * 4
        assert buffers[::2] == list(values.values())[::2]
        assert all(isinstance(each, Unavailable | NotFound) for each in outcomes[1::2])
    finally:
        pool.close()


def test_large_objects_by_tcp_spread_over_bundles(pool: LocalPool) -> None:
    client = pool.client(shm=False)
    values = [random.Random(n).randbytes(size) for n, size in enumerate([9 * MIB + 5, 100, 5 * MIB, 0, 3 * MIB])]
    keys = [b"large-%d" % n for n in range(len(values))]
    assert client.put_objects([Put(key, [value]) for key, value in zip(keys, values, strict=True)]) == [None] * 5
    assert client.get_many(keys) == values
    buffers = [[bytearray(len(value) // 3), bytearray(len(value))] for value in values]
    assert client.get_many_into(keys, buffers) == [len(value) for value in values]
    for value, cut in zip(values, buffers, strict=True):
        assert b"".join(cut)[: len(value)] == value
    damage(pool, client, keys[0], ALIGN_NBYTES + 8 * MIB)
    assert client.get_many(keys) == [None, *values[1:]]
    empty(pool, client)


@pytest.mark.parametrize("shm", [True, False], ids=["shm", "tcp"])
def test_a_lost_node_costs_its_replicas_only(tmp_path: Path, shm: bool) -> None:
    pool = LocalPool(tmp_path, 4 * MIB, num_nodes=2)
    try:
        client = pool.client(shm=shm)
        keys = [b"%d" % n for n in range(40)]
        both = PutOptions(num_replicas=2, all_replicas=True)
        assert client.put_objects([Put(key, [key * 3000], options=both) for key in keys]) == [None] * 40
        begun = client.piece_puts.begin([PutRequest(b"begun", (9,), options=both)])[0]
        assert isinstance(begun, PutSession)
        pool.break_memory(0)
        assert client.get_many(keys) == [key * 3000 for key in keys]
        begun.write_piece(0, bytes(9))
        assert [type(error) for error in client.piece_puts.finish([begun])] == [FewerReplicas]
        assert begun.failed == (pool.nodes[0].segment_name,)
        (fewer,) = client.put_objects([Put(b"more", [b"1"], options=PutOptions(num_replicas=2))])
        assert isinstance(fewer, FewerReplicas)
        assert "stored on 1 of 2 replicas" in str(fewer)
        assert client.put(b"one", b"1", num_replicas=2), "it is stored, after all"
        assert client.counters()["fewer_replicas"] == 3
        assert client.get_many([b"begun", b"more"]) == [bytes(9), b"1"]
        assert client.counters()["corrupt_replicas"] == 0
    finally:
        pool.close()
