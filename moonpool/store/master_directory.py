"""The store's master as a directory of segments (transfer/directory.py). One thread renews the published segments.

A restarted master does not know them; the next renewal publishes them again. If a newer incarnation has taken a name
meanwhile, the older one is no longer renewed, with a warning: others should find the newer one.
"""

from __future__ import annotations

import logging
import threading

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import AlreadyExists, MoonpoolError, NotFound, Unavailable
from moonpool.base.rpc import BlockingClient
from moonpool.store.messages import SERVICE, Announce, FindSegment, Retract

_LOG = logging.getLogger(__name__)
_JOIN_TIMEOUT_S = 5.0


class MasterDirectory:
    """Thread-safe. A segment whose owner has died can be found for at most `ttl_s`."""

    def __init__(self, master_address: str, *, name: str = "", ttl_s: float = 9.0, timeout_s: float = 5.0) -> None:
        self._client = BlockingClient(master_address, SERVICE, name=name, connect_timeout_s=timeout_s)
        self._ttl_s = ttl_s
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._published: dict[str, SegmentDescriptor] = {}
        self._ending = threading.Event()
        self._renewing: threading.Thread | None = None

    def publish(self, descriptor: SegmentDescriptor) -> None:
        self._announce(descriptor)
        with self._lock:
            self._published[descriptor.name] = descriptor
            if self._renewing is None and not self._ending.is_set():
                self._renewing = threading.Thread(target=self._renew_forever, name="directory-renew", daemon=True)
                self._renewing.start()

    def withdraw(self, descriptor: SegmentDescriptor) -> None:
        with self._lock:
            self._published.pop(descriptor.name, None)
        self._client.call(Retract(descriptor.name, descriptor.incarnation), timeout_s=self._timeout_s)

    def find(self, name: str) -> SegmentDescriptor:
        descriptor = self._client.call(FindSegment(name), timeout_s=self._timeout_s)
        if descriptor is None:
            raise NotFound(f"the master knows no segment {name!r}")
        return descriptor

    def close(self) -> None:
        self._ending.set()
        with self._lock:
            published, self._published = list(self._published.values()), {}
        if self._renewing is not None:
            self._renewing.join(_JOIN_TIMEOUT_S)
        for descriptor in published:
            try:
                self.withdraw(descriptor)
            except Unavailable:
                break  # the master removes them after `ttl_s`
        self._client.close()

    def _announce(self, descriptor: SegmentDescriptor) -> None:
        self._client.call(Announce(descriptor, self._ttl_s), timeout_s=self._timeout_s)

    def _renew_forever(self) -> None:
        while not self._ending.wait(self._ttl_s / 3):
            with self._lock:
                published = list(self._published.values())
            for descriptor in published:
                self._renew(descriptor)

    def _renew(self, descriptor: SegmentDescriptor) -> None:
        try:
            self._announce(descriptor)
        except AlreadyExists as error:
            _LOG.warning("%s: %s", descriptor.name, error)
            with self._lock:
                if self._published.get(descriptor.name) is descriptor:
                    del self._published[descriptor.name]
        except MoonpoolError as error:
            _LOG.warning("%s could not be published again: %s", descriptor.name, error)
