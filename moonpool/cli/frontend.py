"""`moonpool frontend`: the OpenAI API in front of a conductor and its workers."""

from __future__ import annotations

from moonpool.base.process import ProcessConfig, run_role
from moonpool.cli.options import command_from
from moonpool.frontend.service import Frontend, FrontendConfig


def _run(config: FrontendConfig, process: ProcessConfig) -> None:
    run_role(config.name, lambda: Frontend(config), process, what="front end")


command = command_from(_run, FrontendConfig, ProcessConfig)
