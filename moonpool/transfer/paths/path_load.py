"""What PeerPaths knows of one path: whether it works, its throughput, how much is under way. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from moonpool.base.backoff import backoff_s
from moonpool.base.errors import (
    Cancelled,
    DeadlineExceeded,
    HandleClosed,
    MoonpoolError,
    Overloaded,
    ProtocolError,
    Unavailable,
)


@dataclass(frozen=True)
class PlanConfig:
    max_slice_nbytes: int = 1024 * 1024
    min_slice_nbytes: int = 64 * 1024
    slices_per_path: int = 2  # under way at the same time
    slice_s: float = 0.05  # a slice is cut to take about this long, so that a slow path does not look silent
    slice_timeout_s: float = 0.6  # allows for a lost packet or two; a dead path delays no transfer for a second
    max_attempts: int = 8  # of one slice
    first_rest_s: float = 0.25
    max_rest_s: float = 2.0
    first_throughput: float = 125e6  # bytes per second, of a path that was not measured yet
    sample_s: float = 0.02  # busy time that makes one measurement
    sample_weight: float = 0.3  # of the newest measurement in the average


class PathState(Enum):
    UP = "up"
    RESTING = "resting"  # failed; it is probed when its rest ends
    PROBING = "probing"
    TRIAL = "trial"  # answered a probe; carries one small slice at a time until one arrives


@dataclass
class PathLoad:
    """The state of one path. Throughput is in bytes per second of the time in which slices were under way."""

    throughput: float
    state: PathState = PathState.UP
    num_under_way: int = 0
    in_flight_nbytes: int = 0
    done_nbytes: int = 0
    num_failures: int = 0  # in a row
    rest_until_s: float = 0.0
    error: MoonpoolError | None = None
    _measured: bool = False
    _sample_nbytes: int = 0
    _sample_slices: int = 0
    _sample_busy_s: float = 0.0
    _counted_until_s: float = 0.0

    @property
    def usable(self) -> bool:
        return self.state in (PathState.UP, PathState.TRIAL)

    def started(self, nbytes: int, now_s: float) -> None:
        if self.num_under_way == 0:
            self._counted_until_s = now_s
        self.num_under_way += 1
        self.in_flight_nbytes += nbytes

    def ended(self, nbytes: int, now_s: float) -> None:
        self._sample_busy_s += now_s - self._counted_until_s
        self._counted_until_s = now_s
        self.num_under_way -= 1
        self.in_flight_nbytes -= nbytes

    def arrived(self, nbytes: int, config: PlanConfig) -> None:
        """A slice arrived: the path works. Update the throughput when enough was measured: at least as many slices as
        are under way at once, because slices that started together share the path and arrive together.
        """
        self.state, self.num_failures, self.error = PathState.UP, 0, None
        self.done_nbytes += nbytes
        self._sample_nbytes += nbytes
        self._sample_slices += 1
        if self._sample_busy_s < config.sample_s or self._sample_slices < config.slices_per_path:
            return
        sample = max(self._sample_nbytes / self._sample_busy_s, config.min_slice_nbytes / config.slice_timeout_s)
        weight = config.sample_weight if self._measured else 1.0
        self.throughput += weight * (sample - self.throughput)
        self._measured = True
        self._reset_sample()

    def broke(self, error: MoonpoolError, now_s: float, config: PlanConfig) -> None:
        self._reset_sample()
        if self.state is PathState.RESTING:
            return  # the same failure, reported by another slice
        self.state, self.error = PathState.RESTING, error
        self.num_failures += 1
        self.rest_until_s = now_s + backoff_s(self.num_failures - 1, config.first_rest_s, config.max_rest_s)
        if isinstance(error, DeadlineExceeded):
            # The path may be alive and slower than estimated: use smaller slices next time.
            self.throughput = max(self.throughput / 2, config.min_slice_nbytes / config.slice_timeout_s)

    def _reset_sample(self) -> None:
        self._sample_nbytes, self._sample_slices, self._sample_busy_s = 0, 0, 0.0


def is_retriable(error: MoonpoolError) -> bool:
    """Return whether another path may succeed: the path failed, not the request."""
    if isinstance(error, Cancelled | HandleClosed):
        return False
    return isinstance(error, Unavailable | Overloaded | ProtocolError)
