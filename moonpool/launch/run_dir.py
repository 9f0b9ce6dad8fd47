"""The run directory of one launcher, which holds the Unix sockets of its roles: private, with a short name."""

from __future__ import annotations

import os
from pathlib import Path

from moonpool.base.address import UNIX_PATH_NBYTES
from moonpool.base.errors import ConfigError
from moonpool.base.own_folder import OwnFolder
from moonpool.base.run_dirs import PREFIX, base_dir

_LONGEST_SOCKET_NAME_NBYTES = 32


def make_run_dir(base: Path | None = None) -> OwnFolder:
    """Raise ConfigError if paths of sockets in it would be too long."""
    base = base or base_dir()
    made = OwnFolder(PREFIX, base)
    if len(os.fsencode(made.path)) + _LONGEST_SOCKET_NAME_NBYTES >= UNIX_PATH_NBYTES:
        made.close()
        raise ConfigError(f"{made.path} is too long for Unix sockets; set XDG_RUNTIME_DIR or TMPDIR to a short path")
    return made
