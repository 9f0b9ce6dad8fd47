"""The numbers the pool's state decides by. Each default is written here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PoolRules:
    """Times are seconds on the clock whose `now_s` the state is given."""

    lease_s: float = 10.0  # how long a look-up keeps an object from eviction
    high_watermark: float = 0.95  # eviction starts above this part of the pool's bytes
    low_watermark: float = 0.90  # and goes on until no more than this part is used
    put_discard_s: float = 30.0  # an unfinished put loses its key after this time
    put_release_s: float = 600.0  # and its space is used again after this one, since its writer may be slow
    heartbeat_s: float = 1.0  # how often a node reports
    segment_ttl_s: float = 10.0  # a node silent for this long is gone, and all it held
    max_fates: int = 65_536  # of how many keys the state remembers what became of them
    step_objects: int = 512  # objects looked at in one tick, so that no tick is long

    def __post_init__(self) -> None:
        if not 0 < self.low_watermark <= self.high_watermark <= 1:
            raise ConfigError("watermarks must satisfy 0 < low <= high <= 1", param="low_watermark")
        if not 0 < self.put_discard_s <= self.put_release_s:
            raise ConfigError("put_discard_s must be above 0 and at most put_release_s", param="put_discard_s")
        if min(self.lease_s, self.heartbeat_s, self.segment_ttl_s, self.max_fates, self.step_objects) <= 0:
            raise ConfigError("times and counts of the pool's rules must be above 0")
