"""What all puts of a client share."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from moonpool.base.clock import Clock
from moonpool.base.errors import NotFound, StaleGeneration, Unauthorized, Unavailable
from moonpool.store.client.counters import ClientCounters
from moonpool.store.client.put_calls import PutCalls
from moonpool.store.client.session_client import SessionClient
from moonpool.transfer import TransferEngine
from moonpool.transfer.transports.cuda.copy_stream import CopyStream
from moonpool.transfer.transports.cuda.driver import Device

# Errors of one replica, which leave the others usable.
REPLICA_ERRORS = (Unavailable, NotFound, StaleGeneration, Unauthorized)


@dataclass(frozen=True, kw_only=True)
class PutTools:
    engine: TransferEngine
    sessions: SessionClient
    calls: PutCalls
    counters: ClientCounters
    clock: Clock
    timeout_s: float  # of one transfer
    renew_after_s: float  # an unfinished put is renewed after this time
    _streams: dict[int, CopyStream] = field(default_factory=dict)  # by GPU
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def drain(self) -> None:
        """Return when no copy from a GPU's memory is under way."""
        with self._lock:
            streams = list(self._streams.values())
        for stream in streams:
            stream.drain()

    def copies_of(self, device: Device) -> CopyStream:
        """Return the stream for copies from this GPU's memory."""
        with self._lock:
            if device.index not in self._streams:
                self._streams[device.index] = CopyStream(device)
            return self._streams[device.index]
