"""The calls of the tour: a front end makes them for the live page, the launcher carries them out (launch/tour.py).

A launcher answers them only with `moonpool serve --tour`.
"""

from __future__ import annotations

import msgspec

from moonpool.base.rpc import Call


class KillWorker(Call[None]):
    """Kill this worker as a crash would (SIGKILL); the launcher starts it again.

    InvalidInput if it is no worker of this launcher, Unavailable if it is not up.
    """

    worker: str


class FillReply(msgspec.Struct, frozen=True, kw_only=True):
    """What filling the pool did. Sizes are of the pool's DRAM; the objects that were written are removed again."""

    num_written: int
    written_nbytes: int
    num_evicted: int
    used_before_nbytes: int
    used_most_nbytes: int
    capacity_nbytes: int
    high_watermark: float


class FillPool(Call[FillReply]):
    """Write objects into the pool until others are evicted, then remove them.

    Unavailable if a fill is under way, or if the pool does not answer.
    """
