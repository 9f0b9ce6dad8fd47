"""Scripts of tests as processes that cost milliseconds: forks of one process that has imported what the script needs.

Each is a real process and a child of this one, so it can be stopped, killed and waited for as any other. It has the
environment and the working folder of this one, pipes of its own, and ends as a script does. Nothing but the start of
Python is saved.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from moonpool.base.forking import adopting, fork_to_adopt

_MAX_REQUEST_NBYTES = 128 * 1024


class ForkedProcess:
    """What tests use of subprocess.Popen(text=True). Close both pipes."""

    def __init__(self, pid: int, to_child: int, from_child: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin, self.stdout = os.fdopen(to_child, "w"), os.fdopen(from_child)
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._pidfd], [], [], 0)[0]:
            self._bury()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self._bury()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _bury(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        os.close(self._pidfd)


class ForkServer:
    """Run by the server, and not as "__main__", the script imports what it needs; `loads` are its arguments then."""

    def __init__(self, script: Path, *loads: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), str(script), *loads],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # no thread while it forks
            )

    def start(self, *arguments: str, environment: Mapping[str, str] | None = None, stderr: int = 2) -> ForkedProcess:
        """Run the script with these arguments; `environment` is added to that of this process."""
        child_in, to_child = os.pipe()
        from_child, child_out = os.pipe()
        asked = {"arguments": arguments, "environment": {**os.environ, **(environment or {})}, "folder": os.getcwd()}
        with adopting():
            socket.send_fds(self._socket, [json.dumps(asked).encode()], [child_in, child_out, stderr])
            os.close(child_in)
            os.close(child_out)
            pid = int(self._socket.recv(64))
        return ForkedProcess(pid, to_child, from_child)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


@contextmanager
def fork_server(script: Path, *loads: str) -> Iterator[ForkServer]:
    server = ForkServer(script, *loads)
    try:
        yield server
    finally:
        server.close()


# the server's side


def serve(sock: socket.socket, script: str, loads: list[str]) -> None:
    sys.path[0], sys.argv = str(Path(script).parent), [script, *loads]
    runpy.run_path(script)  # imports what it needs, and does nothing yet
    while True:
        request, fds, _, _ = socket.recv_fds(sock, _MAX_REQUEST_NBYTES, 3)
        if not request:
            return
        pid = fork_to_adopt()
        if pid is None:
            break
        sock.send(b"%d" % pid)
        for fd in fds:
            os.close(fd)
    sock.close()
    asked = json.loads(request)
    for place, fd in enumerate(fds):
        os.dup2(fd, place)
        os.close(fd)
    sys.stdin, sys.stdout = os.fdopen(0, "r", closefd=False), os.fdopen(1, "w", closefd=False)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    sys.argv = [script, *asked["arguments"]]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], sys.argv[3:])
