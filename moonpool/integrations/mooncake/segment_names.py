"""Names of segments: upstream names one by its client's `host:port`, the pool by its node.

The node of a client that offers memory carries the client's hostname in its name, so every client can tell which
segments belong to `host:port`. Segments of other nodes go by the name they have in the pool.
"""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Callable, Iterable
from random import SystemRandom

from moonpool.base.errors import Unavailable
from moonpool.store.messages import SegmentInfo, Tier

_PREFIX = "mooncake-"
_MAX_HOST_CHARS = 40  # a node's name is part of a socket's path, which has 107
_DIGEST_CHARS = 8
_KNOWN_FOR_S = 1.0
_PORTS = range(12300, 14301)  # upstream's
_PORT_TRIES = 50


def node_name(hostname: str, pid: int, number: int) -> str:
    """Return the name of the `number`th node that process `pid` starts for a client."""
    return f"{_PREFIX}{_short(hostname)}-{pid}-{number}"


def endpoint_of(segment: str) -> str:
    """Return `host:port` of the client that offers the segment; the segment's name when it is another node's."""
    node, _, tier = segment.rpartition(".")
    if not node.startswith(_PREFIX) or tier != "dram":
        return segment
    return node.removeprefix(_PREFIX).rsplit("-", 2)[0]


def segments_of(endpoint: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of the names that `endpoint` stands for: a client's `host:port` or the name of a segment."""
    return tuple(
        name for name in names if endpoint in (name, endpoint_of(name)) or _short(endpoint) == endpoint_of(name)
    )


def _short(hostname: str) -> str:
    if len(hostname) <= _MAX_HOST_CHARS:
        return hostname
    digest = hashlib.sha256(hostname.encode()).hexdigest()[:_DIGEST_CHARS]
    return f"{hostname[: _MAX_HOST_CHARS - _DIGEST_CHARS - 1]}~{digest}"


class SegmentNames:
    """The names of the pool's memory segments, asked for at most once a second. Thread-safe."""

    def __init__(self, list_segments: Callable[[], list[SegmentInfo]]) -> None:
        self._list_segments = list_segments
        self._lock = threading.Lock()
        self._names: tuple[str, ...] = ()
        self._asked_s = float("-inf")

    def resolve(self, endpoint: str, *, fresh: bool = False) -> tuple[str, ...]:
        """Return the segments that `endpoint` stands for. `fresh` asks the master now."""
        with self._lock:
            if fresh or time.monotonic() - self._asked_s > _KNOWN_FOR_S:
                listed = self._list_segments()
                self._names = tuple(sorted(each.descriptor.name for each in listed if each.tier & Tier.DRAM))
                self._asked_s = time.monotonic()
            return segments_of(endpoint, self._names)


def reserve_port() -> socket.socket:
    """Return a socket bound to a free port of upstream's range. While it is open, no other client of this machine gets
    the same number. Raise Unavailable when no port is free.
    """
    for port in SystemRandom().sample(_PORTS, _PORT_TRIES):
        bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            bound.bind(("", port))
        except OSError:
            bound.close()
        else:
            return bound
    raise Unavailable(f"no port of {_PORTS[0]} to {_PORTS[-1]} is free")
