"""One request alone on a lane, and its answer: what most small reads and writes are.

A pipeline (tcp/pipeline.py) keeps many requests under way and receives ahead of what it needs. For a single request
that is three quarters of the time, so it is sent by one call here, and its answer is received by one call straight into
the caller's memory. The frames are the same. Only for lanes without TLS, which cannot receive into several buffers.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.base.clock import Deadline
from moonpool.base.errors import MoonpoolError, ProtocolError, StaleGeneration
from moonpool.transfer.memory.buffers import cut
from moonpool.transfer.transports.sockets import (
    TimedSocket,
    after,
    receive_exactly,
    receive_first,
    send_message,
    send_views,
)
from moonpool.transfer.transports.tcp.frames import (
    RESPONSE_NBYTES,
    VERDICT_NBYTES,
    FrameOp,
    FrameStatus,
    ReadVerdict,
    RequestPacker,
    check_body,
    pack_response,
    pack_verdict,
    unpack_error,
    unpack_response,
    unpack_verdict,
)

MAX_VIEWS = 512
_REQUEST_ID = 1  # no answer is ever left on a lane
_WRITE = FrameOp.WRITE  # looking an attribute up takes longer than using it
_SAME = pack_verdict(_REQUEST_ID, ReadVerdict.SAME)
_WRITTEN = pack_response(_REQUEST_ID, 0)


def read_one(
    sock: TimedSocket,
    packer: RequestPacker,
    offset: int,
    nbytes: int,
    views: Sequence[memoryview],
    generation: int,
    deadline: Deadline,
) -> MoonpoolError | None:
    """Fill the views, of `nbytes` in total, from `offset` on. `generation` is what the space must carry; 0: anything.
    Return the owner's refusal. Raise when the lane is of no more use; the views may be filled in part then.
    """
    send_message(sock, packer.pack(FrameOp.READ, _REQUEST_ID, offset, nbytes, generation), deadline.remaining_s())
    frames = memoryview(bytearray(RESPONSE_NBYTES + VERDICT_NBYTES if generation else RESPONSE_NBYTES))
    head, verdict = frames[:RESPONSE_NBYTES], frames[RESPONSE_NBYTES:]
    room = [head, *views, verdict] if generation else [head, *views]
    count = receive_first(sock, room, deadline)
    if count < RESPONSE_NBYTES:
        receive_exactly(sock, [head[count:]], deadline)
        count = RESPONSE_NBYTES
    if head != pack_response(_REQUEST_ID, nbytes):
        return _refusal(sock, head, nbytes, room[1:], count - RESPONSE_NBYTES, deadline)
    if count < nbytes + frames.nbytes:
        receive_exactly(sock, after(room, count), deadline)
    if generation and verdict != _SAME and unpack_verdict(verdict, _REQUEST_ID) is ReadVerdict.STALE:
        return StaleGeneration(f"space at offset {offset} was given away while generation {generation} of it was read")
    return None


def write_one(
    sock: TimedSocket,
    packer: RequestPacker,
    offset: int,
    nbytes: int,
    views: Sequence[memoryview],
    generation: int,
    deadline: Deadline,
) -> MoonpoolError | None:
    """Write the views, of `nbytes` in total, at `offset`, and stamp the space with `generation`. Return and raise as
    read_one().
    """
    request = memoryview(packer.pack(_WRITE, _REQUEST_ID, offset, nbytes, generation))
    send_views(sock, [request, *views], request.nbytes + nbytes, deadline)
    head = memoryview(bytearray(RESPONSE_NBYTES))
    receive_exactly(sock, [head], deadline)
    return None if head == _WRITTEN else _refusal(sock, head, 0, (), 0, deadline)


def _refusal(
    sock: TimedSocket,
    head: memoryview,
    nbytes: int,
    room: Sequence[memoryview],
    num_here: int,
    deadline: Deadline,
) -> MoonpoolError:
    """Return the error in an answer that is no success, of whose text `num_here` bytes lie in `room`. ProtocolError
    when it is no answer to the request at all.
    """
    response = unpack_response(head)
    if response.status is not FrameStatus.ERROR or response.request_id not in (_REQUEST_ID, 0):
        raise ProtocolError(
            f"the owner answered request {response.request_id} with {response.nbytes} bytes, "
            f"expected were {nbytes} for request {_REQUEST_ID}"
        )
    if num_here > response.nbytes:
        raise ProtocolError("the owner sent more than was asked for")
    rest = memoryview(bytearray(response.nbytes - num_here))
    receive_exactly(sock, [rest], deadline)
    error = unpack_error(check_body(b"".join([*cut(room, 0, num_here), rest]), response.checksum))
    if response.request_id == 0:
        raise error
    return error
