"""Nonsense on the wire: an owner and a caller are fed 12,500 damaged frames (a million in `make soak`).

After each batch: the owner still answers; memory is what tcp_shadow.py says it should be, to the byte, margins around
the segments and segments not served included; nothing large was allocated (tracemalloc sees every bytearray, also one
whose pages were never touched); no thread, descriptor or unhandled exception is left. Seeds: hostile_bytes.py.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from fuzz_harness import bounded_memory, converse, nothing_left_and_nothing_said, run_batches, scale  # noqa: F401
from hostile_bytes import NBYTES, Hostile
from hypothesis import given, settings
from hypothesis import strategies as st
from tcp_shadow import Answer, Memories, Shadow
from waiting import HANG_S

from moonpool.base.clock import Deadline
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import DamagedFrame, MoonpoolError, ProtocolError, Unauthorized
from moonpool.base.frames import HEADER_NBYTES, FrameDecoder, FrameKind, decode_header, encode_frame
from moonpool.base.rpc.protocol import CallDecoder, decode_error, decode_reply
from moonpool.base.security import Secret
from moonpool.transfer.control import CALLS, ControlHandler, Introduce
from moonpool.transfer.memory.location import host_id
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.transports.shm.server import AskSegment, ShmServer
from moonpool.transfer.transports.shm.transport import ShmRemote
from moonpool.transfer.transports.tcp.frames import (
    RESPONSE_NBYTES,
    FrameOp,
    Request,
    pack_answer,
    pack_refusal,
    pack_request,
    pack_response,
    unpack_error,
    unpack_request,
    unpack_response,
)
from moonpool.transfer.transports.tcp.guard import FRAME_NBYTES, CallerSide, Guard, OwnerSide
from moonpool.transfer.transports.tcp.lanes import LanePool, _prove
from moonpool.transfer.transports.tcp.pipeline import Pipeline, PipelinedRequest, PipelineTarget
from moonpool.transfer.transports.tcp.server import TcpServer
from moonpool.transfer.transports.tcp.transport import TcpControlClient, TcpRemote, _receive_answer

# The shares of 12,500; each has its own test.
SERVER, PIPELINE, ANSWERS, HANDSHAKE, UNIX = 6_000, 3_500, 1_500, 750, 750
GUARD = Guard(secret=Secret(b"correct horse battery staple"))


# The owner


class Owner:
    def __init__(self, guard: Guard | None = None) -> None:
        self.memories = Memories(NBYTES)
        self.server = TcpServer(
            self.memories.control, "127.0.0.1", 0, stall_timeout_s=10.0, max_connections=64, guard=guard
        )
        self._pool = LanePool("127.0.0.1", self.server.port, 1, guard)
        descriptor = SegmentDescriptor(name="seg", nbytes=NBYTES, incarnation=1, host="h", endpoints=())
        self._remote = TcpRemote(self._pool, descriptor)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=HANG_S)

    def answers_a_good_caller(self) -> None:
        back = bytearray(NBYTES)
        self._remote.read_into(0, [back], timeout_s=HANG_S)
        assert back == bytes(self.memories.segments["seg"].memory)
        assert TcpControlClient(self._pool).ask(Introduce(), 10).incarnation == 5

    def close(self) -> None:
        self._pool.close()
        self.server.close()
        assert not [t for t in threading.enumerate() if str(self.server.port) in t.name]


@pytest.fixture
def owner() -> Iterator[Owner]:
    made = Owner()
    yield made
    made.close()


@scale
def test_an_owner_fed_damaged_requests(owner: Owner, times: int) -> None:
    shadow = Shadow(NBYTES)

    def run(hostile: Hostile) -> int:
        before = shadow.num_frames
        for _ in range(40):
            stream = hostile.stream(hostile.request, hostile.rng.choice((2, 10, 30, 60)))
            expected = shadow.run(stream)
            with owner.connect() as sock:
                heard = converse(sock, stream)
            shadow.agree(owner.memories)
            check_answers(heard, expected)
        owner.answers_a_good_caller()
        return shadow.num_frames - before

    run_batches(SERVER, times, run)


def check_answers(heard: bytes, expected: list[Answer]) -> None:
    """What was heard is the beginning of what should be said; the rest is lost when a connection breaks off."""
    at = 0
    for answer in expected:
        if len(heard) - at < RESPONSE_NBYTES:
            return
        response = unpack_response(heard[at : at + RESPONSE_NBYTES])
        assert (response.request_id, response.status == 0) == (answer.request_id, answer.ok)
        at += RESPONSE_NBYTES
        body = heard[at : at + response.nbytes]
        at += len(body)
        if answer.ok:
            assert response.nbytes == len(answer.data)
            assert answer.data.startswith(body)
            verdict = heard[at : at + len(answer.verdict)]
            assert answer.verdict.startswith(verdict)
            at += len(verdict)
        else:
            assert isinstance(unpack_error(body), MoonpoolError)
    assert at == len(heard), "the owner said more than it was asked"


@scale
def test_a_guarded_owner_fed_damaged_proofs(times: int) -> None:
    """Whoever has not proved itself changes nothing, whatever it sends after."""
    owner = Owner(Guard(secret=GUARD.secret, timeout_s=5.0, max_unproven=16))
    shadow = Memories(NBYTES)
    write = pack_request(Request(FrameOp.WRITE, 1, "seg", 1, 0, 4, 1)) + b"evil"

    def run(hostile: Hostile) -> int:
        for _ in range(50):
            with owner.connect() as sock:
                meet(hostile, sock, write)
            assert owner.memories.wholes == shadow.wholes
        owner.answers_a_good_caller()
        return 100

    try:
        run_batches(HANDSHAKE, times, run)
    finally:
        owner.close()


def meet(hostile: Hostile, sock: socket.socket, after: bytes) -> None:
    """A greeting of which one frame or both are wrong, and requests on top of it."""
    knows = hostile.rng.random() < 0.5  # with the right secret, and damage on the way
    caller = CallerSide(GUARD.secret if knows else Secret(b"not the right secret"))
    hello = caller.hello()
    damaged = hostile.damage(hello)
    if hostile.rng.random() < 0.5 and damaged != hello:
        converse(sock, damaged + after)
        return
    sock.sendall(hello)
    challenge = sock.recv(FRAME_NBYTES, socket.MSG_WAITALL)
    proof = caller.proof(challenge)
    wrong = hostile.damage(proof)
    if knows and wrong[:FRAME_NBYTES] == proof:
        wrong = bytes(FRAME_NBYTES)
    heard = converse(sock, wrong + after)
    assert heard[:4] != b"MPTG", "let in"


# The caller


@contextlib.contextmanager
def said_by_owner(data: bytes) -> Iterator[socket.socket]:
    """A connection on which the owner has said all this and left."""
    caller, owner = socket.socketpair()
    with caller, owner:
        owner.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        owner.sendall(data)
        owner.shutdown(socket.SHUT_WR)
        yield caller


@scale
def test_a_caller_fed_damaged_answers(times: int) -> None:
    whole = bytearray(3 * 4096)
    views = [memoryview(whole)[at : at + size] for at, size in ((4096, 100), (5000, 0), (5000, 700), (6000, 2000))]

    def run(hostile: Hostile) -> int:
        fed = 0
        for _ in range(200):
            op = hostile.rng.choice((FrameOp.READ, FrameOp.WRITE))
            orders = [PipelinedRequest(0, view.nbytes, [view]) for view in views]
            data = [hostile.data(view.nbytes) for view in views] if op is FrameOp.READ else [b""] * len(views)
            right = [pack_response(number, len(part)) + part for number, part in enumerate(data, 1)]
            refused = hostile.rng.randrange(6)
            refusal = pack_refusal(refused, Unauthorized("x" * hostile.rng.randrange(2000)))
            said = [hostile.rng.choice((part, part, part, hostile.damage(part), refusal)) for part in right]
            out_of_place = any(part is refusal and number != refused for number, part in enumerate(said, 1))
            if hostile.rng.random() < 0.2:
                said.append(hostile.data(hostile.rng.randrange(1, 100)))
            fed += len(said)
            whole[:] = bytes(len(whole))
            accepted = take_answers(op, orders, b"".join(said), b"".join(right))
            assert not (accepted and out_of_place), "the refusal of another request was taken"
            check_margins(whole, views)
        return fed

    run_batches(PIPELINE, times, run)


def take_answers(op: FrameOp, orders: list[PipelinedRequest], said: bytes, right: bytes) -> bool:
    """Whether the lane stays in use: all was answered, be it with a refusal."""
    with said_by_owner(said) as sock:
        try:
            refusal = Pipeline(sock, op, PipelineTarget("seg", 1), Deadline(HANG_S)).run(orders)
        except (MoonpoolError, ConnectionError):
            return False
    if refusal is None:
        heads_said = [
            pack_response(number, order.nbytes if op is FrameOp.READ else 0) for number, order in enumerate(orders, 1)
        ]
        assert len(said) == len(right)
        assert all(head in said for head in heads_said)
        if op is FrameOp.READ:
            taken = b"".join(head + bytes(order.views[0]) for head, order in zip(heads_said, orders, strict=True))
            assert taken == said
    return True


def check_margins(whole: bytearray, views: list[memoryview]) -> None:
    starts = [(4096, 4196), (5000, 5700), (6000, 8000)]
    gaps = [(0, 4096), *((end, start) for (_, end), (start, _) in pairwise(starts)), (8000, len(whole))]
    assert not any(any(whole[start:end]) for start, end in gaps), "bytes outside the caller's buffers changed"


@scale
def test_callers_of_the_control_handler_and_of_the_guard_fed_nonsense(times: int) -> None:
    info = ControlHandler(incarnation=5).answer_body(b"\x91\xa9Introduce")

    def run(hostile: Hostile) -> int:
        for _ in range(100):
            said = pack_answer(1, info)
            if hostile.rng.random() < 0.3:
                said = pack_answer(1, hostile.break_call(info))
            with said_by_owner(hostile.damage(said)) as sock:
                with contextlib.suppress(MoonpoolError, ConnectionError):
                    answer = _receive_answer(sock, Deadline(HANG_S))
                    if not isinstance(answer, MoonpoolError):
                        decode_reply(Introduce(), answer)
            owner = OwnerSide(GUARD.secret)
            challenge = owner.challenge(CallerSide(GUARD.secret).hello())
            welcome = challenge[:5] + b"\x04" + challenge[6:8] + hostile.data(32) + bytes(16)
            frames = [hostile.rng.choice((frame, hostile.damage(frame))) for frame in (challenge, welcome)]
            told = b"".join(frames) + pack_refusal(0, Unauthorized("no"))
            with said_by_owner(told) as sock, pytest.raises((MoonpoolError, ConnectionError)):
                _prove(sock, GUARD.secret, Deadline(HANG_S))
        return 200

    run_batches(ANSWERS, times, run)


# Unix sockets


@scale
def test_an_shm_owner_and_its_callers_fed_damaged_frames(tmp_path: Path, times: int) -> None:
    path = str(tmp_path / "s.sock")
    control = ControlHandler(incarnation=5)
    with Segment.allocate("seg", NBYTES, incarnation=1) as segment, Segment.allocate("private", 1, incarnation=1):
        control.serve(segment)
        server = ShmServer(control, path, max_connections=64)
        ask = encode_frame(FrameKind.CALL, 1, b"\x94\xaaAskSegment\xa3seg\x01\x02")
        descriptor = SegmentDescriptor(name="seg", nbytes=NBYTES, incarnation=1, host=host_id(), endpoints=())

        def frame(hostile: Hostile) -> bytes:
            if hostile.rng.random() < 0.3:
                return hostile.damage(ask)
            return encode_frame(hostile.rng.choice(list(FrameKind)), hostile.number(), hostile.call())

        def run(hostile: Hostile) -> int:
            for _ in range(100):
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                    sock.connect(path)
                    converse(sock, frame(hostile) + (frame(hostile) if hostile.rng.random() < 0.5 else b""))
                fetch_from(hostile, descriptor)
            assert not any(segment.memory)
            remote = ShmRemote(path, descriptor, 5.0)
            remote.read_into(0, [bytearray(10)], timeout_s=HANG_S)
            remote.close()
            return 200

        try:
            run_batches(UNIX, times, run)
        finally:
            server.close()


def fetch_from(hostile: Hostile, descriptor: SegmentDescriptor) -> None:
    """A caller asks for memory, and gets a damaged answer with a descriptor of something else, or none."""
    reply = hostile.damage(encode_frame(FrameKind.REPLY, 1, b"\x92" + b"\xce\x00\x01\x00\x00" + b"\xc0"))
    caller, owner = socket.socketpair()
    fd = os.memfd_create("other")
    os.ftruncate(fd, hostile.rng.choice((0, 10, NBYTES)))
    try:
        with caller, owner:
            if reply:
                socket.send_fds(owner, [reply], [fd] if hostile.rng.random() < 0.8 else [])
            owner.shutdown(socket.SHUT_WR)
            with contextlib.suppress(MoonpoolError, ConnectionError):
                ShmRemote._fetch(_Bare(descriptor), caller, Deadline(HANG_S)).close()  # type: ignore[arg-type]
    finally:
        os.close(fd)


class _Bare:
    """What ShmRemote._fetch() needs to know of its handle."""

    def __init__(self, descriptor: SegmentDescriptor) -> None:
        self.nbytes = descriptor.nbytes
        self._descriptor = descriptor


# The decoders, pure


def raised_by(decode: Callable[[bytes], object], frame: bytes) -> type[Exception] | None:
    try:
        decode(frame)
    except Exception as error:  # noqa: BLE001 - whatever it is
        return type(error)
    return None


@settings(max_examples=max(250, settings().max_examples))
@given(st.binary(max_size=100), st.sampled_from([b"", b"MPTX\x02", b"MPTG\x02", b"MP\x03"]))
def test_decoders_raise_protocol_errors_only_and_allocate_nothing(data: bytes, start: bytes) -> None:
    frame = start + data
    for decode in (
        unpack_request,
        unpack_response,
        FrameDecoder().feed,
        CallDecoder([*CALLS, AskSegment]).decode,
        lambda frame: decode_header(frame.ljust(HEADER_NBYTES, b"\0")),
        decode_error,
        lambda frame: decode_reply(Introduce(), frame),
    ):
        assert raised_by(decode, frame) in (None, ProtocolError, DamagedFrame)


@given(st.binary(min_size=40, max_size=60))
def test_a_header_alone_costs_no_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        for start, decode in ((b"MPTX\x02\x02\x01\x00", unpack_request), (b"MPTX\x02\x00\x00\x00", unpack_response)):
            with contextlib.suppress(ProtocolError, DamagedFrame):
                decode(start + data)
        with contextlib.suppress(ProtocolError, DamagedFrame):
            FrameDecoder().feed(b"MP\x03\x01" + data)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_the_memory_watch_can_fail() -> None:
    def allocate() -> None:
        with bounded_memory():
            bytearray(2**26)

    with pytest.raises(AssertionError, match="allocated"):
        allocate()
