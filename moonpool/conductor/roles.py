"""Which role each worker should have: what a person has said, and what the elastic rule has decided. Pure.

A worker keeps its role itself and registers with it, so a conductor that starts again learns it from the workers. The
conductor asks for a change in its answer to a worker's report; the worker then registers again in the new role.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable
from typing import NamedTuple

from moonpool.base.cluster import AssignedRole, CountOthers, WorkerInfo, WorkerLeft, WorkerRole
from moonpool.base.config import nearest
from moonpool.base.errors import InvalidInput, NotFound, Unavailable
from moonpool.conductor.demand import UnmetDemand
from moonpool.conductor.elastic import ClusterLoad, ElasticRule, least_busy
from moonpool.conductor.registration import Registration

_LOG = logging.getLogger(__name__)


class RoleScaling(NamedTuple):
    num_workers: int
    num_wanted: int
    pressure: float  # 1: its target is just met
    slack_s: float | None  # the target less what is predicted; None without a target


class RoleAssignments:
    """The last assignment of each worker, by its name: a worker that is started again gets it again."""

    def __init__(self, rule: ElasticRule, unmet: UnmetDemand) -> None:
        self._rule, self._unmet = rule, unmet
        # Returns the number of the lease by which this conductor may change roles, None if it may not; without a master
        # there is no other conductor.
        self.lease: Callable[[], int | None] = lambda: 0
        self._assigned: dict[str, AssignedRole] = {}
        self._told: dict[str, int] = {}  # workers that were told to leave, with the incarnation that was told
        self.leaving: dict[str, WorkerInfo] = {}  # workers that drain, by what they say themselves
        self.left: set[str] = set()  # workers that were drained and have ended
        self.retired: dict[Hashable, tuple[str, ...]] = {}  # by launcher: its workers that it does not start again
        self.num_moved = 0  # by the rule

    def assign(self, name: str, role: WorkerRole | None, workers: Collection[Registration]) -> None:
        """Ask a worker to take this role and keep it; None: keep its current role, and let the rule change it.

        Raise NotFound for an unknown worker, InvalidInput if no other worker would have its current role,
        Unavailable if this conductor may not change roles.
        """
        lease = self._require_lease()
        infos = [worker.info for worker in workers]
        info = _find(name, infos)
        current = self._role_of(info)
        if role is not None and role is not current:
            self._require_another(info, infos)
        self._assigned[name] = AssignedRole(role=role or current, fixed=role is not None, lease=lease)

    def drain(self, name: str, workers: Collection[Registration], *, force: bool = False) -> None:
        """Tell a worker to end what it has begun and to leave.

        Raise NotFound for an unknown worker; InvalidInput, without `force`, if no other worker would have its role;
        Unavailable if this conductor may not change roles.
        """
        self._require_lease()
        infos = [worker.info for worker in workers]
        info = _find(name, infos)
        if not force and not self._leaves(info):  # an accepted drain goes on, even if the other workers leave
            self._require_another(info, infos)
        self._told[name] = info.incarnation

    def worker_left(self, call: WorkerLeft, workers: Collection[Registration]) -> None:
        """Record that a drained worker has ended; do nothing if another process of its name is there."""
        others = [one.info for one in workers if one.info.name == call.name]
        if all(other.incarnation == call.incarnation for other in others):
            self.left.add(call.name)
            self._told.pop(call.name, None)
            self._assigned.pop(call.name, None)

    def worker_came(self, info: WorkerInfo) -> None:
        """Record that a worker is there: an earlier process of its name may have left. A role that another conductor
        has given it is known from now on, in case that conductor dies and the worker is started again."""
        self.left.discard(info.name)
        self.leaving.pop(info.name, None)
        known = self._assigned.get(info.name)
        if info.lease > (0 if known is None else known.lease):
            self._assigned[info.name] = AssignedRole(role=info.role, fixed=info.fixed, lease=info.lease)

    def worker_leaves(self, info: WorkerInfo) -> None:
        """Record that a worker drains: a person, its launcher or another conductor has told it to."""
        self.worker_came(info)
        self.leaving[info.name] = info

    def leaver_gone(self, info: WorkerInfo) -> None:
        """Record that a worker that drained is not connected any more: it has left, also if it was killed before it
        could say so. Do nothing if another one of its name is there."""
        if self.leaving.get(info.name) is info:
            del self.leaving[info.name]
            self.left.add(info.name)

    def launcher_gone(self, launcher: Hashable) -> None:
        """Record that the launcher is not connected any more. A worker that the next one starts registers again."""
        self.left.update(self.retired.pop(launcher))

    def all_left(self) -> set[str]:
        """Return the workers that have left or are not started again. None of them is missing, however it has ended and
        whether or not this conductor has heard of its drain."""
        return self.left.union(*self.retired.values())

    def worker_lost(self, info: WorkerInfo) -> None:
        """Record that a worker is not connected any more. One that was told to leave was killed before it began to; if
        it is started again, it comes back like any other."""
        if self._leaves(info):
            self.left.add(info.name)

    def count_others(self, call: CountOthers, workers: Collection[Registration]) -> int:
        """Return how many other workers have that role and stay."""
        others = [one.info for one in workers if one.info.name != call.name and not self._leaves(one.info)]
        return sum(self._role_of(info) is call.role is info.role for info in others)

    def rebalance(self, workers: Collection[Registration], now_s: float) -> None:
        """Ask one worker to change its role, if the rule says so. Nothing moves while a change is under way."""
        lease = self.lease()
        if lease is None or all(worker.info.fixed for worker in workers):
            return
        if any(self.answer(worker.info) for worker in workers):
            return
        gaining = self._rule.decide(ClusterLoad.of(workers, self._unmet, now_s), now_s)
        if gaining is None:
            return
        losing = WorkerRole.DECODE if gaining is WorkerRole.PREFILL else WorkerRole.PREFILL
        worker = least_busy(workers, losing, now_s)
        if worker is not None:
            _LOG.info("%s becomes a %s worker", worker.info.name, gaining)
            self._assigned[worker.info.name] = AssignedRole(role=gaining, fixed=False, lease=lease)
            self.num_moved += 1

    def scaling(self, workers: Collection[Registration], now_s: float) -> dict[WorkerRole, RoleScaling]:
        """Return what an autoscaler reads of each role."""
        load = ClusterLoad.of(workers, self._unmet, now_s)
        present = {WorkerRole.PREFILL: load.num_prefill, WorkerRole.DECODE: load.num_decode}
        return {role: self._scaling(load, role, number) for role, number in present.items()}

    def _scaling(self, load: ClusterLoad, role: WorkerRole, number: int) -> RoleScaling:
        rule, among = self._rule, max(1, number)
        return RoleScaling(
            number, rule.wanted(load, role), rule.pressure(load, role, among), rule.slack_s(load, role, among)
        )

    def answer(self, info: WorkerInfo) -> AssignedRole | None:
        """Return what the worker has to change; None: nothing, or this conductor may not change roles."""
        lease = self.lease()
        if lease is None:
            return None
        if self._leaves(info):
            return AssignedRole(role=info.role, fixed=info.fixed, leaves=True, lease=lease)
        assigned = self._assigned.get(info.name)
        if assigned is None or (assigned.role, assigned.fixed) == (info.role, info.fixed):
            return None
        return AssignedRole(role=assigned.role, fixed=assigned.fixed, lease=lease)

    def _require_lease(self) -> int:
        lease = self.lease()
        if lease is None:
            raise Unavailable(
                "this conductor may not change workers now: another one has the right to, or the master does not answer"
            )
        return lease

    def _leaves(self, info: WorkerInfo) -> bool:
        return self._told.get(info.name) == info.incarnation

    def _role_of(self, info: WorkerInfo) -> WorkerRole:
        """Return the role that the worker has, or is about to have."""
        assigned = self._assigned.get(info.name)
        return assigned.role if assigned is not None else info.role

    def _require_another(self, info: WorkerInfo, infos: Collection[WorkerInfo]) -> None:
        """Raise InvalidInput if no other worker, of those that stay, has the worker's role."""
        current = self._role_of(info)
        others = [one for one in infos if one.name != info.name and not self._leaves(one)]
        if not any(self._role_of(one) is current for one in others):
            raise InvalidInput(
                f"{info.name} is the only {current} worker: start another one, or give another worker that role first"
            )


def _find(name: str, infos: Collection[WorkerInfo]) -> WorkerInfo:
    """Return the worker of that name. Raise NotFound, which names the nearest ones."""
    by_name = {info.name: info for info in infos}
    if name not in by_name:
        names = ", ".join(sorted(by_name)) or "none"
        raise NotFound(f"no worker {name!r} is registered; there are: {names}{nearest(name, by_name)}")
    return by_name[name]
