"""`moonpool worker`: one prefill or decode worker."""

from __future__ import annotations

import os

from moonpool.base.process import ProcessConfig, Service, run_role
from moonpool.cli.options import command_from
from moonpool.worker.config import WorkerConfig


def _run(config: WorkerConfig, process: ProcessConfig) -> None:
    run_role(config.name, lambda: _make(config), process, what=f"{config.role} worker {config.name}")


def _make(config: WorkerConfig) -> Service:
    # Several workers share the cores: threads that wait by spinning would take them from those who compute.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from moonpool.worker.service import Worker  # here: it brings torch, which --help does not need

    return Worker(config)


command = command_from(_run, WorkerConfig, ProcessConfig)
