"""`moonpool conductor`: decides which workers take a request."""

from __future__ import annotations

from moonpool.base.process import ProcessConfig, run_role
from moonpool.cli.options import command_from
from moonpool.conductor.service import Conductor, ConductorConfig


def _run(config: ConductorConfig, process: ProcessConfig) -> None:
    run_role(config.name, lambda: Conductor(config), process, what="conductor")


command = command_from(_run, ConductorConfig, ProcessConfig)
