"""The calls to a running launcher, at a socket in its private run directory. Service name "launcher"."""

from __future__ import annotations

import msgspec

from moonpool.base.ranges import Count
from moonpool.base.rpc import Call


class ScaleReply(msgspec.Struct, frozen=True, kw_only=True):
    """Workers that are being started, and workers that end what they have begun and leave."""

    started: tuple[str, ...] = ()
    draining: tuple[str, ...] = ()


class Scale(Call[ScaleReply]):
    """Have this many workers of each role on this machine; None: as many as now. Workers count in the role that they
    have at this moment.

    InvalidInput if a role would be left without a worker, NoSpace if there is not enough memory for the new ones,
    Unavailable while the service starts or stops, or while no conductor may change workers.
    """

    prefill: Count | None = None
    decode: Count | None = None


class WorkerProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that runs here, or will: it is starting, serves, or drains."""

    name: str
    is_ready: bool
    last_end: str = ""  # why its process ended last; empty if it never did


class ListWorkers(Call[list[WorkerProcess]]):
    pass
