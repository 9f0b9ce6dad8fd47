"""Counters of one client. Thread-safe."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from moonpool.base.errors import FewerReplicas, MoonpoolError


class ClientCounters:
    """Names: bytes_read, bytes_written, bytes_viewed, hits, misses, corrupt_replicas, damaged_copies (pieces that a GPU
    received wrong and that were read again), fewer_replicas (objects that were stored on fewer than asked for),
    disk_reads (whole objects read from SSDs, once there was one), and refused_<code> per error.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[str] = Counter(
            bytes_read=0,
            bytes_written=0,
            bytes_viewed=0,
            hits=0,
            misses=0,
            corrupt_replicas=0,
            damaged_copies=0,
            fewer_replicas=0,
        )

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._values[name] += amount

    def add_lookup(self, num_hits: int, num_misses: int) -> None:
        with self._lock:
            self._values["hits"] += num_hits
            self._values["misses"] += num_misses

    def add_reads(self, num_hits: int, num_misses: int, nbytes: int) -> None:
        with self._lock:
            self._values["hits"] += num_hits
            self._values["misses"] += num_misses
            self._values["bytes_read"] += nbytes

    def add_hit(self, nbytes: int) -> None:
        """add_reads() of one object that was found."""
        values = self._values
        with self._lock:
            values["hits"] += 1
            values["bytes_read"] += nbytes

    def check_replicas(self, num_stored: int, num_asked: int) -> FewerReplicas | None:
        """Return the error for an object stored on fewer replicas than asked for, and count it; else None."""
        if num_stored >= num_asked:
            return None
        self.add("fewer_replicas")
        return FewerReplicas(f"stored on {num_stored} of {num_asked} replicas: nodes are too few, full or out of reach")

    def add_refusal(self, error: MoonpoolError) -> None:
        self.add(f"refused_{error.code}")

    def add_refusals(self, errors: Iterable[MoonpoolError]) -> None:
        with self._lock:
            self._values.update(f"refused_{error.code}" for error in errors)

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._values)
