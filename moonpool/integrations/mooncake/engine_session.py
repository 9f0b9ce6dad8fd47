"""Everything that one `TransferEngine.initialize` of `mooncake.engine` starts: the transfer engine with its tcp port,
the registered memory, and what is known of peers.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import msgspec

from moonpool.base.address import parse_address
from moonpool.base.clock import Deadline
from moonpool.base.errors import InvalidInput, MoonpoolError, NotFound, PeerLost
from moonpool.base.own_folder import OwnFolder
from moonpool.integrations.mooncake.engine_memory import EngineMemory
from moonpool.integrations.mooncake.engine_peers import EnginePeers, PeerRanges, is_on_gpu
from moonpool.integrations.mooncake.engine_types import TransferNotify
from moonpool.integrations.mooncake.metadata_client import P2P, EngineEntry, engine_names
from moonpool.integrations.mooncake.setup_config import split_host
from moonpool.store.client.config import credentials
from moonpool.transfer.batch import TransferOp, TransferRequest
from moonpool.transfer.config import TransferConfig, warn_if_open
from moonpool.transfer.engine import TransferEngine
from moonpool.transfer.memory.buffers import DeviceSpan
from moonpool.transfer.transports.cuda.copy import in_main_memory, mover_of
from moonpool.transfer.transports.cuda.driver import driver

_LOG = logging.getLogger(__name__)
_BIND = "MC_TCP_BIND_ADDRESS"
FORCE_TCP = "MC_FORCE_TCP"
_LEGACY_PORT = "MC_LEGACY_RPC_PORT_BINDING"
_TIMEOUT = "MC_TRANSFER_TIMEOUT"
_TIMEOUT_S, _MIN_TIMEOUT_S = 30.0, 5.0
_BYTES_PER_S = 1e9  # a transfer has a second longer for each of these
_STAGED_NBYTES = 64 * 1024 * 1024  # of GPU memory that is copied to main memory at once


class Spans(NamedTuple):
    """Equally long lists: bytes of this process, and where they are to be or come from in the peer's memory."""

    buffers: Sequence[int]
    peer_addresses: Sequence[int]
    sizes: Sequence[int]

    def check(self) -> None:
        """InvalidInput unless the lists are equally long and all sizes are 0 or more."""
        if not len(self.buffers) == len(self.peer_addresses) == len(self.sizes):
            raise InvalidInput("buffers, peer_buffer_addresses and lengths have different sizes")
        if self.sizes and min(self.sizes) < 0:
            raise InvalidInput("a length is negative")

    def without_empty(self) -> Spans:
        if all(self.sizes):
            return self
        kept = [each for each in zip(*self, strict=True) if each[2]]
        return Spans(*(list(column) for column in zip(*kept, strict=True))) if kept else Spans([], [], [])


