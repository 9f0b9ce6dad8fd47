"""OFFLOAD and DROP: what is answered as done is on the disk, and what is on the disk was right."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from node_world import MIB, allocate, object_of, open_ssd, order, place, store
from waiting import HANG_S

from moonpool.base.errors import MoonpoolError, NoSpace, Unavailable
from moonpool.node import offloading
from moonpool.node.offloading import LogThread
from moonpool.node.ssd import LogItem, LogLocation
from moonpool.node.ssd.folder import LogFolder
from moonpool.node.ssd.reading import check_object
from moonpool.node.ssd_tier import NodeSsd, offset_of
from moonpool.store.messages import Order, OrderKind, OrderResult, Placement
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.transports.file.folder import file_name

SIZES = (5000, 70_000)
SPACE = 128 * 1024


@pytest.fixture
def memory() -> Iterator[Segment]:
    with allocate() as made:
        yield made


@pytest.fixture
def ssd(tmp_path: Path) -> Iterator[NodeSsd]:
    made = open_ssd(tmp_path)
    yield made
    made.close()


@pytest.fixture
def log_thread(memory: Segment, ssd: NodeSsd) -> Iterator[LogThread]:
    made = LogThread(memory, lambda: ssd)
    yield made
    made.close()


def offloads(memory: Segment, count: int, *, generation: int = 7) -> list[Order]:
    """Objects in memory, and orders to offload them."""
    orders = []
    for number in range(count):
        key, offset = b"key-%d" % number, number * SPACE
        nbytes = store(memory, offset, key, generation, SIZES)
        orders.append(order(OrderKind.OFFLOAD, key, nbytes, place(memory, offset, generation)))
    return orders


def drop(of: Order) -> Order:
    return order(OrderKind.DROP, of.key, of.nbytes, Placement("n0.ssd", 0, 3, of.source.generation))


def codes(results: Sequence[OrderResult]) -> list[str | None]:
    return [None if result.refusal is None else result.refusal.code for result in results]


def test_several_in_one_go(memory: Segment, ssd: NodeSsd, log_thread: LogThread) -> None:
    orders = offloads(memory, 20)
    results = log_thread.execute(orders)
    assert [result.order_id for result in results] == [each.order_id for each in orders]
    assert codes(results) == [None] * 20
    for each, result in zip(orders, results, strict=True):
        found = bytearray(each.nbytes)
        assert result.offset is not None
        ssd.segment.read_into(result.offset, [found], timeout_s=HANG_S)
        assert found == object_of(each.key, 7, SIZES)
    assert ssd.log.stats().num_pending_tombstones == 0


def test_checks_run_one_write_ahead(
    memory: Segment, ssd: NodeSsd, log_thread: LogThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Further ahead they would keep the writing thread from Python's lock."""
    orders = offloads(memory, 16)
    nbytes = orders[0].nbytes
    monkeypatch.setattr(offloading, "_FIRST_WRITE_NBYTES", nbytes)
    monkeypatch.setattr(offloading, "_WRITE_NBYTES", 4 * nbytes)
    num_checked = 0
    seen: list[tuple[int, int]] = []
    check, append_many = check_object, ssd.log.append_many

    def counting(*args: Any) -> None:
        nonlocal num_checked
        check(*args)
        num_checked += 1

    def writing(items: Sequence[LogItem]) -> list[LogLocation | MoonpoolError]:
        written = append_many(items)
        seen.append((len(items), num_checked))
        return written

    monkeypatch.setattr(offloading, "check_object", counting)
    monkeypatch.setattr(ssd.log, "append_many", writing)
    assert codes(log_thread.execute(orders)) == [None] * 16
    assert [count for count, _ in seen] == [1, 2, 4, 4, 4, 1]
    for (_, checked), most in zip(seen, (3, 7, 11, 15, 16, 16), strict=True):
        assert checked <= most


