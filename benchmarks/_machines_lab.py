"""Machines on one kernel: each a network namespace with an address, a kernel of its own by name (what host_id() reads)
and folders of its own, all joined by one virtual switch. Roles are real processes, started as typed. Needs root.

    with MachinesLab(2) as (a, b):
        a.start("master", "master", "--listen", f"tcp:{a.address}:7700", ...)
        b.http("http://10.88.0.1:8000/health")

MachinesLab(3, rates_mbit={0: 1000}) shapes what the first machine sends and receives; with delay_ms=1.0 a packet takes
that long from one machine to another (docstring of _delayed_link.py). Used by live.py, tests/e2e/test_two_machines.py
and tests/e2e/test_cluster_file.py.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from _delayed_link import TUNNEL_MTU, open_tunnel, start_relay

from moonpool.base.process import Lifeline

MOONPOOL = [sys.executable, "-m", "moonpool"]
_numbers = itertools.count()
# Before the command runs, this file takes the place of the kernel's name, for that process and its children alone.
_AS_ANOTHER_KERNEL = 'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"'
_HTTP = """
import json, sys, urllib.error, urllib.request
url, body = sys.argv[1], sys.argv[2].encode() or None
request = urllib.request.Request(url, body, {"content-type": "application/json"})
try:
    with urllib.request.urlopen(request, timeout=60) as reply:
        status, text = reply.status, reply.read()
except urllib.error.HTTPError as error:
    status, text = error.code, error.read()
print(json.dumps([status, text.decode()]))
"""


class HttpReply(NamedTuple):
    status: int
    text: str

    @property
    def body(self) -> Any:
        return json.loads(self.text)


class RoleProcess:
    """A role on a machine; `ready()` once it serves. Its log is a file."""

    def __init__(self, process: subprocess.Popen[bytes], ready_fd: int, log_path: Path) -> None:
        self._process = process
        self._ready = os.fdopen(ready_fd)
        self._log_path = log_path

    def ready(self) -> RoleProcess:
        report = self._ready.readline()
        self._ready.close()
        assert "ready" in (json.loads(report) if report else {}), f"it did not start: {report}\n{self.log()}"
        return self

    def log(self) -> str:
        return self._log_path.read_text()

    def kill(self) -> None:
        """kill -9; returns when it is gone."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, signum: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signum)
        try:
            self._process.wait(10)
        finally:
            self._process.kill()
            self._process.wait()
            self._ready.close()


class LauncherProcess:
    """`moonpool up` on a machine, with its roles as children. Its log is a file."""

    def __init__(self, process: subprocess.Popen[bytes], log_path: Path) -> None:
        self._process, self._log_path = process, log_path

    def ready(self, timeout_s: float = 120.0) -> LauncherProcess:
        deadline_s = time.monotonic() + timeout_s
        while "ready after" not in self.log():
            assert self._process.poll() is None, f"it ended with {self._process.returncode}:\n{self.log()}"
            assert time.monotonic() < deadline_s, f"not ready within {timeout_s:g} s:\n{self.log()}"
            time.sleep(0.05)
        return self

    def log(self) -> str:
        return self._log_path.read_text()

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        finally:
            self._process.kill()
            self._process.wait()


class Machine:
    def __init__(self, namespace: str, address: str, folder: Path, lifeline: Lifeline, plug: tuple[str, str]) -> None:
        self.namespace, self.address, self.folder = namespace, address, folder
        self._plug = plug  # of the switch: its namespace and the port of this machine
        self.run_dir = folder / "run"
        self._lifeline = lifeline
        self._boot_id = folder / "boot_id"
        self._boot_id.write_text(f"{uuid.uuid4()}\n")
        self._roles: list[RoleProcess | LauncherProcess] = []

    def start(self, name: str, command: str, *arguments: str, env: Mapping[str, str] = {}) -> RoleProcess:
        """`moonpool COMMAND ARGUMENTS...`, not yet ready."""
        read_fd, write_fd = os.pipe()
        log_path = self.folder / f"{name}.log"
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                self.inside(*MOONPOOL, command, *arguments, "--ready-fd", str(write_fd)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(write_fd, self._lifeline.fd),
                env={**os.environ, **self._lifeline.environment, **env},
            )
        os.close(write_fd)
        role = RoleProcess(process, read_fd, log_path)
        self._roles.append(role)
        return role

    def up(self, file: Path, name: str, env: Mapping[str, str] = {}) -> LauncherProcess:
        """`moonpool up FILE --machine NAME`, not yet ready. A second one has a log of its own."""
        own = {"MOONPOOL_STATE": str(self.folder / "state"), "XDG_RUNTIME_DIR": str(self.folder)}
        log_path = self.folder / f"up-{next(_numbers)}.log"
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                self.inside(*MOONPOOL, "up", str(file), "--machine", name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(self._lifeline.fd,),
                env={**os.environ, **self._lifeline.environment, **own, **env},
            )
        launcher = LauncherProcess(process, log_path)
        self._roles.append(launcher)
        return launcher

    def cut_link(self) -> None:
        """Nothing reaches the other machines any more, and nothing of theirs comes here, without a word to anybody."""
        _run("ip", "-n", self._plug[0], "link", "set", self._plug[1], "down")

    def join_link(self) -> None:
        _run("ip", "-n", self._plug[0], "link", "set", self._plug[1], "up")

    def moonpool(self, *arguments: str, env: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
        """A command by hand."""
        command = self.inside(*MOONPOOL, *arguments)
        return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=60)

    def http(self, url: str, body: Mapping[str, object] | None = None) -> HttpReply:
        """Asked from this machine."""
        command = self.inside(sys.executable, "-c", _HTTP, url, json.dumps(body) if body is not None else "")
        ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=90)
        return HttpReply(*json.loads(ran.stdout))

    def received_nbytes(self) -> int:
        """By its network card, from other machines."""
        return self._counted("rx")

    def sent_nbytes(self) -> int:
        """By its network card, to other machines."""
        return self._counted("tx")

    def _counted(self, direction: str) -> int:
        shown = _run("ip", "-n", self.namespace, "-s", "-j", "link", "show", "eth0")
        return int(json.loads(shown)[0]["stats64"][direction]["bytes"])

    def close(self) -> None:
        """The last one started first."""
        for role in reversed(self._roles):
            with contextlib.suppress(subprocess.TimeoutExpired):
                role.stop()

    def inside(self, *command: str) -> list[str]:
        """Return the command that runs `command` on this machine."""
        # `ip netns exec` also gives the process its own view of mounts.
        return ["ip", "netns", "exec", self.namespace, "sh", "-c", _AS_ANOTHER_KERNEL, str(self._boot_id), *command]


