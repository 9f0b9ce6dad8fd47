"""On which machines the pool's nodes and the prefill workers are: a pull from the own machine uses no network. Pure.

A machine is named as the nodes' segments and the workers name it (SegmentDescriptor.host, WorkerInfo.host). Nodes and
workers whose machine is not known are near no other.
"""

from __future__ import annotations

from collections.abc import Mapping

Places = tuple[tuple[int, str], ...]
"""Where a prompt's leading blocks are: (end, node) of each run of blocks on one node, ascending; "" is not known."""


class PoolPaths:
    def __init__(self) -> None:
        self.hosts: dict[str, str] = {}  # of nodes
        self._near: dict[str, int] = {}  # by machine: mask of the prefill workers there
        self.sources: frozenset[str] = frozenset()  # machines whose blocks others may pull; empty if there is only one

    def set_nodes(self, hosts: Mapping[str, str]) -> None:
        """Set the machine of each node."""
        self.hosts = {node: host for node, host in hosts.items() if host}
        self._update()

    def _update(self) -> None:
        with_nodes = frozenset(self.hosts.values())
        self.sources = with_nodes if len(with_nodes | self._near.keys()) > 1 else frozenset()

    def add(self, host: str, slot: int) -> None:
        """Count a prefill worker that has registered."""
        if host:
            self._near[host] = self._near.get(host, 0) | 1 << slot
            self._update()

    def drop(self, host: str, slot: int) -> None:
        if host in self._near:
            self._near[host] &= ~(1 << slot)
            if not self._near[host]:
                del self._near[host]
            self._update()

    def machines(self, places: Places, begin: int) -> list[tuple[str, int]]:
        """Return the machines with blocks from `begin` on that have prefill workers too, and the masks of these."""
        hosts = dict.fromkeys([self.hosts.get(node, "") for end, node in places if end > begin])
        return [(host, mask) for host in hosts if (mask := self._near.get(host, 0))]
