"""`moonpool node`: gives memory of this machine to the pool."""

from __future__ import annotations

from moonpool.base.process import ProcessConfig, run_role
from moonpool.base.units import format_nbytes
from moonpool.cli.options import command_from
from moonpool.node.config import NodeConfig
from moonpool.node.service import Node


def _run(config: NodeConfig, process: ProcessConfig) -> None:
    what = f"node {config.name}, {format_nbytes(config.dram_nbytes)} of memory for the pool of {config.master_address},"
    run_role(config.name, lambda: Node(config), process, what=what)


command = command_from(_run, NodeConfig, ProcessConfig)
