"""A cluster file: one TOML file that says what runs on which machine, the same for all of them. Pure.

    [cluster]                          # what holds for all machines: the options of `moonpool serve`, with _ for -
    model = "smollm2"
    secret_file = "/etc/moonpool/secret"
    ttft_slo_s = 2.0

    [machines.a]                       # one table per machine; `moonpool up cluster.toml --machine a` starts its part
    host = "10.0.0.1"                  # how the other machines reach it
    master = true                      # the master runs here, and a conductor unless `conductors = 0`
    prefill = 2
    frontends = 1
    dram = "64GB"

    [machines.b]
    host = "10.0.0.2"
    decode = 2
    dram = "64GB"

A machine has what its table says: no worker, node or front end unless it is named (a node comes with `dram`). An option
of a machine overrides that of the cluster. Everything is checked before anything starts, on every machine.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from moonpool.base.address import host_port
from moonpool.base.config import nearest
from moonpool.base.errors import ConfigError
from moonpool.base.run_dirs import CONDUCTOR
from moonpool.launch.machine import NODE, Wiring, numbered
from moonpool.launch.plan import ServeConfig

DEFAULT_MASTER_PORT, DEFAULT_CONDUCTOR_PORT = 7700, 7800
_OF_A_MACHINE = {"prefill", "decode", "nodes", "frontends", "conductors", "host"}  # never for the whole cluster
_OF_THE_CLUSTER = {"model", "random_weights", "block_tokens", "max_model_len", "dtype", "kv_dtype", "policy", "elastic"}
_OF_THE_CLUSTER |= {"ttft_slo_s", "tbt_slo_s", "admission", "secret_file", "tenants_file"}
_OPTIONS = {field.name for field in fields(ServeConfig)}


@dataclass(frozen=True, slots=True)
class ClusterMachine:
    """One machine. `serve` has its own options and those of the cluster; its `host` is where clients reach the API."""

    name: str
    host: str
    is_master: bool
    serve: ServeConfig

    @property
    def prefix(self) -> str:
        """What the names of its nodes and workers begin with."""
        return f"{self.name}-"

    @property
    def worker_names(self) -> tuple[str, ...]:
        roles = (("prefill", self.serve.prefill), ("decode", self.serve.decode))
        return tuple(f"{self.prefix}{role}-{number}" for role, count in roles for number in range(count))

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(self.prefix + name for name in numbered(NODE, self.serve.nodes))


@dataclass(frozen=True, slots=True)
class ClusterFile:
    machines: Mapping[str, ClusterMachine]
    master_port: int
    conductor_port: int

    @property
    def master(self) -> ClusterMachine:
        return next(machine for machine in self.machines.values() if machine.is_master)

    @property
    def master_address(self) -> str:
        return f"tcp:{host_port(self.master.host, self.master_port)}"

    @property
    def conductor_address(self) -> str:
        """The addresses of all conductors, separated by commas."""
        everyone = [pair for machine in self.machines.values() for pair in self.conductors_of(machine)]
        return ",".join(address for _, address in everyone)

    def conductors_of(self, machine: ClusterMachine) -> tuple[tuple[str, str], ...]:
        """Return the names and addresses of that machine's conductors; their ports follow each other."""
        names = enumerate(numbered(CONDUCTOR, machine.serve.conductors))
        return tuple((name, f"tcp:{host_port(machine.host, self.conductor_port + n)}") for n, name in names)

    def wiring(self, machine: ClusterMachine) -> Wiring:
        """Return how that machine's roles reach the others."""
        everyone = self.machines.values()
        return Wiring(
            self.master_address,
            self.conductor_address,
            is_master=machine.is_master,
            conductors=self.conductors_of(machine),
            host=machine.host,
            workers=tuple(name for each in everyone for name in each.worker_names),
            nodes=tuple(name for each in everyone for name in each.node_names),
        )

    def machine(self, name: str) -> ClusterMachine:
        """Raise ConfigError if the file has no such machine."""
        if name not in self.machines:
            raise ConfigError(f"the cluster has no machine {name!r}{nearest(name, self.machines)}", param="machine")
        return self.machines[name]


