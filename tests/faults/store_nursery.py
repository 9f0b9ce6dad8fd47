"""Roles of the store as processes that cost milliseconds: forks of one process that has imported everything.

Both sides of it. The test passes a role's name, its settings and two pipes; the nursery forks, and the child talks in
lines over the pipes. Children end with the nursery, even those that are stopped, and the nursery ends with the test.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "helpers"))  # this also runs as a script
from severe import WrongBytes
from waiting import HANG_S, wait_until

_PR_SET_PDEATHSIG = 1
_MAX_REQUEST_NBYTES = 64 * 1024


class Role:
    """One process. It is known by its pidfd, so that no signal ever hits another one."""

    def __init__(self, pid: int, to_child: int, from_child: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._in = os.fdopen(to_child, "w", buffering=1)
        self._out_fd = from_child
        self._rest = b""

    def say(self, line: str) -> None:
        self._in.write(line + "\n")

    def hear(self, timeout_s: float = HANG_S) -> str:
        """The next line; "" when the process has ended without one."""
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._out_fd], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, f"process {self.pid} said nothing within {timeout_s} s"
            data = os.read(self._out_fd, 65536)
            if not data:
                return ""
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def expect(self, line: str) -> None:
        heard = self.hear()
        if heard.startswith("wrong "):
            raise WrongBytes(heard)
        assert heard == line, f"expected {line!r}, heard {heard!r}"

    @property
    def is_gone(self) -> bool:
        return bool(select.select([self._pidfd], [], [], 0)[0])

    def signal(self, number: int) -> None:
        if not self.is_gone:
            signal.pidfd_send_signal(self._pidfd, number)

    def stop(self) -> None:
        """SIGSTOP, in force when this returns."""
        self.signal(signal.SIGSTOP)
        self.wait_stopped()

    def wait_stopped(self) -> None:
        """Until the process is stopped, by whoever it was."""

        def is_stopped() -> bool:
            assert not self.is_gone, f"process {self.pid} ended instead of stopping"
            return _state_of(self.pid) == "T"

        wait_until(is_stopped, f"process {self.pid} stops")

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9, and waits until it is gone."""
        self.signal(signal.SIGKILL)
        self.wait_gone()

    def wait_gone(self) -> None:
        assert select.select([self._pidfd], [], [], HANG_S)[0], f"process {self.pid} does not end"

    def close(self) -> None:
        """Ends it the friendly way, if it has not ended."""
        self.resume()
        self.signal(signal.SIGTERM)
        if not select.select([self._pidfd], [], [], HANG_S)[0]:
            self.kill()
        self._in.close()
        os.close(self._out_fd)
        os.close(self._pidfd)


def _state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


class Nursery:
    """The test's side."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )

    def bear(self, role: str, config: dict[str, Any]) -> Role:
        """A new process; it has said nothing yet."""
        child_in, to_child = os.pipe()
        from_child, child_out = os.pipe()
        request = json.dumps({"role": role, "config": config}).encode()
        socket.send_fds(self._socket, [request], [child_in, child_out])
        os.close(child_in)
        os.close(child_out)
        return Role(int(self._socket.recv(64)), to_child, from_child)

    def close(self) -> None:
        self._socket.close()
        self._process.wait(HANG_S)


@contextmanager
def open_nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    try:
        yield nursery
    finally:
        nursery.close()


# the nursery's side


def fork_roles(sock: socket.socket) -> None:
    from store_roles import ROLES  # what takes long to import, once for all children

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the dead
    while True:
        request, fds, _, _ = socket.recv_fds(sock, _MAX_REQUEST_NBYTES, 2)
        if not request:
            return
        pid = os.fork()
        if pid == 0:
            sock.close()
            _become(ROLES, request, *fds)
        for fd in fds:
            os.close(fd)
        sock.send(str(pid).encode())


def _become(roles: dict[str, Any], request: bytes, stdin: int, stdout: int) -> None:
    """Never returns."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.close(stdin)
        os.close(stdout)
        sys.stdin, sys.stdout = os.fdopen(0, "r", closefd=False), os.fdopen(1, "w", buffering=1, closefd=False)
        wanted = json.loads(request)
        roles[wanted["role"]](**wanted["config"])
        code = 0
    except BaseException:  # noqa: BLE001 - the end of the process
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    fork_roles(socket.socket(fileno=int(sys.argv[1])))
