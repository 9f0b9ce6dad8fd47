"""Mooncake's sessions: objects written and read in ranges, over several calls or in one."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

import pytest
from mooncake_arena import Arena, value_of
from store_pool import MIB, LocalPool

from moonpool.base.errors import InvalidInput
from moonpool.integrations.mooncake import MooncakeDistributedStore, ReplicateConfig
from moonpool.integrations.mooncake.piece_assembly import PieceAssembly, piece_sizes

MakeStore = Callable[..., MooncakeDistributedStore]
INVALID, NOT_FOUND, TAKEN, EXPIRED, NO_SPACE = -600, -704, -705, -707, -200


def write_ranges(
    store: MooncakeDistributedStore, arena: Arena, key: str, value: bytes, cuts: Sequence[int]
) -> list[int]:
    """Write the value in parts that begin at these offsets, in one call each."""
    results = []
    for start, end in zip(cuts, [*cuts[1:], len(value)], strict=True):
        arena.write([arena.address], [end - start], value[start:end])
        results += store.batch_put_from_multi_buffer_ranges([key], [[arena.address]], [[end - start]], [[start]])
    return results


# pieces from ranges


@pytest.mark.parametrize("nbytes", [1, 64 * 1024, 64 * 1024 + 1, 5 * MIB, 300 * MIB])
def test_pieces_add_up_to_the_object(nbytes: int) -> None:
    sizes = piece_sizes(nbytes)
    assert sum(sizes) == nbytes
    assert len(set(sizes[:-1])) <= 1
    assert max(sizes) <= MIB


@pytest.mark.parametrize("seed", range(20))
def test_ranges_in_any_order_make_the_pieces(seed: int) -> None:
    chance = random.Random(seed)
    sizes = (100, 100, 100, 37)
    value, made = value_of(337, seed), bytearray(337)
    assembly = PieceAssembly(sizes)
    cuts = sorted({0, *(chance.randrange(337) for _ in range(12))})
    parts = list(zip(cuts, [*cuts[1:], 337], strict=True))
    chance.shuffle(parts)
    for start, end in parts:
        for index, piece in assembly.add(start, memoryview(value)[start:end]):
            made[index * 100 : index * 100 + piece.nbytes] = piece
            assembly.written(index)
    assert bytes(made) == value
    assert assembly.rest() == []


def test_what_was_not_added_is_zero_and_what_was_written_stays() -> None:
    assembly = PieceAssembly((10, 10, 5))
    assert assembly.add(2, memoryview(b"ab")) == []
    ((index, whole),) = assembly.add(10, memoryview(b"0123456789"))
    assert (index, bytes(whole)) == (1, b"0123456789")
    assembly.written(1)
    with pytest.raises(InvalidInput):
        assembly.add(11, memoryview(b"x"))
    with pytest.raises(InvalidInput):
        assembly.add(24, memoryview(b"xy"))
    assert [(index, bytes(piece)) for index, piece in assembly.rest()] == [(0, b"\0\0ab" + bytes(6)), (2, bytes(5))]


# writing


def test_an_object_is_visible_when_its_session_ends(make_store: MakeStore) -> None:
    store, other = make_store(), make_store()
    arena, value = Arena(store), value_of(200_000)
    assert store.batch_put_session_start(["k"], [200_000]) == [0]
    assert store.batch_put_session_start(["k"], [200_000]) == [INVALID], "it is open already"
    assert write_ranges(store, arena, "k", value, [0, 50_000, 150_000]) == [50_000, 100_000, 50_000]
    assert other.is_exist("k") == 0
    assert store.batch_put_session_end(["k", "none"]) == [0, INVALID]
    assert other.get("k") == value
    assert store.batch_put_session_start(["k", "n"], [10, 10]) == [TAKEN, 0]
    assert store.batch_put_session_end(["n"]) == [0]
    assert store.get("n") == bytes(10), "what was not written is 0"


def test_layers_of_many_objects_are_written_by_one_call_each(store: MooncakeDistributedStore) -> None:
    arena, keys, layer = Arena(store), ["a", "b", "c"], 10_000
    values = [value_of(4 * layer, seed) for seed in range(3)]
    assert store.batch_put_session_start(keys, [4 * layer] * 3) == [0, 0, 0]
    for number in (2, 0, 3, 1):
        pointers = arena.pointers([layer] * 3)
        for pointer, value in zip(pointers, values, strict=True):
            arena.write([pointer], [layer], value[number * layer : (number + 1) * layer])
        written = store.batch_put_from_multi_buffer_ranges(
            keys, [[each] for each in pointers], [[layer]] * 3, [[number * layer]] * 3
        )
        assert written == [layer] * 3
    assert store.batch_put_session_end(keys) == [0, 0, 0]
    assert store.get_batch(keys) == values


def test_a_revoked_session_leaves_nothing(store: MooncakeDistributedStore, pool: LocalPool) -> None:
    assert store.batch_put_session_start(["k"], [MIB]) == [0]
    assert store.batch_put_session_revoke(["k", "none"]) == [0, INVALID]
    assert store.batch_put_session_end(["k"]) == [INVALID]
    assert store.is_exist("k") == 0
    assert store.put("k", b"v") == 0
    pool.check_integrity()


def test_wrong_ranges_are_refused_alone(store: MooncakeDistributedStore) -> None:
    arena = Arena(store)
    start = arena.address
    assert store.batch_put_session_start(["a", "b"], [1000, 1000]) == [0, 0]
    results = store.batch_put_from_multi_buffer_ranges(
        ["a", "b", "none", "a", "a"],
        [[start], [start], [start], [1], [start, start]],
        [[1000], [1001], [10], [10], [10]],
        [[0], [0], [0], [0], [0]],
    )
    assert results == [1000, INVALID, INVALID, INVALID, INVALID]
    assert store.batch_put_from_multi_buffer_ranges(["a"], [], [], []) == [INVALID]
    assert store.batch_put_from_multi_buffer_ranges(["b"], [[start]], [[10]], [[-1]]) == [INVALID]
    assert store.batch_put_session_start(["", "c"], [10, 0]) == [INVALID, INVALID]
    assert store.batch_put_session_start(["c"], [1, 2]) == [INVALID]
    assert store.batch_put_session_start(["c"], [1], ReplicateConfig(replica_num=0)) == [INVALID]
    assert store.batch_put_session_start(["c"], [50 * MIB]) == [NO_SPACE]


def test_end_waits_for_writes_under_way(store: MooncakeDistributedStore) -> None:
    """Eight threads write one object while the session is ended: the object is whole, or the writes were refused."""
    arena, part = Arena(store, nbytes=MIB), 66_000
    arena.bytes[:] = 1
    for round_number in range(5):
        key = f"k{round_number}"
        assert store.batch_put_session_start([key], [8 * part]) == [0]
        start, first, results = threading.Barrier(8), threading.Event(), [0] * 8

        def write(number: int, key: str, start: threading.Barrier, first: threading.Event, results: list[int]) -> None:
            start.wait()
            (results[number],) = store.batch_put_from_multi_buffer_ranges(
                [key], [[arena.address + number * part]], [[part]], [[number * part]]
            )
            first.set()

        threads = [threading.Thread(target=write, args=(number, key, start, first, results)) for number in range(8)]
        for thread in threads:
            thread.start()
        first.wait()
        assert store.batch_put_session_end([key]) == [0]
        for thread in threads:
            thread.join()
        assert set(results) <= {part, INVALID}
        assert store.get(key) == b"".join(bytes([result == part]) * part for result in results)


# reading


def test_reads_ranges_of_an_open_object(store: MooncakeDistributedStore) -> None:
    arena, value = Arena(store), value_of(90_000)
    layers = arena.pointers([30_000] * 3)
    arena.write(layers, [30_000] * 3, value)
    assert store.batch_put_from_multi_buffers(["k"], [layers], [[30_000] * 3]) == [0]
    assert store.batch_get_session_start(["k", "none"]) == [0, NOT_FOUND]
    into = arena.pointers([30_000, 10, 4000], at=120_000)
    read = store.batch_get_into_multi_buffer_ranges(
        ["k", "none"], [into, into[:1]], [[30_000, 10, 4000], [1]], [[30_000, 7, 58_000], [0]]
    )
    assert read == [34_010, INVALID]
    assert arena.read(into, [30_000, 10, 4000]) == value[30_000:60_000] + value[7:17] + value[58_000:62_000]
    assert store.batch_get_into_multi_buffer_ranges(["k"], [into[:1]], [[10]], [[89_991]]) == [INVALID]
    assert store.batch_get_into_multi_buffer_ranges(["k"], [into[:1]], [[10]], [[-1]]) == [INVALID]
    assert store.batch_get_session_end(["k", "never opened"]) == 0
    assert store.batch_get_into_multi_buffer_ranges(["k"], [into[:1]], [[10]], [[0]]) == [INVALID]


def test_an_open_object_that_is_gone_is_never_read(store: MooncakeDistributedStore, pool: LocalPool) -> None:
    arena = Arena(store)
    assert store.put("k", value_of(1000)) == 0
    assert store.batch_get_session_start(["k"]) == [0]
    assert store.upsert("k", value_of(1000, seed=2)) == 0
    pool.advance(60)
    assert store.put("other", value_of(3 * MIB)) == 0
    read = store.batch_get_into_multi_buffer_ranges(["k"], [[arena.address]], [[1000]], [[0]])
    assert read == [EXPIRED] or arena.read([arena.address], [1000]) == value_of(1000), "its space may be unused yet"
    assert store.batch_get_session_start(["k"]) == [0]
    assert store.batch_get_into_multi_buffer_ranges(["k"], [[arena.address]], [[1000]], [[0]]) == [1000]
    assert arena.read([arena.address], [1000]) == value_of(1000, seed=2)


# many ranges in one call


def test_ranges_of_many_objects_go_to_many_buffers(store: MooncakeDistributedStore) -> None:
    arena = Arena(store)
    a, b = value_of(5000, 1), value_of(6000, 2)
    assert store.put_batch(["a", "b"], [a, b]) == 0
    first, second = arena.address, arena.address + 100_000
    got = store.get_into_ranges(
        [first, second],
        [["a", "b"], ["b", "none", "a"]],
        [[[0, 100], [300]], [[0], [5], [50, 60, 10**9]]],
        [[[10, 4990], [0]], [[5999], [0], [4999, 0, 0]]],
        [[[50, 10], [200]], [[1], [1], [2, 0, 5]]],
    )
    assert got == [[[50, 10], [200]], [[1], [NOT_FOUND], [INVALID, 0, INVALID]]]
    assert arena.read([first, first + 100, first + 300], [50, 10, 200]) == a[10:60] + a[4990:] + b[:200]
    assert arena.read([second], [1]) == b[5999:]


def test_lists_of_ranges_that_differ_are_refused(store: MooncakeDistributedStore) -> None:
    arena = Arena(store)
    assert store.put("a", b"value") == 0
    assert store.get_into_ranges([arena.address], [["a", "a"]], [[[0], []]], [[[0, 1], []]], [[[], []]]) == [
        [[INVALID], []]
    ]
    assert store.get_into_ranges([arena.address], [], [], [], []) == [[]]
    assert store.get_into_ranges([arena.address], [["a"]], [[[0], [1]]], [[[0]]], [[[1]]]) == [[[INVALID], [INVALID]]]
    assert store.get_into_ranges([], [], [], [], []) == []
    assert store.get_into_ranges([5], [["a"]], [[[0]]], [[[0]]], [[[1]]]) == [[[INVALID]]]
    assert store.get_into_ranges([arena.address], [["a"]], [[[-1]]], [[[0]]], [[[1]]]) == [[[INVALID]]]


def test_sessions_before_setup_are_refused() -> None:
    store = MooncakeDistributedStore()
    assert store.batch_put_session_start(["k"], [1]) == [INVALID]
    assert store.batch_put_from_multi_buffer_ranges(["k"], [[1]], [[1]], [[0]]) == [INVALID]
    assert store.batch_put_session_end(["k"]) == store.batch_put_session_revoke(["k"]) == [INVALID]
    assert store.batch_get_session_start(["k"]) == [INVALID]
    assert store.batch_get_into_multi_buffer_ranges(["k"], [[1]], [[1]], [[0]]) == [INVALID]
    assert store.batch_get_session_end(["k"]) == INVALID
    assert store.get_into_ranges([1], [["k"]], [[[0]]], [[[0]]], [[[1]]]) == [[[INVALID]]]
