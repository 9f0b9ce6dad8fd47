"""A role as a real process: readiness, signals, errors, and an end that always comes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import HANG_S, wait_until

from moonpool import __version__
from moonpool.base.process import EXIT_UNREACHABLE

SCRIPT = """
import asyncio, sys, time
from moonpool.base.errors import NoSpace
from moonpool.base.metrics import GetMetrics
from moonpool.base.rpc import RpcServer
from moonpool.base import process
from moonpool.base.process import ProcessConfig, run_role
process.CLOSE_TIMEOUT_S = 0.5 if sys.argv[1] == "hangs" else 10.0

class Service:
    def __init__(self, kind):
        self.kind = kind
    async def start(self):
        if self.kind == "refuses": raise NoSpace("the pool is full")
        if self.kind == "bug": raise KeyError("oops")
        if self.kind == "memory": raise MemoryError
        if self.kind == "slow": await asyncio.sleep(60)
        if self.kind.startswith("unix:"):
            return await RpcServer("testing", {GetMetrics: lambda call, peer: []}).listen(self.kind)
        return "unix:/somewhere"
    async def wait(self):
        await asyncio.sleep(0 if self.kind == "breaks" else 600)
        raise NoSpace("the disk is full")
    async def drain(self):
        print("drains", flush=True)
        await asyncio.sleep(60 if self.kind == "busy" else 0)
        print("drained", flush=True)
    async def close(self):
        print("closed", flush=True)
        if self.kind == "hangs": time.sleep(60)

