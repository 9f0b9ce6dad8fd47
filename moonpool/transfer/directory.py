"""Directories: from a segment's name to its descriptor.

Three kinds, one interface (tests/conformance/test_directories.py):
    MemoryDirectory    engines of one process
    MasterDirectory    the store's master (from moonpool.store import MasterDirectory)
    none               `name@host:port` asks the owner itself, at its tcp port: see parse_target()
"""

from __future__ import annotations

import threading
from typing import NamedTuple, Protocol

from moonpool.base.address import parse_address
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import AlreadyExists, ConfigError, InvalidInput, NotFound


class Directory(Protocol):
    """Names and their segments. Of two incarnations of one name the newer counts, in any order of arrival."""

    def publish(self, descriptor: SegmentDescriptor) -> None:
        """Let others find the segment, until withdraw(), close(), or the end of this process.

        AlreadyExists when a newer incarnation has the name.
        """
        ...

    def withdraw(self, descriptor: SegmentDescriptor) -> None:
        """Withdraw the segment; another incarnation of it is left alone."""
        ...

    def find(self, name: str) -> SegmentDescriptor:
        """Return the published descriptor; NotFound when there is none."""
        ...

    def close(self) -> None:
        """Idempotent. Withdraw what was published through this object."""
        ...


class SegmentTarget(NamedTuple):
    """A segment as a user writes it; `peer` is the address to ask, None: ask the directory."""

    name: str
    peer: str | None


def parse_target(text: str) -> SegmentTarget:
    """Parse `name@host:port`, or a name. Names may contain "@": the last one separates, if a ":" follows it."""
    name, _, peer = text.rpartition("@")
    if ":" not in peer or "@" not in text:
        return SegmentTarget(text, None)
    if not name:
        raise InvalidInput(f"{text!r} has a peer and no segment name")
    try:
        return SegmentTarget(name, str(parse_address(f"tcp:{peer}")))
    except ConfigError as error:
        raise InvalidInput(f"{text!r} is no name@host:port; write an IPv6 address in brackets") from error


def check_newer(held: SegmentDescriptor | None, offered: SegmentDescriptor) -> None:
    """Raise AlreadyExists when `held` is of a newer incarnation: its owner started later."""
    if held is not None and held.incarnation > offered.incarnation:
        raise AlreadyExists(
            f"segment {offered.name!r} is published by a newer incarnation ({held.incarnation}, this is "
            f"{offered.incarnation}); two owners need two names"
        )


class MemoryDirectory:
    """For engines of one process, and for tests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, SegmentDescriptor] = {}

    def publish(self, descriptor: SegmentDescriptor) -> None:
        with self._lock:
            check_newer(self._known.get(descriptor.name), descriptor)
            self._known[descriptor.name] = descriptor

    def withdraw(self, descriptor: SegmentDescriptor) -> None:
        with self._lock:
            held = self._known.get(descriptor.name)
            if held is not None and held.incarnation == descriptor.incarnation:
                del self._known[descriptor.name]

    def find(self, name: str) -> SegmentDescriptor:
        with self._lock:
            descriptor = self._known.get(name)
        if descriptor is None:
            raise NotFound(f"no segment {name!r} is published")
        return descriptor

    def close(self) -> None:
        with self._lock:
            self._known.clear()
