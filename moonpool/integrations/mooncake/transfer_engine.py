"""`mooncake.engine`: Mooncake's TransferEngine on Moonpool's transfer engine.

A peer is `host:port`, or the name that it has in an HTTP metadata server, and remote memory is an address in the peer's
process. Only memory that the peer has registered can be reached. Results are upstream's numbers (engine_types.py): 0 or
an error below zero; calls that return a batch or an address return 0 when they fail. No call raises because of a peer,
a pointer or a missing initialize(), except where it could not answer otherwise (see read_bytes_from_buffer()).
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

from moonpool.base.clock import Deadline
from moonpool.base.errors import InvalidInput, MoonpoolError, NotFound, Refused, Unavailable
from moonpool.base.log import RateLimitedLog
from moonpool.integrations.mooncake.engine_cuda import CudaCalls
from moonpool.integrations.mooncake.engine_memory import ANYWHERE
from moonpool.integrations.mooncake.engine_session import EngineSession, Spans
from moonpool.integrations.mooncake.engine_types import (
    CHECK_FAILED,
    CHECK_PENDING,
    EngineCode,
    InnerTransferEngine,
    TransferNotify,
    check_code_of,
    engine_code_of,
)
from moonpool.integrations.mooncake.engine_types import TransferOpcode as Opcode
from moonpool.transfer.batch import TransferOp
from moonpool.transfer.memory.buffers import DeviceSpan
from moonpool.transfer.pending import Pending
from moonpool.transfer.topology import read_topology
from moonpool.transfer.transports.cuda.copy import in_main_memory, mover_of
from moonpool.transfer.transports.cuda.driver import driver

R = TypeVar("R")
_LOG = logging.getLogger(__name__)
_NO_BATCH = 0
_COPY_TIMEOUT_S = 30.0
_OPS = {Opcode.Read: TransferOp.READ, Opcode.Write: TransferOp.WRITE}


class MooncakeTransferEngine(CudaCalls):
    """Thread-safe. Ends with close(), when it is no longer referenced, or when the process ends. `transport_hint` is
    accepted and has no effect, as in upstream's default build.
    """

    TransferOpcode: ClassVar = Opcode

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._session: EngineSession | None = None
        self._end: weakref.finalize[..., MooncakeTransferEngine] | None = None
        self._numbers = itertools.count(1)
        self._rare_log = RateLimitedLog(_LOG)
        self._batches: dict[int, Pending[None]] = {}

    # start and end

    def initialize(self, local_hostname: str, metadata_server: str, protocol: str, device_name: str | None) -> int:
        """Start the engine. Return 0, or -1 when it cannot start; the log says why.

        `metadata_server` is "P2PHANDSHAKE" or "http://host:port/metadata". Which transport is used is decided per peer
        (shared memory, CUDA or tcp), so `protocol` and `device_name` are not needed; MC_FORCE_TCP=1 switches shared
        memory off.
        """
        return self.initialize_ext(local_hostname, metadata_server, protocol, device_name, "etcd")

    def initialize_ext(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str | None, metadata_type: str
    ) -> int:
        """As initialize(); `metadata_type` is the scheme of a metadata server that is stated without one."""
        if protocol == "xgmi":
            _LOG.error("protocol 'xgmi' is not part of the Python API")
            return EngineCode.INVALID_ARGUMENT
        self.close()
        try:
            session = EngineSession(local_hostname, metadata_server, metadata_type)
        except MoonpoolError as error:
            _LOG.error("initialize: %s", error)
            return EngineCode.INVALID_ARGUMENT
        with self._lock:
            self._session = session
            self._end = weakref.finalize(self, session.close)
        return EngineCode.OK

    def close(self) -> None:
        """End the engine: transfers under way fail, and peers reach no memory of this process any more. Idempotent.
        Upstream has no such method.
        """
        with self._lock:
            end, self._end, self._session = self._end, None, None
            self._batches.clear()
        if end is not None:
            end()

    def get_rpc_port(self) -> int:
        """Return the tcp port at which peers reach this engine; 0 before initialize()."""
        session = self._session
        return 0 if session is None else session.rpc_port

    # memory of this process

    def register_memory(self, buffer_addr: int, capacity: int, location: str = ANYWHERE) -> int:
        """Let peers read and write this memory: main memory, or a GPU's. It must stay until unregister_memory().

        Return -1 when it is no memory of this process, -7 when a part of it is registered already.
        """
        return self._on_memory("register_memory", lambda s: s.memory.register(buffer_addr, capacity, location))

    def unregister_memory(self, buffer_addr: int) -> int:
        """Return -3 when no registered memory begins there."""
        return self._on_memory("unregister_memory", lambda s: s.memory.unregister(buffer_addr))

    def batch_register_memory(
        self, buffer_addresses: Sequence[int], capacities: Sequence[int], location: str = ANYWHERE
    ) -> int:
        """Register all of them. Return the first error; those before it stay registered, as upstream has it."""
        if len(buffer_addresses) != len(capacities):
            return EngineCode.INVALID_ARGUMENT
        for address, capacity in zip(buffer_addresses, capacities, strict=True):
            code = self.register_memory(address, capacity, location)
            if code:
                return code
        return EngineCode.OK

    def batch_unregister_memory(self, buffer_addresses: Sequence[int]) -> int:
        """Unregister all that are registered. Return 0, or the first error."""
        codes = [self.unregister_memory(address) for address in buffer_addresses]
        return next((code for code in codes if code), EngineCode.OK)

    def allocate_managed_buffer(self, length: int) -> int:
        """Return the address of registered, zeroed or used memory of at least `length` bytes; 0 when there is none."""
        return self._ask("allocate_managed_buffer", lambda session: session.memory.allocate(length), lambda _: 0)

    def free_managed_buffer(self, buffer_addr: int, length: int) -> int:
        """Free a managed buffer. Its own size counts, not `length`. Return -3 when no such buffer begins there."""
        return self._on_memory("free_managed_buffer", lambda session: session.memory.free(buffer_addr))

    def write_bytes_to_buffer(self, dest_address: int, src_ptr: bytes, length: int) -> int:
        """Copy `length` bytes of `src_ptr` to this process's memory. Return -1 when one of them is not that long."""

        def write(session: EngineSession) -> None:
            if not 0 <= length <= len(src_ptr):
                raise InvalidInput(f"{length} bytes of {len(src_ptr)}")
            data = memoryview(src_ptr)[:length]
            (memory,) = session.memory.views([dest_address], [length]) if length else (memoryview(bytearray()),)
            if isinstance(memory, DeviceSpan):
                mover_of(driver().device_of(dest_address)).write([(dest_address, data)], Deadline(_COPY_TIMEOUT_S))
            else:
                memory[:] = data

        return self._on_memory("write_bytes_to_buffer", write)

    def read_bytes_from_buffer(self, source_address: int, length: int) -> bytes:
        """Return bytes of this process's memory. Raise ValueError when there is no such memory."""
        session = self._require()
        try:
            return b"".join(in_main_memory(session.memory.views([source_address], [length]), _COPY_TIMEOUT_S))
        except MoonpoolError as error:
            raise ValueError(str(error)) from error

    def get_first_buffer_address(self, segment_name: str) -> int:
        """Ask the peer for its registered memory with the lowest address; 0 when it has none or does not answer."""
        return self._ask(
            "get_first_buffer_address", lambda s: s.peers.look_again(segment_name).first_address, lambda _: 0
        )

    # transfers

    def transfer_sync(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: Opcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """Transfer and wait. Return 0, or -1 when it failed."""
        spans = Spans([buffer], [peer_buffer_address], [length])
        return self._transfer(target_hostname, spans, opcode, notify)

    def transfer_sync_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        spans = Spans([buffer], [peer_buffer_address], [length])
        return self._transfer(target_hostname, spans, Opcode.Write)

    def transfer_sync_read(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        spans = Spans([buffer], [peer_buffer_address], [length])
        return self._transfer(target_hostname, spans, Opcode.Read)

    def batch_transfer_sync(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: Opcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """Transfer all and wait. Return 0, or -1 when one failed; any of the others may have been moved then."""
        return self._transfer(target_hostname, Spans(buffers, peer_buffer_addresses, lengths), opcode, notify)

    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        return self._transfer(target_hostname, Spans(buffers, peer_buffer_addresses, lengths), Opcode.Write)

    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        return self._transfer(target_hostname, Spans(buffers, peer_buffer_addresses, lengths), Opcode.Read)

    def batch_transfer_async(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: Opcode,
        transport_hint: str = "",
    ) -> int:
        """Begin the transfers. Return the batch's number, or 0 when the peer is not found or the lists do not fit.

        Ask for the end by get_batch_transfer_status() or transfer_check_status(): until then the batch is kept.
        """
        return self._begin(target_hostname, Spans(buffers, peer_buffer_addresses, lengths), opcode)

    def batch_transfer_async_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        return self._begin(target_hostname, Spans(buffers, peer_buffer_addresses, lengths), Opcode.Write)

    def batch_transfer_async_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        return self._begin(target_hostname, Spans(buffers, peer_buffer_addresses, lengths), Opcode.Read)

    def transfer_submit_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        """Begin one write. Return its number for transfer_check_status(), or 0 when the peer is not found."""
        spans = Spans([buffer], [peer_buffer_address], [length])
        return self._begin(target_hostname, spans, Opcode.Write)

    def get_batch_transfer_status(self, batch_ids: Sequence[int]) -> int:
        """Wait for all of these batches and forget them. Return 0, or -1 when one failed or is not known."""
        with self._lock:
            batches = [self._batches.pop(number, None) for number in batch_ids]
        failed = False
        for batch in batches:
            failed |= batch is None or not batch.done_within(None) or batch.failure is not None
        return EngineCode.INVALID_ARGUMENT if failed else EngineCode.OK

    def transfer_check_status(self, batch_id: int) -> int:
        """Return 1 for a batch that is done, 0 while it runs, -1 when it failed or is not known, -2 when it took too
        long. A batch that has ended is forgotten.
        """
        with self._lock:
            batch = self._batches.get(batch_id)
            if batch is None:
                return CHECK_FAILED
            if not batch.done():
                return CHECK_PENDING
            del self._batches[batch_id]
        return check_code_of(batch.failure)

    # peers, and this machine

    def get_notifies(self) -> list[TransferNotify]:
        """Return and remove the messages that peers sent with their transfers."""
        session = self._session
        return [] if session is None else session.notifies()

    def send_probe(self, peer_server_name: str) -> int:
        """Return 0 when the peer answers, -101 for a name that cannot be one, -102 when no peer answers, -104 when the
        peer asks for another secret or certificate, -200 when the metadata server does not know the name.
        """

        def code(error: MoonpoolError) -> int:
            by_kind = {InvalidInput: EngineCode.DNS, NotFound: EngineCode.METADATA}
            return by_kind.get(type(error), engine_code_of(error))

        def probe(session: EngineSession) -> int:
            session.probe(peer_server_name)
            return EngineCode.OK

        return self._ask("send_probe", probe, code)

    def get_local_topology(self, device_name: str | None = None) -> str:
        """Return, as JSON, the RDMA devices near each memory of this machine: {"cpu:0": [[preferred], [others]]}.
        `device_name` leaves only the devices named, separated by commas.
        """
        wanted = {name for name in (device_name or "").split(",") if name}
        matrix = {
            place: [
                [name for name in names if not wanted or name in wanted] for names in (near.preferred, near.secondary)
            ]
            for place, near in read_topology(None).rdma.items()
        }
        return json.dumps(matrix, indent=1)

    def warmup_efa_segment(self, segment_name: str) -> int:
        """Return 0: there are no EFA endpoints to connect in advance, as in upstream's build without EFA."""
        return EngineCode.OK

    def get_engine(self) -> InnerTransferEngine:
        """Return a handle for `MooncakeDistributedStore.setup(engine=...)`."""
        return InnerTransferEngine()

    def get_engine_ptr(self) -> int:
        """Return 0, a null pointer: there is no C++ engine that other native code could use."""
        _LOG.warning("get_engine_ptr: Moonpool has no C++ engine; native code cannot share this one")
        return 0

    def _require(self) -> EngineSession:
        session = self._session
        if session is None:
            raise ValueError("the transfer engine is not initialized, or it was closed")
        return session

    def _transfer(self, peer: str, spans: Spans, opcode: Opcode, notify: TransferNotify | None = None) -> EngineCode:
        def transfer(session: EngineSession) -> EngineCode:
            session.move(peer, spans, _op_of(opcode), notify)
            return EngineCode.OK

        return self._ask(f"transfer with {peer}", transfer, lambda _: EngineCode.INVALID_ARGUMENT)

    def _begin(self, peer: str, spans: Spans, opcode: Opcode) -> int:
        spans = Spans(*map(list, spans))  # the caller may change its lists while the batch runs

        def begin(session: EngineSession) -> int:
            op = _op_of(opcode)
            session.start(peer, spans)
            batch = session.engine.call_on_thread(lambda: session.move(peer, spans, op))
            with self._lock:
                number = next(self._numbers)
                self._batches[number] = batch
            return number

        return self._ask(f"transfer with {peer}", begin, lambda _: _NO_BATCH)

    def _on_memory(self, what: str, action: Callable[[EngineSession], None]) -> EngineCode:
        def act(session: EngineSession) -> EngineCode:
            action(session)
            return EngineCode.OK

        return self._ask(what, act, engine_code_of)

    def _ask(self, what: str, action: Callable[[EngineSession], R], on_error: Callable[[MoonpoolError], R]) -> R:
        """Return the result of `action`, or of `on_error` when it raises or there is no session."""
        session = self._session
        try:
            if session is None:
                raise Refused("the transfer engine is not initialized, or it was closed")
            return action(session)
        except MoonpoolError as error:
            # A peer that is away may be asked thousands of times.
            log = self._rare_log if isinstance(error, Unavailable) else _LOG
            log.warning("%s: %s", what, error)
            return on_error(error)


def _op_of(opcode: Opcode) -> TransferOp:
    try:
        return _OPS[Opcode(opcode)]
    except ValueError as error:
        raise InvalidInput(f"{opcode!r} is no opcode") from error
