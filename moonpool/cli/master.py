"""`moonpool master`: the one that knows where the pool's objects are."""

from __future__ import annotations

from moonpool.base.process import ProcessConfig, run_role
from moonpool.cli.options import command_from
from moonpool.master.service import Master, MasterConfig


def _run(config: MasterConfig, process: ProcessConfig) -> None:
    run_role("master", lambda: Master(config), process, what=f"master with its journal in {config.data_dir}")


command = command_from(_run, MasterConfig, ProcessConfig)
