"""The frames of docs/formats.md: golden vectors, round trips, and nonsense."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.base.errors import Internal, InvalidInput, MoonpoolError, ProtocolError, StaleGeneration
from moonpool.transfer.transports.tcp.frames import (
    MAX_ASK_NBYTES,
    MAX_DATA_NBYTES,
    MAX_ERROR_NBYTES,
    REQUEST_NBYTES,
    RESPONSE_NBYTES,
    Op,
    Request,
    Response,
    Status,
    pack_ask,
    pack_refusal,
    pack_request,
    pack_response,
    unpack_error,
    unpack_request,
    unpack_response,
)

u64 = st.integers(0, 2**64 - 1)
names = st.text(min_size=1, max_size=60).filter(lambda name: len(name.encode()) <= 255)


def test_golden_write_request() -> None:
    request = Request(Op.WRITE, 0x0102030405060708, "node-0", 3, 0x1000, 4096, 9)
    assert pack_request(request).hex() == (
        "4d505458"  # MPTX
        "01"
        "02"
        "0600"  # version, WRITE, length of the name
        "0807060504030201"  # request id
        "0300000000000000"  # incarnation
        "0010000000000000"  # offset
        "0010000000000000"  # nbytes
        "0900000000000000"  # generation
        "6e6f64652d30"  # node-0
    )


def test_golden_responses() -> None:
    assert pack_response(5, 4096).hex() == "4d5054580100000005000000000000000010000000000000"
    text = b"stale_generation too late"
    assert pack_refusal(5, StaleGeneration("too late")).hex() == (
        "4d5054580101000005000000000000001900000000000000" + text.hex()
    )


def test_golden_ask() -> None:
    assert pack_ask(7, b"\x91\xa9Introduce").hex() == (
        "4d505458010300000700000000000000" + "00" * 16 + "0b00000000000000" + "00" * 8 + "91a9496e74726f64756365"
    )
    assert unpack_request(pack_ask(7, b"x" * MAX_ASK_NBYTES)).nbytes == MAX_ASK_NBYTES
    with pytest.raises(InvalidInput):
        pack_ask(7, b"x" * (MAX_ASK_NBYTES + 1))


@given(
    st.sampled_from([Op.READ, Op.WRITE]), u64, names, u64, st.integers(0, 2**63), st.integers(0, MAX_DATA_NBYTES), u64
)
def test_requests_survive(op: Op, id_: int, name: str, inc: int, offset: int, nbytes: int, generation: int) -> None:
    request = Request(op, id_, name, inc, offset, nbytes, generation)
    frame = pack_request(request)
    head = unpack_request(frame)
    assert head.name_nbytes == len(frame) - REQUEST_NBYTES
    assert head.with_name(frame[REQUEST_NBYTES:]) == request


@given(u64, st.integers(0, MAX_DATA_NBYTES))
def test_responses_survive(id_: int, nbytes: int) -> None:
    assert unpack_response(pack_response(id_, nbytes)) == Response(Status.OK, id_, nbytes)


@given(st.text(max_size=3000))
def test_refusals_survive_and_are_cut_to_fit(message: str) -> None:
    frame = pack_refusal(1, StaleGeneration(message))
    response = unpack_response(frame)
    assert response.status is Status.ERROR
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
        Request(Op.READ, 1, "", 1, 0, 1),
        Request(Op.READ, 1, "n" * 256, 1, 0, 1),
        Request(Op.READ, 1, "n", 1, -1, 1),
        Request(Op.READ, 1, "n", 1, 2**64, 1),
        Request(Op.READ, 1, "n", 1, 0, MAX_DATA_NBYTES + 1),
    ],
)
def test_what_does_not_fit_is_not_packed(request_: Request) -> None:
    with pytest.raises(InvalidInput):
        pack_request(request_)


GOOD = pack_request(Request(Op.READ, 1, "n", 1, 0, 1))


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, b"X"), (4, b"\x02"), (5, b"\x00"), (5, b"\x04"), (6, b"\x00\x00"), (6, b"\x00\x01"), (32, b"\xff" * 8)],
)
def test_broken_requests_are_refused(at: int, value: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack_request(GOOD[:at] + value + GOOD[at + len(value) :])


@settings(max_examples=2000)
@given(st.binary(max_size=80), st.booleans())
def test_random_bytes_are_a_frame_or_a_protocol_error(data: bytes, with_magic: bool) -> None:
    if with_magic:
        data = b"MPTX\x01" + data
    with contextlib.suppress(ProtocolError):
        head = unpack_request(data)
        assert head.nbytes <= MAX_DATA_NBYTES
        assert head.with_name(data[REQUEST_NBYTES:]).op in Op
    with contextlib.suppress(ProtocolError):
        assert unpack_response(data).nbytes <= MAX_DATA_NBYTES
    assert isinstance(unpack_error(data), MoonpoolError)