def test_done_means_durable(
    memory: Segment, ssd: NodeSsd, log_thread: LogThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    sync = ssd.log.sync

    def noted() -> None:
        sync()
        synced.append(ssd.log.stats().num_objects)

    monkeypatch.setattr(ssd.log, "sync", noted)
    log_thread.execute(offloads(memory, 5))
    assert synced == [5]


def test_a_failed_sync_is_no_success(
    memory: Segment, ssd: NodeSsd, log_thread: LogThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = offloads(memory, 3)
    with monkeypatch.context() as patch:
        patch.setattr(ssd.log, "sync", fail_with(Unavailable("input/output error")))
        assert codes(log_thread.execute(orders)) == ["unavailable"] * 3
    assert not list(ssd.log.items())
    assert codes(log_thread.execute(orders)) == [None] * 3


def test_wrong_bytes_are_never_stored(memory: Segment, ssd: NodeSsd, log_thread: LogThread) -> None:
    orders = offloads(memory, 4)
    memory.memory[1 * SPACE + 50_000] ^= 1
    memory.memory[2 * SPACE + 10] ^= 1
    assert codes(log_thread.execute(orders)) == [None, "corrupt", "corrupt", None]
    assert {each.key for each in ssd.log.items()} == {b"key-0", b"key-3"}


def test_space_that_was_given_away_before(memory: Segment, ssd: NodeSsd, log_thread: LogThread) -> None:
    orders = offloads(memory, 2)
    store(memory, 0, b"other", 8, SIZES)
    assert memory.fence is not None
    memory.fence.admit(SPACE, SPACE, 9)  # the new owner has begun
    memory.memory[SPACE + 40_000] ^= 1
    assert codes(log_thread.execute(orders)) == ["stale_generation"] * 2
    assert not list(ssd.log.items())


def test_space_that_is_given_away_while_its_bytes_are_written(
    memory: Segment, ssd: NodeSsd, log_thread: LogThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = offloads(memory, 3)
    append_many = ssd.log.append_many

    def slow(items: Sequence[LogItem]) -> list[LogLocation | MoonpoolError]:
        store(memory, 1 * SPACE, b"other", 8, SIZES)
        return append_many(items)

    monkeypatch.setattr(ssd.log, "append_many", slow)
    results = log_thread.execute(orders)
    assert codes(results)[::2] == [None, None]
    assert codes(results)[1] in ("stale_generation", "corrupt", "invalid_input")
    assert {each.key for each in ssd.log.items()} == {b"key-0", b"key-2"}


def test_asked_again_it_says_where_it_is(memory: Segment, ssd: NodeSsd, log_thread: LogThread) -> None:
    orders = offloads(memory, 3)
    first, again = log_thread.execute(orders), log_thread.execute(orders)
    assert [result.offset for result in first] == [result.offset for result in again]


def test_a_record_under_another_generation(memory: Segment, ssd: NodeSsd, log_thread: LogThread) -> None:
    """The log has an older object of the key, which was dropped, under a higher generation."""
    nbytes = store(memory, SPACE, b"key-0", 9, SIZES)
    newer = order(OrderKind.OFFLOAD, b"key-0", nbytes, place(memory, SPACE, 9))
    (offload,) = offloads(memory, 1)
    assert codes(log_thread.execute([newer, drop(newer), offload])) == [None, None, "stale_generation"]
    target = Placement("n0.ssd", 0, ssd.segment.incarnation, 12)
    again = order(OrderKind.OFFLOAD, offload.key, offload.nbytes, offload.source, target)
    first, second = log_thread.execute([again]), log_thread.execute([again])
    assert codes(first) == [None]
    assert first[0].offset is not None
    assert second[0].offset == first[0].offset
    found = bytearray(again.nbytes)
    ssd.segment.read_into(first[0].offset, [found], timeout_s=HANG_S)
    assert found == object_of(b"key-0", 12, SIZES)
    assert bytes(memory.memory[: again.nbytes]) == object_of(b"key-0", 7, SIZES), "memory stays as it was"


def test_in_their_order(memory: Segment, ssd: NodeSsd, log_thread: LogThread) -> None:
    (offload,) = offloads(memory, 1)
    results = log_thread.execute([offload, drop(offload), offload, drop(offload), offload])
    assert codes(results) == [None] * 5
    there = ssd.log.find(b"key-0", 7)
    assert there is not None
    assert offset_of(there) == results[-1].offset
    log_thread.execute([drop(offload)])
    assert ssd.log.find(b"key-0", 7) is None


def test_orders_of_earlier_mounts(memory: Segment, ssd: NodeSsd, log_thread: LogThread) -> None:
    (offload,) = offloads(memory, 1)
    late = order(OrderKind.OFFLOAD, offload.key, offload.nbytes, offload.source, Placement("n0.ssd", 0, 2, 7))
    memory.incarnation += 1
    assert codes(log_thread.execute([offload])) == ["not_found"]
    memory.incarnation -= 1
    assert codes(log_thread.execute([late])) == ["not_found"]


def test_a_full_log_refuses_and_goes_on_when_there_is_room(
    memory: Segment, ssd: NodeSsd, log_thread: LogThread, caplog: pytest.LogCaptureFixture
) -> None:
    refusals: set[str | None] = set()
    with caplog.at_level(logging.WARNING):
        for generation in range(10, 30):
            orders = [
                order(OrderKind.OFFLOAD, key, nbytes, place(memory, offset, generation))
                for offset in range(0, 8 * MIB - SPACE, SPACE)
                for key in [b"%d-%d" % (generation, offset)]
                for nbytes in [store(memory, offset, key, generation, SIZES)]
            ]
            refusals |= set(codes(log_thread.execute(orders)))
    assert refusals == {None, NoSpace.code}
    assert sum("not offloaded" in record.message for record in caplog.records) == 1
    old = [(each.key, each.generation) for each in ssd.log.items() if each.generation < 15]
    ssd.log.remove(old)
    while ssd.log.compact(64 * MIB):
        pass
    for number in ssd.log.drained():
        ssd.log.release(number)
    assert codes(log_thread.execute(offloads(memory, 2, generation=50))) == [None, None]


def test_a_disk_in_trouble_refuses_and_recovers(
    memory: Segment, ssd: NodeSsd, log_thread: LogThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = offloads(memory, 2)
    with monkeypatch.context() as patch:
        patch.setattr(LogFolder, "make_file", fail_with(Unavailable("read-only file system")))
        assert codes(log_thread.execute(orders)) == ["unavailable"] * 2
    assert codes(log_thread.execute(orders)) == [None, None]


def test_without_a_disk(memory: Segment) -> None:
    assert codes(LogThread(memory, lambda: None).execute(offloads(memory, 2))) == ["unavailable"] * 2


def test_log_and_segment_call_files_the_same(ssd: NodeSsd) -> None:
    for number in (1, 77, 2**31 - 1):
        assert Path(ssd.log.path_of(number)).name == file_name(number)


def fail_with(error: MoonpoolError) -> object:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail
