"""Many small reads at once over tcp are asked, answered and received as one after the other would be."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
from fuzz_harness import converse
from hypothesis import given
from hypothesis import strategies as st
from severe import check_bytes
from tcp_shadow import Memories, Shadow
from waiting import HANG_S

from moonpool.base.checksum import crc32c
from moonpool.base.clock import Deadline
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import InvalidInput, StaleGeneration
from moonpool.transfer.memory.fence import Fence, make_fence
from moonpool.transfer.memory.segment import Borrowed, Segment
from moonpool.transfer.transports.sockets import TimedSocket
from moonpool.transfer.transports.tcp import connection, frame_columns, frames
from moonpool.transfer.transports.tcp.answer_runs import AnswerRun
from moonpool.transfer.transports.tcp.frame_columns import ReadRun, pack_run, read_run
from moonpool.transfer.transports.tcp.frames import (
    MAX_DATA_NBYTES,
    REQUEST_NBYTES,
    RESPONSE_NBYTES,
    FrameOp,
    FrameStatus,
    ReadVerdict,
    Request,
    RequestPacker,
    pack_refusal,
    pack_request,
    pack_response,
    pack_verdict,
    unpack_response,
)
from moonpool.transfer.transports.tcp.read_runs import GATHER_NBYTES, answer_together
from moonpool.transfer.transports.tcp.server import TcpServer
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
    first = Request(FrameOp.READ, 1, "seg", 1, 0, 10, 7, crc32c(b"seg"))
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
    run = read_run(memoryview(bytes(stream)), first)
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
    served: tuple[TcpTransport, Segment], wrong: AbstractSet[int] = frozenset(), *, expecting: bool = True
) -> tuple[set[int], list[bytearray]]:
    """Read all objects of two granules with one call. Expect another generation of those at `wrong`, or none at all."""
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
        if not expecting:
            remote.read_many([(at * 2 * GRANULE, room[at]) for at in range(512)], timeout_s=HANG_S)
            return set(), room
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


def test_every_object_is_read_whatever_its_generation(served: tuple[TcpTransport, Segment]) -> None:
    _, room = read_all(served, expecting=False)
    for at in range(512):
        check_bytes(room[at], served[1].memory[at * 2 * GRANULE : (at + 1) * 2 * GRANULE - 7], f"object {at}")


def test_space_that_is_given_away_while_it_is_read_is_stale(served: tuple[TcpTransport, Segment]) -> None:
    """Another owner stamps the space after the bytes of a run were taken, before the verdicts."""
    fence = served[1].borrow().fence
    assert fence is not None

    def overtaken(run: ReadRun, borrowed: Borrowed) -> bytes:
        real = fence.carries

        def carries(offsets: np.ndarray, *rest: np.ndarray) -> np.ndarray:
            if 40 * GRANULE in offsets.tolist():
                fence.stamp(40 * GRANULE, GRANULE, 9999)
            return real(offsets, *rest)

        with patch.object(fence, "carries", carries):
            return answer_together(run, borrowed)

    with patch.object(connection, "answer_together", overtaken):
        stale, _ = read_all(served)
    assert stale == {20}


RECEIVE = AnswerRun.receive


@pytest.mark.parametrize("expecting", [True, False])
def test_small_reads_of_a_batch_are_answered_and_received_together(
    served: tuple[TcpTransport, Segment], expecting: bool
) -> None:
    num_answered, num_received = 0, 0

    def answer(run: ReadRun, borrowed: Borrowed) -> bytes:
        nonlocal num_answered
        num_answered += len(run.request_ids)
        return answer_together(run, borrowed)

    def receive(run: AnswerRun, sock: TimedSocket, deadline: Deadline) -> tuple[int, bytes]:
        nonlocal num_received
        count, rest = RECEIVE(run, sock, deadline)
        num_received += count
        return count, rest

    with patch.object(connection, "answer_together", answer), patch.object(AnswerRun, "receive", receive):
        read_all(served, expecting=expecting)
    assert num_answered > 400  # the rest: the first of what has come together, and few that come late
    assert num_received == 512


# the owner's side alone

NBYTES = 96 * 1024
LARGE = GATHER_NBYTES + 1
PLAIN, EXPECTING = ("seg", 0), ("fenced", 1)


def read_request(number: int, place: tuple[int, int], what: tuple[str, int]) -> Request:
    return Request(FrameOp.READ, number, what[0], 1, *place, what[1])


@pytest.fixture(scope="module")
def owner() -> Iterator[tuple[Memories, TcpServer]]:
    """Two segments; the second half of "fenced" carries generation 1."""
    memories = stamped(Memories(NBYTES))
    server = TcpServer(memories.control, "127.0.0.1", 0, stall_timeout_s=HANG_S, max_connections=64)
    yield memories, server
    server.close()


def stamped(memories: Memories) -> Memories:
    fence = memories.segments["fenced"].fence
    assert fence is not None
    fence.stamp(NBYTES // 2, NBYTES // 2, 1)
    for at, whole in enumerate(memories.wholes.values()):
        whole[:] = np.random.default_rng(at).bytes(len(whole))
    return memories


def ask(server: TcpServer, requests: bytes) -> bytes:
    """Return what the owner answers to requests that are sent in one piece."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S) as sock:
        return converse(sock, requests)


@given(
    kinds=st.lists(
        st.tuples(
            st.sampled_from([*range(0, NBYTES, 4096), NBYTES - 1, NBYTES, NBYTES + 1, 2**62]),
            st.sampled_from([0, 1, 512, 513, GATHER_NBYTES - 1, GATHER_NBYTES, 50_000]),
            st.sampled_from(
                [PLAIN, PLAIN, ("fenced", 0), EXPECTING, EXPECTING, ("fenced", 2), ("seg", 1), ("gone", 0)]
            ),
            st.integers(1, 40),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_reads_of_all_kinds_that_come_together_are_each_answered(
    owner: tuple[Memories, TcpServer], kinds: list[tuple[int, int, tuple[str, int], int]]
) -> None:
    alike = [((offset, nbytes), what) for offset, nbytes, what, count in kinds for _ in range(count)]
    requests = [read_request(number, *each) for number, each in enumerate(alike, 1)]
    shadow = Shadow(NBYTES)
    stamped(shadow.memories)
    raw = b"".join([pack_request(each) for each in requests])
    heard = memoryview(ask(owner[1], raw))
    for answer in shadow.run(raw):
        head = unpack_response(heard[:RESPONSE_NBYTES])
        assert (head.request_id, head.status is FrameStatus.OK) == (answer.request_id, answer.ok)
        end = RESPONSE_NBYTES + head.nbytes
        if answer.ok:
            check_bytes(heard[RESPONSE_NBYTES:end], answer.data, f"the data of request {head.request_id}")
            assert heard[end : end + len(answer.verdict)] == answer.verdict
        heard = heard[end + len(answer.verdict) :]
    assert not heard


@pytest.mark.parametrize(
    "kinds",
    [
        [((0, 64), PLAIN)],
        [((NBYTES // 2, 64), EXPECTING)],
        [((0, 64), EXPECTING)],
        [((0, LARGE), PLAIN)],
        [((0, 64), PLAIN), ((0, LARGE), PLAIN)],
        [((NBYTES // 2, 64), EXPECTING), ((0, 64), EXPECTING)],
        [((0, 64), ("fenced", 0)), ((NBYTES // 2, 64), EXPECTING)],
        [((NBYTES, 64), PLAIN)],
        [((0, 64), ("gone", 0))],
        [((0, 64), PLAIN), ((0, 64), ("fenced", 0))],
    ],
    ids=[
        "plain", "expecting", "stale", "large", "small and large by turns", "stale by turns", "expecting by turns",
        "outside", "unknown", "two segments by turns",
    ],
)  # fmt: skip
def test_the_head_of_each_request_is_looked_at_once(
    owner: tuple[Memories, TcpServer],
    kinds: list[tuple[tuple[int, int], tuple[str, int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An owner that looked at all that was left after each answer had five times the work of this."""
    requests = [read_request(number, *kinds[number % len(kinds)]) for number in range(1, 301)]
    num_heads = 0

    def counting(data: bytes | memoryview) -> int:
        nonlocal num_heads
        num_heads += len(data) == REQUEST_NBYTES - 4
        return crc32c(data)

    raw = b"".join([pack_request(each) for each in requests])
    monkeypatch.setattr(frames, "crc32c", counting)
    monkeypatch.setattr(frame_columns, "crc32c", counting)
    assert ask(owner[1], raw)
    assert num_heads == len(requests)


# the caller's side alone


def answers(sizes: Sequence[int], refused: int | None, stale: int | None, expecting: bool) -> list[bytes]:
    frames = []
    for number, nbytes in enumerate(sizes, 1):
        verdict = ReadVerdict.STALE if stale == number - 1 else ReadVerdict.SAME
        frames.append(pack_response(number, nbytes) + bytes([number]) * nbytes)
        if expecting:
            frames[-1] += pack_verdict(number, verdict)
        if refused == number - 1:
            frames[-1] = pack_refusal(number, StaleGeneration("gone"))
    return frames


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=20),
    refused=st.one_of(st.none(), st.integers(0, 19)),
    stale=st.one_of(st.none(), st.integers(0, 19)),
    cuts=st.lists(st.integers(0, 5000), max_size=5),
    expecting=st.booleans(),
)
def test_answers_are_received_up_to_the_first_that_is_no_success(
    sizes: list[int], refused: int | None, stale: int | None, cuts: list[int], expecting: bool
) -> None:
    stale = stale if expecting else None
    frames = answers(sizes, refused, stale, expecting)
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
        count, rest = AnswerRun(1, sizes, views, expecting).receive(sock, Deadline(HANG_S))
    assert count == num_right
    assert (rest + b"".join(parts)) == b"".join(frames[num_right:])
    for number, view in enumerate(views[:num_right], 1):
        assert view == bytes([number]) * view.nbytes
