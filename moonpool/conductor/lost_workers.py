"""Workers that were lost, and whether waiting for them makes sense. Pure.

A worker whose process has ended is started again in a moment, so requests wait for it. One on another machine that is
just silent is not: its machine is off, hangs, or is cut off from this one. If a role has no worker left and all that it
lost are silent, requests end with an error at once, and clients may ask a front end on another machine.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from moonpool.base.cluster import WorkerInfo, WorkerRole

_RESTART_S = 30.0  # for so long a worker whose process has ended is expected back


class _Lost(NamedTuple):
    role: WorkerRole
    at_s: float
    is_silent: bool


class LostWorkers:
    def __init__(self) -> None:
        self._lost: dict[str, _Lost] = {}

    def came(self, name: str) -> None:
        self._lost.pop(name, None)

    def lost(self, info: WorkerInfo, now_s: float, *, was_silent: bool) -> None:
        """Record a lost worker. One that is reached by a Unix socket is on this machine, which is not cut off."""
        self._lost[info.name] = _Lost(info.role, now_s, was_silent and info.address.startswith("tcp:"))

    def silent_role(self, present: Collection[WorkerRole], now_s: float) -> WorkerRole | None:
        """Return a role without workers that is not expected back; None if there is none."""
        expected = {one.role for one in self._lost.values() if not one.is_silent and now_s < one.at_s + _RESTART_S}
        silent = {one.role for one in self._lost.values() if one.is_silent}
        return next((role for role in WorkerRole if role in silent and role not in expected | set(present)), None)
