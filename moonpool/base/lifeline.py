"""Children end by themselves when the process that started them is gone, even by `kill -9`.

The parent keeps the write end of a pipe that no other process ever gets; every child inherits the read end and a
small thread of it waits there. When the parent is gone, however it went, the kernel closes the write end and the
thread wakes: it asks its own process to stop (SIGTERM, so before a handler is installed the process ends at once)
and ends it by force after a short grace, even if the event loop is stuck.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from types import TracebackType

from moonpool.base.errors import ConfigError

LIFELINE_FD = "MOONPOOL_LIFELINE_FD"
GRACE_S = 1.0
EXIT_ORPHANED = 75


class Lifeline:
    """The parent's end. Give `fd` to children (`pass_fds`) and `environment` to their environment."""

    def __init__(self) -> None:
        # os.pipe makes both ends close-on-exec: only pass_fds lets the read end through, nothing the write end.
        self.fd, self._write_fd = os.pipe()
        self._closed = False

    @property
    def environment(self) -> Mapping[str, str]:
        return {LIFELINE_FD: str(self.fd)}

    def close(self) -> None:
        """Idempotent. Children that still run take it as the parent's end."""
        if not self._closed:
            self._closed = True
            os.close(self._write_fd)
            os.close(self.fd)

    def __enter__(self) -> Lifeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def watch_inherited(grace_s: float = GRACE_S) -> bool:
    """Call first thing in a child. False when no parent left a lifeline; ConfigError when it is not a descriptor.

    The variable is taken out of the environment and the descriptor is closed on exec: it is for this process only.
    """
    text = os.environ.pop(LIFELINE_FD, None)
    if text is None:
        return False
    try:
        fd = int(text)
        os.set_inheritable(fd, False)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{LIFELINE_FD}={text!r} is not an open descriptor") from error
    threading.Thread(target=_end_with_parent, args=(fd, grace_s), name="lifeline", daemon=True).start()
    return True


def _end_with_parent(fd: int, grace_s: float) -> None:
    while os.read(fd, 1):
        pass  # nobody writes; only the end of the pipe means something
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os._exit(EXIT_ORPHANED)
