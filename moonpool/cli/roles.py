"""The commands that run one role of a cluster, and `moonpool serve`, which runs all of them on this machine.

Each function imports its role, so that a command loads only what it runs, and returns the typer command.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from moonpool.base.process import ProcessConfig, Service, run_role
from moonpool.base.units import format_nbytes
from moonpool.cli.options import command_from


def serve() -> Callable[..., None]:
    from moonpool.cli.model import fetch_if_named
    from moonpool.launch.plan import ServeConfig
    from moonpool.launch.serve import serve

    def run(config: ServeConfig) -> None:
        serve(config, prepare_model=fetch_if_named)

    return command_from(run, ServeConfig)


def master() -> Callable[..., None]:
    from moonpool.master.service import Master, MasterConfig

    def run(config: MasterConfig, process: ProcessConfig) -> None:
        run_role("master", lambda: Master(config), process, what=f"master with its journal in {config.data_dir}")

    return command_from(run, MasterConfig, ProcessConfig)


def node() -> Callable[..., None]:
    from moonpool.node.config import NodeConfig
    from moonpool.node.service import Node

    def run(config: NodeConfig, process: ProcessConfig) -> None:
        size, master = format_nbytes(config.dram_nbytes), config.master_address
        what = f"node {config.name}, {size} of memory for the pool of {master},"
        run_role(config.name, lambda: Node(config), process, what=what)

    return command_from(run, NodeConfig, ProcessConfig)


def conductor() -> Callable[..., None]:
    from moonpool.conductor.service import Conductor, ConductorConfig

    def run(config: ConductorConfig, process: ProcessConfig) -> None:
        run_role(config.name, lambda: Conductor(config), process, what="conductor")

    return command_from(run, ConductorConfig, ProcessConfig)


def worker() -> Callable[..., None]:
    from moonpool.worker.config import WorkerConfig

    def make(config: WorkerConfig) -> Service:
        # Several workers share the cores: threads that spin while they wait would take cores from those that compute.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        from moonpool.worker.service import Worker  # here, because it imports torch, which --help does not need

        return Worker(config)

    def run(config: WorkerConfig, process: ProcessConfig) -> None:
        run_role(config.name, lambda: make(config), process, what=f"{config.role} worker {config.name}")

    return command_from(run, WorkerConfig, ProcessConfig)


def frontend() -> Callable[..., None]:
    from moonpool.frontend.service import Frontend, FrontendConfig

    def run(config: FrontendConfig, process: ProcessConfig) -> None:
        run_role(config.name, lambda: Frontend(config), process, what="front end")

    return command_from(run, FrontendConfig, ProcessConfig)
