"""A node and a master that only wants to see it work: mounts, recounts, orders, sessions, disks."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest
from node_world import LOG_FILE_NBYTES, MIB, config, object_of, order, place, store
from scripted_master import FLOOR, ScriptedMaster, refusal_of
from waiting import HANG_S

from moonpool.base.errors import ConfigError, PeerLost, StaleGeneration
from moonpool.base.metrics import GetMetrics
from moonpool.base.rpc import AsyncClient
from moonpool.node import orders as orders_module
from moonpool.node import session_registry
from moonpool.node import ssd_tier as ssd_module
from moonpool.node.orders import OrderLane
from moonpool.node.service import Node
from moonpool.node.ssd import MovedRecord, SsdLog
from moonpool.store.messages import (
    SESSIONS_ALONE,
    Order,
    OrderKind,
    Placement,
    ReportCorrupt,
    Tier,
    session_calls,
)
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.transports.file.folder import file_name

SPACE = 128 * 1024
NEW = FLOOR + 50


class World:
    def __init__(self, tmp_path: Path, stack: AsyncExitStack) -> None:
        self.tmp_path = tmp_path
        self._stack = stack
        self.master = ScriptedMaster(f"unix:{tmp_path}/m.sock")

    async def node(self, name: str = "n0", **settings: object) -> Node:
        made = Node(config(self.tmp_path, name=name, **settings))  # type: ignore[arg-type]
        self._stack.push_async_callback(made.close)
        await made.start()
        if made.ssd is not None:
            await self.master.until(lambda: any(last for _, last in self.master.inventory_parts))
        return made


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        made = World(tmp_path, stack)
        await made.master.start()
        stack.push_async_callback(made.master.close)
        yield made


def offload(node: Node, number: int, generation: int = NEW) -> Order:
    """An object in memory and the order to offload it."""
    key, offset = b"key-%d" % number, number * SPACE
    nbytes = store(node.segment, offset, key, generation)
    assert node.ssd is not None
    target = Placement(node.ssd.segment.name, 0, node.ssd.segment.incarnation, generation)
    return order(OrderKind.OFFLOAD, key, nbytes, place(node.segment, offset, generation), target)


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def copy(source: Placement, nbytes: int, node: Node, key: bytes = b"key-0", at: int = 4 * MIB) -> Order:
    return order(OrderKind.COPY, key, nbytes, source, place(node.segment, at, NEW + 1))


def contents(segment: Segment, at: int, nbytes: int) -> bytes:
    return bytes(segment.memory[at : at + nbytes])


# --- mounts -----------------------------------------------------------------------------------------------------------


async def test_both_tiers_are_mounted(world: World) -> None:
    node = await world.node()
    dram, ssd = world.master.mounts["n0.dram"], world.master.mounts["n0.ssd"]
    assert (dram.tier, dram.node, dram.registry_address) == (Tier.DRAM, "n0", node.config.registry_address)
    assert (ssd.tier, ssd.registry_address) == (Tier.SSD, None)
    assert ssd.capacity_nbytes is not None
    assert 0.6 * node.config.ssd_nbytes < ssd.capacity_nbytes < 0.8 * node.config.ssd_nbytes
    assert node.segment.fence is not None
    assert node.segment.fence.spans_above(FLOOR - 1) == [(0, node.segment.nbytes)], "the past is fenced off"


async def test_a_master_that_comes_back_gets_a_recount_and_nothing_is_void(world: World) -> None:
    node = await world.node(ssd_nbytes=0)
    store(node.segment, 0, b"old", FLOOR + 1)
    store(node.segment, 3 * SPACE, b"new", FLOOR + 7, (4096,))
    store(node.segment, 3 * SPACE + 8192, b"neighbour", FLOOR + 8, (10,))
    incarnation = node.segment.incarnation
    client = await AsyncClient.connect(node.config.registry_address, session_calls.SERVICE)
    await client.call(session_calls.Register(session=2**40))
    await world.master.close()
    world.master.recount_above = FLOOR + 5
    await world.master.start()
    await world.master.until(lambda: world.master.recounts)
    (recount,) = world.master.recounts
    assert (recount.segment, recount.incarnation) == ("n0.dram", incarnation)
    assert recount.spans == [(3 * SPACE, 8192 + 8192)]
    assert recount.sessions == [2**40]
    assert node.segment.incarnation == incarnation
    assert contents(node.segment, 0, 100) == object_of(b"old", FLOOR + 1, (5000, 70_000))[:100]
    client.close()


async def test_before_a_recount_the_node_refuses_what_the_master_has_lost(world: World) -> None:
    """In its own memory, over tcp and in place alike: also later, and after the master was lost again."""
    node = await world.node(ssd_nbytes=0)
    fence, seen = node.segment.fence, list[bool]()
    assert fence is not None
    fence.admit(0, 4096, FLOOR + 7)
    original = fence.spans_above

    def spans_above(generation: int) -> list[tuple[int, int]]:
        with pytest.raises(StaleGeneration, match="lost the record"):
            fence.admit(SPACE, 4096, FLOOR + 6)  # a write that the report would miss
        seen.append(True)
        return original(generation)

    fence.spans_above = spans_above  # type: ignore[method-assign]
    for above, up_to in ((FLOOR + 5, FLOOR + 10), (FLOOR + 15, FLOOR + 20)):
        world.master.recounts.clear()
        await world.master.close()
        world.master.recount_above, world.master.refuse_up_to = above, up_to
        await world.master.start()
        await world.master.until(lambda: world.master.recounts)
    assert seen == [True, True]
    for lost in (FLOOR + 6, FLOOR + 10, FLOOR + 16, FLOOR + 20):
        with pytest.raises(StaleGeneration, match="lost the record"):
            fence.admit(2 * SPACE, 4096, lost)
    with pytest.raises(StaleGeneration, match="lost the record"):
        fence.confirm(0, 4096, FLOOR + 7)  # it was admitted before, and is told that it was in vain
    for known in (FLOOR + 5, FLOOR + 11, FLOOR + 15, FLOOR + 21):
        fence.admit(2 * SPACE, 4096, known)


async def test_a_question_about_sessions_refuses_no_generation(world: World) -> None:
    node = await world.node(ssd_nbytes=0)
    await world.master.close()
    world.master.recount_above = SESSIONS_ALONE
    await world.master.start()
    await world.master.until(lambda: world.master.recounts)
    assert node.segment.fence is not None
    node.segment.fence.admit(0, 4096, FLOOR + 1)


async def test_a_master_that_forgot_gets_a_new_incarnation(world: World) -> None:
    node = await world.node()
    before, ssd_before = node.segment.incarnation, world.master.mounts["n0.ssd"].descriptor.incarnation
    world.master.mounts.clear()
    await world.master.until(lambda: len(world.master.mounts) == 2)
    assert world.master.mounts["n0.dram"].descriptor.incarnation > before
    assert world.master.mounts["n0.ssd"].descriptor.incarnation > ssd_before


async def test_a_mount_that_was_cut_short_is_not_used(world: World) -> None:
    """The master knows the segment then, but nothing is fenced off."""
    world.master.cut_next_mount = True
    node = await world.node(ssd_nbytes=0)
    assert world.master.num_mounts == 2
    assert node.segment.fence is not None
    assert node.segment.fence.spans_above(FLOOR - 1) == [(0, node.segment.nbytes)]


async def test_a_name_that_is_taken_is_a_clear_error(world: World) -> None:
    world.master.refuse_mounts = True
    with pytest.raises(ConfigError, match="another node called 'n0'"):
        await world.node(start_timeout_s=0.5)


async def test_a_restarted_node_waits_until_its_predecessor_is_forgotten(world: World) -> None:
    world.master.refuse_mounts = True
    starting = asyncio.create_task(world.node())
    await world.master.until(lambda: world.master.num_calls.get("MountSegment", 0) >= 2)
    assert not starting.done()
    assert world.master.mounts == {}
    world.master.refuse_mounts = False
    await starting
    assert world.master.mounts.keys() == {"n0.dram", "n0.ssd"}


async def test_twins_on_one_machine_are_refused_at_once(world: World) -> None:
    await world.node()
    with pytest.raises(ConfigError, match=r"n0\.sess"):
        await world.node(start_timeout_s=HANG_S)


async def test_two_nodes_cannot_share_a_folder(world: World) -> None:
    await world.node()
    with pytest.raises(ConfigError, match="in use"):
        await world.node("n1", ssd_dir=str(world.tmp_path / "n0.disk"))


async def test_no_master_in_time(tmp_path: Path) -> None:
    with pytest.raises(PeerLost):
        await Node(config(tmp_path, ssd_nbytes=0, start_timeout_s=0.2)).start()


# --- orders -----------------------------------------------------------------------------------------------------------


async def test_offload_drop_and_bring_back(world: World) -> None:
    node = await world.node()
    orders = [offload(node, number) for number in range(30)]
    results = await world.master.execute(*orders)
    assert [refusal_of(result) for result in results] == [None] * 30
    assert world.master.num_calls["OrdersDone"] <= 15, "answers go together"
    assert node.ssd is not None
    assert results[0].offset is not None
    source = Placement(node.ssd.segment.name, results[0].offset, node.ssd.segment.incarnation, NEW)
    node.segment.memory[: orders[0].nbytes] = bytes(orders[0].nbytes)
    back = copy(source, orders[0].nbytes, node)
    assert refusal_of((await world.master.execute(back))[0]) is None
    assert contents(node.segment, 4 * MIB, back.nbytes) == object_of(b"key-0", NEW + 1, (5000, 70_000))
    drop = order(OrderKind.DROP, b"key-0", back.nbytes, source)
    assert refusal_of((await world.master.execute(drop))[0]) is None
    assert node.ssd.log.find(b"key-0", NEW) is None


def lane_of(node: Node, kind: OrderKind) -> OrderLane:
    return node.work.orders._lanes[kind]


def registry_of(node: Node) -> session_registry.SessionRegistry:
    assert node._registry is not None
    return node._registry


@pytest.mark.parametrize("shm", [True, False])
async def test_copy_from_another_nodes_memory_and_disk(world: World, shm: bool) -> None:
    there, here = await world.node("there"), await world.node("here", shm=shm)
    held = offload(there, 0)
    (result,) = await world.master.execute(copy(held.source, held.nbytes, here))
    assert refusal_of(result) is None
    expected = object_of(b"key-0", NEW + 1, (5000, 70_000))
    assert contents(here.segment, 4 * MIB, held.nbytes) == expected
    assert there.ssd is not None
    (stored,) = lane_of(there, OrderKind.OFFLOAD).run([held])
    assert stored.offset is not None
    source = Placement(there.ssd.segment.name, stored.offset, there.ssd.segment.incarnation, NEW)
    (result,) = await world.master.execute(copy(source, held.nbytes, here, at=6 * MIB))
    assert refusal_of(result) is None
    assert contents(here.segment, 6 * MIB, held.nbytes) == expected


async def test_a_source_that_is_gone(world: World) -> None:
    node = await world.node(ssd_nbytes=0)
    nowhere = Placement("gone.dram", 0, 1, NEW)
    (result,) = await world.master.execute(copy(nowhere, 80_000, node))
    assert refusal_of(result) == "not_found"


async def test_orders_are_sent_again_after_an_outage_and_done_once(world: World) -> None:
    node = await world.node()
    orders = [offload(node, number) for number in range(20)]
    await world.master.close()
    world.master.give(*orders)
    await world.master.start()
    results = await world.master.answers(*orders)
    assert [refusal_of(result) for result in results] == [None] * 20
    assert node.ssd is not None
    assert node.ssd.log.stats().num_objects == 20


async def test_nothing_is_begun_before_what_is_under_way_has_ended(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that outlives its connection must not write into space that a later mount gives away."""
    node = await world.node(ssd_nbytes=0)
    began, go_on = threading.Event(), threading.Event()
    lane = lane_of(node, OrderKind.COPY)
    run = lane.run

    def slow(orders: list[Order]) -> object:
        began.set()
        assert go_on.wait(HANG_S)
        return run(orders)

    monkeypatch.setattr(lane, "run", slow)
    world.master.give(copy(Placement("gone.dram", 0, 1, NEW), 80_000, node))
    await asyncio.to_thread(began.wait)
    num_mounts = world.master.num_mounts
    world.master.mounts.clear()  # the next beat makes it mount anew
    beats = world.master.num_beats
    await world.master.until(lambda: world.master.num_beats > beats)
    await asyncio.sleep(0.1)
    assert world.master.num_mounts == num_mounts
    go_on.set()
    await world.master.until(lambda: world.master.num_mounts > num_mounts)


