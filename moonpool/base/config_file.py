"""The configuration file: one TOML file for `moonpool serve`, every role, and a cluster of machines.

    [serve]                # the settings of `moonpool serve -c FILE`
    model = "smollm2"
    dram = "64GB"

    [worker]               # those of `moonpool worker -c FILE`; also of the workers that serve and up start
    pull_timeout_s = 5.0

    [cluster]              # those of `moonpool up FILE`, and of its machines (launch/cluster_file.py)
    [machines.a]

Each table has the settings of one command under the names of its options, with _ for - (base/settings.py).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moonpool.base.errors import ConfigError
from moonpool.base.settings import unknown_key

SERVE, CLUSTER, MACHINES = "serve", "cluster", "machines"
ROLES = ("master", "node", "conductor", "worker", "frontend")
TABLES = (SERVE, *ROLES, CLUSTER, MACHINES)
CONFIG_VARIABLE = "MOONPOOL_CONFIG"  # names the file if the command line does not


def read_tables(path: Path) -> dict[str, Mapping[str, Any]]:
    """Return the tables of the file by name. Raise ConfigError, which names the file, if it cannot be read, is not
    TOML, or has an unknown table. What is in the tables is not checked."""
    try:
        given = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    faults = table_faults(given)
    if faults:
        raise ConfigError(f"{path}: {faults[0]}")
    return given


def table_faults(given: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the names at the top of a file."""
    unknown = [unknown_key(name, TABLES) for name in given if name not in TABLES]
    return [
        *(f"{each}; the tables are {', '.join(f'[{name}]' for name in TABLES)}" for each in unknown),
        *(f"[{name}] must be a table" for name in TABLES if not isinstance(given.get(name, {}), Mapping)),
    ]


def table_of(tables: Mapping[str, Mapping[str, Any]], command: str, path: Path) -> Mapping[str, Any]:
    """Return the command's table. Raise ConfigError if the file has none: it is meant for something else."""
    if command in tables:
        return tables[command]
    advice = f"add [{command}], which may be empty"
    if MACHINES in tables:
        advice += f"; `moonpool up {path}` starts this machine's part of the cluster that it describes"
    raise ConfigError(f"{path} has no table [{command}]: {advice}")
