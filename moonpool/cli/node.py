"""`moonpool node`: gives memory of this machine to the pool."""

from __future__ import annotations

from moonpool.base.process import ProcessConfig, run_role
from moonpool.cli.options import command_from
from moonpool.store.node import Node, NodeConfig


def _run(config: NodeConfig, process: ProcessConfig) -> None:
    run_role(config.name, lambda: Node(config), process)


command = command_from(_run, NodeConfig, ProcessConfig)
