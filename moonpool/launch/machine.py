"""What runs on one machine: its nodes, workers and front ends, with what each may use. Pure.

A MachinePlan is made from the options of `moonpool serve`, or from those of one machine in a cluster file. plan.py
turns it into processes; a Wiring says where they find those of other machines.

The first node and the first front end have the plain names `node` and `frontend`, those after them `node-1`, `node-2`,
... So a service that gets more of them keeps the names, and the folders, of those that it had.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from moonpool.base.run_dirs import numbered_name
from moonpool.base.units import format_nbytes
from moonpool.engine.config import Device

NODE, FRONTEND = "node", "frontend"


@dataclass(frozen=True, slots=True)
class NodePart:
    """One node of the pool. With `ssd_dir` None it has no disk."""

    name: str
    dram_nbytes: int
    ssd_dir: str | None
    ssd_nbytes: int


@dataclass(frozen=True, slots=True)
class WorkerPart:
    """One worker. `role` is prefill or decode; in a cluster its name begins with that of its machine."""

    prefix: str
    role: str
    number: int
    device: Device
    threads: int | None  # None: its share of the machine's cores, as workers come and go
    kv_nbytes: int

    @property
    def name(self) -> str:
        return f"{self.prefix}{self.role}-{self.number}"


@dataclass(frozen=True, slots=True)
class FrontendPart:
    """One front end. Those of a machine share one port if there are several."""

    name: str


@dataclass(frozen=True, slots=True)
class MachinePlan:
    nodes: tuple[NodePart, ...]
    workers: tuple[WorkerPart, ...]
    frontends: tuple[FrontendPart, ...]

    @property
    def pool_nbytes(self) -> int:
        """Memory of all nodes together."""
        return sum(node.dram_nbytes for node in self.nodes)

    @property
    def ssd_dirs(self) -> tuple[str, ...]:
        return tuple(node.ssd_dir for node in self.nodes if node.ssd_dir is not None)

    def describe(self) -> str:
        """Return one line for the person who started the service."""
        dram, ssd_nbytes = format_nbytes(self.pool_nbytes), sum(node.ssd_nbytes for node in self.nodes)
        pool = f"{dram} of memory" + (f" and {format_nbytes(ssd_nbytes)} of SSD" if ssd_nbytes else "")
        if len(self.nodes) > 1:
            first = self.nodes[0]
            each = format_nbytes(first.dram_nbytes)
            each += f" and {format_nbytes(first.ssd_nbytes)}" if first.ssd_nbytes else ""
            names = ", ".join(node.name for node in self.nodes)
            pool += f" in {len(self.nodes)} nodes of {each} each ({names})"
        front = "1 front end" if self.frontends else "no front end"
        if len(self.frontends) > 1:
            names = ", ".join(frontend.name for frontend in self.frontends)
            front = f"{len(self.frontends)} front ends at one port ({names})"
        return f"pool: {pool}; {front}"


@dataclass(frozen=True, slots=True)
class Wiring:
    """How the roles of a machine reach those that may be on another one."""

    master: str  # address
    conductor: str  # address; of several, separated by commas
    is_master: bool  # it runs here
    conductors: tuple[tuple[str, str], ...] = ()  # that run here: name and address
    host: str | None = None  # where nodes and workers serve other machines; None: there are no other machines
    workers: tuple[str, ...] = ()  # of the whole cluster, by name
    nodes: tuple[str, ...] = ()  # of the whole cluster, by name


def numbered(name: str, count: int) -> list[str]:
    """Return the names of `count` roles of one kind: the first has the plain name."""
    return [numbered_name(name, number) for number in range(count)]


def node_parts(
    count: int, *, dram_nbytes: int, ssd: str | None, ssd_nbytes: int, prefix: str = ""
) -> tuple[NodePart, ...]:
    """Return nodes of these sizes each. The first has its SSD log in the folder `ssd`, as a single node does; each of
    the others in a folder of its name inside it."""
    parts = []
    for name in numbered(NODE, count):
        folder = ssd if ssd is None or name == NODE else str(PurePath(ssd, name))
        parts.append(NodePart(prefix + name, dram_nbytes, folder, ssd_nbytes))
    return tuple(parts)
