"""The run directory of one launcher, which holds the Unix sockets of its roles: private, with a short name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from moonpool.base.address import UNIX_PATH_NBYTES
from moonpool.base.errors import ConfigError
from moonpool.base.own_folder import OwnFolder
from moonpool.base.run_dirs import PREFIX, base_dir

_LONGEST_SOCKET_NAME_NBYTES = 32


class RunDir(OwnFolder):
    """Owns the folder, as any OwnFolder, and makes it again if it is removed while the service runs."""

    def __init__(self, base: Path | None = None) -> None:
        """Raise ConfigError if paths of sockets in it would be too long."""
        super().__init__(PREFIX, base or base_dir())
        self._writers: list[Callable[[], None]] = []
        if len(os.fsencode(self.path)) + _LONGEST_SOCKET_NAME_NBYTES >= UNIX_PATH_NBYTES:
            self.close()
            raise ConfigError(
                f"{self.path} is too long for Unix sockets; set XDG_RUNTIME_DIR or TMPDIR to a short path"
            )

    def keep(self, write: Callable[[], None]) -> None:
        """Call `write`, which puts a file into the folder, now and whenever the folder is made again."""
        write()
        self._writers.append(write)

    def restore(self) -> bool:
        """Make the folder and its files again if it is not there any more. Return whether it was. Raise OSError."""
        if not self.own_again():
            return False
        for write in self._writers:
            write()
        return True