async def test_an_order_that_waited_too_long_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    node = await world.node()
    monkeypatch.setattr(orders_module, "MAX_WAIT_S", -1.0)
    (result,) = await world.master.execute(offload(node, 0))
    assert refusal_of(result) == "overloaded"


async def test_a_lane_that_is_held_waits_and_its_answers_are_told(world: World) -> None:
    node = await world.node()
    runner = node.work.orders
    first = offload(node, 0)
    world.master.give(first)
    await asyncio.sleep(0)
    async with runner.hold(lane_of(node, OrderKind.OFFLOAD)):
        was_done = first.order_id in world.master.done
        second = offload(node, 1)
        world.master.give(second)
        (copied,) = await world.master.execute(copy(place(node.segment, 0, NEW), first.nbytes, node))
        assert refusal_of(copied) is None, "other lanes go on"
        assert second.order_id not in world.master.done
        assert (first.order_id in world.master.done) == was_done
    await world.master.answers(first, second)


async def test_a_bug_is_an_answer_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    node = await world.node()

    def buggy(*_: object) -> None:
        raise ZeroDivisionError("oops")

    with monkeypatch.context() as patch:
        patch.setattr(SsdLog, "append_many", buggy)
        (result,) = await world.master.execute(offload(node, 0))
        assert refusal_of(result) == "internal"
    (result,) = await world.master.execute(offload(node, 1))
    assert refusal_of(result) is None


