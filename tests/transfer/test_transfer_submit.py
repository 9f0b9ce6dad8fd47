"""engine.submit(): small requests together, cancellation, priorities, messages, threads and event loops."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slow_remote import FakeRemote, Gate, Stepped, refusing, slow
from waiting import HANG_S

from moonpool.base.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidInput,
    MoonpoolError,
    NotFound,
    Overloaded,
    PeerLost,
    StaleGeneration,
    Unauthorized,
)
from moonpool.transfer import (
    Batch,
    MemoryFabric,
    Priority,
    RemoteSegment,
    Segment,
    SegmentDescriptor,
    TransferConfig,
    TransferEngine,
    TransferOp,
    TransferRequest,
    TransferStatus,
)
from moonpool.transfer.memory.buffers import as_bytes_views

READ, WRITE = TransferOp.READ, TransferOp.WRITE
DONE, FAILED, CANCELLED = TransferStatus.DONE, TransferStatus.FAILED, TransferStatus.CANCELLED
KIB, MIB = 1 << 10, 1 << 20
LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])


def config(tmp_path: Path, **others: object) -> TransferConfig:
    return TransferConfig(**{"run_dir": str(tmp_path), "tcp_host": None, "shm": False} | others)  # type: ignore[arg-type]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[TransferEngine]:
    with TransferEngine(config(tmp_path)) as made:
        yield made


@pytest.fixture
def lone(tmp_path: Path) -> Iterator[TransferEngine]:
    """An engine of one thread, so that what is behind a gate has not begun."""
    with TransferEngine(config(tmp_path, num_threads=1)) as made:
        yield made


def reads(remote: RemoteSegment, count: int, nbytes: int) -> list[TransferRequest]:
    return [TransferRequest(READ, remote, n * nbytes, [bytearray(nbytes)]) for n in range(count)]


def filled(request: TransferRequest) -> bytes:
    return b"".join(as_bytes_views(request.buffers, False))


def statuses(batch: Batch) -> list[TransferStatus]:
    return [batch.status(n) for n in range(len(batch))]


def test_small_requests_go_together(engine: TransferEngine) -> None:
    remote = FakeRemote(1000 * 4 * KIB)
    remote.memory[:] = random.Random(1).randbytes(remote.nbytes)
    requests = reads(remote, 1000, 4 * KIB)
    engine.submit(requests).wait(HANG_S)
    assert len(remote.calls) == 4
    assert b"".join(filled(request) for request in requests) == remote.memory


def test_large_ones_do_not(engine: TransferEngine) -> None:
    remote = FakeRemote(4 * MIB)
    engine.submit([TransferRequest(READ, remote, 0, [bytearray(4 * MIB)])]).wait(HANG_S)
    assert sorted(remote.calls) == [[(at, MIB)] for at in range(0, 4 * MIB, MIB)]


def test_groups_are_of_one_segment_op_and_generation(engine: TransferEngine) -> None:
    one, two = FakeRemote(), FakeRemote()
    kinds = [(READ, one, 0), (WRITE, one, 1), (WRITE, one, 2), (WRITE, two, 2)]
    requests = [
        TransferRequest(op, remote, n * 64 + m * KIB, [bytearray([n]) * 64], generation)
        for n in range(10)
        for m, (op, remote, generation) in enumerate(kinds)
    ]
    engine.submit(requests).wait(HANG_S)
    assert sorted(len(spans) for spans in one.calls) == [10, 10, 10]
    assert [len(spans) for spans in two.calls] == [10]
    assert two.memory[3 * KIB :][: 10 * 64] == b"".join(bytes([n]) * 64 for n in range(10))


pieces = st.lists(st.lists(st.integers(0, 300), max_size=4), min_size=1, max_size=20)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces, st.integers(1, 500), st.sampled_from([READ, WRITE]), st.integers(0, 2**32))
def test_any_mix_of_sizes_and_buffers_arrives(
    tmp_path: Path, sizes: list[list[int]], slice_nbytes: int, op: TransferOp, seed: int
) -> None:
    chance = random.Random(seed)
    remote = FakeRemote(20 * 4 * 300)
    data = bytearray(chance.randbytes(remote.nbytes))
    requests, expected, at = [], bytearray(remote.nbytes), 0
    if op is READ:
        remote.memory[:] = data
    for own in sizes:
        buffers, start = [], at
        for nbytes in own:
            buffers.append(bytearray(nbytes) if op is READ else data[at : at + nbytes])
            at += nbytes
        expected[start:at] = data[start:at]
        requests.append(TransferRequest(op, remote, start, buffers))
    with TransferEngine(config(tmp_path, slice_nbytes=slice_nbytes)) as engine:
        batch = engine.submit(requests)
        batch.wait(HANG_S)
    assert set(statuses(batch)) == {DONE}
    if op is WRITE:
        assert remote.memory == expected
    else:
        assert b"".join(filled(request) for request in requests) == bytes(expected[:at])


def test_one_refused_among_many_fails_alone(engine: TransferEngine) -> None:
    remote = refusing(3 * 64, 7 * 64, error=StaleGeneration("newer"))
    batch = engine.submit([TransferRequest(WRITE, remote, n * 64, [bytes([n]) * 64], 1) for n in range(10)])
    with pytest.raises(StaleGeneration):
        batch.wait(HANG_S)
    assert [n for n in range(10) if batch.status(n) is not DONE] == [3, 7]
    assert statuses(batch).count(FAILED) == 2
    assert all(remote.memory[n * 64 : (n + 1) * 64] == bytes([0 if n in (3, 7) else n]) * 64 for n in range(10))


@pytest.mark.parametrize("error", [PeerLost("gone"), DeadlineExceeded("silence"), Unauthorized("not you")])
def test_a_lost_peer_is_not_asked_again_for_each(engine: TransferEngine, error: MoonpoolError) -> None:
    remote = refusing(0, error=error)
    batch = engine.submit(reads(remote, 10, 64))
    with pytest.raises(type(error)):
        batch.wait(HANG_S)
    assert set(statuses(batch)) == {FAILED}
    assert len(remote.calls) == 1


def test_a_bug_is_looked_for_one_by_one_too(engine: TransferEngine) -> None:
    def before(spans: list[tuple[int, int]]) -> None:
        if any(offset == 64 for offset, _ in spans):
            raise ZeroDivisionError("a bug")

    batch = engine.submit(reads(FakeRemote(before=before), 5, 64))
    with pytest.raises(MoonpoolError, match="ZeroDivisionError"):
        batch.wait(HANG_S)
    assert statuses(batch).count(DONE) == 4


def test_a_request_that_makes_no_sense_ends_its_batch_and_not_the_engine(lone: TransferEngine) -> None:
    nonsense = TransferRequest(WRITE, FakeRemote(), 0, [b"x"], generation=[])  # type: ignore[arg-type]
    with pytest.raises(MoonpoolError, match="unhashable"):
        lone.submit([nonsense], room_timeout_s=0).wait(HANG_S)
    lone.submit(reads(FakeRemote(), 1, 1)).wait(HANG_S)


def test_a_single_small_request_is_moved_by_the_callers_thread(engine: TransferEngine) -> None:
    threads: list[str] = []
    remote = FakeRemote(MIB, lambda spans: threads.append(threading.current_thread().name))
    batch = engine.submit(reads(remote, 1, 64))
    assert batch.done()
    assert statuses(batch) == [DONE]
    assert list(batch.as_completed()) == [0]
    batch.cancel()
    engine.submit(reads(remote, 1, 64), room_timeout_s=0).wait(HANG_S)
    engine.submit(reads(remote, 1, 512 * KIB)).wait(HANG_S)
    engine.submit(reads(remote, 1, 64), notify=b"x").wait(HANG_S)
    assert [name == threading.current_thread().name for name in threads] == [True, False, False, False]
    refused = engine.submit(reads(refusing(0, error=NotFound("x")), 1, 64))
    assert (statuses(refused), [type(error) for error in refused.outcomes()]) == ([FAILED], [NotFound])


def test_requests_are_reported_as_they_end(tmp_path: Path) -> None:
    gate, fast = Gate(), refusing(64, error=NotFound("x"))
    with TransferEngine(config(tmp_path, num_threads=2)) as engine:
        batch = engine.submit([*reads(gate, 1, MIB), *reads(fast, 3, 64)])
        ended = batch.as_completed()
        assert {next(ended), next(ended), next(ended)} == {1, 2, 3}
        assert (batch.error(1), batch.status(0)) == (None, TransferStatus.PENDING)
        assert isinstance(batch.error(2), NotFound)
        gate.open.set()
        assert list(ended) == [0]
        assert [error is None for error in batch.outcomes()] == [True, True, False, True]


@pytest.fixture
def fenced(tmp_path: Path) -> Iterator[tuple[TransferEngine, RemoteSegment, Segment]]:
    """A segment with a fence of 4 KiB, reached by tcp."""
    with (
        Segment.allocate("seg", 8 * MIB, granule_nbytes=4 * KIB, incarnation=1) as segment,
        TransferEngine(config(tmp_path, tcp_host="127.0.0.1")) as owner,
        TransferEngine(config(tmp_path)) as peer,
    ):
        yield peer, peer.open(owner.serve(segment)), segment


Fenced = tuple[TransferEngine, RemoteSegment, Segment]


def test_writes_of_many_generations_go_together_and_fail_alone(fenced: Fenced) -> None:
    peer, remote, segment = fenced
    assert segment.fence is not None
    segment.fence.stamp(3 * 4 * KIB, 1, 99)
    batch = peer.submit(
        [TransferRequest(WRITE, remote, n * 4 * KIB, [bytes([n]), bytes([n])], n + 1) for n in range(9)]
    )
    outcomes = batch.outcomes()
    assert [n for n, error in enumerate(outcomes) if error is not None] == [3]
    assert isinstance(outcomes[3], StaleGeneration)
    for n in (0, 1, 2, 4, 5, 6, 7, 8):
        assert segment.fence.generation_at(n * 4 * KIB) == n + 1
        assert bytes(segment.memory[n * 4 * KIB :][:2]) == bytes([n, n])


def test_a_read_expects_a_generation(fenced: Fenced) -> None:
    peer, remote, segment = fenced
    assert segment.fence is not None
    data = random.Random(5).randbytes(4 * MIB)
    segment.memory[: len(data)] = data
    segment.fence.stamp(0, 4 * MIB, 7)
    segment.fence.stamp(8 * KIB, 1, 8)

    def read(offset: int, nbytes: int, expected: int) -> TransferRequest:
        return TransferRequest(READ, remote, offset, [bytearray(nbytes // 2), bytearray(nbytes // 2)], 0, expected)

    requests = [read(0, 4 * KIB, 7), read(8 * KIB, 4 * KIB, 7), read(MIB, 3 * MIB, 7), read(8 * KIB, 64, 8)]
    outcomes = peer.submit([*requests, *reads(remote, 1, 64)]).outcomes()
    assert [type(error) for error in outcomes] == [type(None), StaleGeneration, *[type(None)] * 3]
    for request in (requests[0], requests[2], requests[3]):
        moved = filled(request)
        assert moved == data[request.offset :][: len(moved)]
    for inline in (True, False):
        room_timeout_s = None if inline else 0
        with pytest.raises(StaleGeneration):
            peer.submit([read(8 * KIB, 64, 7)], room_timeout_s=room_timeout_s).wait(HANG_S)
        peer.submit([read(8 * KIB, 64, 8)], room_timeout_s=room_timeout_s).wait(HANG_S)
        with pytest.raises(InvalidInput):
            peer.submit([read(8 * KIB, 64, 0)], room_timeout_s=room_timeout_s).wait(HANG_S)
    unfenced = TransferRequest(READ, FakeRemote(), 0, [bytearray(1)], expected_generation=1)
    with pytest.raises(InvalidInput, match="without generations"):
        peer.submit([unfenced]).wait(HANG_S)


def test_cancel_settles_what_has_not_begun_at_once(lone: TransferEngine) -> None:
    gate = Gate(8 * MIB)
    first = TransferRequest(READ, gate, 0, [bytearray(MIB)])
    second = TransferRequest(READ, gate, MIB, [bytearray(4 * MIB)])
    batch = lone.submit([first, second])
    behind = lone.submit(reads(gate, 3, 64))
    assert gate.entered.acquire(timeout=HANG_S)
    behind.cancel()
    assert behind.done()
    assert set(statuses(behind)) == {CANCELLED}
    batch.cancel()
    batch.cancel()
    assert statuses(batch) == [TransferStatus.PENDING, CANCELLED]
    assert not batch.done(), "its first slice is under way"
    gate.open.set()
    with pytest.raises(Cancelled):
        batch.wait(HANG_S)
    assert statuses(batch) == [DONE, CANCELLED]
    assert isinstance(batch.error(1), Cancelled)
    assert len(gate.calls) == 1


def test_cancel_of_what_is_done_changes_nothing(engine: TransferEngine) -> None:
    batch = engine.submit(reads(FakeRemote(), 10, 64))
    batch.wait(HANG_S)
    batch.cancel()
    batch.wait(0)
    assert set(statuses(batch)) == {DONE}
    empty = engine.submit([])
    empty.cancel()
    empty.wait(0)


def test_when_done_no_buffer_is_touched(tmp_path: Path) -> None:
    """Batches cancelled at random moments: whatever is done is right, whatever is not was not delivered as done."""
    chance = random.Random(3)
    with TransferEngine(config(tmp_path, num_threads=3, slice_nbytes=64 * KIB)) as engine:
        for turn in range(60):
            remote = slow(0.0005, MIB)
            remote.memory[:] = chance.randbytes(MIB)
            sizes = [chance.choice([100, 4 * KIB, 200 * KIB]) for _ in range(4)]
            requests = [
                TransferRequest(READ, remote, sum(sizes[:n]), [bytearray(nbytes)]) for n, nbytes in enumerate(sizes)
            ]
            batch = engine.submit(requests, priority=Priority(turn % 3))
            canceller = threading.Timer(chance.random() * 0.003, batch.cancel)
            canceller.start()
            assert batch.done_within(HANG_S)
            assert remote.touching == 0
            for number, request in enumerate(requests):
                right = remote.memory[request.offset :][: sizes[number]]
                if batch.status(number) is DONE:
                    assert request.buffers[0] == right
                else:
                    assert batch.status(number) is CANCELLED
            canceller.join()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_urgent_work_waits_for_one_slice_at_most(tmp_path: Path, num_threads: int) -> None:
    """No slice of the bulk begins between the submission of urgent work and its begin."""
    begun_before: list[int] = []
    with TransferEngine(config(tmp_path, num_threads=num_threads, slice_nbytes=64 * KIB)) as engine:
        stepped = Stepped(8 * MIB)
        urgent = FakeRemote(before=lambda spans: begun_before.append(len(stepped.calls)))
        all_of_it = TransferRequest(READ, stepped, 0, [bytearray(8 * MIB)])
        bulk = engine.submit([all_of_it], priority=Priority.REPLICATION, timeout_s=5 * HANG_S)
        for _ in range(num_threads - 1):
            assert stepped.entered.acquire(timeout=HANG_S)
        for _ in range(20):
            assert stepped.entered.acquire(timeout=HANG_S)
            batch = engine.submit(reads(urgent, 1, 64), priority=Priority.HANDOFF, room_timeout_s=0)
            stepped.go_on.release()
            batch.wait(HANG_S)
        bulk.cancel()
        stepped.go_on.release(1000)
        assert bulk.done_within(HANG_S)
    assert begun_before == list(range(num_threads, num_threads + 20))


def test_a_slow_peer_delays_no_other(tmp_path: Path) -> None:
    with (
        Segment.allocate("seg", MIB, incarnation=1) as segment,
        TransferEngine(config(tmp_path, tcp_host="127.0.0.1")) as owner,
        TransferEngine(config(tmp_path)) as peer,
    ):
        remote, silent = peer.open(owner.serve(segment)), Gate(8 * MIB)
        stuck = peer.submit(
            [TransferRequest(READ, silent, 0, [bytearray(8 * MIB)])], priority=Priority.HANDOFF, timeout_s=60
        )
        for _ in range(2):
            assert silent.entered.acquire(timeout=HANG_S)
        for priority in Priority:
            peer.submit(reads(remote, 10, 4 * KIB), priority=priority, timeout_s=HANG_S).wait()
        assert not stuck.done()
        silent.open.set()
        stuck.wait(HANG_S)


def test_priorities_and_the_share_of_the_rest(tmp_path: Path) -> None:
    served: list[Priority] = []

    def remote_of(priority: Priority) -> FakeRemote:
        return FakeRemote(before=lambda spans: served.append(priority))

    remotes = {priority: remote_of(priority) for priority in Priority}
    gate = Gate()
    with TransferEngine(config(tmp_path, num_threads=1, slice_nbytes=64, promote_after_s=60)) as engine:
        engine.submit(reads(gate, 1, 1), room_timeout_s=0)
        assert gate.entered.acquire(timeout=HANG_S)
        batches = [engine.submit(reads(remotes[p], 4, 64), priority=p) for p in reversed(Priority)]
        gate.open.set()
        for batch in batches:
            batch.wait(HANG_S)
        assert served == [p for p in Priority for _ in range(4)]
    served.clear()
    gate = Gate()
    with TransferEngine(config(tmp_path, num_threads=1, slice_nbytes=64, promote_after_s=0.0)) as engine:
        engine.submit(reads(gate, 1, 1), room_timeout_s=0)
        assert gate.entered.acquire(timeout=HANG_S)
        batches = [
            engine.submit(reads(remotes[p], 12, 64), priority=p) for p in (Priority.REPLICATION, Priority.HANDOFF)
        ]
        gate.open.set()
        for batch in batches:
            batch.wait(HANG_S)
        assert served[:16] == ([Priority.HANDOFF] * 3 + [Priority.REPLICATION]) * 4


def test_a_full_queue_of_replicas_lets_a_hand_off_in(tmp_path: Path) -> None:
    gate = Gate()
    with TransferEngine(config(tmp_path, num_threads=1, max_queued_slices=2, slice_nbytes=1)) as engine:
        engine.submit(reads(gate, 1, 1), room_timeout_s=0)
        assert gate.entered.acquire(timeout=HANG_S)
        low = engine.submit(reads(gate, 2, 1), priority=Priority.REPLICATION)
        with pytest.raises(Overloaded):
            engine.submit(reads(gate, 1, 1), priority=Priority.REPLICATION, room_timeout_s=0)
        high = engine.submit(reads(gate, 2, 1), priority=Priority.HANDOFF, room_timeout_s=0)
        low.cancel()  # makes room
        engine.submit(reads(gate, 2, 1), priority=Priority.REPLICATION, room_timeout_s=0)
        gate.open.set()
        high.wait(HANG_S)


def test_messages_follow_success_once_for_each_owner(tmp_path: Path) -> None:
    fabric = MemoryFabric()
    gate = Gate()
    with TransferEngine(config(tmp_path), fabric=fabric) as engine:
        one, two = FakeRemote(), FakeRemote()
        engine.submit([*reads(one, 3, 64), *reads(two, 2, 64), *reads(one, 1, 64)], notify=b"all there").wait(HANG_S)
        assert (one.messages, two.messages) == ([b"all there"], [b"all there"])
        bad = refusing(0, error=NotFound("x"))
        with pytest.raises(NotFound):
            engine.submit([*reads(bad, 1, 64), *reads(one, 1, 64)], notify=b"not so").wait(HANG_S)
        late = engine.submit(reads(gate, 1, 64), notify=b"later")
        assert gate.entered.acquire(timeout=HANG_S)
        assert not gate.messages
        gate.open.set()
        late.wait(HANG_S)
        assert gate.messages == [b"later"]
        engine.submit([], notify=b"to nobody").wait(0)
    assert (one.messages, bad.messages) == ([b"all there"], [])


def test_a_message_that_is_not_taken_fails_the_batch(engine: TransferEngine) -> None:
    class Deaf(FakeRemote):
        def notify(self, message: bytes, *, timeout_s: float) -> None:
            assert 0 < timeout_s <= 3
            raise Overloaded("nobody reads")

    batch = engine.submit(reads(Deaf(), 2, 64), notify=b"x", timeout_s=3)
    with pytest.raises(Overloaded):
        batch.wait(HANG_S)
    assert set(statuses(batch)) == {DONE}, "the bytes are there, all the same"


@LOOPS
def test_from_a_coroutine(tmp_path: Path, new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    fabric = MemoryFabric()

    async def use(engine: TransferEngine, descriptor: SegmentDescriptor) -> bytes:
        remote = await engine.opening(descriptor)
        assert await engine.opening(descriptor) is remote
        await engine.submit([TransferRequest(WRITE, remote, 0, [b"hello"])], notify=b"said", room_timeout_s=0)
        back = bytearray(5)
        async with asyncio.TaskGroup() as group:
            for n in range(5):
                group.create_task(read_one(engine, remote, n, back))
        with pytest.raises(InvalidInput):
            await engine.submit([TransferRequest(READ, remote, MIB, [bytearray(1)])])
        return bytes(back)

    async def read_one(engine: TransferEngine, remote: RemoteSegment, n: int, back: bytearray) -> None:
        await engine.submit([TransferRequest(READ, remote, n, [memoryview(back)[n : n + 1]])])

    with (
        Segment.allocate("seg", MIB, incarnation=1) as segment,
        TransferEngine(config(tmp_path), fabric=fabric) as owner,
        TransferEngine(config(tmp_path), fabric=fabric) as peer,
        asyncio.Runner(loop_factory=new_loop) as runner,
    ):
        assert runner.run(use(peer, owner.serve(segment))) == b"hello"


async def test_opening_reports_what_open_would_raise(tmp_path: Path) -> None:
    with (
        Segment.allocate("seg", MIB, incarnation=1) as segment,
        TransferEngine(config(tmp_path, tcp_host="127.0.0.1")) as owner,
    ):
        peer = TransferEngine(config(tmp_path))
        descriptor = owner.serve(segment)
        with pytest.raises(NotFound):
            await peer.opening(msgspec.structs.replace(descriptor, incarnation=9))
        peer.close()
        with pytest.raises(PeerLost):
            await peer.opening(descriptor)


@LOOPS
def test_a_cancelled_coroutine_gets_its_buffer_back_untouched(
    tmp_path: Path, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    gate = Gate(4 * MIB)
    gate.memory[:] = b"\x01" * gate.nbytes

    async def give_up(engine: TransferEngine) -> None:
        buffer = bytearray(4 * MIB)
        batch = engine.submit([TransferRequest(READ, gate, 0, [buffer])])

        async def read() -> None:
            await batch

        task = asyncio.create_task(read())
        assert await asyncio.to_thread(gate.entered.acquire, timeout=HANG_S)
        task.cancel()
        await asyncio.sleep(0.02)
        assert not task.done()
        gate.open.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert batch.done()
        assert gate.touching == 0
        buffer[:] = b"\x07" * len(buffer)  # ours again
        await asyncio.sleep(0.02)
        assert buffer == b"\x07" * len(buffer)

    with TransferEngine(config(tmp_path)) as engine, asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(give_up(engine))
