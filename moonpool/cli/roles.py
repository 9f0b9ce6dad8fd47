"""The commands that run one role of a cluster, and `moonpool serve`, which runs all of them on this machine.

Each function imports its role, so that a command loads only what it runs, and returns the typer command.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moonpool.base.config_file import ROLES
from moonpool.base.errors import ConfigError
from moonpool.base.process import ProcessConfig, run_role
from moonpool.base.settings import from_table, settings_of
from moonpool.base.units import format_nbytes
from moonpool.cli.options import Settled, layered_command

if TYPE_CHECKING:
    from moonpool.worker.service import Worker

EXAMPLES = {
    "serve": (
        "moonpool serve",
        "moonpool serve --prefill 2 --decode 2 --dram 64GB --ssd /data/moonpool --ssd-size 1TB",
        "moonpool config init && moonpool serve -c moonpool.toml --port 8080",
        "MOONPOOL_DRAM=64GB moonpool serve",
    ),
    "master": ("moonpool master --data-dir /var/lib/moonpool --listen tcp:10.0.0.1:7700",),
    "node": (
        "moonpool node --name node-a --dram 64GB --run-dir /run/moonpool --master tcp:10.0.0.1:7700",
        "moonpool node -c moonpool.toml --name node-a",
    ),
    "conductor": ("moonpool conductor --listen tcp:10.0.0.1:7800 --master tcp:10.0.0.1:7700 --policy-ttft-slo-s 2",),
    "worker": (
        "moonpool worker --name prefill-a --role prefill --model smollm2 --run-dir /run/moonpool "
        "--listen tcp:10.0.0.1:7900 --conductor tcp:10.0.0.1:7800 --master tcp:10.0.0.1:7700",
        "moonpool worker -c moonpool.toml --name decode-b --role decode",
    ),
    "frontend": (
        "moonpool frontend --conductor tcp:10.0.0.1:7800 --master tcp:10.0.0.1:7700 --state-dir /var/lib/moonpool "
        "--listen tcp:0.0.0.0:8000",
    ),
    "up": (
        "moonpool up cluster.toml --check",
        "moonpool up cluster.toml --machine a",
    ),
}


def configs_of(command: str) -> tuple[type[Any], ...]:
    """Return the dataclasses of `serve` or a role."""
    match command:
        case "serve":
            from moonpool.launch.plan import ServeConfig

            return (ServeConfig,)
        case "master":
            from moonpool.master.service import MasterConfig

            return MasterConfig, ProcessConfig
        case "node":
            from moonpool.node.config import NodeConfig

            return NodeConfig, ProcessConfig
        case "conductor":
            from moonpool.conductor.service import ConductorConfig

            return ConductorConfig, ProcessConfig
        case "worker":
            from moonpool.worker.config import WorkerConfig

            return WorkerConfig, ProcessConfig
        case "frontend":
            from moonpool.frontend.service import FrontendConfig

            return FrontendConfig, ProcessConfig
    raise AssertionError(f"{command} has no settings")


def role_tables(path: Path | None, tables: Mapping[str, Mapping[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    """Return the tables of the roles that a service starts, by role. Raise ConfigError if one is wrong."""
    found = {role: table for role, table in (tables or {}).items() if role in ROLES}
    for role, table in found.items():
        _, faults = from_table(settings_of(*configs_of(role)), table)
        if faults:
            raise ConfigError(f"{path}: [{role}]: {faults[0]}")
    return found


def serve() -> Callable[..., None]:
    from moonpool.cli.model import fetch_if_named
    from moonpool.launch.plan import ServeConfig
    from moonpool.launch.serve import serve

    def use(settled: Settled) -> None:
        tables = role_tables(settled.path, settled.tables)
        serve(settled.build(ServeConfig), prepare_model=fetch_if_named, role_tables=tables)

    return layered_command(use, "serve", ServeConfig)


def _role(command: str, run: Callable[..., None]) -> Callable[..., None]:
    """Return the command that calls `run` with an instance of each of its dataclasses."""
    configs = configs_of(command)
    return layered_command(lambda settled: run(*map(settled.build, configs)), command, *configs)


def master() -> Callable[..., None]:
    from moonpool.master.service import Master, MasterConfig

    def run(config: MasterConfig, process: ProcessConfig) -> None:
        run_role("master", lambda: Master(config), process, what=f"master with its journal in {config.data_dir}")

    return _role("master", run)


def node() -> Callable[..., None]:
    from moonpool.node.config import NodeConfig
    from moonpool.node.service import Node

    def run(config: NodeConfig, process: ProcessConfig) -> None:
        size, master = format_nbytes(config.dram_nbytes), config.master_address
        what = f"node {config.name}, {size} of memory for the pool of {master},"
        run_role(config.name, lambda: Node(config), process, what=what)

    return _role("node", run)


def conductor() -> Callable[..., None]:
    from moonpool.conductor.service import Conductor, ConductorConfig

    def run(config: ConductorConfig, process: ProcessConfig) -> None:
        run_role(config.name, lambda: Conductor(config), process, what="conductor")

    return _role("conductor", run)


def worker() -> Callable[..., None]:
    from moonpool.worker.config import WorkerConfig

    def run(config: WorkerConfig, process: ProcessConfig) -> None:
        run_role(config.name, lambda: worker_class()(config), process, what=f"{config.role} worker {config.name}")

    return _role("worker", run)


def worker_class() -> type[Worker]:
    """Import torch, which `moonpool worker --help` does not need."""
    # Several workers share the cores: threads that spin while they wait would take cores from those that compute.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from moonpool.worker.service import Worker

    return Worker


def frontend() -> Callable[..., None]:
    from moonpool.frontend.service import Frontend, FrontendConfig

    def run(config: FrontendConfig, process: ProcessConfig) -> None:
        run_role(config.name, lambda: Frontend(config), process, what="front end")

    return _role("frontend", run)
