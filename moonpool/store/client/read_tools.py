"""What all reads of one client share, and how long each may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from moonpool.store.client.counters import ClientCounters
from moonpool.store.client.directory import SegmentDirectory
from moonpool.store.messages import ObjectInfo, Placement

ReportCorrupt: TypeAlias = Callable[[ObjectInfo, Placement], bool]
TimeFor: TypeAlias = Callable[[int], float]  # takes a number of bytes and returns the timeout of their transfer
_SLOWEST_NBYTES_PER_S = 8 * 1024 * 1024  # of a network that is in order


@dataclass(frozen=True, kw_only=True)
class ReadTools:
    directory: SegmentDirectory
    counters: ClientCounters
    timeout_s: float  # of one transfer, whatever its size
    read_timeout_s: float  # of one read of few bytes
    report_corrupt: ReportCorrupt  # tells the master of wrong bytes; False: the object no longer has this replica

    def time_for(self, nbytes: int) -> float:
        """Return the timeout of a read of so many bytes: a node that is silent is given up soon, a slow one is not."""
        return min(self.timeout_s, self.read_timeout_s + nbytes / _SLOWEST_NBYTES_PER_S)

    def time_for_disk(self, _nbytes: int) -> float:
        """time_for() of a disk of this machine, which is never silent but may be slow."""
        return self.timeout_s
