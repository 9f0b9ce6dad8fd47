"""`SegmentCalls`: memory that a store offers to the pool while it runs, besides that of setup()."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from moonpool.base.errors import ConfigError, MoonpoolError
from moonpool.integrations.mooncake.base_store import StoreBase
from moonpool.integrations.mooncake.codes import ErrorCode, code_of
from moonpool.transfer.memory.location import parse_location

_LOG = logging.getLogger(__name__)
_FAILED = -1  # what upstream returns here for all that is wrong with an argument


class SegmentCalls(StoreBase):
    def allocate_and_mount_segment(self, size: int, protocol: str = "tcp", location: str = "") -> dict[str, Any]:
        """Offer `size` bytes of new memory to the pool. Return a dictionary: `ret` is 0 or an error, `segment_ids` and
        `allocated_size` say what was mounted. A location "cpu:1" asks for memory of that NUMA node.
        """
        nothing = {"ret": _FAILED, "segment_ids": [], "allocated_size": 0}
        session = self._session
        if session is None or size <= 0:
            return nothing
        try:
            name, nbytes = session.memory.offer(size, _numa_node(location))
        except MoonpoolError as error:
            _LOG.error("allocate_and_mount_segment: %s", error)
            return nothing | {"ret": code_of(error)}
        return {"ret": ErrorCode.OK, "segment_ids": [name], "allocated_size": nbytes}

    def unmount_and_free_segment(self, segment_ids: Sequence[str], grace_period_seconds: int = 0) -> int:
        """Take memory of allocate_and_mount_segment() back. With a grace period, its objects are moved to other memory
        first, in the background, and it is freed when it is empty or the time is over. Return 0, or the first error: -1
        for an unknown segment.
        """
        session = self._session
        if session is None:
            return _FAILED
        codes = [self._take_back(each, grace_period_seconds) for each in segment_ids]
        return next((code for code in codes if code != ErrorCode.OK), ErrorCode.OK)

    def mount_segment(
        self, path: str, size: int, offset: int = 0, protocol: str = "tcp", location: str = ""
    ) -> dict[str, Any]:
        """Refuse to make a file part of the pool: `ret` is -1012. Memory of the pool has a fence behind it that only
        its node may change, and a file of the caller has none. allocate_and_mount_segment() offers memory.
        """
        _LOG.error("mount_segment: %s cannot be mounted; use allocate_and_mount_segment()", path)
        return {"ret": _FAILED if self._session is None else ErrorCode.NOT_SUPPORTED, "segment_ids": []}

    def unmount_segment(self, segment_ids: Sequence[str], grace_period_seconds: int = 0) -> int:
        """Return -1 for every segment: mount_segment() mounts none. Without segments return 0."""
        return _FAILED if self._session is None or segment_ids else ErrorCode.OK

    def unmount_local_disk_segment(self, grace_period_seconds: int = 0) -> int:
        """Return 0: a client has no disk segment to unmount, which upstream answers with 0 as well. -1 before setup."""
        return _FAILED if self._session is None else ErrorCode.OK

    def _take_back(self, segment: str, grace_s: float) -> int:
        session = self._session
        try:
            if session is None or not session.memory.take_back(segment, grace_s):
                return _FAILED
        except MoonpoolError as error:
            _LOG.error("unmount_and_free_segment: %s", error)
            return code_of(error)
        return ErrorCode.OK


def _numa_node(location: str) -> int | None:
    """Return the NUMA node of "cpu:1"; None for "", "*" and "cpu". Raise ConfigError for other places."""
    if location in ("", "*"):
        return None
    found = parse_location(location)
    if found.kind != "cpu":
        raise ConfigError(f"the pool has main memory and disks, not {location}", param="location")
    return found.index
