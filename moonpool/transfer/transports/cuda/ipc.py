"""How GPU memory crosses from one process to another of the same machine: what the owner says about it, and the
mappings a process has. An allocation is mapped once per process, however many segments lie in it, and unmapped when the
last user lets go.

Within one process no mapping is needed (CUDA refuses it): the owner's memory itself is found by a token.
"""

from __future__ import annotations

import itertools
import os
import threading
import uuid
import weakref
from functools import cache
from typing import NamedTuple, TypeVar

import msgspec

from moonpool.base.errors import InvalidInput, NotFound, ProtocolError, Unavailable
from moonpool.transfer.memory.buffers import DeviceSpan
from moonpool.transfer.transports.base import check_bounds
from moonpool.transfer.transports.cuda.driver import Device, DeviceMemory, driver
from moonpool.transfer.transports.cuda.driver_api import IPC_HANDLE_NBYTES
from moonpool.transfer.transports.cuda.segment import DeviceSegment

T = TypeVar("T")


class IpcHello(msgspec.Struct, frozen=True, array_like=True):
    """Who asks."""

    process: str


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """Where a segment lies: `offset` bytes into an allocation of GPU `uuid`. `handle` is None for the same process,
    which takes the memory by its `token`; a token is never used again.
    """

    token: int
    uuid: bytes
    nbytes: int
    fenced: bool
    handle: bytes | None = None
    allocation_nbytes: int = 0
    offset: int = 0


class Reach(NamedTuple):
    """Memory of the owner's, usable here as long as this is held."""

    span: DeviceSpan
    device: Device


_lock = threading.Lock()
_mapped: weakref.WeakValueDictionary[tuple[bytes, bytes], DeviceMemory] = weakref.WeakValueDictionary()
_offered: weakref.WeakValueDictionary[int, DeviceSegment] = weakref.WeakValueDictionary()
_tokens = itertools.count(1)


@cache
def _process_of(pid: int) -> str:  # a forked child is another process
    return f"{pid}-{uuid.uuid4().hex}"


def hello(process: str | None = None) -> bytes:
    """What this process (None), or another one, says when it asks."""
    return msgspec.msgpack.encode(IpcHello(process or _process_of(os.getpid())))


class Offers:
    """What an owner answers about one segment, as long as it serves it; asked before every transfer, so kept."""

    def __init__(self, segment: DeviceSegment) -> None:
        self._segment = weakref.ref(segment)
        self._token = next(_tokens)
        self._to_others: bytes | None = None
        _offered[self._token] = segment

    def answer(self, asked: bytes) -> bytes:
        """Unavailable when the memory cannot be given to other processes, or is closed."""
        segment = self._segment()
        if segment is None:
            raise Unavailable("that segment is closed")
        span = segment.span  # not after close()
        if _decode(asked, IpcHello).process == _process_of(os.getpid()):
            return msgspec.msgpack.encode(self._offer(segment))
        if self._to_others is None:
            self._to_others = msgspec.msgpack.encode(_exported(self._offer(segment), span, segment.device))
        return self._to_others

    def _offer(self, segment: DeviceSegment) -> Offer:
        return Offer(self._token, segment.device.uuid, segment.nbytes, segment.fence is not None)


def _exported(offer: Offer, span: DeviceSpan, device: Device) -> Offer:
    start, nbytes = device.allocation_of(span.address)
    if span.address + span.nbytes > start + nbytes:
        raise Unavailable("the segment goes beyond one allocation and cannot be given to other processes")
    handle = device.export(span.address)
    return msgspec.structs.replace(offer, handle=handle, allocation_nbytes=nbytes, offset=span.address - start)


def decode_offer(answer: bytes) -> Offer:
    """ProtocolError when it makes no sense."""
    offer = _decode(answer, Offer)
    if offer.handle is None:
        return offer
    if len(offer.handle) != IPC_HANDLE_NBYTES:
        raise ProtocolError(f"a CUDA handle has {IPC_HANDLE_NBYTES} bytes, not {len(offer.handle)}")
    try:
        check_bounds(offer.offset, offer.nbytes, offer.allocation_nbytes)
    except InvalidInput as error:
        raise ProtocolError(f"the owner's offer contradicts itself: {error}") from error
    return offer


def reach(offer: Offer) -> Reach:
    """Unavailable when that GPU, or its memory, cannot be reached from this process."""
    if offer.handle is None:
        segment = _offered.get(offer.token)
        if segment is None:
            raise NotFound("that segment is gone")
        return Reach(segment.span, segment.device)
    device = driver().device_by_uuid(offer.uuid)
    memory = _map(device, offer.handle, offer.allocation_nbytes)
    return Reach(DeviceSpan(memory.address + offer.offset, offer.nbytes, owner=memory), device)


def _map(device: Device, handle: bytes, nbytes: int) -> DeviceMemory:
    with _lock:
        memory = _mapped.get((device.uuid, handle))
        if memory is None:
            memory = _mapped[device.uuid, handle] = device.open_export(handle, nbytes)
        return memory


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"the peer sent something else than agreed: {error}") from error
