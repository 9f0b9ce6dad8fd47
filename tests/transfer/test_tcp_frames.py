"""The frames of docs/formats.md: golden vectors, round trips, and nonsense."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.base.checksum import crc32c
from moonpool.base.errors import DamagedFrame, Internal, InvalidInput, MoonpoolError, ProtocolError, StaleGeneration
from moonpool.transfer.transports.tcp.frames import (
    MAX_ASK_NBYTES,
    MAX_DATA_NBYTES,
    MAX_ERROR_NBYTES,
    REQUEST_NBYTES,
    RESPONSE_NBYTES,
    VERDICT_NBYTES,
    FrameOp,
    FrameStatus,
    ReadVerdict,
    Request,
    Response,
    check_body,
    check_start,
    pack_ask,
    pack_refusal,
    pack_request,
    pack_response,
    pack_verdict,
    unpack_error,
    unpack_request,
    unpack_response,
    unpack_verdict,
)

u64 = st.integers(0, 2**64 - 1)
names = st.text(min_size=1, max_size=60).filter(lambda name: len(name.encode()) <= 255)


def test_golden_write_request() -> None:
    request = Request(FrameOp.WRITE, 0x0102030405060708, "node-0", 3, 0x1000, 4096, 9)
    assert pack_request(request).hex() == (
        "4d505458"  # MPTX
        "02"
        "02"
        "0600"  # version, WRITE, length of the name
        "0807060504030201"  # request id
        "0300000000000000"  # incarnation
        "0010000000000000"  # offset
        "0010000000000000"  # nbytes
        "0900000000000000"  # generation
        "fdc30601"  # CRC-32C of the name
        "c4b83db6"  # of all before it
        "6e6f64652d30"  # node-0
    )


def test_golden_responses() -> None:
    assert pack_response(5, 4096).hex() == "4d505458020000000500000000000000001000000000000000000000e89d1621"
    head = "4d50545802010000050000000000000019000000000000007569be225e390ea9"
    assert pack_refusal(5, StaleGeneration("too late")).hex() == head + b"stale_generation too late".hex()
    assert pack_verdict(5, ReadVerdict.STALE).hex() == "010000000500000000000000279e3072"


def test_golden_ask() -> None:
    call = b"\x91\xa9Introduce"
    head = "4d505458020300000700000000000000" + "00" * 16 + "0b00000000000000" + "00" * 8 + "e6e89630ce8a89b5"
    assert pack_ask(7, call).hex() == head + call.hex()
    assert unpack_request(pack_ask(7, b"x" * MAX_ASK_NBYTES)).nbytes == MAX_ASK_NBYTES
    with pytest.raises(InvalidInput):
        pack_ask(7, b"x" * (MAX_ASK_NBYTES + 1))


@given(
    st.sampled_from([FrameOp.READ, FrameOp.WRITE]),
    u64,
    names,
    u64,
    st.integers(0, 2**63),
    st.integers(0, MAX_DATA_NBYTES),
    u64,
)
def test_requests_survive(
    op: FrameOp, id_: int, name: str, inc: int, offset: int, nbytes: int, generation: int
) -> None:
    request = Request(op, id_, name, inc, offset, nbytes, generation)
    frame = pack_request(request)
    head = unpack_request(frame)
    assert head.name_nbytes == len(frame) - REQUEST_NBYTES
    assert head.with_name(frame[REQUEST_NBYTES:]) == request._replace(checksum=head.checksum)


@given(u64, st.integers(0, MAX_DATA_NBYTES))
def test_responses_survive(id_: int, nbytes: int) -> None:
    assert unpack_response(pack_response(id_, nbytes)) == Response(FrameStatus.OK, id_, nbytes)


@given(st.text(max_size=3000))
def test_refusals_survive_and_are_cut_to_fit(message: str) -> None:
    frame = pack_refusal(1, StaleGeneration(message))
    response = unpack_response(frame)
    assert response.status is FrameStatus.ERROR
    assert response.nbytes == len(frame) - RESPONSE_NBYTES <= MAX_ERROR_NBYTES
    error = unpack_error(frame[RESPONSE_NBYTES:])
    assert type(error) is StaleGeneration


def test_an_unknown_error_code_is_kept_in_the_text() -> None:
    error = unpack_error(b"flux_capacitor is empty")
    assert type(error) is Internal
    assert "flux_capacitor" in str(error)


@pytest.mark.parametrize(
    "request_",
    [
        Request(FrameOp.READ, 1, "", 1, 0, 1),
        Request(FrameOp.READ, 1, "n" * 256, 1, 0, 1),
        Request(FrameOp.READ, 1, "n", 1, -1, 1),
        Request(FrameOp.READ, 1, "n", 1, 2**64, 1),
        Request(FrameOp.READ, 1, "n", 1, 0, MAX_DATA_NBYTES + 1),
    ],
)
def test_what_does_not_fit_is_not_packed(request_: Request) -> None:
    with pytest.raises(InvalidInput):
        pack_request(request_)


def sealed(frame: bytes) -> bytes:
    """With the checksum of a peer that means what it says."""
    return frame + crc32c(frame).to_bytes(4, "little")


GOOD = pack_request(Request(FrameOp.READ, 1, "n", 1, 0, 1))


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, b"X"), (4, b"\x01"), (5, b"\x00"), (5, b"\x04"), (6, b"\x00\x00"), (6, b"\x00\x01"), (32, b"\xff" * 8)],
)
def test_requests_that_break_a_rule_are_refused(at: int, value: bytes) -> None:
    head = GOOD[: REQUEST_NBYTES - 4]
    with pytest.raises(ProtocolError):
        unpack_request(sealed(head[:at] + value + head[at + len(value) :]))


def test_another_version_is_named() -> None:
    for unpack in (unpack_request, unpack_response, check_start):
        with pytest.raises(ProtocolError, match="version 1 of the transfer protocol, this side version 2"):
            unpack(b"MPTX\x01".ljust(REQUEST_NBYTES, b"\0"))


def flips(frame: bytes, nbytes: int) -> list[bytes]:
    """The frame with each bit of its first `nbytes` flipped, one at a time."""
    found = []
    for bit in range(8 * nbytes):
        flipped = bytearray(frame)
        flipped[bit // 8] ^= 1 << bit % 8
        found.append(bytes(flipped))
    return found


def test_no_flipped_bit_of_a_head_gets_through() -> None:
    """Not one of offset, size and generation above all: nothing is written elsewhere, or stamped for ever."""
    request = pack_request(
        Request(FrameOp.WRITE, 2**40 + 7, "node-0/dram", 2**60 + 1, 2**30 + 4096, 2**20, (5 << 32) + 9)
    )
    for flipped in flips(request, len(request)):
        with pytest.raises((DamagedFrame, ProtocolError)):
            unpack_request(flipped).with_name(flipped[REQUEST_NBYTES:])
    for answer in (pack_response(77, 4096), pack_refusal(77, StaleGeneration("too late"))):
        for flipped in flips(answer, len(answer)):
            with pytest.raises((DamagedFrame, ProtocolError)):
                check_body(flipped[RESPONSE_NBYTES:], unpack_response(flipped).checksum)
    for flipped in flips(pack_verdict(77, ReadVerdict.STALE), VERDICT_NBYTES):
        with pytest.raises(DamagedFrame):
            unpack_verdict(flipped, 77)


def test_damage_is_told_from_other_protocols() -> None:
    for flipped in flips(GOOD, REQUEST_NBYTES)[8 * 5 :]:  # behind magic and version
        with pytest.raises(DamagedFrame):
            unpack_request(flipped)


@pytest.mark.parametrize("verdict", list(ReadVerdict))
def test_verdicts_survive(verdict: ReadVerdict) -> None:
    assert unpack_verdict(pack_verdict(9, verdict), 9) is verdict
    with pytest.raises(ProtocolError):
        unpack_verdict(pack_verdict(9, verdict), 8)
    with pytest.raises(ProtocolError):
        unpack_verdict(sealed(struct.pack("<IQ", 2, 9)), 9)


@settings(max_examples=2000)
@given(st.binary(max_size=80), st.booleans())
def test_random_bytes_are_a_frame_or_a_protocol_error(data: bytes, with_magic: bool) -> None:
    if with_magic:
        data = b"MPTX\x02" + data
    with contextlib.suppress(ProtocolError, DamagedFrame):
        head = unpack_request(data)
        assert head.nbytes <= MAX_DATA_NBYTES
        assert head.with_name(data[REQUEST_NBYTES:]).op in FrameOp
    with contextlib.suppress(ProtocolError, DamagedFrame):
        assert unpack_response(data).nbytes <= MAX_DATA_NBYTES
    assert isinstance(unpack_error(data), MoonpoolError)