async def test_metrics_of_the_session_registry(world: World) -> None:
    node = await world.node()
    corrupt = offload(node, 1)
    node.segment.memory[SPACE + 9000] ^= 1
    await world.master.execute(offload(node, 0), corrupt)
    client = await AsyncClient.connect(node.config.registry_address, session_calls.SERVICE)
    families = {family.name: family for family in await client.call(GetMetrics())}
    client.close()
    counts = {tuple(s.labels.values()): s.value for s in families["moonpool_node_orders"].samples if s.value}
    assert counts == {("offload", "done"): 1, ("offload", "corrupt"): 1}
    nbytes = {tuple(s.labels.values()): s.value for s in families["moonpool_node_bytes"].samples}
    assert nbytes["dram", "offered"] == node.config.dram_nbytes
    assert nbytes["ssd", "live"] >= 75_000
    assert families["moonpool_node_ssd_log"].samples


# --- the session registry ---------------------------------------------------------------------------------------------

_HOLDER = """
import sys
from moonpool.base.rpc import BlockingClient
from moonpool.store.messages import session_calls
client = BlockingClient(sys.argv[1], session_calls.SERVICE)
client.call(session_calls.Register(session=int(sys.argv[2]), uses_gpu=len(sys.argv) > 3))
print("registered", flush=True)
sys.stdin.read()
"""


