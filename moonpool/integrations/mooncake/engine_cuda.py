"""The `*_on_cuda` calls of `mooncake.engine`: transfers in the order of a CUDA stream.

Upstream's build without CUDA does not have these methods. So a TransferEngine has them only where a GPU can be used;
elsewhere they are AttributeErrors, as programs that look before they call expect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

from moonpool.base.errors import InvalidInput, MoonpoolError
from moonpool.integrations.mooncake.engine_session import EngineSession, Spans
from moonpool.transfer.batch import TransferOp
from moonpool.transfer.transports.cuda.driver import Device, driver


@cache
def has_cuda() -> bool:
    """Return whether this process can use a GPU."""
    try:
        return bool(driver().devices)
    except MoonpoolError:
        return False


class CudaOnly:
    """A method that exists only where has_cuda() is true."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        if not has_cuda():
            raise AttributeError(f"{owner.__name__} has no {self._name}: this process can use no CUDA device")
        return self._function if instance is None else self._function.__get__(instance, owner)


class _HasSession(Protocol):
    def _require(self) -> EngineSession: ...


class CudaCalls:
    """Each call waits for the work that the stream has so far, then transfers, and returns when the bytes are there. So
    what is given to the stream later finds them. A failure is a RuntimeError; upstream ends the process instead.
    """

    @CudaOnly
    def transfer_write_on_cuda(
        self: _HasSession,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        spans = Spans([buffer], [peer_buffer_address], [length])
        _transfer_on_stream(self._require(), target_hostname, spans, TransferOp.WRITE, stream_ptr)

    @CudaOnly
    def transfer_read_on_cuda(
        self: _HasSession,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        spans = Spans([buffer], [peer_buffer_address], [length])
        _transfer_on_stream(self._require(), target_hostname, spans, TransferOp.READ, stream_ptr)

    @CudaOnly
    def batch_transfer_write_on_cuda(
        self: _HasSession,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        spans = Spans(buffers, peer_buffer_addresses, lengths)
        _transfer_on_stream(self._require(), target_hostname, spans, TransferOp.WRITE, stream_ptr)

    @CudaOnly
    def batch_transfer_read_on_cuda(
        self: _HasSession,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        spans = Spans(buffers, peer_buffer_addresses, lengths)
        _transfer_on_stream(self._require(), target_hostname, spans, TransferOp.READ, stream_ptr)


def _transfer_on_stream(session: EngineSession, peer: str, spans: Spans, op: TransferOp, stream: int) -> None:
    try:
        spans.check()
        device = _device_of(spans.buffers)
        with device.current():
            device.wait_stream(stream)
        session.move(peer, spans, op)
    except MoonpoolError as error:
        raise RuntimeError(f"the transfer with {peer} failed: {error}") from error


def _device_of(buffers: Sequence[int]) -> Device:
    """Return the GPU of the first buffer; the first GPU when the buffer is in main memory."""
    try:
        return driver().device_of(buffers[0]) if buffers else driver().device(0)
    except InvalidInput:
        return driver().device(0)
