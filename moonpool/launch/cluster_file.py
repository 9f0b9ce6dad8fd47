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

These are two tables of the configuration file (base/config_file.py); it may have those of the roles beside them, with
more settings for the roles that `moonpool up` starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from moonpool.base.address import host_port
from moonpool.base.config import nearest
from moonpool.base.config_file import CLUSTER, MACHINES, read_tables, table_faults
from moonpool.base.errors import ConfigError
from moonpool.base.run_dirs import CONDUCTOR
from moonpool.base.settings import InForce, Layer, Setting, Source, build, from_table, merge, settings_of
from moonpool.launch.machine import NODE, Wiring, numbered
from moonpool.launch.plan import ServeConfig

DEFAULT_MASTER_PORT, DEFAULT_CONDUCTOR_PORT = 7700, 7800
_OF_A_MACHINE = {"prefill", "decode", "nodes", "frontends", "conductors", "host"}  # never for the whole cluster
_OF_THE_CLUSTER = {"model", "random_weights", "block_tokens", "max_model_len", "dtype", "kv_dtype", "policy", "elastic"}
_OF_THE_CLUSTER |= {"ttft_slo_s", "tbt_slo_s", "admission", "pipeline_min_tokens", "secret_file", "tenants_file"}


@dataclass(frozen=True, slots=True)
class ClusterMachine:
    """One machine. `serve` has its own options and those of the cluster; its `host` is where clients reach the API."""

    name: str
    host: str
    is_master: bool
    serve: ServeConfig
    in_force: Mapping[str, InForce]  # where each of its settings comes from

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
    given = read_tables(path)
    try:
        return parse_cluster(given)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_cluster(given: Mapping[str, Any]) -> ClusterFile:
    """Return the cluster that a file describes. Raise ConfigError if anything in it is wrong."""
    found, faults = check_cluster(given)
    if found is None or faults:
        raise ConfigError(faults[0])
    return found


def check_cluster(given: Mapping[str, Any]) -> tuple[ClusterFile | None, list[str]]:
    """Return the cluster that a file describes, and everything that is wrong with it."""
    faults = table_faults(given)
    if faults:
        return None, faults
    table = dict(given.get(CLUSTER, {}))
    ports = [table.pop(f"{role}_port", port) for role, port in _PORTS.items()]
    if not all(isinstance(port, int) and 0 < port < 65536 for port in ports) or ports[0] == ports[1]:
        faults.append("[cluster]: master_port and conductor_port must be two different ports")
    common, wrong = from_table(_without(_OF_A_MACHINE), table)
    faults += [f"[cluster]: {fault}" for fault in wrong]
    machines = {}
    for name, own in given.get(MACHINES, {}).items():
        machine, wrong = _machine(name, own, Layer(Source.FILE, common, f"[{CLUSTER}]"))
        faults += [f"[machines.{name}]: {fault}" for fault in wrong]
        if machine is not None:
            machines[name] = machine
    found = ClusterFile(machines, *ports)
    return found, faults or _faults_between(found)


_PORTS = {"master": DEFAULT_MASTER_PORT, "conductor": DEFAULT_CONDUCTOR_PORT}


def _machine(name: str, table: object, common: Layer) -> tuple[ClusterMachine | None, list[str]]:
    """Return the machine, and what is wrong with its table."""
    if not isinstance(table, Mapping):
        return None, ["must be a table"]
    faults = []
    if not name.replace("-", "").replace("_", "").isalnum():
        faults.append("a machine's name has letters, digits, - and _ only")
    faults += [f"{key} is the same for all machines: move it to [cluster]" for key in table if key in _OF_THE_CLUSTER]
    is_master = table.get("master", False)
    if not isinstance(is_master, bool):
        faults.append("master must be true or false")
    own = {key: value for key, value in table.items() if key != "master" and key not in _OF_THE_CLUSTER}
    values, wrong = from_table(_without(_OF_THE_CLUSTER), own)
    if not own.get("host"):
        faults.append('host is missing: the address at which the other machines reach it, as "10.0.0.1"')
    if faults or wrong:
        return None, faults + wrong
    counts = {"prefill": 0, "decode": 0, "frontends": 0, "nodes": 1 if "dram" in own else 0}
    counts["conductors"] = 1 if is_master else 0
    layers = Layer(Source.FILE, values, f"[machines.{name}]"), common, Layer(Source.DEFAULT, counts)
    in_force = merge(_settings(), layers)
    try:
        serve = build(ServeConfig, in_force)
        serve.check_values()
    except ConfigError as error:
        return None, [str(error)]
    return ClusterMachine(name, values["host"], is_master, serve, in_force), []


@cache
def _settings() -> dict[str, Setting]:
    return settings_of(ServeConfig)


def _without(names: set[str]) -> dict[str, Setting]:
    return {name: setting for name, setting in _settings().items() if name not in names}


def _faults_between(cluster: ClusterFile) -> list[str]:
    """Return the first fault that concerns several machines."""
    try:
        _check(cluster)
    except ConfigError as error:
        return [str(error)]
    return []


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