class MachinesLab:
    """Names are this process's own; everything is removed on exit."""

    def __init__(self, num_machines: int, *, rates_mbit: Mapping[int, int] = {}, delay_ms: float = 0.0) -> None:
        self._rates_mbit = rates_mbit  # by the machine's position; the others are not shaped
        self._delay_ms = delay_ms  # of one way between two machines
        self._names = [f"mpm{os.getpid()}x{next(_numbers)}" for _ in range(num_machines)]
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> list[Machine]:
        _sweep()
        with contextlib.ExitStack() as undo:
            # Not tmp_path: a Unix socket's path has at most 107 bytes.
            folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="mp")))
            lifeline = undo.enter_context(Lifeline())
            switch = f"mpm{os.getpid()}x{next(_numbers)}"
            self._add_namespace(undo, switch)
            _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
            _run("ip", "-n", switch, "link", "set", "br0", "up")
            machines = []
            for number, name in enumerate(self._names, 1):
                self._add_namespace(undo, name)
                address = f"10.88.0.{number}"
                if self._delay_ms:
                    _join_by_relay(undo, name, switch, f"port{number}", self._delay_ms / 2)  # a packet passes two
                else:
                    _join_by_veth(name, switch, f"port{number}")
                _plug_in(name, switch, f"port{number}", address)
                if number - 1 in self._rates_mbit:
                    for place, link in ((name, "eth0"), (switch, f"port{number}")):
                        _shape(place, link, self._rates_mbit[number - 1])
                (folder / str(number)).mkdir()
                plug = (switch, f"port{number}")
                machines.append(Machine(name, address, folder / str(number), lifeline, plug))
                undo.callback(machines[-1].close)
            self._undo = undo.pop_all()
        return machines

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def _add_namespace(self, undo: contextlib.ExitStack, name: str) -> None:
        _run("ip", "netns", "add", name)
        undo.callback(_run, "ip", "netns", "del", name)


def missing(*, delay_ms: float = 0.0) -> str | None:
    """Why this machine cannot have such a lab; None if it can."""
    if os.geteuid() != 0:
        return "several machines need root (network namespaces)"
    if shutil.which("ip") is None:
        return "several machines need ip: apt-get install -y iproute2"
    try:
        with MachinesLab(1, delay_ms=delay_ms) as [machine]:
            subprocess.run(machine.inside("true"), check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        return f"several machines: {' '.join(error.cmd)}: {error.stderr.strip()}"
    except OSError as error:
        return f"several machines with a delay between them need TUN: {error}"
    return None


def _join_by_veth(namespace: str, switch: str, port: str) -> None:
    _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)


def _join_by_relay(undo: contextlib.ExitStack, namespace: str, switch: str, port: str, delay_ms: float) -> None:
    fds = []
    for place, link in ((namespace, "eth0"), (switch, port)):
        name = f"mt{os.getpid() % 10_000_000}x{next(_numbers)}"
        fds.append(open_tunnel(name, is_tap=True))
        undo.callback(os.close, fds[-1])
        _run("ip", "link", "set", name, "mtu", str(TUNNEL_MTU), "netns", place, "name", link)
    start_relay(undo, fds, delay_ms)


def _plug_in(namespace: str, switch: str, port: str, address: str) -> None:
    _run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
    _run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
    for link in ("lo", "eth0"):
        _run("ip", "-n", namespace, "link", "set", link, "up")


def _shape(namespace: str, link: str, rate_mbit: int) -> None:
    shape = ("tbf", "rate", f"{rate_mbit}mbit", "burst", "256kb", "latency", "20ms")
    _run("tc", "-n", namespace, "qdisc", "add", "dev", link, "root", *shape)


def _sweep() -> None:
    """Removes the namespaces of labs whose process was killed."""
    for name, pid in re.findall(r"^(mpm(\d+)x\d+)\b", _run("ip", "netns", "list"), re.M):
        if not Path("/proc", pid).exists():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)  # another may be quicker


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
