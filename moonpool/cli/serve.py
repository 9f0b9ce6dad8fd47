"""`moonpool serve`: the whole service on this machine."""

from __future__ import annotations

from moonpool.cli.model import fetch_if_named
from moonpool.cli.options import command_from
from moonpool.launch.plan import ServeConfig
from moonpool.launch.serve import serve


def _run(config: ServeConfig) -> None:
    serve(config, prepare_model=fetch_if_named)


command = command_from(_run, ServeConfig)
