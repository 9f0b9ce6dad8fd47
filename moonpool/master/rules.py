"""The parameters of the pool's state. Each default is defined only here."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PoolRules:
    """Times are in seconds, on the clock of the state's `now_s`."""

    lease_s: float = 10.0  # seconds for which a look-up protects an object from eviction
    high_watermark: float = 0.95  # start to evict when this fraction of the pool's bytes is used
    low_watermark: float = 0.90  # evict until at most this fraction is used
    put_discard_s: float = 30.0  # seconds after which an unfinished put is dropped and its key is free again
    # seconds after which the space of a dropped put is reused; longer, because its client may still write
    put_release_s: float = 600.0
    heartbeat_s: float = 1.0  # seconds between two reports of a node
    # seconds without a report after which a node counts as lost, with everything in its memory
    segment_ttl_s: float = 10.0
    away_ttl_s: float = 86_400.0  # seconds after which a lost node's SSD contents are forgotten too
    max_objects: int = 2**25  # most objects in the pool; the table grows with them, so a high limit costs nothing
    max_fates: int = 65_536  # number of removed keys for which `moonpool why` still knows the reason
    step_objects: int = 256  # objects handled per tick; more tick work is spread over several ticks
    eviction: str = "prefix"  # eviction policy: prefix, lru or s3fifo
    ssd_high_watermark: float = 0.95  # drop the oldest records of an SSD segment above this used fraction
    offloads_in_flight: int = 128  # copies to SSD that a node may have outstanding
    promote_after_hits: int = 2  # copy an object from SSD back to DRAM after this many look-ups; 0: never
    read_ahead_blocks: int = 8  # when a block is copied back to DRAM, also copy up to this many blocks that follow it
    hot_hits: int = 8  # look-ups within one window that make a key hot, so that it gets more replicas; 0: never
    hot_window_s: float = 10.0  # length of that window in seconds
    hot_max_replicas: int = 2  # DRAM replicas of a hot key, including the first
    hot_max_part: float = 0.1  # fraction of the pool's bytes that these extra replicas may use
    hot_copies_in_flight: int = 256  # objects that are copied for hot keys at the same time
    order_timeout_s: float = 60.0  # seconds a node has for a copy, move or drop that the master ordered
    task_moves_in_flight: int = 16  # objects that one copy, move or drain task transfers at the same time

    def __post_init__(self) -> None:
        if not 0 < self.low_watermark <= self.high_watermark <= 1:
            raise ConfigError("watermarks must satisfy 0 < low <= high <= 1", param="low_watermark")
        if not 0 < self.put_discard_s <= self.put_release_s:
            raise ConfigError("put_discard_s must be above 0 and at most put_release_s", param="put_discard_s")
        if not 0 < self.ssd_high_watermark <= 1 or not 0 <= self.hot_max_part <= 1:
            raise ConfigError("ssd_high_watermark and hot_max_part are parts of the whole", param="ssd_high_watermark")
        times = (self.lease_s, self.heartbeat_s, self.segment_ttl_s, self.hot_window_s, self.order_timeout_s)
        counts = (self.max_fates, self.step_objects, self.max_objects, self.offloads_in_flight)
        more = (self.task_moves_in_flight, self.hot_max_replicas, self.hot_copies_in_flight)
        if min(*times, *counts, *more) <= 0:
            raise ConfigError("the times and counts of the pool's rules must be above 0")
