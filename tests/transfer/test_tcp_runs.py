"""Many small reads at once over tcp are asked, answered and received as one after the other would be."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import HANG_S

from moonpool.base.clock import Deadline
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import InvalidInput, StaleGeneration
from moonpool.transfer.memory.fence import Fence, make_fence
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.transports.sockets import TimedSocket
from moonpool.transfer.transports.tcp import read_runs
from moonpool.transfer.transports.tcp.answer_runs import AnswerRun
from moonpool.transfer.transports.tcp.frame_columns import ReadRun, pack_run, read_run
from moonpool.transfer.transports.tcp.frames import (
    MAX_DATA_NBYTES,
    FrameOp,
    ReadVerdict,
    Request,
    RequestPacker,
    pack_refusal,
    pack_request,
    pack_response,
    pack_verdict,
)
from moonpool.transfer.transports.tcp.transport import TcpTransport

U64 = st.integers(0, 2**64 - 1)
ORDERS = st.lists(st.tuples(U64, st.integers(0, MAX_DATA_NBYTES), U64), min_size=1, max_size=40)
GRANULE = 4096


@given(
    name=st.sampled_from(["s", "segment", "n" * 255]), op=st.sampled_from([FrameOp.READ, FrameOp.WRITE]), orders=ORDERS
)
def test_a_run_is_packed_as_its_requests_are(name: str, op: FrameOp, orders: list[tuple[int, int, int]]) -> None:
    offsets, sizes, generations = zip(*orders, strict=True)
    packer = RequestPacker(name, 2**64 - 1)
    one_by_one = [packer.pack(op, number, *order) for number, order in enumerate(orders, 5)]
    assert pack_run(packer, op, 5, offsets, sizes, generations) == b"".join(one_by_one)


@pytest.mark.parametrize("wrong", [(-1, 1, 1), (1, -1, 1), (1, 1, -1), (1, MAX_DATA_NBYTES + 1, 1), (2**64, 1, 1)])
def test_what_does_not_fit_a_frame_is_not_packed(wrong: tuple[int, int, int]) -> None:
    offsets, sizes, generations = zip(*([(0, 1, 1)] * 20), wrong, strict=True)
    with pytest.raises(InvalidInput):
        pack_run(RequestPacker("s", 1), FrameOp.READ, 1, offsets, sizes, generations)


@given(
    others=st.lists(
        st.builds(
            Request,
            st.sampled_from([FrameOp.READ, FrameOp.READ, FrameOp.READ, FrameOp.WRITE]),
            U64,
            st.sampled_from(["seg", "seg", "seg", "sex", "longer"]),
            st.sampled_from([1, 1, 1, 2]),
            st.integers(0, 2**62),
            st.integers(0, MAX_DATA_NBYTES),
            U64,
        ),
        min_size=16,
        max_size=40,
    ),
    damaged_bit=st.one_of(st.none(), st.integers(0, 16 * 59 * 8 - 1)),
)
def test_a_run_ends_before_the_first_request_of_another_kind(others: list[Request], damaged_bit: int | None) -> None:
    first = Request(FrameOp.READ, 1, "seg", 1, 0, 10, 7)
    packed = [pack_request(each) for each in others]
    stream, num_alike = bytearray(b"".join(packed)), 0
    if damaged_bit is not None:
        stream[damaged_bit // 8] ^= 1 << damaged_bit % 8
    size = len(pack_request(first))
    for at, each in enumerate(others):
        is_alike = (each.op, each.name, each.incarnation) == (FrameOp.READ, "seg", 1)
        if not is_alike or stream[at * size : (at + 1) * size] != packed[at]:
            break
        num_alike += 1
    run = read_run(memoryview(bytes(stream)), pack_request(first))
    assert run is not None
    alike = others[:num_alike]
    assert run.request_ids == [each.request_id for each in alike]
    assert run.offsets.tolist() == [each.offset for each in alike]
    assert run.sizes.tolist() == [each.nbytes for each in alike]
    assert run.generations.tolist() == [each.generation for each in alike]


@given(
    stamps=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    spans=st.lists(
        st.tuples(st.integers(0, 7 * GRANULE), st.integers(1, GRANULE), st.integers(0, 3)), min_size=1, max_size=20
    ),
)
def test_the_fence_confirms_many_as_it_confirms_one(stamps: list[int], spans: list[tuple[int, int, int]]) -> None:
    fence = make_fence(8 * GRANULE, GRANULE)
    assert fence is not None
    for at, stamp in enumerate(stamps):
        fence.stamp(at * GRANULE, GRANULE, stamp)

    def is_confirmed(fence: Fence, span: tuple[int, int, int]) -> bool:
        try:
            fence.confirm(*span)
        except StaleGeneration:
            return False
        return True

    offsets, sizes, generations = (np.array(column, np.uint64) for column in zip(*spans, strict=True))
    assert fence.carries(offsets, sizes, generations).tolist() == [is_confirmed(fence, span) for span in spans]
    assert fence.carries(offsets[:0], sizes[:0], generations[:0]).tolist() == []


# from end to end


@pytest.fixture
def served() -> Iterator[tuple[TcpTransport, Segment]]:
    segment = Segment.allocate("seg", 1024 * GRANULE, incarnation=1, granule_nbytes=GRANULE)
    segment.memory[:] = np.random.default_rng(1).bytes(segment.nbytes)
    owner = TcpTransport()
    owner.serve(segment)
    for at in range(1024):
        fence = segment.borrow().fence
        assert fence is not None
        fence.stamp(at * GRANULE, GRANULE, 1 + at // 2)
    yield owner, segment
    owner.close()


def read_all(
    served: tuple[TcpTransport, Segment], wrong: AbstractSet[int] = frozenset()
) -> tuple[set[int], list[bytearray]]:
    """Read all objects of two granules with one call. Expect another generation of those at `wrong`."""
    owner, segment = served
    caller = TcpTransport(host=None)
    try:
        assert owner.endpoint is not None
        descriptor = SegmentDescriptor(
            name=segment.name,
            nbytes=segment.nbytes,
            incarnation=segment.incarnation,
            endpoints=(owner.endpoint,),
            host="h",
            granule_nbytes=GRANULE,
        )
        remote = caller.open(descriptor, owner.endpoint, timeout_s=HANG_S)
        room = [bytearray(2 * GRANULE - 7) for _ in range(512)]
        items = [(at * 2 * GRANULE, room[at], at + 1 + (1000 if at in wrong else 0)) for at in range(512)]
        batches = [items[at : at + 100] for at in range(0, 512, 100)]
        stale: set[int] = set()
        for number, found in enumerate(remote.read_expecting(batches, timeout_s=HANG_S)):
            stale |= {number * 100 + at for at in found}
        return stale, room
    finally:
        caller.close()


@pytest.mark.parametrize(
    "wrong", [set(), {0}, {511}, {63, 64}, {17, 18, 19, 300}, set(range(512)), set(range(0, 512, 2))]
)
def test_every_object_is_read_or_found_to_be_stale(served: tuple[TcpTransport, Segment], wrong: set[int]) -> None:
    stale, room = read_all(served, wrong)
    assert stale == wrong
    for at in set(range(512)) - wrong:
        assert room[at] == served[1].memory[at * 2 * GRANULE : (at + 1) * 2 * GRANULE - 7]


TAKEN = read_runs._taken


def test_space_that_is_given_away_while_it_is_read_is_stale(served: tuple[TcpTransport, Segment]) -> None:
    """Another owner stamps the space after the bytes of a run were taken, before the verdicts."""
    fence = served[1].borrow().fence
    assert fence is not None

    def overtaken(run: ReadRun, memory: memoryview, fence: Fence) -> bytes:
        real = fence.carries

        def carries(offsets: np.ndarray, *rest: np.ndarray) -> np.ndarray:
            if 40 * GRANULE in offsets.tolist():
                fence.stamp(40 * GRANULE, GRANULE, 9999)
            return real(offsets, *rest)

        with patch.object(fence, "carries", carries):
            return TAKEN(run, memory, fence)

    with patch.object(read_runs, "_taken", overtaken):
        stale, _ = read_all(served)
    assert stale == {20}


def test_small_reads_of_a_batch_are_answered_together(served: tuple[TcpTransport, Segment]) -> None:
    with patch.object(read_runs, "_taken", side_effect=TAKEN) as taken:
        read_all(served)
    assert sum(len(call.args[0].request_ids) for call in taken.call_args_list) > 400


# the caller's side alone


def answers(sizes: Sequence[int], refused: int | None, stale: int | None) -> list[bytes]:
    frames = []
    for number, nbytes in enumerate(sizes, 1):
        verdict = ReadVerdict.STALE if stale == number - 1 else ReadVerdict.SAME
        frames.append(pack_response(number, nbytes) + bytes([number]) * nbytes + pack_verdict(number, verdict))
        if refused == number - 1:
            frames[-1] = pack_refusal(number, StaleGeneration("gone"))
    return frames


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=20),
    refused=st.one_of(st.none(), st.integers(0, 19)),
    stale=st.one_of(st.none(), st.integers(0, 19)),
    cuts=st.lists(st.integers(0, 5000), max_size=5),
)
def test_answers_are_received_up_to_the_first_that_is_no_success(
    sizes: list[int], refused: int | None, stale: int | None, cuts: list[int]
) -> None:
    frames = answers(sizes, refused, stale)
    stream = b"".join(frames)
    num_right = min([at for at in (refused, stale) if at is not None and at < len(sizes)], default=len(sizes))
    here, there = socket.socketpair()
    sock, views = TimedSocket.over(here), [memoryview(bytearray(nbytes)) for nbytes in sizes]
    edges = [0, *sorted(cut for cut in cuts if cut < len(stream)), len(stream)]
    parts = [stream[start:end] for start, end in pairwise(edges)]

    def receive(sock: TimedSocket, room: Sequence[memoryview], deadline: Deadline) -> int:
        while not parts[0]:
            parts.pop(0)
        taken = min(len(parts[0]), sum(view.nbytes for view in room))
        data, parts[0] = parts[0][:taken], parts[0][taken:]
        there.sendall(data)
        return sock.recvmsg_into(room)[0]

    with there, sock, patch("moonpool.transfer.transports.tcp.answer_runs.receive_first", receive):
        count, rest = AnswerRun(1, sizes, views).receive(sock, Deadline(HANG_S))
    assert count == num_right
    assert (rest + b"".join(parts)) == b"".join(frames[num_right:])
    for number, view in enumerate(views[:num_right], 1):
        assert view == bytes([number]) * view.nbytes
