"""Changes of roles in the simulated cluster: by the conductor's own rule, and by a person's orders.

As in a real cluster the conductor looks at its rule at equal intervals, a worker learns of its new role by the answer
to its next report, and it then registers in that role at once and goes on with what it has begun in the old one.
"""

from __future__ import annotations

from collections.abc import Callable

from moonpool.base.errors import MoonpoolError
from moonpool.conductor.elastic import REBALANCE_S
from moonpool.sim.world.components import ClusterComponents
from moonpool.sim.world.config import ClusterConfig, RoleChange


class SimRoles:
    """`is_busy` says whether requests are open or still to come; `on_changed` is called after a worker has registered
    in another role."""

    def __init__(
        self,
        config: ClusterConfig,
        components: ClusterComponents,
        is_busy: Callable[[], bool],
        on_changed: Callable[[], None],
    ) -> None:
        self._components, self._clock, self._conductor = components, components.clock, components.conductors[0]
        self._is_busy, self._on_changed = is_busy, on_changed
        self._asked: set[str] = set()  # workers that will learn of their new role by their next report
        self.refused: list[tuple[RoleChange, str]] = []  # a person's orders that the conductor refused, and why
        self.num_changes = 0
        if config.elastic:
            self._clock.call_at(REBALANCE_S, self._rebalance)
        for change in config.role_changes:
            self._clock.call_at(change.at_s, lambda change=change: self._order(change))  # type: ignore[misc]

    def _rebalance(self) -> None:
        self._conductor.roles.rebalance(self._conductor.workers, self._clock.now_s)
        self._ask()
        if self._is_busy():
            self._clock.call_at(self._clock.now_s + REBALANCE_S, self._rebalance)

    def _order(self, change: RoleChange) -> None:
        try:
            self._conductor.roles.assign(change.node, change.role, self._conductor.workers)
        except MoonpoolError as error:
            self.refused.append((change, str(error)))
        self._ask()

    def _ask(self) -> None:
        for worker in self._conductor.workers:
            name = worker.info.name
            if name not in self._asked and self._conductor.roles.answer(worker.info) is not None:
                self._asked.add(name)
                reporter = self._components.reporters[name]
                self._clock.call_at(max(self._clock.now_s, reporter.next_s), lambda name=name: self._follow(name))  # type: ignore[misc]

    def _follow(self, name: str) -> None:
        """Send a report, and take the role that the conductor's answer asks for."""
        self._asked.discard(name)
        self._components.reporters[name].report(self._clock.now_s)
        info = next(worker.info for worker in self._conductor.workers if worker.info.name == name)
        assigned = self._conductor.roles.answer(info)
        if assigned is None:
            return
        if assigned.role is not info.role:
            self.num_changes += 1
        self._components.take_role(name, assigned)
        self._on_changed()
