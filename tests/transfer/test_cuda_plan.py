"""What of the cuda transport needs no GPU: how transfers are cut, what is said where there is none, what is refused."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import HANG_S

from moonpool.base.errors import InvalidInput, MoonpoolError, NoSpace, ProtocolError, Unavailable
from moonpool.transfer import SegmentDescriptor, host_id
from moonpool.transfer.control import ControlHandler
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.register import make_segment
from moonpool.transfer.transports.cuda.copy import DevicePiece, cut_loads, share_out
from moonpool.transfer.transports.cuda.driver import driver
from moonpool.transfer.transports.cuda.driver_api import cuda_error
from moonpool.transfer.transports.cuda.ipc import Offer, decode_offer, hello
from moonpool.transfer.transports.cuda.transport import CudaTransport
from moonpool.transfer.transports.tcp.transport import TcpTransport


@st.composite
def device_pieces(draw: st.DrawFn) -> tuple[np.ndarray, list[DevicePiece]]:
    """A GPU's memory (address 0 is its first byte) and pieces of it, some following each other, some empty."""
    device = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, 400, dtype=np.uint8)
    pieces, at = [], 0
    for gap, nbytes in draw(st.lists(st.tuples(st.sampled_from([0, 0, 3]), st.integers(0, 40)), max_size=8)):
        pieces.append(DevicePiece(at + gap, memoryview(bytearray(nbytes))))
        at += gap + nbytes
    return device, pieces


def read_through_a_slot(device: np.ndarray, pieces: list[DevicePiece], slot_nbytes: int) -> int:
    """As a lane does it; the number of copies on the GPU."""
    num_runs = 0
    for runs, parts in cut_loads(pieces, slot_nbytes):
        slot = np.zeros(slot_nbytes, dtype=np.uint8)
        for address, start, nbytes in runs:
            slot[start : start + nbytes] = device[address : address + nbytes]
        for start, view in parts:
            view[:] = slot[start : start + view.nbytes].tobytes()
        num_runs += len(runs)
    return num_runs


@given(device_pieces(), st.integers(1, 50))
def test_every_byte_goes_through_the_slot_once(made: tuple[np.ndarray, list[DevicePiece]], slot_nbytes: int) -> None:
    device, pieces = made
    read_through_a_slot(device, pieces, slot_nbytes)
    for address, view in pieces:
        assert view == device[address : address + view.nbytes].tobytes()


def test_pieces_that_follow_each_other_are_one_copy() -> None:
    device = np.arange(200, dtype=np.uint8)
    pieces = [DevicePiece(at, memoryview(bytearray(10))) for at in range(0, 100, 10)]
    assert read_through_a_slot(device, pieces, 100) == 1
    assert read_through_a_slot(device, pieces, 30) == 4
    assert read_through_a_slot(device, pieces[::2], 100) == 5


@given(device_pieces(), st.integers(1, 5), st.integers(1, 60))
def test_shares_are_all_there_is(made: tuple[np.ndarray, list[DevicePiece]], max_shares: int, min_nbytes: int) -> None:
    _, pieces = made
    shares = share_out(pieces, max_shares, min_nbytes)
    sizes = [sum(view.nbytes for _, view in share) for share in shares]
    assert 1 <= len(shares) <= max_shares
    assert len(shares) == 1 or max(sizes) - min(sizes) < max(sizes)
    covered = [(a + n, v[n : n + 1].tobytes()) for share in shares for a, v in share for n in range(v.nbytes)]
    assert covered == [(a + n, v[n : n + 1].tobytes()) for a, v in pieces for n in range(v.nbytes)]


def test_the_drivers_codes_become_our_errors() -> None:
    for code, kind, hint in [
        (1, InvalidInput, "cuX, code 1"),
        (2, NoSpace, "not that much memory"),
        (3, Unavailable, "forked"),
        (100, Unavailable, "CUDA_VISIBLE_DEVICES"),
        (700, Unavailable, "must be restarted"),
        (803, Unavailable, "different versions"),
        (999, Unavailable, "unknown"),
    ]:
        error = cuda_error("cuX", code, "unknown")
        assert type(error) is kind
        assert hint in str(error)


def test_offers_that_make_no_sense_are_refused() -> None:
    good = Offer(1, b"u" * 16, 100, False, b"h" * 64, 200, 100)
    assert decode_offer(msgspec.msgpack.encode(good)) == good
    for bad in [
        msgspec.structs.replace(good, handle=b"short"),
        msgspec.structs.replace(good, offset=101),
        msgspec.structs.replace(good, offset=-1),
        msgspec.structs.replace(good, nbytes=201),
    ]:
        with pytest.raises(ProtocolError):
            decode_offer(msgspec.msgpack.encode(bad))
    with pytest.raises(ProtocolError):
        decode_offer(b"nonsense")
    assert hello() == hello()
    assert hello() != hello("another")


def no_driver() -> bool:
    try:
        driver()
    except MoonpoolError:
        return True
    return False


@pytest.mark.skipif(not no_driver(), reason="there is a GPU here")
class TestWithoutADriver:
    def test_what_is_missing_is_said(self) -> None:
        with pytest.raises(Unavailable, match=r"no NVIDIA driver here .*; install NVIDIA's driver, or start"):
            driver()
        with pytest.raises(Unavailable, match="no NVIDIA driver"):
            make_segment("m", nbytes=100, location="cuda:0", incarnation=1)

    def test_the_transport_is_there_and_not_usable(self) -> None:
        tcp = TcpTransport(None)
        transport = CudaTransport(ControlHandler(), "tcp:127.0.0.1:1", tcp.line)
        descriptor = SegmentDescriptor(name="x", nbytes=1, incarnation=1, host=host_id(), endpoints=())
        assert not transport.usable(descriptor, "cuda:unix:/x.sock")
        segment = Segment.over("host", bytearray(8), incarnation=1)
        assert not transport.can_serve(segment)
        with pytest.raises(InvalidInput, match="cannot be served by cuda"):
            transport.serve(segment)
        transport.close()
        transport.close()
        tcp.close()


def test_nothing_is_loaded_before_it_is_used() -> None:
    code = (
        "import sys, moonpool.transfer.register\n"
        "assert 'torch' not in sys.modules\n"
        "assert 'libcuda' not in open('/proc/self/maps').read()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ, timeout=HANG_S)
