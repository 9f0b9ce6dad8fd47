"""How to make a result again: the command as it can be typed, the version and the seed. Replay and plan end with it."""

from __future__ import annotations

import shlex
from collections.abc import Collection

import typer

from moonpool import __version__


def made_by(context: typer.Context, seed: int, *, left_out: Collection[str]) -> dict[str, str]:
    """Return what the result depends on, by name. `left_out` names parameters that change only the output."""
    return {"command": _as_typed(context, left_out), "version": f"moonpool {__version__}", "seed": str(seed)}


def _as_typed(context: typer.Context, left_out: Collection[str]) -> str:
    """Return the command line with all that differs from the defaults."""
    words = ["moonpool", context.info_name or ""]
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if parameter.name in left_out or value in (None, parameter.default):
            continue
        for each in value if isinstance(value, list | tuple) else [value]:
            words += [str(each)] if parameter.param_type_name == "argument" else [parameter.opts[0], str(each)]
    return shlex.join(words)