fd = int(sys.argv[2]) if len(sys.argv) > 2 else None
run_role("test", lambda: Service(sys.argv[1]), ProcessConfig(ready_fd=fd))
"""


@contextlib.contextmanager
def role(kind: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    read_fd, write_fd = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, kind, str(write_fd)],
        pass_fds=(write_fd,),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write_fd)
    try:
        yield process, read_fd
    finally:
        process.kill()
        process.communicate()
        os.close(read_fd)


def report(fd: int) -> Any:
    return json.loads(os.read(fd, 65536))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_it_reports_readiness_and_closes_when_told(signum: signal.Signals) -> None:
    with role("good") as (process, fd):
        assert report(fd) == {"ready": "unix:/somewhere"}
        assert os.read(fd, 1) == b""  # one line, then the end
        process.send_signal(signum)
        out, err = process.communicate(timeout=HANG_S)
        assert (process.returncode, out, err) == (0, "closed\n", "")


def test_a_reason_goes_to_whoever_waits() -> None:
    with role("refuses") as (process, fd):
        assert report(fd) == {"error": "the pool is full"}
        _, err = process.communicate(timeout=HANG_S)
        assert (process.returncode, err) == (1, "")


def test_a_reason_is_one_line_when_nobody_waits() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT, "refuses"], capture_output=True, text=True, timeout=HANG_S)
    assert (ran.returncode, ran.stderr) == (1, "moonpool test: the pool is full\n")


def test_a_bug_is_logged_and_reported() -> None:
    with role("bug") as (process, fd):
        assert report(fd) == {"error": "a bug: KeyError: 'oops'"}
        _, err = process.communicate(timeout=HANG_S)
        assert process.returncode == 70
        assert "Traceback" in err


def test_a_service_that_breaks_ends_its_process() -> None:
    with role("breaks") as (process, fd):
        assert report(fd) == {"ready": "unix:/somewhere"}
        out, err = process.communicate(timeout=HANG_S)
        assert (process.returncode, out, err) == (1, "closed\n", "moonpool test: the disk is full\n")


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_child_whose_socket_is_gone_says_so_and_ends(tmp_path: Path, how: str) -> None:
    path = tmp_path / "role.sock"
    with role(f"unix:{path}") as (process, fd):
        assert report(fd) == {"ready": f"unix:{path}"}
        path.unlink()
        if how == "replaced":
            path.touch()
        out, err = process.communicate(timeout=HANG_S)
        assert (process.returncode, out) == (EXIT_UNREACHABLE, "closed\n")
        assert f"the socket {path} was removed or replaced: no new client can reach this process there" in err
        assert f"moonpool test: its socket {path} was removed or replaced" in err
        assert path.exists() == (how == "replaced"), "what another process has put there stays"


def test_a_child_serves_on_while_its_socket_could_not_be_made_again(tmp_path: Path) -> None:
    """Without the folder, a new process could not listen either, and the connections that there are still work."""
    folder = tmp_path / "run"
    folder.mkdir()
    with role(f"unix:{folder}/role.sock") as (process, fd):
        report(fd)
        shutil.rmtree(folder)
        assert process.stderr is not None
        assert f"the socket {folder}/role.sock was removed" in process.stderr.readline()
        assert process.poll() is None
        folder.mkdir()
        process.communicate(timeout=HANG_S)
        assert process.returncode == EXIT_UNREACHABLE


def test_a_role_started_by_hand_says_that_its_socket_is_gone_and_serves_on(tmp_path: Path) -> None:
    path = tmp_path / "role.sock"
    words = [sys.executable, "-c", SCRIPT, f"unix:{path}"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert "serves at" in process.stderr.readline()
            path.unlink()
            assert f"the socket {path} was removed" in process.stderr.readline()
            assert process.poll() is None, "no launcher would start it again"
        finally:
            process.kill()


def test_a_stop_during_the_start_is_obeyed() -> None:
    with role("slow") as (process, fd):
        wait_until(lambda: _handles_signals(process.pid), "SIGTERM is caught")
        process.terminate()
        out, _ = process.communicate(timeout=HANG_S)
        assert (process.returncode, out) == (0, "closed\n")
        assert os.read(fd, 1) == b""  # never ready


def test_a_close_that_hangs_is_cut_short() -> None:
    with role("hangs") as (process, fd):
        report(fd)
        process.terminate()
        process.communicate(timeout=HANG_S)
        assert process.returncode == 70


def test_a_ready_descriptor_must_exist() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT, "good", "999"], capture_output=True, text=True, timeout=HANG_S)
    assert ran.returncode == 1
    assert ran.stderr == "moonpool test: --ready-fd 999 is not an open descriptor\n"


def _handles_signals(pid: int) -> bool:
    """Whether the kernel says that SIGTERM is caught."""
    with open(f"/proc/{pid}/status") as status:
        caught = next(line for line in status if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) & (1 << (signal.SIGTERM - 1)))


def test_lack_of_memory_is_a_reason_and_no_traceback() -> None:
    with role("memory") as (process, fd):
        assert report(fd)["error"].startswith("not enough memory (MemoryError)")
        _, err = process.communicate(timeout=HANG_S)
        assert (process.returncode, err) == (1, "")


@contextlib.contextmanager
def by_hand(kind: str) -> Iterator[subprocess.Popen[str]]:
    """A role that serves, without a launcher."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, kind], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        assert "serves at" in process.stderr.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def test_sigterm_drains_a_role_that_was_started_by_hand() -> None:
    with by_hand("good") as process:
        process.terminate()
        out, _ = process.communicate(timeout=HANG_S)
        assert (process.returncode, out) == (0, "drains\ndrained\nclosed\n")


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_draining(second: signal.Signals) -> None:
    with by_hand("busy") as process:
        process.terminate()
        assert process.stdout is not None
        assert process.stdout.readline() == "drains\n"
        process.send_signal(second)
        out, _ = process.communicate(timeout=HANG_S)
        assert (process.returncode, out) == (0, "closed\n")


def test_sigint_does_not_drain() -> None:
    with by_hand("busy") as process:
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=HANG_S)
        assert (process.returncode, out) == (0, "closed\n")


def test_a_role_started_by_hand_logs_what_it_is_and_where() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "good"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    process.terminate()
    _, rest = process.communicate(timeout=HANG_S)
    assert f"moonpool {__version__}: test serves at unix:/somewhere (process {process.pid})" in line
    assert "ending what was begun, for at most 30 s" in rest