def start_holder(node: Node, session: int, *, uses_gpu: bool = False) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, node.config.registry_address, str(session), *(["gpu"] if uses_gpu else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "registered\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


async def test_a_killed_process_is_gone_at_once_and_a_stopped_one_is_not(world: World) -> None:
    node = await world.node(ssd_nbytes=0)
    victim, stopped = await asyncio.gather(*(asyncio.to_thread(start_holder, node, number) for number in (1, 2)))
    try:
        os.kill(stopped.pid, signal.SIGSTOP)
        victim.kill()
        await world.master.until(lambda: world.master.gone)  # not by its silence: the other's is longer
        assert world.master.gone == [1]
    finally:
        end(victim)
        end(stopped)
    await world.master.until(lambda: world.master.gone == [1, 2])


async def test_a_process_with_a_gpu_is_gone_a_while_after_its_exit(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its GPU may still write for a moment. Until then it counts as alive."""
    monkeypatch.setattr(session_registry, "GPU_GRACE_S", 1.0)
    node = await world.node(ssd_nbytes=0)
    victim = await asyncio.to_thread(partial(start_holder, node, 1, uses_gpu=True))
    registry = registry_of(node)
    try:
        killed_s = time.monotonic()
        victim.kill()
        victim.wait()
        await world.master.until(lambda: not registry._sessions_of)
        assert registry.sessions() == [1]
        await world.master.until(lambda: world.master.gone == [1])
        assert time.monotonic() - killed_s >= 1.0
        assert registry.sessions() == []
    finally:
        end(victim)


async def test_a_gpu_session_that_comes_back_lives_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that ends without its process's exit ends no session."""
    monkeypatch.setattr(session_registry, "GPU_GRACE_S", 0.0)
    node = await world.node(ssd_nbytes=0)
    first, second = [await AsyncClient.connect(node.config.registry_address, session_calls.SERVICE) for _ in range(2)]
    await first.call(session_calls.Register(session=5, uses_gpu=True))
    await second.call(session_calls.Register(session=6))
    first.close()
    second.close()
    await world.master.until(lambda: world.master.gone == [6])
    assert registry_of(node).sessions() == [5]


async def test_a_gpu_session_whose_copies_are_over_ends_with_its_connection(world: World) -> None:
    node = await world.node(ssd_nbytes=0)
    client = await AsyncClient.connect(node.config.registry_address, session_calls.SERVICE)
    await client.call(session_calls.Register(session=5, uses_gpu=True))
    await client.call(session_calls.EndSessions())
    client.close()
    await world.master.until(lambda: world.master.gone == [5])


async def test_a_session_is_gone_with_its_last_connection(world: World) -> None:
    node = await world.node(ssd_nbytes=0)
    first, second = [await AsyncClient.connect(node.config.registry_address, session_calls.SERVICE) for _ in range(2)]
    for client in (first, first, second):
        await client.call(session_calls.Register(session=5))
    await first.call(session_calls.Register(session=6))
    first.close()
    await world.master.until(lambda: world.master.gone)
    assert world.master.gone == [6]
    second.close()
    await world.master.until(lambda: world.master.gone == [6, 5])


async def test_who_leaves_during_an_outage_is_reported_after_it(world: World) -> None:
    node = await world.node(ssd_nbytes=0)
    client = await AsyncClient.connect(node.config.registry_address, session_calls.SERVICE)
    await client.call(session_calls.Register(session=5))
    await world.master.close()
    client.close()
    await world.master.start()
    await world.master.until(lambda: world.master.gone == [5])


async def test_a_node_that_closes_declares_nobody_gone(world: World) -> None:
    node = await world.node(ssd_nbytes=0)
    client = await AsyncClient.connect(node.config.registry_address, session_calls.SERVICE)
    await client.call(session_calls.Register(session=5))
    await node.close()
    await client.closed.wait()
    assert world.master.gone == []
    assert world.master.mounts == {}


# --- the disk ---------------------------------------------------------------------------------------------------------


async def test_a_restarted_node_tells_what_its_disk_holds(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssd_module, "_ITEMS_PER_CALL", 4)
    node = await world.node()
    results = await world.master.execute(*(offload(node, number) for number in range(10)))
    await node.close()
    world.master.inventory_parts.clear()
    world.master.unwanted = {b"key-3", b"key-7"}
    again = await world.node()
    assert world.master.inventory_parts == [(4, False), (4, False), (2, True)]
    told = {(item.key, item.generation, item.offset) for item in world.master.inventory}
    assert told == {(b"key-%d" % at, NEW, result.offset) for at, result in enumerate(results)}
    assert again.ssd is not None
    log = again.ssd.log
    assert {each.key for each in log.items()} == {b"key-%d" % at for at in range(10)} - world.master.unwanted


async def test_compaction_is_told_and_old_files_rest(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssd_module, "_COMPACT_EVERY_S", 0.02)
    monkeypatch.setattr(ssd_module, "_HIGH_DEAD_PART", 0.05)
    node = await world.node(ssd_rest_s=0.4)
    assert node.ssd is not None
    log = node.ssd.log
    offsets: dict[bytes, int | None] = {}
    for generation in range(NEW, NEW + 3):  # each round replaces the one before
        orders = [offload(node, number, generation) for number in range(60)]
        results = await world.master.execute(*orders)
        offsets |= {each.key: result.offset for each, result in zip(orders, results, strict=True)}
    drops = [
        order(OrderKind.DROP, b"key-%d" % number, 1, Placement("n0.ssd", 0, 1, NEW + 2)) for number in range(0, 60, 2)
    ]
    await world.master.execute(*drops)
    await world.master.until(lambda: world.master.relocated)
    offsets |= {key: offset for key, _, offset in world.master.relocated}
    for number in range(1, 60, 2):
        key = b"key-%d" % number
        there = log.find(key, NEW + 2)
        assert there is not None
        offset = offsets[key]
        assert offset is not None
        found = bytearray(there.nbytes)
        node.ssd.segment.read_into(offset, [found], timeout_s=HANG_S)
        assert found == object_of(key, NEW + 2, (5000, 70_000))
    await world.master.until(lambda: log.stats().num_spare_files > 0)
    log.check_integrity()


async def test_what_is_moved_during_an_outage_is_told_after_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssd_module, "_COMPACT_EVERY_S", 0.02)
    node = await world.node()
    results = await world.master.execute(*(offload(node, number) for number in range(60)))
    assert node.ssd is not None
    log = node.ssd.log
    compact, began, go_on = log.compact, threading.Event(), threading.Event()

    def slow(max_nbytes: int) -> object:
        began.set()
        assert go_on.wait(HANG_S)
        return compact(max_nbytes)

    monkeypatch.setattr(log, "compact", slow)
    log.remove([(b"key-%d" % number, NEW) for number in range(0, 50, 2)])
    monkeypatch.setattr(ssd_module, "_HIGH_DEAD_PART", 0.01)
    await asyncio.to_thread(began.wait)
    await world.master.close()
    go_on.set()
    await world.master.start()
    await world.master.until(lambda: world.master.relocated)
    known = {b"key-%d" % at: result.offset for at, result in enumerate(results)}
    known |= {key: offset for key, _, offset in world.master.relocated}
    assert all(known[each.key] == ssd_module.offset_of(each.location) for each in log.items())


async def test_a_move_is_not_told_when_the_record_was_written_again_since(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the same generation: a master lost its removal with power, and the next one had it stored again."""
    monkeypatch.setattr(ssd_module, "_COMPACT_EVERY_S", 0.02)
    node = await world.node()
    await world.master.execute(*(offload(node, number) for number in range(60)))
    assert node.ssd is not None
    log, again = node.ssd.log, list[bytes]()
    compact = log.compact

    def compact_and_write(max_nbytes: int) -> list[MovedRecord]:
        moved = compact(max_nbytes)
        if moved and not again:
            key, generation = moved[0][:2]
            again.append(key)
            log.remove([(key, generation)])
            log.append(key, generation, [object_of(key, generation, (5000, 70_000))])
        return moved

    monkeypatch.setattr(log, "compact", compact_and_write)
    log.remove([(b"key-%d" % number, NEW) for number in range(0, 50, 2)])
    monkeypatch.setattr(ssd_module, "_HIGH_DEAD_PART", 0.01)
    await world.master.until(lambda: world.master.relocated)
    told = {key: offset for key, _, offset in world.master.relocated}
    known = {each.key: ssd_module.offset_of(each.location) for each in log.items()}
    assert again
    assert told == {key: known[key] for key in told}


async def test_damage_that_compaction_finds_is_told_with_its_place(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssd_module, "_COMPACT_EVERY_S", 0.02)
    node = await world.node()
    assert node.ssd is not None
    results = await world.master.execute(*(offload(node, number) for number in range(60)))
    bad = node.ssd.log.find(b"key-1", NEW)
    assert bad is not None
    flip(world.tmp_path / "n0.disk" / file_name(bad.file_number), bad.offset + 50_000)
    node.ssd.log.remove([(b"key-%d" % number, NEW) for number in range(0, 50, 2)])
    monkeypatch.setattr(ssd_module, "_HIGH_DEAD_PART", 0.01)
    await world.master.until(lambda: world.master.corrupt)
    assert results[1].offset is not None
    assert world.master.corrupt == [ReportCorrupt(b"key-1", NEW, "n0.ssd", results[1].offset)]
    assert b"key-1" not in {key for key, _, _ in world.master.relocated}


async def test_a_disk_that_cannot_be_used_at_start_is_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonpool.node.service._DISK_RETRY_S", 0.05)
    in_the_way = world.tmp_path / "n0.disk"
    in_the_way.write_text("not a folder")
    node = await world.node()
    assert node.ssd is None
    assert list(world.master.mounts) == ["n0.dram"]
    in_the_way.unlink()
    await world.master.until(lambda: "n0.ssd" in world.master.mounts)
    await world.master.until(lambda: world.master.inventory_parts)
    (result,) = await world.master.execute(offload(node, 0))
    assert refusal_of(result) is None


def test_sizes_must_fit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="go together"):
        config(tmp_path, ssd_nbytes=0, ssd_dir="/tmp/x")
    with pytest.raises(ConfigError):
        config(tmp_path, ssd_nbytes=LOG_FILE_NBYTES)
