"""What a configuration file and the environment say about the roles that the launcher starts. Pure.

A role takes from its table of the file, and from the environment, what the launcher does not set itself. The file is
read once, at the start of the launcher: a role that is started again has the settings that it had before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moonpool.base.config_file import CONFIG_VARIABLE
from moonpool.base.errors import ConfigError
from moonpool.base.settings import file_key, variable_name
from moonpool.launch.plan import Role

RoleTables = Mapping[str, Mapping[str, Any]]  # by role; base/settings.py has checked them


def with_settings(role: Role, tables: RoleTables, environment: Mapping[str, str]) -> Role:
    """Return the role with the options of its table, save those that the environment states: the role reads these
    itself. Raise ConfigError if the table has an option that the launcher sets."""
    table = tables.get(role.command, {})
    own = {file_key(name) for name in role.options}
    taken = next((key for key in table if key in own), None)
    if taken is not None:
        raise ConfigError(
            f"[{role.command}]: {taken} is set by the launcher for the roles that it starts; remove it there, and use "
            "the settings of [serve], or of [cluster] and [machines]",
            param=taken,
        )
    more = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in table.items()
        if not environment.get(variable_name(key))
    }
    return replace(role, options={**more, **role.options})


def child_environment(options: Mapping[str, object], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a role: without the launcher's file, and without variables of options for which the
    launcher has chosen the role's default (None)."""
    without = {variable_name(name) for name, value in options.items() if value is None} | {CONFIG_VARIABLE}
    return {name: value for name, value in environment.items() if name not in without}