def read_cluster(path: Path) -> ClusterFile:
    """Read and check the file. Raise ConfigError with the reason if anything in it is wrong."""
    try:
        given = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    try:
        return parse_cluster(given)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_cluster(given: Mapping[str, Any]) -> ClusterFile:
    """Return the cluster that a file describes. Raise ConfigError if anything in it is wrong."""
    _refuse_unknown("", given, {"cluster", "machines"})
    common = dict(_table("[cluster]", given.get("cluster", {})))
    ports = [common.pop(f"{role}_port", port) for role, port in _PORTS.items()]
    if not all(isinstance(port, int) and 0 < port < 65536 for port in ports) or ports[0] == ports[1]:
        raise ConfigError("[cluster]: master_port and conductor_port must be two different ports")
    _refuse_unknown("[cluster]: ", common, (_OPTIONS - _OF_A_MACHINE) | {f"{role}_port" for role in _PORTS})
    tables = _table("[machines]", given.get("machines", {}))
    machines = {name: _machine(name, _table(f"[machines.{name}]", table), common) for name, table in tables.items()}
    found = ClusterFile(machines, *ports)
    _check(found)
    return found


_PORTS = {"master": DEFAULT_MASTER_PORT, "conductor": DEFAULT_CONDUCTOR_PORT}


def _machine(name: str, table: Mapping[str, Any], common: Mapping[str, Any]) -> ClusterMachine:
    where, own = f"[machines.{name}]: ", dict(table)
    if not name.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(f"{where}a machine's name has letters, digits, - and _ only")
    fixed = sorted(own.keys() & _OF_THE_CLUSTER)
    if fixed:
        raise ConfigError(f"{where}{fixed[0]} is the same for all machines: move it to [cluster]")
    _refuse_unknown(where, own, (_OPTIONS - _OF_THE_CLUSTER) | {"master"})
    host, is_master = own.pop("host", None), own.pop("master", False)
    if not isinstance(host, str) or not host:
        raise ConfigError(f'{where}host is missing: the address at which the other machines reach it, as "10.0.0.1"')
    if not isinstance(is_master, bool):
        raise ConfigError(f"{where}master must be true or false")
    counts = {"prefill": 0, "decode": 0, "frontends": 0, "nodes": 1 if "dram" in own else 0}
    counts["conductors"] = 1 if is_master else 0
    try:
        serve = msgspec.convert({**common, **counts, **own, "host": host}, ServeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}{error}") from error
    try:
        serve.check_values()
    except ConfigError as error:
        raise ConfigError(f"{where}{error}") from error
    return ClusterMachine(name, host, is_master, serve)


def _check(cluster: ClusterFile) -> None:
    """Check what concerns several machines."""
    machines = cluster.machines.values()
    masters = [machine.name for machine in machines if machine.is_master]
    if len(masters) != 1:
        found = f"{' and '.join(masters)} have" if masters else "none has"
        raise ConfigError(f"one machine must have master = true; {found} it")
    for kind in ("prefill", "decode", "nodes", "frontends", "conductors"):
        if not any(getattr(machine.serve, kind) for machine in machines):
            raise ConfigError(f"no machine has {kind}: the cluster could not answer")
    hosts = [machine.host for machine in machines]
    twice = next((host for host in hosts if hosts.count(host) > 1), None)
    if twice is not None:
        raise ConfigError(f"two machines have the host {twice}")
    if len(hosts) > 1 and cluster.master.serve.secret_file is None:
        raise ConfigError(
            "[cluster]: secret_file is missing: machines that reach each other over a network need one (mode 600, the "
            "same on all of them), or every program on that network could read and change the pool"
        )


def _table(where: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must be a table")
    return value


def _refuse_unknown(where: str, given: Iterable[str], known: Iterable[str]) -> None:
    known = set(known)
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None:
        raise ConfigError(f"{where}{unknown!r} is unknown{nearest(unknown, known)}")
