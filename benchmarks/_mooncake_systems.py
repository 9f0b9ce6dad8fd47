"""The systems that vs_mooncake.py compares, each with a master, a process that offers the memory, and two clients.

Upstream is its wheel in an environment of its own; ours are the commands of this repository. The clients of all are
_mooncake_client.py. Everything ends with the block that started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moonpool.integrations.mooncake import shadow_path

WHEEL = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
_LIBRARIES = "libibverbs1 librdmacm1 libnuma1"
_CLIENT = str(Path(__file__).with_name("_mooncake_client.py"))
_REPOSITORY = str(Path(__file__).resolve().parent.parent)
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 10.0


class ClientFailed(Exception):
    pass


class MooncakeClient:
    """A client process, which does one thing at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def do(self, what: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"it ended with {self._process.wait()}"}
        if "error" in answer:
            raise ClientFailed(f"{what}: {answer['error']}")
        return answer["result"]


class PoolSystem(NamedTuple):
    """`writer` and `reader` are different processes, and neither offers memory."""

    name: str
    writer: MooncakeClient
    reader: MooncakeClient


def find_upstream(python: str | None, cache: Path) -> tuple[str | None, str]:
    """Return the interpreter of an environment with upstream's wheel, and "", or None and why there is none. Without
    `python` the environment is made in the folder `cache`, by pip.
    """
    if python is None:
        python = str(cache / "bin" / "python")
        if not os.path.exists(python):
            subprocess.run([sys.executable, "-m", "venv", str(cache)], check=True)
        installed = subprocess.run(
            [python, "-m", "pip", "install", "--quiet", WHEEL], capture_output=True, text=True, check=False
        )
        if installed.returncode:
            return None, f"pip cannot install {WHEEL}: {installed.stderr.strip().splitlines()[-1:]}"
    imported = subprocess.run([python, "-c", "import mooncake.store"], capture_output=True, text=True, check=False)
    if imported.returncode:
        reason = (imported.stderr.strip().splitlines() or ["no reason"])[-1]
        hint = f" (apt-get install {_LIBRARIES})" if ".so" in reason else ""
        return None, f"mooncake.store cannot be imported by {python}: {reason}{hint}"
    return python, ""


@contextlib.contextmanager
def start_upstream(python: str, offered_nbytes: int, memory_nbytes: int) -> Iterator[PoolSystem]:
    with contextlib.ExitStack() as stack:
        port, metrics_port = _free_ports(2)
        master = str(Path(python).with_name("mooncake_master"))
        options = [f"-rpc_port={port}", f"-metrics_port={metrics_port}", "-enable_metric_reporting=false"]
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="vs-mooncake-"))
        stack.enter_context(_process([master, *options], cwd=folder, quiet=True))
        _wait_for_port(port)
        environment = {**os.environ, "MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2"}
        holder = stack.enter_context(_client(python, environment, folder))
        holder.do("setup", master=f"127.0.0.1:{port}", offered_nbytes=offered_nbytes, memory_nbytes=0)
        yield _two_clients("upstream", python, environment, folder, f"127.0.0.1:{port}", memory_nbytes, stack)


@contextlib.contextmanager
def start_ours(name: str, shm: bool, offered_nbytes: int, memory_nbytes: int) -> Iterator[PoolSystem]:
    """`shm` False: the node shares no memory, so that all bytes take tcp, as between machines."""
    with contextlib.ExitStack() as stack:
        (port,) = _free_ports(1)
        home = stack.enter_context(tempfile.TemporaryDirectory(prefix="vs-mp-"))
        address = f"127.0.0.1:{port}"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(shadow_path()), _REPOSITORY))}
        moonpool = [sys.executable, "-m", "moonpool"]
        master = [*moonpool, "master", "--data-dir", f"{home}/data", "--listen", f"tcp:{address}"]
        stack.enter_context(_process([*master, "--log-level", "WARNING"], cwd=home, environment=environment))
        _wait_for_port(port)
        node = [*moonpool, "node", "--name", "bench", "--master", f"tcp:{address}", "--dram", str(offered_nbytes)]
        node += ["--run-dir", home, "--shm" if shm else "--no-shm", "--log-level", "WARNING"]
        read_fd, write_fd = os.pipe()
        with open(read_fd) as ready:
            node += ["--ready-fd", str(write_fd)]
            stack.enter_context(_process(node, cwd=home, environment=environment, pass_fds=(write_fd,)))
            os.close(write_fd)
            report = json.loads(ready.readline() or "{}")
        if report.get("ready") is None:
            raise ClientFailed(f"the node did not start: {report.get('error')}")
        yield _two_clients(name, sys.executable, environment, home, address, memory_nbytes, stack)


def _two_clients(
    name: str,
    python: str,
    environment: dict[str, str],
    folder: str,
    address: str,
    memory_nbytes: int,
    stack: contextlib.ExitStack,
) -> PoolSystem:
    clients = [stack.enter_context(_client(python, environment, folder)) for _ in range(2)]
    for client in clients:
        client.do("setup", master=address, offered_nbytes=0, memory_nbytes=memory_nbytes)
    return PoolSystem(name, *clients)


@contextlib.contextmanager
def _client(python: str, environment: dict[str, str], folder: str) -> Iterator[MooncakeClient]:
    with _process([python, _CLIENT], cwd=folder, environment=environment, talks=True) as process:
        yield MooncakeClient(process)


@contextlib.contextmanager
def _process(
    argv: Sequence[str],
    *,
    cwd: str,
    environment: dict[str, str] | None = None,
    talks: bool = False,
    quiet: bool = False,
    pass_fds: tuple[int, ...] = (),
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
        stdout=subprocess.PIPE if talks else subprocess.DEVNULL,
        stderr=subprocess.DEVNULL if quiet else None,
        cwd=cwd,
        env=environment,
        pass_fds=pass_fds,
        text=True,
    )
    try:
        yield process
    finally:
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


def _wait_for_port(port: int) -> None:
    ends_s = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            if time.monotonic() > ends_s:
                raise
            time.sleep(0.05)
        else:
            return