class EngineSession:
    """Raises MoonpoolError when it cannot start, and leaves nothing behind then. Thread-safe."""

    def __init__(self, local_hostname: str, metadata_server: str, metadata_kind: str) -> None:
        self._timeout_s = transfer_timeout_s(os.environ.get(_TIMEOUT))
        self._names = engine_names(metadata_server, metadata_kind)
        with ExitStack() as stack:
            run_dir = str(stack.enter_context(OwnFolder("mp.engine-")))
            config = engine_config(local_hostname, run_dir, is_p2p=metadata_server == P2P)
            self.engine = engine = TransferEngine(config)
            self.memory = EngineMemory(engine)
            stack.callback(self.memory.close)
            stack.callback(engine.close)
            warn_if_open(_LOG, config, engine.addresses)
            address = parse_address(f"tcp:{engine.addresses[0]}")
            self.rpc_port = address.port
            self.name = engine.addresses[0] if metadata_server == P2P else local_hostname
            self._names.publish(self.name, EngineEntry(address.host, address.port), self._is_alive)
            stack.callback(self._withdraw)
            self.peers = EnginePeers(engine, self._names.resolve)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Idempotent. Transfers under way fail."""
        self._stack.close()

    def probe(self, peer: str) -> None:
        """Return when the peer's engine has answered; raise MoonpoolError otherwise."""
        self.engine.introduce(self._names.resolve(peer))

    def notifies(self) -> list[TransferNotify]:
        """Return and remove the messages of peers. Messages of another format are logged and dropped."""
        found: list[TransferNotify] = []
        for _, message in self.engine.notifications():
            try:
                name, text = msgspec.msgpack.decode(message, type=tuple[str, str])
            except msgspec.DecodeError as error:
                _LOG.warning("a peer sent a message that cannot be read: %s", error)
                continue
            found.append(TransferNotify(name, text))
        return found

    def start(self, peer: str, spans: Spans) -> None:
        """Find the peer before a transfer that runs later, so that an unknown peer is reported at once."""
        spans.check()
        self.peers.ranges(peer)

    def move(self, peer: str, spans: Spans, op: TransferOp, notify: TransferNotify | None = None) -> None:
        """Transfer all spans, then leave `notify` with the peer. Raise MoonpoolError when one of them failed; then any
        of the others may have been moved.

        When the peer has registered other memory than was known, or was restarted, it is asked once more where the
        addresses are, and the spans are moved there.
        """
        self.start(peer, spans)
        spans = spans.without_empty()
        deadline = Deadline(self._timeout_s + sum(spans.sizes) / _BYTES_PER_S)
        memories = self.memory.views(spans.buffers, spans.sizes)
        for is_last in (False, True):
            places, known = self.peers.place(peer, spans.peer_addresses, spans.sizes)
            try:
                self._carry(self.peers.requests(op, places, memories), deadline)
                if notify is not None:
                    self._notify(known, notify, deadline)
                return
            except (NotFound, PeerLost):
                if is_last or not self._has_changed(peer, known):
                    self.peers.forget(peer)
                    raise

    def _has_changed(self, peer: str, known: PeerRanges) -> bool:
        """Return whether the peer has other ranges than `known` now."""
        current = self.peers.ranges(peer)
        if current is known:
            current = self.peers.look_again(peer)
        return current.segments != known.segments

    def _notify(self, known: PeerRanges, notify: TransferNotify, deadline: Deadline) -> None:
        if not known.segments:
            raise NotFound("the peer has registered no memory that a message could be about")
        message = msgspec.msgpack.encode((notify.name, notify.msg))
        self.engine.open(known.segments[0]).notify(message, timeout_s=deadline.remaining_s())

    def _carry(self, requests: Sequence[TransferRequest], deadline: Deadline) -> None:
        direct = [each for each in requests if each.remote.takes_gpu_memory or not is_on_gpu(each)]
        staged = [each for each in requests if not each.remote.takes_gpu_memory and is_on_gpu(each)]
        if direct:
            self.engine.submit(direct, timeout_s=deadline.remaining_s()).wait()
        for request in staged:
            self._carry_staged(request, deadline)

    def _carry_staged(self, request: TransferRequest, deadline: Deadline) -> None:
        """Move memory of a GPU by a transport that takes main memory only, a bounded part at a time."""
        at = request.offset
        for part in _parts(request.buffers):
            if request.op is TransferOp.WRITE:
                views = in_main_memory(part, deadline.remaining_s())
            else:
                views = [memoryview(bytearray(span.nbytes)) for span in part]
            moved = TransferRequest(request.op, request.remote, at, views)
            self.engine.submit([moved], timeout_s=deadline.remaining_s()).wait()
            if request.op is TransferOp.READ:
                pairs = [(span.address, view) for span, view in zip(part, views, strict=True)]
                mover_of(driver().device_of(part[0].address)).write(pairs, deadline)
            at += sum(span.nbytes for span in part)

    def _is_alive(self, address: str) -> bool:
        try:
            self.engine.introduce(address)
        except MoonpoolError:
            return False
        return True

    def _withdraw(self) -> None:
        with contextlib.suppress(MoonpoolError):
            self._names.withdraw(self.name)


def _parts(spans: Sequence[object]) -> list[list[DeviceSpan]]:
    """Return the spans in groups of at most _STAGED_NBYTES each, larger ones cut."""
    cut = [
        span[start : start + _STAGED_NBYTES]
        for span in spans
        if isinstance(span, DeviceSpan)
        for start in range(0, span.nbytes, _STAGED_NBYTES)
    ]
    groups: list[list[DeviceSpan]] = []
    left = 0
    for span in cut:
        if span.nbytes > left:
            groups.append([])
            left = _STAGED_NBYTES
        groups[-1].append(span)
        left -= span.nbytes
    return groups


def transfer_timeout_s(text: str | None) -> float:
    """Return MC_TRANSFER_TIMEOUT as upstream reads it: whole seconds, at least 5; 30 when it is not set."""
    if text is None:
        return _TIMEOUT_S
    digits = "".join(itertools.takewhile(str.isdigit, text.strip()))
    return max(_MIN_TIMEOUT_S, float(digits or 0))


def engine_config(local_hostname: str, run_dir: str, *, is_p2p: bool) -> TransferConfig:
    """Return the settings of the transfer engine. It listens at the host of `local_hostname`, or at
    MC_TCP_BIND_ADDRESS; at a free port, unless MC_LEGACY_RPC_PORT_BINDING asks for the one in the name.
    """
    host, port = split_host(local_hostname)
    if not host:
        raise InvalidInput("local_hostname is missing")
    bound = os.environ.get(_BIND) or host
    return TransferConfig(
        run_dir=run_dir,
        tcp_host=bound,
        tcp_advertise_host=host if is_p2p and bound != host else None,
        tcp_port=port or 0 if _LEGACY_PORT in os.environ and not is_p2p else 0,
        shm=FORCE_TCP not in os.environ,
        **credentials(),
    )
