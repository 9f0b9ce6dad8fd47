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
    segment_ttl_s: float = 10.0  # a node silent for this long is gone, and all its memory held
    away_ttl_s: float = 86_400.0  # and after this one nobody waits for its SSD any more
    max_objects: int = 2**25  # the table's size; memory is taken as objects come
    max_fates: int = 65_536  # of how many keys the state remembers what became of them
    step_objects: int = 256  # objects looked at in one tick, so that no tick is long
    eviction: str = "prefix"  # which policy orders the objects (policies/)
    ssd_high_watermark: float = 0.95  # of an SSD segment's bytes; older records go above it
    offloads_in_flight: int = 128  # per node: some are written while the answers to others are on their way
    promote_after_hits: int = 2  # look-ups of an object on SSD alone before it comes back to DRAM; 0: never
    read_ahead_blocks: int = 8  # blocks behind a prefix's last one that come along
    hot_hits: int = 8  # look-ups in one window that make a key hot; 0: no replication of hot keys
    hot_window_s: float = 10.0
    hot_max_replicas: int = 2  # in DRAM, the first included
    hot_max_part: float = 0.1  # of the pool's bytes that extra replicas may take
    order_timeout_s: float = 60.0  # for a node to do what it was asked
    task_moves_in_flight: int = 16

    def __post_init__(self) -> None:
        if not 0 < self.low_watermark <= self.high_watermark <= 1:
            raise ConfigError("watermarks must satisfy 0 < low <= high <= 1", param="low_watermark")
        if not 0 < self.put_discard_s <= self.put_release_s:
            raise ConfigError("put_discard_s must be above 0 and at most put_release_s", param="put_discard_s")
        if not 0 < self.ssd_high_watermark <= 1 or not 0 <= self.hot_max_part <= 1:
            raise ConfigError("ssd_high_watermark and hot_max_part are parts of the whole", param="ssd_high_watermark")
        times = (self.lease_s, self.heartbeat_s, self.segment_ttl_s, self.hot_window_s, self.order_timeout_s)
        counts = (self.max_fates, self.step_objects, self.max_objects, self.offloads_in_flight)
        if min(*times, *counts, self.task_moves_in_flight, self.hot_max_replicas) <= 0:
            raise ConfigError("times and counts of the pool's rules must be above 0")
