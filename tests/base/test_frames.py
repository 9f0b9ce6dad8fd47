"""Wire frames: golden bytes, any chunking, and nonsense is refused before memory is spent on it."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.errors import DamagedFrame, ProtocolError
from moonpool.base.frames import (
    HEADER_NBYTES,
    MAX_BODY_NBYTES,
    MAX_WAIT_MS,
    VERSION,
    DamageCount,
    Frame,
    FrameDecoder,
    FrameKind,
    decode_header,
    encode_frame,
    whole_frame,
)

FRAMES = st.builds(
    Frame,
    st.sampled_from(FrameKind),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=200) | st.binary(min_size=8180, max_size=8200),  # larger ones are decoded in another way
    st.integers(0, MAX_WAIT_MS),
)


def test_golden_frame() -> None:
    golden = bytes.fromhex("4d50 03 01 cf29b578 02000000 fdffffff 0201000000000000 c8000000 0102")
    assert encode_frame(FrameKind.CALL, 258, b"\1\2", 200) == golden
    assert FrameDecoder().feed(golden) == [Frame(FrameKind.CALL, 258, b"\1\2", 200)]


@given(st.lists(FRAMES, max_size=8), st.lists(st.integers(1, 60), min_size=1, max_size=50))
def test_any_chunking_gives_the_same_frames(frames: list[Frame], cuts: list[int]) -> None:
    data, decoder, got = b"".join(encode_frame(*frame) for frame in frames), FrameDecoder(), []
    at = 0
    while at < len(data):
        step = cuts[at % len(cuts)]
        got += decoder.feed(data[at : at + step])
        at += step
    assert got == frames


@given(FRAMES, st.sampled_from(FrameKind), st.binary(max_size=3))
def test_one_whole_frame_of_a_kind_is_known_at_once(frame: Frame, kind: FrameKind, rest: bytes) -> None:
    data = encode_frame(*frame)
    assert whole_frame(frame.kind, data, len(data)) == frame[1:]
    assert whole_frame(frame.kind, bytearray(data), len(data)) == frame[1:]
    assert (whole_frame(kind, data, len(data)) is not None) == (kind is frame.kind)
    for cut in (0, 1, HEADER_NBYTES - 1, HEADER_NBYTES, len(data) - 1):
        assert cut == len(data) or whole_frame(frame.kind, data, cut) is None
    assert not rest or whole_frame(frame.kind, data + rest, len(data) + len(rest)) is None


def header(magic: bytes = b"MP", version: int = VERSION, kind: int = 1, nbytes: int = 0) -> bytes:
    return struct.pack("<2sBBIIIQI", magic, version, kind, 0, nbytes, nbytes ^ 0xFFFFFFFF, 1, 0)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (header(magic=b"HT"), "does not speak"),
        (header(version=2), "version 2 of the RPC protocol, this side version 3"),
        (header(version=4), "version 4 of the RPC protocol, this side version 3"),
        (header(kind=99), "kind 99"),
        (header(nbytes=MAX_BODY_NBYTES + 1), "the limit"),
    ],
)
def test_nonsense_is_refused_at_the_header(header: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        decode_header(header)
    with pytest.raises(ProtocolError, match=message):
        FrameDecoder().feed(header)


def test_a_body_over_the_limit_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        encode_frame(FrameKind.CALL, 1, bytes(MAX_BODY_NBYTES + 1))


def test_an_older_version_is_named_although_its_frames_are_shorter() -> None:
    for old in (b"MP\x02\x00" + bytes(20), b"MP\x02"):  # a HELLO without a body, and its beginning
        with pytest.raises(ProtocolError, match="version 2 of the RPC protocol, this side version 3"):
            FrameDecoder().feed(old)


@given(FRAMES, st.data())
def test_no_flipped_bit_gets_through(frame: Frame, data: st.DataObject) -> None:
    """Whichever bit it is: of the size it is found before a body is waited for."""
    sent = bytearray(encode_frame(*frame))
    bit = data.draw(st.integers(0, 8 * len(sent) - 1))
    sent[bit // 8] ^= 1 << bit % 8
    before = DamageCount.total
    assert whole_frame(frame.kind, bytes(sent), len(sent)) is None
    decoder = FrameDecoder()
    decoder.feed(encode_frame(FrameKind.PING, 0))
    with pytest.raises(DamagedFrame, match="checksum"):
        decoder.feed(sent)
    assert DamageCount.total == before + 1


@given(st.binary(min_size=16, max_size=200))
def test_garbage_never_raises_anything_else(data: bytes) -> None:
    try:
        frames = FrameDecoder().feed(data)
    except (ProtocolError, DamagedFrame):
        return
    assert all(isinstance(frame, Frame) for frame in frames)
